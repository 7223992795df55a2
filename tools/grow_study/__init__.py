"""The study of libraries that grow and merge, with every control: cells that are run side by side, and their page."""

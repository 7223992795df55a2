"""The live page and the completions API: run folders, read as they grow. The trainer knows nothing of it."""

"""The embedded corpus: children's stories that are told from a seed, each word with its tags."""

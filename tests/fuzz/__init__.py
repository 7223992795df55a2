"""Mutated files of every format that this program reads: `python -m tests.fuzz.campaign`."""

"""Runs experiments: registry, queue, comparison, benchmarks."""

"""The laboratory: the registry of experiments, the queue that runs them, what they gave, and benchmarks."""

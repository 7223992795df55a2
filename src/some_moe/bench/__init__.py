"""Benchmarks: one layer's experts against their peers, and a whole training step.

shapes → problem → variants (ours and `peers`) → checks → timing → layer; step and profile for the whole step.
"""

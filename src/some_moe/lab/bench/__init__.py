"""Benchmarks: one layer's experts against their peers, and a whole training step.

shapes → problem → variants → timing → layer; and for the whole step, step.
"""

"""Training: one loop, evaluation, checkpoints that survive anything, and the run folder they live in."""

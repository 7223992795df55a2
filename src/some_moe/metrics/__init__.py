"""Numbers that say how well a model does, and the baselines it must beat."""

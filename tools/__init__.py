"""Builds docs/results.md and docs/audit.md from results/."""

"""Looks inside finished runs: analysis, figures, pages."""

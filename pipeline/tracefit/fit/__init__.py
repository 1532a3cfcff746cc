"""Fit linear models to training frames, and validate every number."""

"""Training frames become linear models with a validation beside every number."""

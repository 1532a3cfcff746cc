"""Evaluations for people to read. Nothing here computes a metric."""

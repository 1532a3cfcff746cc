"""Conversion for each consumer: what its own formula needs, in its units and file format."""

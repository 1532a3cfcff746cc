"""Spans become the published tables: one schema, one dialect table, one place that joins requests."""

"""Turn spans into the published tables: one schema, one dialect table, one module that joins requests."""

"""Blocks of whole records to spans and events as columns, and rejects with reasons."""

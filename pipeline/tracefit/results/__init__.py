"""Typed results of every command: plain frozen dataclasses, no behaviour but an exit code.

Commands return them, reports write them for people, `--json` prints them as they are, and `schemas/results/`
describes them. Code that makes or shows a result imports this room; the room itself imports only `tables`, for
the checks that `inspect` shows.
"""

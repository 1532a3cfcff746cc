"""Typed results of every command: plain frozen dataclasses, no behaviour but an exit code.

Commands return them, reports write them for people, `--json` prints them as they are, and `schemas/results/` describes
them. What fills or shows a result imports this room; the room itself knows `tables` alone: the checks that `inspect` shows,
and the tables that the result of a run opens.
"""

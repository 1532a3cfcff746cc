"""Typed results of every command: plain frozen dataclasses, no behaviour but an exit code.

Commands return them, reports write them for people, `--json` prints them as they are, and `schemas/results/` describes
them. The room knows no command and no report; of the rooms to its left it takes only the value types that results
carry (`Check` of tables, differences of two models, held-out errors of an export).
"""

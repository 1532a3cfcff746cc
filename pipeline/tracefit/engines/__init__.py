"""Engines decide where blocks are decoded: on this machine, in one process or several."""

"""Engines decide where blocks are decoded and runs are built: on this machine, in one process or several, or on Ray."""

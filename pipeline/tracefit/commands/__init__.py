"""The commands of tracefit, a module each. The command line and the Python API both call these."""

"""What a user asks for, a module for each command. The command line and the Python API both call these."""

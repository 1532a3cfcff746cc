"""What a user asks for: ingest, train, run, synth. The command line and the Python API both call these."""

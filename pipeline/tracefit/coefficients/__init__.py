"""The coefficient file and the evaluation file: their published shape, reading and writing."""

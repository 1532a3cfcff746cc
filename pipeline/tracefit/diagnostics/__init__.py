"""Facts that the tables of a scope show beside its models, as frames: residuals, parts of durations, load, engines over time."""

"""Frames that a report shows beside the models: residuals, parts of durations, load, engines over time."""

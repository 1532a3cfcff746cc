"""Replay requests through a scheduler: arrivals, lengths and a model of step times to the times of every request."""

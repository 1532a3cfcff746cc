"""Build training frames with declared features from timeline, model configuration, GPU and server settings."""

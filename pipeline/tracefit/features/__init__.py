"""Timeline, model configuration, GPU and server settings become training frames with declared features."""

"""Facts of one server: its config.json, its GPU, its settings."""

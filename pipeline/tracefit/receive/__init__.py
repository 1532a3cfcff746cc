"""The OTLP receiver: writes the traces that servers send into run folders. Reading them needs nothing of this room."""

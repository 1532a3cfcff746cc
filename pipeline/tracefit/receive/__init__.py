"""The OTLP receiver: what a server sends becomes trace files in run folders. Nothing here is needed to read them."""

"""Who carries operations out: the Cloud TPU API, or its command line."""

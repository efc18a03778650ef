"""Backends that carry out operations: the Cloud TPU API, `gcloud`, this machine."""

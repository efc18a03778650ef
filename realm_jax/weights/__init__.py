"""Readers and writers of published weights, driven by tables of tensor names."""

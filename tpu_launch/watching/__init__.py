"""Monitoring of a run: its status and logs, from its model directory alone."""

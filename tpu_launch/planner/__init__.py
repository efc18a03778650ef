"""Estimates the memory, time and cost of a run before it is launched."""

"""Runs the stages' commands as processes: today, a chain on this machine."""

"""Plans a run, and runs it: on this machine, or on TPU slices."""

"""Plans a run, and has it run: by this machine, or by an engine of Google Cloud."""

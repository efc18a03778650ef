"""Training objectives: pure functions from arrays to sums and counts."""

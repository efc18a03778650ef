"""What is optimised: pure functions from arrays to sums and counts."""

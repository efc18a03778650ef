"""Models: Flax Linen modules, without I/O and without losses."""

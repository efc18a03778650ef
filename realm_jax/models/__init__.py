"""What is computed: Flax Linen modules, without I/O and without losses."""

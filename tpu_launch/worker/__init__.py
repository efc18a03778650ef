"""What runs on each worker: the command of its role, kept alive."""

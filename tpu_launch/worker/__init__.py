"""The supervisor that runs on each worker and keeps the command of its role alive."""

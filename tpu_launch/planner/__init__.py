"""What a run will need, take and cost, before anything is paid for."""

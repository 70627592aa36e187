"""What XLA's schedulers make of a task graph by themselves."""

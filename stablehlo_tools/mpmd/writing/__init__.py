"""Writing the program of each rank, by a schedule."""

"""Child processes: how they start, what watches them, and what is said of how they ended."""

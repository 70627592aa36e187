"""Child processes: their start, the parent that watches them, and messages about their end."""

"""Merges several collectives into one; callers decide which."""

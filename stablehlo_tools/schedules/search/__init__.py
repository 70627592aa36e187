"""Searches for schedules: orders of forwards and backwards, filled with weight gradients."""

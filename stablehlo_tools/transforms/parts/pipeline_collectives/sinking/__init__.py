"""Collectives of a loop that run once after it: which can, and how they are written there."""

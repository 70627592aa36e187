"""Runs collectives of a loop once, after it: finds those that can, and writes them."""

"""Rewrites how the ranks of a set hand tensors to each other."""

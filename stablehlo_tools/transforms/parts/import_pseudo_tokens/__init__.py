"""Finds torch-xla's pseudo-tokens, decides which are tokens, and removes them."""

"""Loops over layers as loops over ranges of them, and what is stacked by layer as pieces."""

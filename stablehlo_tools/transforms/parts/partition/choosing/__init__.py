"""Chooses by cost how each op of a propagated program is divided."""

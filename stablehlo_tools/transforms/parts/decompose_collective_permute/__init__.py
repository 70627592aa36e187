"""Skips transfers of loops, for decompose-collective-permute."""

"""Skips the transfers of a permute in a loop that no output depends on."""

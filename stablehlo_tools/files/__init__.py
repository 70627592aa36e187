"""Reads and writes files: atomic writes, and JSON whose errors name their place."""

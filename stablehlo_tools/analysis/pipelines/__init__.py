"""Reads pipelines over a mesh axis from programs whose ranks advance in lock step."""

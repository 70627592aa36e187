"""Pipelines over a mesh axis, read back from programs whose ranks advance in lock step."""

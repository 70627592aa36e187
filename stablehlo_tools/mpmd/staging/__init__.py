"""Assigns each op of a training step to a pipeline stage and to a phase."""

"""Scheduled HLO text as the task graph of what a compiler made of a program. Pure Python."""

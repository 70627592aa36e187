"""Separately compiled programs, each in a process of its own, that talk to each other over gloo."""

"""Runs a set of rank programs: in one process, or as real processes."""

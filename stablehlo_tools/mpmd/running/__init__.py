"""Runs a set of rank programs: in one process, in the reference interpreter, as real processes."""

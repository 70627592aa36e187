"""Relates the elements of an op's result to the elements of its operands."""

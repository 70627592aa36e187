"""Which elements of an op's result come from which elements of its operands."""

"""Target machines: chips, and the compilers of XLA:CPU, XLA:GPU and XLA:TPU."""

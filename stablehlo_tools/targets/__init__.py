"""What programs run on: hardware profiles, and the compilers of XLA:CPU, XLA:GPU and XLA:TPU."""

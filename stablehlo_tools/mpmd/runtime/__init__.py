"""Training with a set of rank programs: in one process, or in one for each rank under jax."""

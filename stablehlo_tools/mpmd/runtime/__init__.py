"""Trains with a set of rank programs: in one jax process, or in one for each rank."""

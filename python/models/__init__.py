"""Small JAX programs that the tests, the demo and the benchmarks export."""

from models import devices as devices  # before any module here imports jax: sets up the devices

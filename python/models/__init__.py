"""Small JAX programs that the tests, the demo and the benchmarks export."""

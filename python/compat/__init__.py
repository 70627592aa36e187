"""Which releases of jax this toolkit works with, and what it does with its dependencies alone."""

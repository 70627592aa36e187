"""Artifacts: `jax.export` files, MLIR text, bytecode and portable artifacts, read by content."""

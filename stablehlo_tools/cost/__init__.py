"""Cost models of a named device: kernels, collectives, measured times. Imports no MLIR."""

"""What work costs on a named device: kernels, collectives, measured times. Imports no MLIR."""

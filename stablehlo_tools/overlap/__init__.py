"""Task graphs of compute and collectives, and their simulation. Imports no MLIR."""

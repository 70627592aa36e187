"""The Python interface: transform an `Exported`, jit through one, weights in pipeline order."""

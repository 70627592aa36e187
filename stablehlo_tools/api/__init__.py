"""What a program calls: transform an `Exported`, jit by way of one, weights in pipeline order."""

"""What people look at: text table, JSON, HTML page, Perfetto trace. Imports no MLIR."""

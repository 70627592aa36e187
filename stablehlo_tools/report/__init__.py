"""What people look at: text table, JSON, HTML page, Perfetto trace.

`exposure.py` and `pipeline_rows.py` make the data from programs; all views of it import no MLIR.
"""

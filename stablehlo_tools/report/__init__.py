"""Renders results: text table, JSON, HTML page, Perfetto trace.

`exposure.py` and `pipeline_rows.py` compute the data from programs; the renderers import no MLIR.
"""

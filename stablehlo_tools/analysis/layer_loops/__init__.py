"""Loops over the layers of a model: what they read and write layer by layer, what they hand on.

`reading.py` recognises them, `partial_sums.py` says which of their values are sums over the batch.
"""

"""Checks that separately compiled programs issue their collectives in one order.

Only data and decisions: the collectives of each program (`program`), one run of all programs with
blocking rendezvous (`simulation`), the unordered pairs (`hazards`), and the verdict (`verdict`).
Imports no MLIR; `analysis/issued.py` reads a module into this form.
"""

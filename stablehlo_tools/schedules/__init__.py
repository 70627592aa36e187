"""Pipeline schedules as data: who computes what in which order, checked and timed.

A `Table` (table.py) lists each rank's actions (actions.py) in order; `placement.py` says which rank
holds which stage. `generators/` writes the known schedules, `search/` looks for better ones,
`validator.py` proves that a table runs, `simulator.py` times it. Nothing here imports MLIR or JAX.
"""

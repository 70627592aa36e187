"""Pipeline schedules as data: the order of each rank's computations, checked and timed.

A `Table` (table.py) lists each rank's actions in order, and says which rank holds which stage.
`catalogue.py` names the schedules: `generators/` writes the known ones, `search/` looks for
better ones. `validator.py` proves that a table runs, `simulator.py` times it, `lockstep.py` lays
it out for one SPMD program. Nothing here imports MLIR or JAX.
"""

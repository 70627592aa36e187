"""The parts of expand-pipeline, in the order in which they run.

`expansion_plan.py` decides, with these: `microbatches.py` finds the batch dimension, and
`layer_phase.py` plans a layer loop on one microbatch. `training.py` plans the ops between a forward
and a backward loop, and `head_division.py` decides if each rank can run a part of those. For
layout=pipeline, `stack_orders.py` finds the arguments and results that are stacks of layers.

`emit.py` writes a manual computation (`region.py`) with a loop over the ticks of the schedule. In
it, every layer loop has its turn (`ticks.py`); for 1F1B, so have the ops between them (`links.py`).
`slots.py` keeps values of microbatches and sends them round the ring. `stacks.py` spreads stacks of
layers over the ranks and gathers them again. `results.py` divides the ops after the pipeline.
"""

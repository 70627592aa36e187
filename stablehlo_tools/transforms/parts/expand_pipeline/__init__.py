"""The parts of expand-pipeline, in the order in which a program goes through them.

What is decided, by `expansion_plan.py`: `microbatches.py` which dimension is the batch,
`layer_phase.py` how a layer loop runs on one microbatch, `training.py` what stands between a
forward and a backward loop, and `head_division.py` whether each rank can run a part of that; for
layout=pipeline, `stack_orders.py` which arguments and results are stacks of layers.

What is written, by `emit.py`: a manual computation (`region.py`) with a loop over the ticks of the
schedule, in which every layer loop has its turn (`ticks.py`), and what stands between them
(`links.py`) where both directions are one; `slots.py` keeps values of microbatches and hands them
on, `stacks.py` spreads stacks of layers over the ranks and gathers them again, and `results.py`
divides what comes behind.
"""

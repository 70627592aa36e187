"""The parts of expand-pipeline, in the order in which a program goes through them.

What is decided, by `expansion_plan.py`: `microbatches.py` which dimension is the batch,
`layer_phase.py` how a layer loop runs on one microbatch, `head.py` what stands between a forward
and a backward loop, `chunks.py` which layers lie on which rank; for layout=pipeline,
`stack_orders.py` which arguments and results are stacks of layers.

What is written, by `emit.py`: a manual computation (`region.py`) with a loop over the ticks of the
schedule, in which every layer loop has its turn (`ticks.py`); `stacks.py` spreads stacks of layers
over the ranks and gathers them again.
"""

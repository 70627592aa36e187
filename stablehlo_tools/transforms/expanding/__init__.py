"""The parts of expand-pipeline.

`microbatches.py` finds the batch, `phases.py` plans how a layer loop runs on one microbatch,
`chunks.py` which layers lie on which rank. `region.py`, `ticks.py` and `layers.py` write the loop
over ticks, `narrowing.py` the ops in it.
"""

"""The parts of expand-pipeline.

What is decided: `planning.py` all of it; `microbatches.py` which dimension is the batch,
`phases.py` how a layer loop runs on one microbatch, `head.py` what stands between a forward and a
backward loop, `chunks.py` which layers lie on which rank, `layouts.py` and `following.py` which
arguments and results are stacks of layers. `refusals.py` and `explanation.py` tell the user.

What is written, by `expansion.py`: `writing.py` a loop of its own, `training.py` a forward and a
backward loop in one. Both use `region.py` (the manual computation), `tables.py` (the schedule),
`ticks.py` (a layer loop in a tick), `narrowing.py` (ops on one microbatch), `counted.py`,
`elements.py` and `state.py`. `stacks.py` puts stacks in the ranks' order, `resharding.py` by
exchanging chunks, `ordering.py` by keeping them so.
"""

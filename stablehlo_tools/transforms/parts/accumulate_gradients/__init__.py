"""Writes a loop over microbatches in a plain training step, for accumulate-gradients.

`searching.py` finds the arguments that carry the batch. `division.py` decides which ops run in the
loop, and which before or after it. `microbatch_loop.py` writes the loop.
"""

"""How accumulate-gradients makes a loop over microbatches of a plain training step.

`searching.py` finds the arguments that carry the batch, `division.py` says which ops run in the
loop and which before or behind it, `microbatch_loop.py` writes the loop.
"""

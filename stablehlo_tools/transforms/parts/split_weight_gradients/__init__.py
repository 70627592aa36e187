"""The parts of split-weight-gradients.

`backward_loops.py` finds the loops over layers that are backwards, `division.py` what of one can
wait, by a cheapest cut (`minimum_cut.py`), and `two_loops.py` writes the loop in two.
"""

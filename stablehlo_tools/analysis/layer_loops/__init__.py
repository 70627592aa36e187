"""Loops over layers that depend on each other.

`linked_loops.py` follows values from loop to loop, and `cut_loops.py` finds the loops to cut into
ranges of layers. `division.py` divides a backward loop by a cheapest cut (`cheapest_cut.py`).
"""

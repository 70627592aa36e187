"""Finds the dimension of each value that is the batch (or the layers), and how ops run on parts.

`tilings.py` describes how one op runs on tiled operands. `propagation.py` follows tilings through a
graph in both directions. `seeds.py` finds the arguments to start from.
"""

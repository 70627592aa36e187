"""Which dimension of each value is the batch (or the layers), and how each op runs on parts of it.

`tilings.py` says how one op runs on tiled operands, `propagation.py` follows tilings through a
graph in both directions, `seeds.py` finds the arguments to start from.
"""

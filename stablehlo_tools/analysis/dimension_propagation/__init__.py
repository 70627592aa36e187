"""Which dimension of each value is the batch, and how each op runs on parts of it.

`graph.py` reads a block, `propagation.py` follows the batch through it by the rules per op
(`rules.py`), `seeds.py` finds the arguments that carry it.
"""

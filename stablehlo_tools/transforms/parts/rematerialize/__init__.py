"""What a training step keeps for its backward, and what it computes again.

`same_values` says which values of the backward are values of the forward, `passages` what crosses
from one to the other, `prices` what it takes to keep or to repeat it, `cheapest_cut` which to do at
a price of memory, `choosing` at which price the program fits, and `writing` writes it.
"""

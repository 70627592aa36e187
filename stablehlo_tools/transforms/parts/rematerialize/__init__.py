"""Chooses the values that a training step keeps for its backward; it recomputes the others.

`same_values` finds values of the backward that equal values of the forward. `passages` finds the
residuals that cross from one to the other. `recomputation_prices` estimates the cost to keep or to
recompute them. `residual_cut` decides which to do at a price of memory, and `memory_price` finds
the price at which the program fits. `recomputation_writing` writes the result.
"""

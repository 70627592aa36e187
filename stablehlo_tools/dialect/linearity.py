"""Which ops of StableHLO give a sum of results for a sum of operands."""

from __future__ import annotations

# f(a + b) = f(a) + f(b) in the first operand; the others say where, not what.
LINEAR_IN_FIRST = frozenset(
    f"stablehlo.{name}"
    for name in (
        "broadcast_in_dim",
        "dynamic_slice",
        "gather",
        "imag",
        "negate",
        "real",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    )
)
# f(a + c, b + d) = f(a, b) + f(c, d): in all operands at once.
LINEAR_IN_ALL = frozenset(
    f"stablehlo.{name}" for name in ("add", "complex", "concatenate", "subtract")
)
# f(a + b, c) = f(a, c) + f(b, c), and in the second operand likewise, but not in both.
LINEAR_IN_EACH = frozenset(
    f"stablehlo.{name}" for name in ("convolution", "dot", "dot_general", "multiply")
)

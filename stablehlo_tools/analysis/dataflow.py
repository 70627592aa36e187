"""Dependence that no compiler can simplify away.

That a value is computed from another in the text proves little: `x * 0` of integers, a slice of
a concatenation, a select on a constant all lose their operand in XLA's algebraic simplifier. Here
a path counts only through ops that keep every element's dependence.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir

# Ops of floats whose every result element depends on the operand elements it is made of, for any
# values of them: no identity turns `0 * x`, `x - x` or `x / x` of floats into a constant, because
# of NaN. Minimum, maximum, clamp, select and the slicing ops are left out: those can fold.
_KEEPS_DEPENDENCE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "reshape",
        "transpose",
        "reverse",
        "broadcast_in_dim",
        "add",
        "multiply",
        "dot_general",
        "negate",
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "tanh",
        "sine",
        "cosine",
        "sqrt",
        "rsqrt",
        "cbrt",
        "all_gather",
        "all_reduce",
        "reduce_scatter",
        "all_to_all",
    )
)
_SEARCH_LIMIT = 64  # ops looked at before giving up; giving up costs one link, never the order


def depends_on(later: ir.Operation, earlier: ir.Operation) -> bool:
    """Whether an operand of `later` surely depends on a result of `earlier`, in one block.

    Sound, not complete: False also means "not shown".
    """
    block = later.block
    pending = list(later.operands)
    seen: set[ir.Operation] = set()
    while pending and len(seen) < _SEARCH_LIMIT:
        value = pending.pop()
        owner = value.owner
        if isinstance(owner, ir.Block):
            continue
        producer = owner.operation
        if producer == earlier:
            return True
        if producer in seen or producer.block != block or producer.is_before_in_block(earlier):
            continue
        if not keeps_dependence(producer):
            continue
        seen.add(producer)
        pending.extend(producer.operands)
    return False


def keeps_dependence(op: ir.Operation) -> bool:
    """Whether every result element surely depends on the operand elements it is made of."""
    if op.name not in _KEEPS_DEPENDENCE:
        return False
    return all(_never_folds(value.type) for value in (*op.operands, *op.results))


def _never_folds(kind: ir.Type) -> bool:
    """Floats of at least one element: integer and boolean identities fold, empty tensors vanish."""
    if not isinstance(kind, ir.RankedTensorType) or not isinstance(kind.element_type, ir.FloatType):
        return False
    return kind.has_static_shape and 0 not in kind.shape

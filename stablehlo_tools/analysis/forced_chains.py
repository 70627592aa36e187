"""Proves quickly, in the usual cases, that ops of one block must follow one another.

A use in the text proves little. XLA's algebraic simplifier drops the operand of `x * 0` of
integers, of a slice of a concatenation, and of a select on a constant. A path counts here only if
it leads through barriers and through ops that keep the dependence of every element. The search goes
backwards, and not far. Sound, not complete: if it finds no path, `forced_dependence` looks at every
op.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.forced_dependence import has_no_elements
from stablehlo_tools.analysis.liveness import reaches_an_output
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, AFTER_ALL, BARRIER, DOT_GENERAL, MULTIPLY
from stablehlo_tools.dialect.traits import (
    COLLECTIVES,
    LAYOUT,
    STABLEHLO,
    Trait,
    full_names,
    ops_with,
)

# Float ops whose result elements each depend on the operand elements that they are computed from,
# for any values. No identity folds `0 * x`, `x - x` or `x / x` of floats, because of NaN. Minimum,
# maximum, clamp, select and the slicing ops can fold, so they are left out. `forced_dependence`
# follows more ops than these. This set also decides which links thread-tokens leaves out.
_KEEPS_DEPENDENCE = (
    LAYOUT
    | (STABLEHLO & ops_with(Trait.UNARY | Trait.TRANSCENDENTAL))
    | (COLLECTIVES & ops_with(Trait.GROUPED))
    | {ADD, DOT_GENERAL, MULTIPLY, "stablehlo.negate"}
) - full_names("collective_broadcast tan")
_SEARCH_LIMIT = 64  # ops visited before giving up, which costs one link, never the order


def depends_on(later: ir.Operation, earlier: ir.Operation) -> bool:
    """Returns True if an operand of `later` surely depends on a result of `earlier`.

    Both are in one block. Sound, not complete: False also means "not shown".
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
        if not _keeps_dependence(producer):
            continue
        seen.add(producer)
        pending.extend(producer.operands)
    return False


def _keeps_dependence(op: ir.Operation) -> bool:
    """Returns True if every result element surely depends on the operand elements it is made of.

    This holds for non-empty float tensors. Integer and boolean identities fold, and empty tensors
    vanish.
    """
    return op.name in _KEEPS_DEPENDENCE and all(
        isinstance(type_ := value.type, ir.RankedTensorType)
        and isinstance(type_.element_type, ir.FloatType)
        and type_.has_static_shape
        and 0 not in type_.shape
        for value in (*op.operands, *op.results)
    )


_LONGEST_SEARCH = 64  # values, for one collective
_LONGEST_LINK = 8  # barriers and joins, between two collectives


def is_chain(collectives: Sequence[Collective], live: set[ir.Value]) -> bool:
    """Returns True if each collective must come after the one before it.

    None of them may be dead, or in control flow. `live` are values on paths to an output, as
    `live_paths` finds them.
    """
    if any(has_no_elements(value.type) for c in collectives for value in c.op.results):
        return False
    return all(_follows(later, earlier, live) for earlier, later in pairwise(collectives))


def _follows(later: Collective, earlier: Collective, live: set[ir.Value]) -> bool:
    if not len(earlier.op.results):
        return False
    goal = earlier.op.results[0]
    if _is_linked(later, goal, live):
        return True
    pending = deque(later.op.operands)  # breadth first, because the collective before is near
    doubted: deque[tuple[ir.Value, ir.Value]] = deque()  # operand and result of a barrier
    seen: set[ir.Value] = set()
    while (pending or doubted) and len(seen) < _LONGEST_SEARCH:
        if not pending:
            operand, result = doubted.popleft()
            if operand not in seen and _is_used(result, live):
                pending.append(operand)
            continue
        value = pending.popleft()
        if value in seen:
            continue
        seen.add(value)
        owner = value.owner
        if isinstance(owner, ir.Block) or has_no_elements(value.type):
            continue
        op = owner.operation
        if op.results[0] == goal:
            return True
        if op.name == BARRIER:
            for operand, result in zip(op.operands, op.results, strict=True):
                if result == value or not isinstance(operand.type, ir.RankedTensorType):
                    pending.append(operand)  # a result waits for its own operand and for tokens
                else:  # and for all operands whose results are used
                    doubted.append((operand, result))
        elif op.name == AFTER_ALL or _keeps_dependence(op):
            pending += op.operands
    return False


def _is_linked(later: Collective, goal: ir.Value, live: set[ir.Value]) -> bool:
    """Returns True if tokens lead from a barrier on `goal` to one on the first operand."""
    value = next(iter(later.op.operands), None)
    for _ in range(_LONGEST_LINK):
        if value is None or isinstance(value.owner, ir.Block):
            return False
        op = value.owner.operation
        if op.name == BARRIER:
            place = next((u.operand_number for u in goal.uses if u.owner.operation == op), None)
            if place is not None:
                return _is_used(op.results[place], live)
            if isinstance(op.operands[-1].type, ir.RankedTensorType):
                return False
        elif op.name != AFTER_ALL:
            return False
        value = op.operands[-1] if len(op.operands) else None
    return False


def _is_used(value: ir.Value, live: set[ir.Value]) -> bool:
    return value in live or reaches_an_output([value], live)

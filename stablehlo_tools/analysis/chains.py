"""Whether ops of one block surely follow one another: the usual case, and quick to see.

That a value is computed from another in the text proves little: `x * 0` of integers, a slice of
a concatenation, a select on a constant all lose their operand in the algebraic simplifier of XLA.
Here a path counts only through ops that keep the dependence of every element, and through barriers;
it is searched backwards, and not far. Sound, not complete: where it is not found,
`forced_dependence` looks at every op.
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

# Ops of floats whose every result element depends on the operand elements it is made of, for any
# values of them: no identity turns `0 * x`, `x - x` or `x / x` of floats into a constant, because
# of NaN. Minimum, maximum, clamp, select and the slicing ops are left out: those can fold. Fewer
# than `forced_dependence` follows; they decide where thread-tokens needs no link, too.
_KEEPS_DEPENDENCE = (
    LAYOUT
    | (STABLEHLO & ops_with(Trait.UNARY | Trait.TRANSCENDENTAL))
    | (COLLECTIVES & ops_with(Trait.GROUPED))
    | {ADD, DOT_GENERAL, MULTIPLY, "stablehlo.negate"}
) - full_names("collective_broadcast tan")
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
        if not _keeps_dependence(producer):
            continue
        seen.add(producer)
        pending.extend(producer.operands)
    return False


def _keeps_dependence(op: ir.Operation) -> bool:
    """Returns True if every result element surely depends on the operand elements it is made of:
    floats of at least one element. Integer and boolean identities fold, empty tensors vanish."""
    return op.name in _KEEPS_DEPENDENCE and all(
        isinstance(type_ := value.type, ir.RankedTensorType)
        and isinstance(type_.element_type, ir.FloatType)
        and type_.has_static_shape
        and 0 not in type_.shape
        for value in (*op.operands, *op.results)
    )


_LONGEST_SEARCH = 64  # values, for one collective
_LONGEST_LINK = 8  # barriers and joins, from one collective to the next


def is_chain(collectives: Sequence[Collective], live: set[ir.Value]) -> bool:
    """Whether each must come after the one before it.

    None of them is dead, or in control flow; `live` are values on paths that show it, as
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
    pending = deque(later.op.operands)  # nearest first: the one before is not far
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
                else:  # and for all that is used
                    doubted.append((operand, result))
        elif op.name == AFTER_ALL or _keeps_dependence(op):
            pending += op.operands
    return False


def _is_linked(later: Collective, goal: ir.Value, live: set[ir.Value]) -> bool:
    """Whether a token leads from a barrier on the goal to one on the first operand."""
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

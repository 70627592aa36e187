"""Uses that compilers fold away: a value that is used by nothing else is deleted all the same.

Judged backwards, by the elements that are surely needed: of what is put together and taken apart
again only the part that is taken counts, and of other ops the operands that the rules of
`forced_dependence` keep, each operand but constants taken to vary. Where those rules leave out a
predicate, an index or the key of a reduction, it counts as used here: that the order through it is
not sure does not mean that compilers see through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.dependence import VARIES, Dependence
from stablehlo_tools.analysis.elements.boxes import Box, contains, shape_of, whole_box
from stablehlo_tools.analysis.elements.folding import folded
from stablehlo_tools.analysis.elements.links import Link, link_of
from stablehlo_tools.analysis.elements.moves import Links, Moved, moves_of, scattered
from stablehlo_tools.analysis.forced_dependence import (
    Transfer,
    has_no_elements,
    is_made_of_constants,
    rule_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import is_float, maker_of

OPAQUE = "stablehlo_tools.keeps_alive"  # unit: made so that no compiler sees through the op
ALL: None = None
Demand = tuple[Box, ...] | None  # boxes of elements that are surely needed; None: all are
_MOST_BOXES = 4
_TRANSFER = Transfer(set)  # asked of no barrier, for which alone it needs live values
_MOVING = frozenset({"assembly", "order", "scatter", "select", "slice"})
_NEVER_FOLDING = frozenset({"all", "bitcast", "convolution", "first", "mixing"})


def needed_operands(result: ir.Value, demand: Demand) -> list[tuple[ir.Value, Demand]]:
    """What elements of an op's operands are surely needed, where some of its result's are."""
    op = maker_of(result)
    if demand is None and _is_reordered(op):
        return [(op.operands[0], ALL)]
    moves = _moves(op)
    if moves is not None:
        return _moved(op, moves, demand)
    written = _written(op)
    if written is not None:
        needed: list[tuple[ir.Value, Demand]] = [(op.operands[0], demand)]
        return needed + _pulled(op, written, demand)
    survivors = _computed_survivors(result)
    if demand is None:
        return [(value, ALL) for value in survivors]
    needed = []
    for position, value in enumerate(op.operands):
        if value not in survivors:
            continue
        link = link_of(op, position)
        pulled = [link.pull(box) for box in demand] if link is not None else []
        boxes = [box for box in pulled if box is not None]
        needed.append((value, tuple(boxes) if boxes else ALL))
    return needed


def _is_reordered(op: ir.Operation) -> bool:
    """Whether an op's result has all elements of its first operand, and no others."""
    return rule_of(op.name) == "order" and not has_no_elements(op.results[0].type)


def _moves(op: ir.Operation) -> Moved | None:
    """Where the elements of an op's result come from, if nothing is computed."""
    if rule_of(op.name) not in _MOVING or OPAQUE in op.attributes:
        return None
    return moves_of(op)


def _moved(op: ir.Operation, moves: Moved, demand: Demand) -> list[tuple[ir.Value, Demand]]:
    if moves.steering:  # nobody knows what is taken, or where it is put
        used = [*sorted(moves.sources), *moves.steering]
        return [(op.operands[position], ALL) for position in used]
    return _pulled(op, moves.links, demand)


def _written(op: ir.Operation) -> Links | None:
    """The updates that a scatter which computes combines with what is there; None if not known."""
    if rule_of(op.name) != "scatter":
        return None
    shapes = [shape_of(value.type) for value in op.operands]
    known = [shape for shape in shapes if shape is not None]
    written = scattered(op, known) if len(shapes) == len(known) == 3 else None
    return None if written is None else written[0]


def _pulled(
    op: ir.Operation, links: Sequence[tuple[int, Link]], demand: Demand
) -> list[tuple[ir.Value, Demand]]:
    shape = shape_of(op.results[0].type)
    assert shape is not None, "of every op whose moves are known"
    needed: list[tuple[ir.Value, Demand]] = []
    for box in [whole_box(shape)] if demand is None else demand:
        for position, link in links:
            pulled = link.pull(box)
            if pulled is not None:
                needed.append((op.operands[position], (pulled,)))
    return needed


def grown(known: Demand, more: Demand, type_: ir.Type) -> Demand:
    """Elements of a value of a type that are needed for one use or another."""
    if known is None or more is None:
        return ALL
    boxes = list(known)
    for box in more:
        if len(boxes) < _MOST_BOXES and not any(contains(other, box) for other in boxes):
            boxes = [*(other for other in boxes if not contains(box, other)), box]
    shape = shape_of(type_)
    is_whole = shape is not None and whole_box(shape) in boxes
    return ALL if is_whole else tuple(boxes)


def _survivors(result: ir.Value) -> Sequence[ir.Value]:
    """The operands of an op's result that it still depends on once compilers have simplified it."""
    op = maker_of(result)
    moves = _moves(op)
    if moves is not None:
        used = {position for position, _ in moves.links}
        used = moves.sources.union(moves.steering) if moves.steering else used
        return [op.operands[position] for position in sorted(used)]
    written = _written(op)
    if written is not None:
        return [op.operands[0], *(op.operands[position] for position, _ in written)]
    return _computed_survivors(result)


def _computed_survivors(result: ir.Value) -> Sequence[ir.Value]:
    """The same of an op that computes, or of which it is not known what it moves."""
    op = maker_of(result)
    if rule_of(op.name) == "own":
        return _sorted_by(op, ir.OpResult(result).result_number)
    operands = list(op.operands)
    if not _may_fold(op):
        return operands
    computed = [value for value in operands if not _is_constant(value)]
    known: dict[ir.Value, Dependence] = {}
    for position, value in enumerate(computed):
        bits = VARIES | 2 << position
        known[value] = Dependence(bits, bits)
    dependences = _TRANSFER.results(op, op.name, known)
    if dependences is None:
        return operands
    left = dependences[ir.OpResult(result).result_number].whole
    survivors = [value for i, value in enumerate(computed) if left >> (i + 1) & 1]
    return [*survivors, *_steering(op, operands)]


def may_vanish(op: ir.Operation) -> bool:
    """Whether some computed operand's use may be folded away."""
    if not _may_fold(op) or _is_reordered(op):
        return False
    computed = {value for value in op.operands if not _is_constant(value)}
    return any(computed.difference(_survivors(result)) for result in op.results)


def takes_part(op: ir.Operation, position: int) -> bool:
    """Whether an op may leave out elements of an operand."""
    moves = _moves(op) if rule_of(op.name) != "order" else None
    if moves is None:
        return position == 2 and rule_of(op.name) == "scatter"
    return position not in moves.kept


def puts_together(op: ir.Operation) -> bool:
    """Whether elements of an op's result come from several operands, whole."""
    moves = _moves(op) if rule_of(op.name) not in ("order", "slice") else None
    return moves is not None and len(moves.sources) > 1


def _may_fold(op: ir.Operation) -> bool:
    rule = rule_of(op.name)
    if rule is None or rule in _NEVER_FOLDING or OPAQUE in op.attributes:
        return False
    if rule == "scatter":  # of which may_vanish alone asks, where something is known of it
        return moves_of(op) is not None or _written(op) is not None
    if rule == "reduction":
        return len(op.results) == 1
    return rule != "arithmetic" or not is_float(op.results[0].type)


def _sorted_by(sort: ir.Operation, position: int) -> list[ir.Value]:
    """The operand that is one result of a sort, and those that are compared."""
    arguments = sort.regions[0].blocks[0].arguments
    return [
        value
        for i, value in enumerate(sort.operands)
        if i == position or any(list(argument.uses) for argument in arguments[2 * i : 2 * i + 2])
    ]


def _steering(op: ir.Operation, operands: list[ir.Value]) -> list[ir.Value]:
    """Predicates and indices, which decide what is taken."""
    rule = rule_of(op.name)
    if rule == "select":
        is_open = operands[1] != operands[2] and not _is_constant(operands[0])
        return operands[:1] if is_open else []
    if rule == "slice":
        return operands[1:]
    return operands[2:] if op.name == "stablehlo.dynamic_update_slice" else []


def _is_constant(value: ir.Value) -> bool:
    return is_made_of_constants(value) or folded(value) is not None

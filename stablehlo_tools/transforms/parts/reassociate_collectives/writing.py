"""Writes the collective of a sum in the place of the sum of two collectives."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.tensor_shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES, LAYOUTS, shared
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.reassociate_collectives.terms import Term, through

_OF_ONE = frozenset({SHARDING, FRONTEND_ATTRIBUTES, *LAYOUTS})  # not of what stands for two


def write_merged(combine: ir.Operation, one: Term, other: Term) -> None:
    """Combines what two terms' collectives take, and lets one collective take the op's place.

    The op, and of the terms what nothing uses any more, is erased.
    """
    point = ir.InsertionPoint(combine)
    operands = [_before(term, point) for term in (one, other)]
    summed = _create(combine, operands, operands[0].type, point)
    value = _collective(summed, one, other, point)
    for op in one.after:
        values = list(op.operands)
        values[through(op)] = value
        value = _create(op, values, op.results[0].type, point)
    _keep_sharding(combine, value)
    combine.results[0].replace_all_uses_with(value)
    combine.erase()
    terms = [one] if one.collective.op == other.collective.op else [one, other]
    for op in [op for term in terms for op in term.ops]:
        op.erase()


def _before(term: Term, point: ir.InsertionPoint) -> ir.Value:
    """What the term's collective takes, after the ops that may come before it."""
    value = term.collective.op.operands[0]
    for op in term.before:
        kind = op.results[0].type
        if term.collective.kind == "reduce_scatter":  # an elementwise op, on all that it takes
            kind = _tensor(shape_of(value), element_of(op.results[0]), op.location)
        value = _create(op, [value, *list(op.operands)[1:]], kind, point)
    return value


def _collective(value: ir.Value, one: Term, other: Term, point: ir.InsertionPoint) -> ir.Value:
    ops = [one.collective.op, other.collective.op]
    kept = {name: a for name, a in ops[0].attributes.items() if name not in _OF_ONE}
    locations = list(dict.fromkeys(op.location for op in ops))
    location = ir.Location.fused(locations, context=ops[0].context)
    new = ir.Operation.create(
        ops[0].name,
        results=[one.between.type],
        operands=[value],
        attributes={**kept, **shared(ops)},
        regions=1,
        loc=location,
        ip=point,
    )
    scalar = _tensor([], element_of(value), location)
    block = ir.Block.create_at_start(new.regions[0], [scalar, scalar], [location, location])
    inner = ir.InsertionPoint(block)
    combine = ops[0].regions[0].blocks[0].operations[0].operation
    combined = _create(combine, list(block.arguments), scalar, inner)
    ir.Operation.create("stablehlo.return", operands=[combined], loc=location, ip=inner)
    return new.results[0]


def _create(
    like: ir.Operation, operands: Sequence[ir.Value], kind: ir.Type, point: ir.InsertionPoint
) -> ir.Value:
    """An op like another on other operands; how its result is sharded is not said."""
    return ir.Operation.create(
        like.name,
        results=[kind],
        operands=list(operands),
        attributes={name: a for name, a in like.attributes.items() if name != SHARDING},
        loc=like.location,
        ip=point,
    ).results[0]


def _keep_sharding(combine: ir.Operation, value: ir.Value) -> None:
    if SHARDING in combine.attributes:
        maker = value.owner
        assert isinstance(maker, ir.Operation | ir.OpView), "the result of an op"
        maker.operation.attributes[SHARDING] = combine.attributes[SHARDING]


def _tensor(shape: Sequence[int], element: ir.Type, location: ir.Location) -> ir.Type:
    return ir.RankedTensorType.get(list(shape), element, loc=location)

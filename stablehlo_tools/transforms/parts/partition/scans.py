"""Prefix sums as windows that grow over the rows, for which a partitioner has a rule.

jax writes `jnp.cumsum` as a composite. What it is decomposed to is a loop over the rows, one at a
time, that no compiler takes for a prefix sum again; a window they do.

    %1:2 = stablehlo.composite "chlo.scan" %x, %zeros ({add}) {dimension = 0}
==>
    %1 = stablehlo.reduce_window(%x, %zero) ({add}) <window = [n], padding = [[n - 1, 0]]>
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import COMPOSITE
from stablehlo_tools.dialect.reducers import REDUCERS
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import element_of, shape_of, write_reducer
from stablehlo_tools.ir.values import is_identity_of
from stablehlo_tools.ir.walk import callee_name, functions_by_name, ops_named

_SCAN = "chlo.scan"
_BROADCAST = "stablehlo.broadcast_in_dim"


@dataclass(frozen=True)
class _Scan:
    """A scan of one tensor by a reducer, from the reducer's identity on."""

    reducer: str
    dimension: int
    is_reverse: bool
    start: ir.Value  # a scalar

    @staticmethod
    def of(composite: ir.Operation) -> _Scan | None:
        """What the composite scans; None for any other, and where its last row is asked for."""
        if ir.StringAttr(composite.attributes["name"]).value != _SCAN:
            return None
        reducer = _reducer(composite)
        start = _scalar(composite.operands[-1])
        alone = len(composite.operands) == len(composite.results) == 2
        if reducer is None or start is None or not alone or list(composite.results[1].uses):
            return None
        if (
            not is_identity_of(reducer, start)
            or not ir.RankedTensorType(composite.operands[0].type).has_static_shape
        ):
            return None
        attributes = ir.DictAttr(composite.attributes["composite_attributes"])
        if not ir.BoolAttr(attributes["is_associative"]).value:
            return None
        return _Scan(
            reducer,
            ir.IntegerAttr(attributes["dimension"]).value,
            ir.BoolAttr(attributes["is_reverse"]).value,
            start,
        )


def scans_as_windows(module: ir.Module) -> None:
    """Rewrites the scans by a reducer; others stay composites, to be inlined."""
    decompositions: set[str] = set()
    for composite in ops_named(module.operation, {COMPOSITE}):
        scan = _Scan.of(composite)
        if scan is not None:
            decompositions.add(callee_name(composite))
            _rewrite(composite, scan)
    if not decompositions:
        return
    called = {callee_name(op) for op in ops_named(module.operation, CALLS)}
    for name, function in functions_by_name(module).items():
        if name in decompositions - called:
            function.erase()


def _rewrite(composite: ir.Operation, scan: _Scan) -> None:
    rows = composite.operands[0]
    shape = shape_of(rows)
    window, padding = [1] * len(shape), [[0, 0] for _ in shape]
    window[scan.dimension] = shape[scan.dimension]
    padding[scan.dimension][scan.is_reverse] = shape[scan.dimension] - 1
    context, location = composite.context, composite.location
    text = f"dense<{padding}> : tensor<{len(shape)}x2xi64>"
    made = ir.Operation.create(
        "stablehlo.reduce_window",
        results=[rows.type],
        operands=[rows, scan.start],
        attributes={
            "window_dimensions": ir.DenseI64ArrayAttr.get(window, context),
            "padding": ir.Attribute.parse(text, context),
        },
        regions=1,
        loc=location,
        ip=ir.InsertionPoint(composite),
    )
    write_reducer(scan.reducer, element_of(rows), made.regions[0], location)
    composite.results[0].replace_all_uses_with(made.results[0])
    composite.erase()


def _reducer(composite: ir.Operation) -> str | None:
    """The op that combines a row with what came before it, which is both kept and handed on."""
    if len(composite.regions) != 1 or not composite.regions[0].blocks:
        return None
    block = composite.regions[0].blocks[0]
    ops = [op.operation for op in block.operations]
    if len(ops) != 2:
        return None
    combine, end = ops
    name = combine.name.removeprefix("stablehlo.")
    both = set(combine.operands) == set(block.arguments)
    handed_on = list(end.operands) == [combine.results[0]] * 2
    return name if name in REDUCERS and both and handed_on else None


def _scalar(value: ir.Value) -> ir.Value | None:
    """The scalar that a tensor has in all its elements."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != _BROADCAST:
        return None
    scalar = owner.operands[0]
    return None if shape_of(scalar) else scalar

"""Small changes to ops that the emission makes."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.dimension_propagation.layout import Layout, Step, part_shape
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of

SIZES = {  # lists of sizes that shrink with the operand
    "stablehlo.dynamic_slice": ("slice_sizes",),
    "stablehlo.gather": ("slice_sizes",),
    "stablehlo.pad": ("edge_padding_low", "edge_padding_high"),
    "stablehlo.slice": ("start_indices", "limit_indices"),
}
_PER_VALUE = frozenset({"sdy.sharding", "mhlo.sharding"})


def combined(op: ir.Operation, kind: str, made: Sequence[Sequence[ir.Value]]) -> ir.Value:
    """The one result of an op, from what each part gives."""
    build = Builder(ir.InsertionPoint(op), op.location)
    total = made[0][0]
    for (part,) in made[1:]:
        total = build.same(kind, total, part)
    return total


def replace_end(end: ir.Operation, values: Sequence[ir.Value]) -> None:
    """Lets a terminator return other values."""
    ir.Operation.create(
        end.name, operands=list(values), loc=end.location, ip=ir.InsertionPoint(end)
    )
    end.erase()


def attributes(op: ir.Operation) -> dict[str, ir.Attribute]:
    """Those that do not speak of each result."""
    return {name: value for name, value in op.attributes.items() if name not in _PER_VALUE}


def part_type(value: ir.Value, layout: Layout | None, parts: int, count: int = 1) -> ir.Type:
    """The type of one part of a value, or of `count` consecutive ones together."""
    if layout is None:
        return value.type
    shape = part_shape(tuple(shape_of(value)), layout, parts, count)
    return ir.RankedTensorType.get(shape, element_of(value), loc=ir.Location.unknown())


def shrink(copy: ir.Operation, step: Step, parts: int, count: int = 1) -> None:
    """Fits the sizes that a slicing op states to one part of its operand, or to `count` parts."""
    layout = step.operands[0]
    if layout is None:
        return
    for name in SIZES.get(copy.name, ()):
        sizes = list(ir.DenseI64ArrayAttr(copy.attributes[name]))
        if sizes[layout.dim] == 1:  # a batching dimension of a gather
            continue
        sizes[layout.dim] = sizes[layout.dim] // parts * count
        copy.attributes[name] = ir.DenseI64ArrayAttr.get(sizes, copy.context)

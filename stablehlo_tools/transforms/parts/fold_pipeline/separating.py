"""A pipeline and its backward in one manual computation, as `jax.value_and_grad` inside of
`jax.shard_map` gives them, as two: as jax itself divides one that it differentiates.

    %r = sdy.manual_computation(%x) { pipeline; ...; its backward; ... }
  ==>
    %rows = sdy.manual_computation(%x) { pipeline }
    %r = sdy.manual_computation(%x, %rows) { ...; its backward; ... }
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools import bindings
from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.inline import copy_with, rename
from stablehlo_tools.ir.values import CONSTANTS, producer
from stablehlo_tools.ir.walk import values_used
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.recognition import permutes_of

_AGAIN = CONSTANTS | ops_with(Trait.DEVICE_ID)
Axes = Sequence[tuple[str, int]]  # names and sizes, in the order of the mesh


def separate_backward(region: LoopRegion) -> bool:
    """Divides the manual computation behind a region's loop, where another one in it, which
    permutes, too, takes what its ticks leave; whether it did."""
    manual = region.manual
    if manual is None:
        return False
    ops = [view.operation for view in manual.regions[0].blocks[0].operations]
    place = ops.index(region.loop) + 1
    if not any(_takes_ticks(op, region) for op in ops[place:]):
        return False
    cut = _Cut.behind(region, manual, ops[:place], ops[place:])
    first = cut.write_first()
    second, inner = cut.write_second(first)
    end = cut.later[-1].clone(ip=ir.InsertionPoint(inner))
    for op in cut.later[:-1]:
        op.move_before(end)
    cut.later[-1].erase()
    replace_in(inner, cut.entered(inner))
    block = manual.regions[0].blocks[0]
    ir.Operation.create(
        "sdy.return", operands=cut.rows, loc=manual.location, ip=ir.InsertionPoint(block)
    )
    block.append_to(first.regions[0])
    for old, new in zip(manual.results, second.results, strict=True):
        old.replace_all_uses_with(new)
    manual.erase()
    return True


@dataclass(frozen=True)
class _Cut:
    """A manual computation that is divided: what its `later` ops use of the others is made `again`,
    is one of the `arguments`, or is `handed` on in `rows`."""

    region: LoopRegion
    manual: ir.Operation
    later: list[ir.Operation]
    again: list[ir.Value]
    arguments: list[ir.Value]
    handed: list[ir.Value]
    rows: list[ir.Value]

    @staticmethod
    def behind(
        region: LoopRegion,
        manual: ir.Operation,
        earlier: list[ir.Operation],
        later: list[ir.Operation],
    ) -> _Cut:
        """Behind the earlier ops."""
        made = set(earlier)
        used = made_in(manual.regions[0].blocks[0], later)
        needed = [value for value in used if (op := producer(value)) is None or op in made]
        again = [value for value in needed if _is_made_again(value)]
        arguments = [value for value in needed if producer(value) is None]
        others = {*again, *arguments}
        handed = [value for value in needed if value not in others]
        build = Builder(ir.InsertionPoint(later[0]), manual.location)
        rows = [row_of(build, value) for value in handed]
        return _Cut(region, manual, later, again, arguments, handed, rows)

    @property
    def shardings(self) -> list[ir.Attribute]:
        """How the rows of all devices are sharded."""
        mesh, axes = self.region.mesh_reference(), self.region.manual_axes()
        return [rows_sharding(row, axes, mesh) for row in self.rows]

    def write_first(self) -> ir.Operation:
        """The manual computation of the earlier ops, without its block."""
        return self._manual(
            [rows_type(row, self.region.manual_axes()) for row in self.rows],
            list(self.manual.operands),
            "out_shardings",
            self.shardings,
        )

    def write_second(self, first: ir.Operation) -> tuple[ir.Operation, ir.Block]:
        """That of the later ops, and its block, which is empty."""
        numbers = [ir.BlockArgument(value).arg_number for value in self.arguments]
        listed = sharding_per_value(self.manual.attributes["in_shardings"])
        second = self._manual(
            [result.type for result in self.manual.results],
            [*(self.manual.operands[number] for number in numbers), *first.results],
            "in_shardings",
            [*(listed[number] for number in numbers), *self.shardings],
        )
        types = [value.type for value in (*self.arguments, *self.rows)]
        locations = [self.manual.location] * len(types)
        return second, second.regions[0].blocks.append(*types, arg_locs=locations)

    def entered(self, inner: ir.Block) -> dict[ir.Value, ir.Value]:
        """What stands in the second block for values of the first."""
        start, count = ir.InsertionPoint.at_block_begin(inner), len(self.arguments)
        build = Builder(start, self.manual.location)
        taken: dict[ir.Value, ir.Value] = dict(
            zip(self.arguments, inner.arguments[:count], strict=True)
        )
        for value, row in zip(self.handed, inner.arguments[count:], strict=True):
            taken[value] = build.reshape(row, shape_of(value))
        for value in self.again:
            _make_again(value, taken, start)
        return taken

    def _manual(
        self,
        types: list[ir.Type],
        operands: list[ir.Value],
        name: str,
        shardings: list[ir.Attribute],
    ) -> ir.Operation:
        """A manual computation like this one, but for its operands, results and one attribute."""
        per_value = bindings.TensorShardingPerValueAttr.get(shardings, self.manual.context)
        return ir.Operation.create(
            MANUAL_COMPUTATION,
            results=types,
            operands=operands,
            attributes={**dict(self.manual.attributes.items()), name: per_value},
            regions=1,
            loc=self.manual.location,
            ip=ir.InsertionPoint(self.manual),
        )


def _takes_ticks(op: ir.Operation, region: LoopRegion) -> bool:
    """Whether a loop that permutes takes what each tick of a region's has left."""
    if op.name != WHILE or not permutes_of(op):
        return False
    return any(
        producer(value) == region.loop and shape_of(value)[:1] == [region.ticks]
        for value in op.operands
    )


def _is_made_again(value: ir.Value) -> bool:
    """Whether a value is made of constants and the number of the device alone, as an integer."""
    op = producer(value)
    if op is None or len(op.regions) or len(op.results) != 1:
        return False
    if op.name in _AGAIN:
        return True
    is_integer = isinstance(element_of(value), ir.IntegerType) and not shape_of(value)
    return is_integer and all(map(_is_made_again, op.operands))


def _make_again(value: ir.Value, made: dict[ir.Value, ir.Value], point: ir.InsertionPoint) -> None:
    """Makes a value at a point, too."""
    if value not in made:
        op = producer(value)
        assert op is not None
        for operand in op.operands:
            _make_again(operand, made, point)
        made[value] = copy_with(op, made, point).results[0]


def row_of(build: Builder, value: ir.Value) -> ir.Value:
    """The value as one device's row of a whole value, divided by all axes in its first dimension:

    %whole = sdy.manual_computation ... { ... sdy.return %row : tensor<1x2xf32> }
             out_shardings=[[{"data", "stage"}, {}]] ... -> tensor<8x2xf32>
    """
    return build.reshape(value, [1, *shape_of(value)])


def rows_type(row: ir.Value, axes: Axes) -> ir.Type:
    """The type of the rows of all devices along some axes."""
    shape = [prod(size for _, size in axes), *shape_of(row)[1:]]
    return ir.RankedTensorType.get(shape, element_of(row), loc=ir.Location.unknown(row.context))


def rows_sharding(row: ir.Value, axes: Axes, mesh: ir.Attribute) -> ir.Attribute:
    """How the rows of all devices are sharded."""
    context, of_dim = row.context, bindings.SdyDimensionShardingAttr
    named = [bindings.SdyAxisRefAttr.get(name, context=context) for name, _ in axes]
    others = [of_dim.get([], True, context=context) for _ in shape_of(row)[1:]]
    dims = [of_dim.get(named, True, context=context), *others]
    return bindings.TensorShardingAttr.get(mesh, dims, context=context)


def made_in(block: ir.Block, ops: Iterable[ir.Operation]) -> list[ir.Value]:
    """The values of a block, its arguments among them, that ops and those inside of them use."""
    used = (value for op in ops for value in values_used(op))
    return list(dict.fromkeys(value for value in used if _block_of(value) == block))


def replace_in(block: ir.Block, replacing: Mapping[ir.Value, ir.Value]) -> None:
    """Lets the ops of a block, and those inside of them, use other values."""
    for view in block.operations:
        rename(view.operation, replacing)


def _block_of(value: ir.Value) -> ir.Block:
    op = producer(value)
    return ir.BlockArgument(value).owner if op is None else op.block

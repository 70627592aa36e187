"""What the rest of a program uses of a pipeline, and where the loop over layers goes that gives it.

    %r = sdy.manual_computation(%x) manual_axes={"stage", "data"} { ... the pipeline ... }
  ==>
    %r = sdy.manual_computation(%x) manual_axes={"data"} { ... what is written here ... }

Other manual axes than that of the stages stay manual around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from stablehlo_tools import bindings
from stablehlo_tools.analysis.shardings import sharding_per_value, without_axis
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, SLICE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.fold_pipeline.device_rows import (
    made_in,
    replace_in,
    row_of,
    rows_sharding,
    rows_type,
)
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.segments import (
    erase_unused,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
)


def _no(_: ir.Operation) -> bool:
    return False


class Output(NamedTuple):
    """A value to be replaced, which is a box of a result."""

    value: ir.Value
    result: int
    box: Box


def outputs_of(
    op: ir.Operation, region: LoopRegion, *, but: Callable[[ir.Operation], bool] = _no
) -> Iterator[Output]:
    """The results of an op that are used; or the slices where nothing else is of one.

    The pipeline's last ticks give the outputs, and the others garbage that must not be traced. Uses
    by ops that `but` names do not count.
    """
    for number, result in enumerate(op.results):
        users = [user for use in result.uses if not but(user := use.owner.operation)]
        if not users:
            continue
        own = region.leaving_shape(number)
        boxes = [_sliced(user, own) for user in users]
        if None in boxes:
            yield Output(result, number, Box.whole(own))
            continue
        for user, box in zip(users, boxes, strict=True):
            assert box is not None
            yield Output(user.results[0], number, box)


def _sliced(op: ir.Operation, own: Sequence[int]) -> Box | None:
    """The box that a slice without strides takes of a value of which a device has the shape `own`,
    but for the axis of the stages: along what other axes divide, it is all of it."""
    if op.name != SLICE or any(stride != 1 for stride in integers(op, "strides")):
        return None
    box = Box(integers(op, "start_indices"), tuple(shape_of(op.results[0])))
    for dim, (size, whole) in enumerate(zip(own, shape_of(op.operands[0]), strict=True)):
        if size != whole:
            if box.sizes[dim] != whole:
                return None
            box = box.along(dim, 0, size)
    return box


class FoldSite:
    """Where the loop over layers goes: in front of the pipeline's loop, or of the manual
    computation around it, outside of the axis of the stages; but inside of a new one over the
    other manual axes."""

    def __init__(self, region: LoopRegion) -> None:
        self._region = region
        self._entering: dict[ir.Value, ir.Value] = {}
        self.anchor = region.manual or region.loop
        self.point = ir.InsertionPoint(self.anchor)
        self.inner: ir.Block | None = None
        self._received: list[tuple[ir.Value, ir.Attribute]] = []
        if region.manual is not None:
            self._enter(region.manual)

    def entering(self, value: ir.Value) -> ir.Value:
        """What stands here for a value from outside of the region."""
        return self._entering.get(value, value)

    def type_of(self, output: Output) -> ir.Type:
        """The type that an output has here."""
        return ir.RankedTensorType.get(
            output.box.sizes, element_of(output.value), loc=self.anchor.location
        )

    def leaving(
        self, outputs: Sequence[Output], values: Sequence[ir.Value], later: FoldSite | None = None
    ) -> list[ir.Value]:
        """What takes the place of outputs, of which values stand here. What is used at a later
        site is handed on to it."""
        manual = self._region.manual
        if self.inner is None or manual is None:
            return list(values)
        handed = [] if later is None else self._hand_on_arguments(later)
        build = Builder(ir.InsertionPoint(self.inner), manual.location)
        rows = [row_of(build, value) for value in handed]
        ir.Operation.create(
            "sdy.return",
            operands=[*values, *rows],
            loc=terminator(manual.regions[0].blocks[0]).location,
            ip=ir.InsertionPoint(self.inner),
        )
        erase_unused(self.inner)
        listed = sharding_per_value(manual.attributes["out_shardings"])
        shardings = [
            without_axis(listed[output.result], self._region.ranks.axis) for output in outputs
        ]
        mesh, axes = self._region.mesh_reference(), self._others()
        by_device = [rows_sharding(row, axes, mesh) for row in rows]
        shardings += by_device
        types = [output.value.type for output in outputs]
        types += [rows_type(row, axes) for row in rows]
        new = self._manual(types, shardings, manual)
        self.inner.append_to(new.regions[0])
        results: list[ir.Value] = list(new.results)
        left = zip(handed, rows, results[len(outputs) :], by_device, strict=True)
        for value, row, whole, sharding in left:
            assert later is not None
            later.receive(value, row.type, whole, sharding)
        return [
            self._ordered(result, "out_shardings", output.result, leaving=True)
            for output, result in zip(outputs, results, strict=False)
        ]

    def _hand_on_arguments(self, later: FoldSite) -> list[ir.Value]:
        """Hands on to a later site what it uses of this one's arguments; returns what else it uses
        of this site."""
        assert self.inner is not None
        assert later.inner is not None
        used = made_in(self.inner, (view.operation for view in later.inner.operations))
        numbers: dict[ir.Value, int] = {a: n for n, a in enumerate(self.inner.arguments)}
        for value in used:
            if (number := numbers.get(value)) is not None:
                later.receive(value, value.type, *self._operand(number))
        return [value for value in used if value not in numbers]

    def receive(
        self, value: ir.Value, type_: ir.Type, whole: ir.Value, sharding: ir.Attribute
    ) -> None:
        """Lets what is written here use a value of another site, which enters as a shard of a whole
        one: as it is, or in a row of each device's."""
        assert self.inner is not None
        if (entered := self._argument_for(whole, type_, sharding)) is not None:
            replace_in(self.inner, {value: entered})
            return
        own: ir.Value = self.inner.add_argument(type_, self.anchor.location)
        if type_ != value.type:
            start = ir.InsertionPoint.at_block_begin(self.inner)
            own = Builder(start, self.anchor.location).reshape(own, shape_of(value))
        replace_in(self.inner, {value: own})
        self._received.append((whole, sharding))

    def _argument_for(
        self, whole: ir.Value, type_: ir.Type, sharding: ir.Attribute
    ) -> ir.Value | None:
        """The argument as which a value enters already, with a sharding."""
        region = self._region
        assert region.manual is not None
        assert self.inner is not None
        for number, operand in enumerate(region.manual.operands):
            argument = self.inner.arguments[number]
            if operand == whole and argument.type == type_:
                own = without_axis(region.sharding("in_shardings", number), region.ranks.axis)
                if own == sharding:
                    return argument
        return None

    def clear(self) -> None:
        """Erases what held the block of a new manual computation."""
        if self.inner is not None:
            self._held.erase()

    def _enter(self, manual: ir.Operation) -> None:
        """Starts the new manual computation, where axes other than that of the stages are left."""
        arguments = list(manual.regions[0].blocks[0].arguments)
        if not self._region.has_other_axes():
            self._entering = dict(zip(arguments, manual.operands, strict=True))
            return
        types = [self._whole(argument) for argument in arguments]
        self._held = ir.Operation.create(  # holds the block until the results are known
            MANUAL_COMPUTATION,
            results=[],
            operands=[],
            attributes=dict(manual.attributes.items()),
            regions=1,
            loc=manual.location,
            ip=self.point,
        )
        locations = [argument.location for argument in arguments]
        inner = self._held.regions[0].blocks.append(*types, arg_locs=locations)
        self.inner = inner
        self._entering = dict(zip(arguments, inner.arguments, strict=True))
        self.point = ir.InsertionPoint(inner)

    def _manual(
        self, types: Sequence[ir.Type], shardings: Sequence[ir.Attribute], manual: ir.Operation
    ) -> ir.Operation:
        context, inner = manual.context, self.inner
        assert inner is not None
        count = len(manual.operands)
        entering: list[tuple[ir.Value, ir.Attribute]] = []
        used = [has_uses(argument) for argument in inner.arguments]
        for number, is_used in enumerate(used[:count]):
            if is_used:
                entering.append(self._operand(number))
        entering += [
            own for own, is_used in zip(self._received, used[count:], strict=True) if is_used
        ]
        for number in reversed(range(len(used))):
            if not used[number]:
                inner.erase_argument(number)
        named = ", ".join(f'"{axis}"' for axis, _ in self._others())
        per_value = bindings.TensorShardingPerValueAttr
        return ir.Operation.create(
            MANUAL_COMPUTATION,
            results=list(types),
            operands=[value for value, _ in entering],
            attributes={
                "in_shardings": per_value.get([sharding for _, sharding in entering], context),
                "out_shardings": per_value.get(list(shardings), context),
                "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{named}}}>", context),
            },
            regions=1,
            loc=manual.location,
            ip=ir.InsertionPoint(manual),
        )

    def _operand(self, number: int) -> tuple[ir.Value, ir.Attribute]:
        """What enters the new manual computation for an argument of the old one, and how."""
        manual = self._region.manual
        assert manual is not None
        sharding = self._region.sharding("in_shardings", number)
        value = self._ordered(manual.operands[number], "in_shardings", number, leaving=False)
        return value, without_axis(sharding, self._region.ranks.axis)

    def _ordered(self, value: ir.Value, name: str, number: int, *, leaving: bool) -> ir.Value:
        """A value that enters or leaves, where the axis of the stages divides a dimension before
        others do: the parts of all stages together for each of the others, or back again."""
        axes, axis = self._region.axes_of(name, number), self._region.ranks.axis
        dim = next((dim for dim, own in enumerate(axes) if axis in own[:-1]), None)
        if dim is None:
            return value
        sizes, shape = dict(self._region.mesh_axes()), shape_of(value)
        order = [a for a in axes[dim] if a != axis] + [axis]
        start, end = (order, axes[dim]) if leaving else (axes[dim], order)
        parts = [sizes[a] for a in start]
        split = [*shape[:dim], *parts, shape[dim] // prod(parts), *shape[dim + 1 :]]
        places = [*range(dim), *(dim + start.index(a) for a in end)]
        build = Builder(ir.InsertionPoint(self.anchor), self.anchor.location)
        moved = build.reshape(value, split)
        moved = build.transpose(moved, [*places, *range(len(places), len(split))])
        return build.reshape(moved, shape)

    def _others(self) -> list[tuple[str, int]]:
        """The manual axes but that of the stages, with their sizes, in the order of the mesh."""
        return [each for each in self._region.manual_axes() if each[0] != self._region.ranks.axis]

    def _whole(self, argument: ir.Value) -> ir.Type:
        """The type of an argument with the shards of all ranks put together."""
        shape = self._region.entering_shape(argument)
        return ir.RankedTensorType.get(shape, element_of(argument), loc=self.anchor.location)

"""The border of `main`: how arguments and results are divided outside, and the original signature.

Inside, a value in parts of a sum (`unreduced={"x"}` in a sharding) is summed in the place where it
is made. At the border the parts stay parts. An argument is summed first. For a result in parts,
each device returns its own part; or the first device along the axes returns all of the result, and
the others zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.entry import counted_name
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Axes,
    Dims,
    ValueShardings,
    function_sharding,
    manual_axes,
    rank_of,
    sharding_per_value,
    without_parts,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.dialect.frontend_attributes import set_side_entries, side_entries
from stablehlo_tools.dialect.names import BARRIER, MANUAL_COMPUTATION
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import Trait, ops_with_any, traits_of
from stablehlo_tools.ir.builder import Builder, device_table, element_of, shape_of
from stablehlo_tools.ir.carriers import append_to_terminator, drop_from_terminator
from stablehlo_tools.ir.inline import wrap_body
from stablehlo_tools.ir.values import has_uses, maker_of, producer
from stablehlo_tools.ir.views import Combining, Function, ManualComputation
from stablehlo_tools.ir.walk import ops_named, terminator, walk
from stablehlo_tools.transforms.parts.partition.halo_writing import DeviceGroup
from stablehlo_tools.transforms.parts.partition.partition_form import stated_shardings

# Ops that pass each value on unchanged.
_CARRIERS = ops_with_any(Trait.BRANCH | Trait.LOOP) | {BARRIER, "stablehlo.return"}
_REDUCERS = {"sum": "add", "max": "maximum", "min": "minimum"}


@dataclass(frozen=True)
class Unreduced:
    """The axes along which devices hold parts of a value, and the reduction that combines the
    parts."""

    axes: Axes = ()
    reduction: str = "sum"

    @staticmethod
    def from_sharding(attribute: ir.Attribute | None, shardings: ValueShardings) -> Unreduced:
        """Returns the unreduced axes of a sharding, and their reduction."""
        if attribute is None:
            return Unreduced()
        axes = shardings.unreduced_axes(attribute)
        return Unreduced(axes, str(bindings.TensorShardingAttr(attribute).reduction_op))


@dataclass(frozen=True)
class UnreducedBorder:
    """The axes and reductions of the arguments and results of `main` that are in parts."""

    arguments: Sequence[Unreduced]
    results: Sequence[Unreduced]

    @staticmethod
    def from_function(main: ir.Operation, shardings: ValueShardings) -> UnreducedBorder:
        """Reads the signature of `main`."""
        arguments, results = (
            [
                Unreduced.from_sharding(function_sharding(main, name, number), shardings)
                for number in range(len(_values(main, name)))
            ]
            for name in ("arg_attrs", "res_attrs")
        )
        return UnreducedBorder(arguments, results)

    def cross(self, main: ir.Operation, shardings: ValueShardings, channel: int) -> None:
        """Combines the parts of arguments in a body for one device, and leaves the results in
        parts."""
        if not any(each.axes for each in (*self.arguments, *self.results)):
            return
        block = Function(main).body
        arguments = list(block.arguments)
        devices = DeviceGroup(block, shardings.axes, main.location, channel)
        # `DeviceGroup` has written partition_id as the first op.
        after_partition = block.operations[1].operation
        for argument, parts in zip(arguments, self.arguments, strict=True):
            if parts.axes:
                build = Builder(ir.InsertionPoint(after_partition), main.location)
                reducer = _REDUCERS[parts.reduction]
                groups = shardings.axes.groups(parts.axes)
                whole = build.all_reduce(argument, groups, devices.next_channel(), reducer)
                argument.replace_all_uses_except(whole, [maker_of(whole)])
        end = terminator(block)
        build = Builder(ir.InsertionPoint(end), main.location)
        for number, parts in enumerate(self.results):
            # For max and min, the whole value on every device is a valid set of parts.
            if parts.axes and parts.reduction == "sum":
                whole = end.operands[number]
                end.operands[number] = _part(build, whole, parts.axes, shardings, devices)
                maker = producer(whole)
                if maker is not None and not any(map(has_uses, maker.results)):
                    maker.erase()
        devices.finish()


def _part(
    build: Builder, value: ir.Value, axes: Axes, shardings: ValueShardings, devices: DeviceGroup
) -> ir.Value:
    """Returns a device's part of a value that all devices hold.

    The part is the operand of the all_reduce that made the value. Without such an op it is the
    whole value on the first device along the axes, and zeros on the others.
    """
    maker = producer(value)
    if maker is not None and maker.name == "stablehlo.all_reduce" and len(maker.results) == 1:
        summed = reducer_kind(Combining(maker).combiner) == "add"
        groups = device_table(shardings.axes.groups(axes), build.context)
        if summed and len(list(value.uses)) == 1 and maker.attributes["replica_groups"] == groups:
            return maker.operands[0]
    first = devices.by_position(axes, [1] + [0] * (shardings.axes.size(axes) - 1))
    holds = build.compare("EQ", first, build.splat(1, [], element_of(first)))
    return build.same("select", holds, value, build.splat_like(0, value))


def check_sums(module: ir.Module, shardings: ValueShardings) -> None:
    """Raises a located ToolError for an op that takes and returns parts of sums, and is not linear
    in its parts (P6)."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        if not op.name.startswith("stablehlo.") or op.name in _CARRIERS:
            return ir.WalkResult.ADVANCE
        parts = [shardings.partial_sum_axes(operand) for operand in op.operands]
        after = [axis for result in op.results for axis in shardings.partial_sum_axes(result)]
        shared = [shardings.axes.overlap(axes, after) for axes in parts]
        if any(shared) and not _is_linear(op, shared):
            raise ToolError(
                f"{op.name} reads and returns parts of sums, but is not linear in them: its "
                "results on the devices do not add up to one sum; partition needs the operand "
                "summed first, by a sharding constraint without unreduced axes (P6)",
                op.location,
            )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _is_linear(op: ir.Operation, parts: Sequence[bool]) -> bool:
    if Trait.LINEAR_IN_FIRST in traits_of(op.name):
        return parts[0] and not any(parts[1:])
    if Trait.LINEAR_IN_ALL in traits_of(op.name):
        return all(parts)
    return Trait.LINEAR_IN_EACH in traits_of(op.name) and sum(parts) == 1


def sum_everywhere(module: ir.Module, shardings: ValueShardings, channel: int) -> None:
    """Removes unreduced axes from all shardings of the module, in place. Results that a manual
    computation returns in parts are summed inside it.

    Raises a located ToolError for a manual computation that takes parts.
    """
    for op in ops_named(module.operation, {MANUAL_COMPUTATION}):
        channel = _sum_results(op, shardings, channel)
    for op, name, attribute in stated_shardings(module):
        if (whole := without_parts(attribute)) != attribute:
            op.attributes[name] = whole


def _sum_results(computation: ir.Operation, shardings: ValueShardings, channel: int) -> int:
    """Sums the results that a manual computation returns in parts, inside it.

    Returns the next free channel handle.
    """
    own = manual_axes(computation)
    for number, attribute in enumerate(sharding_per_value(computation.attributes["in_shardings"])):
        if any(axis.name in own for axis in shardings.unreduced_axes(attribute)):
            raise ToolError(
                f"a manual computation takes operand {number} in parts of a sum, {attribute}, and "
                "its result can depend on which device holds which part: partition needs the "
                "operand whole, so sum the parts before it (P6)",
                computation.location,
            )
    end = terminator(ManualComputation(computation).body)
    for number, attribute in enumerate(sharding_per_value(computation.attributes["out_shardings"])):
        parts = Unreduced.from_sharding(attribute, shardings)
        axes = tuple(axis for axis in parts.axes if axis.name in own)
        if axes:
            build = Builder(ir.InsertionPoint(end), computation.location)
            groups = shardings.axes.groups(axes)
            reducer = _REDUCERS[parts.reduction]
            end.operands[number] = build.all_reduce(end.operands[number], groups, channel, reducer)
            channel += 1
    return channel


@dataclass(frozen=True)
class MainSignature:
    """The types and attributes of `main`, to be restored after partitioning."""

    arguments: list[ir.Type]
    results: list[ir.Type]
    attributes: dict[str, ir.Attribute]

    @staticmethod
    def from_function(main: ir.Operation) -> MainSignature:
        """Returns the signature of a function."""
        return MainSignature(
            [argument.type for argument in Function(main).body.arguments],
            [value.type for value in Function(main).yields],
            dict(main.attributes.items()),
        )

    def wrap(self, main: ir.Operation, border: Border, axes: list[str]) -> None:
        """Puts the local body into one manual computation, and restores the signature around it."""
        block, results, shardings = Function(main).body, list(self.results), border.results
        if border.witness is not None:
            build = Builder(ir.InsertionPoint(terminator(block)), main.location)
            witness = build.splat(0, [], ir.IntegerType.get_signless(32, main.context))
            append_to_terminator(block, [witness])
            results.append(witness.type)
            shardings = [*shardings, border.witness]
        wrap_body(main, (border.arguments, shardings), axes, (self.arguments, results))
        if border.witness is not None:
            drop_from_terminator(block, 1)
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
        for name, attribute in self.attributes.items():
            main.attributes[name] = attribute


@dataclass(frozen=True)
class Border:
    """The shardings of a function's arguments and results, as a manual computation lists them.

    `witness` is the sharding of one more result, an unused number. XLA requires of an op that takes
    parts of a sum that it returns parts along the same axes (sdy-verify-unreduced-axes).
    """

    arguments: list[ir.Attribute]
    results: list[ir.Attribute]
    witness: ir.Attribute | None

    @staticmethod
    def from_function(
        main: ir.Operation, shardings: ValueShardings, unreduced: UnreducedBorder
    ) -> Border:
        """Returns the shardings that Shardy chose, with the unreduced axes of `unreduced`."""

        def border_shardings(name: str, parts: Sequence[Unreduced]) -> list[ir.Attribute]:
            divided = zip(_values_with_dims(main, name, shardings), parts, strict=True)
            return [
                shardings.attribute(dims, main.context, part.axes, part.reduction)
                for (_, dims), part in divided
            ]

        axes = shardings.axes.canonical(
            dict.fromkeys(axis for parts in unreduced.arguments for axis in parts.axes)
        )
        witness = shardings.attribute((), main.context, axes) if axes else None
        arguments = border_shardings("arg_attrs", unreduced.arguments)
        return Border(arguments, border_shardings("res_attrs", unreduced.results), witness)


def warn_of_uneven(main: ir.Operation, shardings: ValueShardings, diagnostics: Diagnostics) -> None:
    """Warns of arguments and results with dimensions that their axes do not divide evenly."""
    for name, what in (("arg_attrs", "argument"), ("res_attrs", "result")):
        for number, (value, stated) in enumerate(_values_with_dims(main, name, shardings)):
            for dim, axes in enumerate(stated):
                size, parts = shape_of(value)[dim], shardings.axes.size(axes)
                if size % parts:
                    kept = shardings.axes.size(shardings.even_axes(size, axes))
                    named = counted_name(value) if what == "argument" else f"{what} {number}"
                    diagnostics.warn(
                        f"{named} of @main has a dimension of {size} that is divided by "
                        f"{parts}, which leaves uneven parts: it is "
                        + (f"divided by {kept}" if kept > 1 else "whole on each device")
                        + " instead, as XLA keeps it",
                        main.location,
                    )


_BorderShardings = dict[tuple[str, int], ir.Attribute]  # by attribute (arg_attrs, …) and number


def make_border_even(main: ir.Operation, shardings: ValueShardings) -> _BorderShardings:
    """Removes axes, or parts of them, that do not divide dimensions of arguments and results
    evenly. Returns the shardings that it changed."""
    changed: _BorderShardings = {}
    for name in ("arg_attrs", "res_attrs"):
        if name not in main.attributes:
            continue
        for number, (value, stated) in enumerate(_values_with_dims(main, name, shardings)):
            # jax and XLA pad values inside of a program, but not arguments and results of `main`.
            even = shardings.even_dims(value, stated)
            if even != stated:
                changed[name, number] = shardings.attribute(even, main.context)
    state_border(main, changed)
    return changed


def state_border(main: ir.Operation, stated: _BorderShardings) -> None:
    """Writes shardings on arguments and results of a function, in place of their old ones."""
    for name in dict.fromkeys(name for name, _ in stated):
        entries = side_entries(main, name) or [{} for _ in _values(main, name)]
        for number, entry in enumerate(entries):
            if (name, number) in stated:
                entry[SHARDING] = stated[name, number]
        set_side_entries(main, name, entries)


def _values(main: ir.Operation, name: str) -> list[ir.Value]:
    function = Function(main)
    return list(function.body.arguments) if name == "arg_attrs" else function.yields


def _values_with_dims(
    main: ir.Operation, name: str, shardings: ValueShardings
) -> list[tuple[ir.Value, Dims]]:
    """Returns the arguments or results of a function, each with the axes of its dimensions."""
    values = enumerate(_values(main, name))
    return [(v, shardings.at_border(main, name, n, rank_of(v))) for n, v in values]

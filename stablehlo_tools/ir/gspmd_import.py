"""Converts GSPMD's shardings to Shardy's, on one mesh whose axes express all tilings of a program.

    mhlo.sharding of an argument, of a result, of an op    sdy.sharding
    custom_call @Sharding                                  sdy.sharding_constraint; dimensions that
                                                           `unspecified_dims` lists stay open
    shard_as, shard_like                                   sdy.sharding_group
    @SPMDFullToShardShape … @SPMDShardToFullShape          sdy.manual_computation

Values without a sharding stay open to propagation, arguments too, as when jax compiles an export.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.frontend_attributes import SIDES, set_side_entries, side_entries
from stablehlo_tools.dialect.gspmd import (
    GSPMD,
    OF_OUTPUT,
    OF_PARAMETERS,
    begins_shard_map,
    is_gspmd_call,
    is_sharding_call,
    unspecified_dims,
)
from stablehlo_tools.dialect.hlo_sharding import (
    MANUAL,
    UNREDUCED,
    Axis,
    HloSharding,
    TileMesh,
    mesh_of_tiles,
    parse_hlo_sharding,
    split_hlo_shardings,
)
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import Builder, constrain_sharding
from stablehlo_tools.ir.manual_regions import ManualBorder, wrap_manual_regions
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import producer, stand_in
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import (
    FUNCTION,
    MESH,
    entry_function,
    functions_by_name,
    ops_where,
    symbol_name,
    terminator,
)

_SHARDING = "sdy.sharding"


def import_gspmd(module: ir.Module) -> None:
    """Replaces GSPMD's custom calls and attributes by Shardy's ops and attributes, in place.

    Raises a located ToolError for invalid shardings, tilings that no single mesh expresses, values
    on a single device, and manual computations that cannot be separated.
    """
    for op in ops_where(module.operation, is_gspmd_call):
        if len(op.operands) != 1 or len(op.results) != 1:
            raise ToolError(
                "a custom call of GSPMD's must have one operand and one result (P1)", op.location
            )
    _move_to_signature(module)
    _drop_repeated(module)
    stated = _collect_shardings(module)
    if not stated:
        return
    # All shardings must be for the same number of devices.
    said = module.operation.attributes.get("mhlo.num_partitions")
    count = None if said is None else ir.IntegerAttr(said).value
    for sharding, location in stated.items():
        own = len(sharding.devices)
        if sharding.kind == "tiled" and own != (count := count or own):
            raise ToolError(
                f"a sharding is over {own} devices, but the program has {count} (P3)", location
            )
    devices = count or 1
    known = _known_mesh(module, devices)
    tiled = [each for each in stated if each.kind == "tiled"]
    mesh = mesh_of_tiles(tiled, devices, () if known is None else known[1])
    if mesh is None:
        raise _no_mesh(tiled, stated, devices)
    # The module's own mesh expresses all tilings.
    if known is not None and mesh.axes == known[1] and not mesh.device_ids:
        name = known[0]
    else:
        ops = [view.operation for view in module.body.operations]
        taken = {symbol_name(op) for op in ops if "sym_name" in op.attributes}
        names = ("mesh", *(f"mesh_{i}" for i in range(len(taken))))
        name = next(name for name in names if name not in taken)
        write_mesh(module, name, mesh.axes, mesh.device_ids)
    _Importer(module, mesh, name).run()


def _move_to_signature(module: ir.Module) -> None:
    """Moves the module's shardings of parameters and outputs to the signature of `main`."""
    main, context = entry_function(module), module.context
    block, attributes = Function(main).body, module.operation.attributes
    listed: list[tuple[str, int, list[ir.Attribute]]] = []
    if OF_PARAMETERS in attributes:
        parameters = list(ir.ArrayAttr(attributes[OF_PARAMETERS]))
        listed.append(("arg_attrs", len(block.arguments), parameters))
    if OF_OUTPUT in attributes:
        count = len(terminator(block).operands)
        try:
            texts = split_hlo_shardings(ir.StringAttr(attributes[OF_OUTPUT]).value_bytes)
        except ValueError as error:
            raise ToolError(f"{OF_OUTPUT}: {error} (P1)", main.location) from None
        whole = texts * count if len(texts) == 1 else texts
        output: list[ir.Attribute] = [ir.StringAttr.get(text, context) for text in whole]
        listed.append(("res_attrs", count, output))
    for side, count, shardings in listed:
        if len(shardings) != count:
            raise ToolError(
                f"the module states {len(shardings)} shardings for {count} values of @main (P1)",
                main.location,
            )
        entries = side_entries(main, side) or [{}] * count
        pairs = zip(entries, shardings, strict=True)
        set_side_entries(main, side, [{GSPMD: said, **entry} for entry, said in pairs])
    for name in (OF_OUTPUT, OF_PARAMETERS):
        if name in attributes:
            del attributes[name]


def _drop_repeated(module: ir.Module) -> None:
    """Drops each GSPMD sharding that has Shardy's beside it, as it only repeats that."""
    for op in ops_where(module.operation, lambda op: op.name == FUNCTION or GSPMD in op.attributes):
        if GSPMD in op.attributes and _SHARDING in op.attributes:
            del op.attributes[GSPMD]
        for side in SIDES if op.name == FUNCTION else ():
            entries = side_entries(op, side)
            for entry in entries:
                if _SHARDING in entry:
                    entry.pop(GSPMD, None)
            if entries:
                set_side_entries(op, side, entries)


def _collect_shardings(module: ir.Module) -> dict[HloSharding, ir.Location]:
    """Returns the GSPMD shardings of a module, each with the location of its first use.

    Raises a located ToolError for a sharding on a single device.
    """
    stated: dict[HloSharding, ir.Location] = {}
    for op in ops_where(module.operation, lambda op: op.name == FUNCTION or GSPMD in op.attributes):
        listed = [op.attributes[GSPMD]] if GSPMD in op.attributes else []
        if op.name == FUNCTION:
            entries = [each for side in SIDES for each in side_entries(op, side)]
            listed += [entry[GSPMD] for entry in entries if GSPMD in entry]
        for attribute in listed:
            for sharding in _read(attribute, op):
                if sharding.kind == "maximal":
                    raise ToolError(
                        f"mhlo.sharding places a value on device {sharding.devices[0]} alone: "
                        "partition divides values over all devices (P3)",
                        op.location,
                    )
                stated.setdefault(sharding, op.location)
    return stated


def _read(attribute: ir.Attribute, op: ir.Operation) -> tuple[HloSharding, ...]:
    try:
        return parse_hlo_sharding(ir.StringAttr(attribute).value_bytes)
    except ValueError as error:
        raise ToolError(f"mhlo.sharding: {error} (P1)", op.location) from None


def _no_mesh(
    tiled: Sequence[HloSharding], stated: Mapping[HloSharding, ir.Location], devices: int
) -> ToolError:
    """Returns the error for the first sharding that no mesh expresses with those before it."""
    counts = range(1, len(tiled) + 1)
    first = next(n for n in counts if mesh_of_tiles(tiled[:n], devices) is None)
    sharding = tiled[first - 1]
    shown = ", ".join(map(str, sharding.devices[:16])) + (", …" if devices > 16 else "")
    return ToolError(
        f"no single mesh expresses the tiles {list(sharding.tiles)} over devices {shown} together "
        "with the shardings before (P3)",
        stated[sharding],
    )


def _known_mesh(module: ir.Module, devices: int) -> tuple[str, tuple[Axis, ...]] | None:
    """Returns the name and axes of the first mesh over all devices in default order, or None."""
    for view in module.body.operations:
        if view.operation.name != MESH:
            continue
        mesh = bindings.SdyMeshAttr(view.operation.attributes["mesh"])
        named = [bindings.SdyMeshAxisAttr(axis) for axis in mesh.axes]
        axes = tuple((axis.name, axis.size) for axis in named)
        if not list(mesh.device_ids) and math.prod(size for _, size in axes) == devices:
            return symbol_name(view), axes
    return None


def write_mesh(
    module: ir.Module, name: str, axes: Sequence[Axis], device_ids: Sequence[int] = ()
) -> None:
    """Adds an `sdy.mesh` to a module, at its beginning."""
    sizes = ", ".join(f'"{axis}"={size}' for axis, size in axes)
    ids = f", device_ids={list(device_ids)}" if device_ids else ""
    attributes = {
        "sym_name": ir.StringAttr.get(name, module.context),
        "mesh": ir.Attribute.parse(f"#sdy.mesh<[{sizes}]{ids}>", module.context),
    }
    point = ir.InsertionPoint.at_block_begin(module.body)
    Builder(point, module.operation.location).create(MESH, [], [], attributes)


@dataclass(frozen=True)
class _Said:
    """The sharding of a value, and the dimensions that it leaves open."""

    sharding: HloSharding
    open_dims: Collection[int] = ()


def _said(value: ir.Value) -> _Said | None:
    """Returns the sharding that a value's producer states, or its function; None without one."""
    op = producer(value)
    if op is not None:
        shardings = _of_results(op)
        if not shardings:
            return None
        return _Said(shardings[ir.OpResult(value).result_number], unspecified_dims(op))
    argument = ir.BlockArgument(value)
    function = argument.owner.owner.operation
    entries = side_entries(function, "arg_attrs") if function.name == FUNCTION else []
    if not entries or GSPMD not in entries[argument.arg_number]:
        return None
    return _Said(_read(entries[argument.arg_number][GSPMD], function)[0])


def _of_results(op: ir.Operation) -> tuple[HloSharding, ...]:
    """Returns the sharding of each result of an op; empty without an mhlo.sharding.

    Raises a located ToolError if their number is not that of the results.
    """
    if GSPMD not in op.attributes:
        return ()
    shardings = _read(op.attributes[GSPMD], op)
    count = len(op.results)
    if len(shardings) == 1:
        return shardings * count
    if len(shardings) != count:
        raise ToolError(
            f"{op.name} has {count} results, but an mhlo.sharding of {len(shardings)} (P1)",
            op.location,
        )
    return shardings


@dataclass(frozen=True)
class _Importer:
    """Rewrites the GSPMD shardings of a module as Shardy shardings on one mesh."""

    module: ir.Module
    mesh: TileMesh
    mesh_name: str

    def run(self) -> None:
        """Rewrites the module: manual computations first, as the shardings show their borders."""
        functions = [f for f in functions_by_name(self.module).values() if f.regions[0].blocks]
        entry = entry_function(self.module)
        for function in functions:
            wrap_manual_regions(Function(function).body, self.border)
        for function in functions:
            self._restate_signature(function, is_entry=function == entry)
        for op in ops_where(self.module.operation, lambda op: GSPMD in op.attributes):
            if is_sharding_call(op):
                self._restate_call(op, _of_results(op)[0])
            else:
                self._restate_results(op, _of_results(op))
        for op in ops_where(self.module.operation, is_sharding_call):  # those without a sharding
            replace(op, op.operands)

    def border(self, op: ir.Operation) -> ManualBorder:
        """Returns the shardings at a custom call that begins or ends a manual computation."""
        enters = begins_shard_map(op)
        whole = op.operands[0] if enters else op.results[0]
        local = op.results[0] if enters else op.operands[0]
        outside = _said(whole) or _Said(HloSharding("unknown"))
        inside = _said(local)
        around = self._along(outside.sharding, MANUAL)
        axes = self._axes(outside.sharding, whole, op.location)
        sizes = dict(self.mesh.axes)
        return ManualBorder(
            around=around,
            manual=self._along(inside.sharding, MANUAL) - around if inside else None,
            every=self._every(),
            sharding=self._attribute(outside, whole, op.location),
            divided=tuple({axis: sizes[axis] for axis in each} for each in axes),
        )

    def _restate_signature(self, function: ir.Operation, *, is_entry: bool) -> None:
        """Converts the shardings of a function's arguments and results.

        Functions other than the entry lose their signature when they are inlined, so their
        shardings become constraints.
        """
        block = Function(function).body
        for side in SIDES:
            entries = side_entries(function, side)
            if not any(GSPMD in entry for entry in entries):
                continue
            listed = block.arguments if side == "arg_attrs" else terminator(block).operands
            for number, (entry, value) in enumerate(zip(entries, list(listed), strict=True)):
                if GSPMD not in entry:
                    continue
                said = _Said(_read(entry.pop(GSPMD), function)[0])
                if self._says_nothing(said):
                    continue
                attribute = self._attribute(said, value, function.location)
                if is_entry:
                    entry[_SHARDING] = attribute
                elif side == "arg_attrs":
                    point = ir.InsertionPoint.at_block_begin(block)
                    stand_in(value, constrain_sharding(value, attribute, point))
                else:
                    point = ir.InsertionPoint(terminator(block))
                    terminator(block).operands[number] = constrain_sharding(value, attribute, point)
            set_side_entries(function, side, entries)

    def _restate_call(self, op: ir.Operation, sharding: HloSharding) -> None:
        """Replaces a @Sharding call by a constraint, and a sharding group if it names one."""
        said, value = _Said(sharding, unspecified_dims(op)), op.operands[0]
        attribute = self._attribute(said, value, op.location)
        if not self._says_nothing(said):
            value = constrain_sharding(value, attribute, ir.InsertionPoint(op), op.location)
        if sharding.group is not None:
            build = Builder(ir.InsertionPoint(op), op.location)
            group = {"group_id": build.integer(sharding.group[0])}
            build.create("sdy.sharding_group", [value], [], group)
        replace(op, [value])

    def _restate_results(self, op: ir.Operation, shardings: Sequence[HloSharding]) -> None:
        del op.attributes[GSPMD]
        if all(self._says_nothing(_Said(sharding)) for sharding in shardings):
            return
        pairs = list(zip(op.results, map(_Said, shardings), strict=True))
        attributes = [self._attribute(said, value, op.location) for value, said in pairs]
        if op.name not in CALLS:
            per_value = bindings.TensorShardingPerValueAttr.get(attributes, op.context)
            op.attributes[_SHARDING] = per_value
            return
        for (value, said), attribute in zip(pairs, attributes, strict=True):
            if not self._says_nothing(said):
                behind = ir.InsertionPoint.after(op)
                stand_in(value, constrain_sharding(value, attribute, behind, op.location))

    def _says_nothing(self, said: _Said) -> bool:
        """Returns True if all dimensions are open, or the value is manual."""
        sharding = said.sharding
        if sharding.kind in ("manual", "unknown"):
            return True
        rank = sharding.rank
        if rank is None:
            return False
        divided = any(self.mesh.divided[sharding][:rank]) or self._along(sharding, UNREDUCED)
        return not divided and set(range(rank)) <= set(said.open_dims)

    def _attribute(self, said: _Said, value: ir.Value, place: ir.Location) -> ir.Attribute:
        """Returns the Shardy sharding of a value."""
        sharding = said.sharding
        is_open = sharding.kind in ("manual", "unknown")
        dims: list[str] = []
        for dim, axes in enumerate(self._axes(sharding, value, place)):
            words = [f'"{axis}"' for axis in axes]
            words += ["?"] if is_open or dim in said.open_dims else []
            dims.append("{" + ", ".join(words) + "}")
        unreduced = ", ".join(f'"{axis}"' for axis in sorted(self._along(sharding, UNREDUCED)))
        rest = f", unreduced={{{unreduced}}}" if unreduced else ""
        text = f"#sdy.sharding<@{self.mesh_name}, [{', '.join(dims)}]{rest}>"
        return ir.Attribute.parse(text, self.module.context)

    def _axes(
        self, sharding: HloSharding, value: ir.Value, place: ir.Location
    ) -> list[tuple[str, ...]]:
        """Returns the axes that divide each dimension of a value.

        Raises a located ToolError if the sharding has another rank than the value.
        """
        rank = value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0
        if sharding.rank is None:
            return [()] * rank
        if sharding.rank != rank:
            raise ToolError(
                f"an mhlo.sharding of {sharding.rank} dimensions on a value of type {value.type} "
                "(P1)",
                place,
            )
        return list(self.mesh.divided[sharding][:rank])

    def _along(self, sharding: HloSharding, name: str) -> frozenset[str]:
        """Returns the axes of subgroups of this kind; every axis if the whole sharding is."""
        if sharding.kind == name:
            return self._every()
        if sharding.rank is None:
            return frozenset()
        groups = self.mesh.divided[sharding][sharding.rank :]
        named = zip(sharding.subgroups, groups, strict=True)
        return frozenset(axis for kind, group in named if kind == name for axis in group)

    def _every(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.mesh.axes)

"""Checks the preconditions of partitioning, and brings a module into the form that it needs.

That form has one mesh under one name. It has no named computations: their shardings become
constraints on their operands and results. It has no constraints on scalars, and no ops or notes
that Shardy's passes leave.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives, meshes_of
from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Axes,
    MeshAxes,
    ValueShardings,
    axes_in,
    dimension_axes,
    function_sharding,
    manual_axes,
    project,
    rank_of,
    result_sharding,
    rule_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note, to_place
from stablehlo_tools.dialect.names import (
    CONSTANT,
    CUSTOM_CALL,
    MANUAL_COMPUTATION,
    NAMED_COMPUTATION,
    RESHARD,
    SHARDING_CONSTRAINT,
)
from stablehlo_tools.dialect.traits import CALLS, Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import Builder, constrain_sharding, element_of, shape_of
from stablehlo_tools.ir.inline import dissolve
from stablehlo_tools.ir.platform_index import platform_arguments
from stablehlo_tools.ir.rewriter import Patterns, replace
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function, WithBody
from stablehlo_tools.ir.walk import (
    MESH,
    callee_name,
    drop_attributes_everywhere,
    functions_by_name,
    ops_named,
    symbol_name,
    terminator,
    walk,
)

_WITH_SHARDINGS = (
    "sdy.sharding",
    "sharding",
    "in_shardings",
    "out_shardings",
    "arg_attrs",
    "res_attrs",
)
_INLINED = re.compile(r"<\s*mesh<")
_SYMBOL = re.compile(r'@("[^"]*"|[\w$.-]+)')
# Shardy's debug attributes.
_DEBUG = frozenset({"sdy.propagation_edges", "sdy.sharding_origins"})
_REDUCTIONS = {"sdy.all_reduce": "reduction_axes", "sdy.reduce_scatter": "reduce_scatter_axes"}
_SUM = 0  # the reduction_op of a sum in Shardy's reductions; the others are maximum and minimum
# Ops that move parts between devices, and do not change the value.
_MOVES = ops_with(Trait.RESHARDING) - _REDUCTIONS.keys()

# Returns a copy of a module whose ops have Shardy's sharding rules.
WithRules = Callable[[ir.Module], ir.Module]


def one_mesh(module: ir.Module, main: ir.Operation) -> ValueShardings | None:
    """Returns the shardings over the one mesh of the program; None if it runs on one device.

    The mesh is the one that the program's shardings name. If they name none, it is one of the
    module. Raises a ToolError if `main`, and the functions it calls, use several different meshes
    (P3).
    """
    all_meshes = {n: m for n, m in meshes_of(module).items() if m.size > 1}
    used = _named_meshes(module, main)
    meshes = {n: m for n, m in all_meshes.items() if n in used} or all_meshes
    if not meshes:
        return None
    ops = {symbol_name(op): op for op in module.body.operations if op.operation.name == MESH}
    first = next(iter(meshes))
    for name, mesh in meshes.items():
        if mesh != meshes[first]:
            place = to_place(ops[name].location)
            raise ToolError(
                f"the meshes @{first} and @{name} differ: partition needs one mesh, with the same "
                "axes over the same devices (P3)",
                place if place.line else main.location,
                notes=tuple(
                    note(f"@{each} is {ops[each].attributes['mesh']}") for each in (first, name)
                ),
            )
    return ValueShardings(MeshAxes(meshes[first]), first)


def _named_meshes(module: ir.Module, main: ir.Operation) -> set[str]:
    """Returns the symbols in the shardings and replica groups of a function and of all that it
    calls."""
    functions = functions_by_name(module)
    texts: dict[ir.Attribute, None] = {}
    pending, seen = [main], {symbol_name(main)}

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in (*_WITH_SHARDINGS, "out_sharding", "replica_groups"):
            if name in op.attributes:
                texts[op.attributes[name]] = None
        if op.name in CALLS and callee_name(op) not in seen:
            seen.add(callee_name(op))
            pending.extend(filter(None, [functions.get(callee_name(op))]))
        return ir.WalkResult.ADVANCE

    while pending:
        walk(pending.pop(), visit)
    return {name.strip('"') for text in texts for name in _SYMBOL.findall(str(text))}


def stated_shardings(module: ir.Module) -> list[tuple[ir.Operation, str, ir.Attribute]]:
    """Returns the attributes with shardings of all ops of a module, each with its op and name."""
    found: list[tuple[ir.Operation, str, ir.Attribute]] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in _WITH_SHARDINGS:
            if name in op.attributes:
                found.append((op, name, op.attributes[name]))
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found


def has_inlined_meshes(module: ir.Module) -> bool:
    """Returns True if a sharding contains its mesh instead of naming one of the module."""
    return any(_INLINED.search(str(a)) for a in {a for _, _, a in stated_shardings(module)})


def _unify_meshes(module: ir.Module, shardings: ValueShardings) -> None:
    """Makes every sharding name the one mesh. A sharding over a mesh without axes then divides
    nothing.

    Raises a located ToolError for a value on a single device (P3).
    """
    others = [
        symbol_name(op)
        for op in module.body.operations
        if op.operation.name == MESH and symbol_name(op) != shardings.mesh_name
    ]
    if not others:
        return
    symbol = re.compile(r"@(" + "|".join(map(re.escape, others)) + r")\b")
    known = meshes_of(module)
    for op, name, attribute in stated_shardings(module):
        text = str(attribute)
        for other in dict.fromkeys(symbol.findall(text)):
            devices = known[other].device_ids
            # A mesh without axes that lists device ids places a value on one device.
            if devices and devices != shardings.axes.mesh.device_ids:
                raise ToolError(
                    f"a value is on a single device, by @{other}: partition divides values "
                    f"over all of @{shardings.mesh_name} (P3)",
                    op.location,
                )
        if symbol.search(text):
            renamed = symbol.sub(f"@{shardings.mesh_name}", text)
            op.attributes[name] = ir.Attribute.parse(renamed, op.context)


def rename_meshes(module: ir.Module, other: ir.Module) -> None:
    """Gives the meshes of a module new names that neither `module` nor `other` uses."""
    taken = {symbol_name(op) for m in (module, other) for op in m.body.operations}
    for mesh in [op.operation for op in module.body.operations if op.operation.name == MESH]:
        old = symbol_name(mesh)
        new = next(n for n in (f"xla_{old}_{i}" for i in itertools.count()) if n not in taken)
        taken.add(new)
        ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
        ir.SymbolTable.set_symbol_name(mesh, new)


_ASKS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng"})
_ORDERED = ops_with_any(Trait.EFFECT | Trait.OPAQUE)  # with a token, they have an effect


def is_partitioned(main: ir.Operation, shardings: ValueShardings) -> bool:
    """Returns True if all of `main` is one manual computation over every axis of the mesh. Its
    operands and results have to be divided as the signature states."""
    block = Function(main).body
    *ops, end = [op.operation for op in block.operations]
    manual = next((op for op in ops if op.name == MANUAL_COMPUTATION), None)
    if manual is None or not all(
        op == manual or not any(_is_tensor(value) for value in (*op.operands, *op.results))
        for op in ops
    ):
        return False
    if not {name for name, size in shardings.axes.mesh.axes if size > 1} <= manual_axes(manual):
        return False
    taken, given = (list(filter(_is_tensor, side)) for side in (manual.operands, manual.results))
    # Further results are witnesses that partition wrote (`Border`).
    given, witnesses = given[: len(end.operands)], given[len(end.operands) :]
    if taken != list(block.arguments) or list(end.operands) != given:
        return False
    if any(list(witness.uses) for witness in witnesses):
        return False
    sides = (("arg_attrs", "in_shardings", taken), ("res_attrs", "out_shardings", given))
    for side, border, values in sides:
        inside = sharding_per_value(manual.attributes[border])
        for number in range(len(values)):
            said = function_sharding(main, side, number)
            if said is None:
                continue
            # The computation may divide evenly, and further if the signature leaves that open.
            wanted = shardings.even_dims(values[number], shardings.read(said))
            dims = zip(dimension_axes(said), wanted, shardings.read(inside[number]), strict=True)
            for (_, is_open), outer, inner in dims:
                if inner != outer and (not is_open or inner[: len(outer)] != outer):
                    return False
            if shardings.unreduced_axes(said) != shardings.unreduced_axes(inside[number]):
                return False
    return True


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def check(module: ir.Module, main: ir.Operation, shardings: ValueShardings) -> None:
    """Raises a located ToolError if P2, P4, P5, P6 or P7 does not hold."""
    replicas = module.operation.attributes.get("mhlo.num_replicas")
    if replicas is not None and ir.IntegerAttr(replicas).value > 1:
        raise ToolError(
            "partition needs a program of one replica and several partitions (P4)", main.location
        )
    communicating = {collective.op for collective in find_collectives(module)}
    several = bool(platform_arguments(main))
    for argument in Function(main).body.arguments:
        _check_static(argument, main)
        if bindings.TokenType.isinstance(argument.type):
            raise ToolError(
                "an argument is a token, which orders side effects: partition only divides "
                "programs without side effects (P5)",
                main.location,
            )

    def visit(op: ir.Operation) -> ir.WalkResult:
        for result in op.results:
            _check_static(result, op)
            shardings.axes_by_dim(result)
        if several and op.name == CUSTOM_CALL:
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            raise ToolError(
                f"the program is for several platforms, and the custom call {target!r} "
                "for one of them may be unknown to the others: export for one platform (P7)",
                op.location,
            )
        # Its ops already run once on each device.
        if op.name == MANUAL_COMPUTATION:
            return ir.WalkResult.SKIP
        has_token = any(bindings.TokenType.isinstance(v.type) for v in (*op.operands, *op.results))
        if op.name in _ASKS or op in communicating or (has_token and op.name in _ORDERED):
            raise ToolError(
                f"{op.name} is outside of a manual computation: it would run on every device "
                "instead of once, so partition cannot divide it (P5)",
                op.location,
            )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _check_static(value: ir.Value, op: ir.Operation) -> None:
    type_ = value.type
    if isinstance(type_, ir.RankedTensorType) and not type_.has_static_shape:
        is_argument = isinstance(value.owner, ir.Block)
        which = argument_name(value) if is_argument else op.name
        raise ToolError(
            f"{which} has a value of a symbolic shape, {type_}: partition needs static shapes; "
            "export for concrete ones (P2)",
            value.location if is_argument else op.location,
        )


def prepare(module: ir.Module, shardings: ValueShardings) -> None:
    """Inlines named computations, and makes all shardings name the one mesh."""
    for op in reversed(ops_named(module.operation, {NAMED_COMPUTATION})):  # inner ones first
        for name, user in (("in_shardings", op), ("out_shardings", terminator(WithBody(op).body))):
            stated = sharding_per_value(op.attributes[name]) if name in op.attributes else []
            for number, sharding in enumerate(stated):
                value = user.operands[number]
                if isinstance(value.type, ir.RankedTensorType):
                    point = ir.InsertionPoint(user)
                    user.operands[number] = constrain_sharding(value, sharding, point, op.location)
        dissolve(op)
    # Erase constraints on scalars, which cannot be divided. jax writes them into reducers.
    for op in ops_named(module.operation, {SHARDING_CONSTRAINT}):
        if not rank_of(op.operands[0]):
            replace(op, op.operands)
    _unify_meshes(module, shardings)


def drop_propagation_notes(module: ir.Module) -> None:
    """Removes Shardy's debug attributes, because some of its passes read them and others do not."""
    drop_attributes_everywhere(module, _DEBUG)


def restore_global_view(
    module: ir.Module, shardings: ValueShardings, with_rules: WithRules
) -> None:
    """Rewrites the results of Shardy's own passes to the view that all devices share, in place.

        sdy.constant                                  ==>  stablehlo.constant
        sdy.data_flow_edge, sdy.func_data_flow_edge   ==>  a constraint, if they are sharded
        sdy.all_gather, all_slice, all_to_all,        ==>  sdy.reshard: the value is the same
          collective_permute, …_to_unreduced
        sdy.all_reduce, reduce_scatter                ==>  sdy.reshard if they complete a sum of
                                                           parts; else a multiple of it

    A program after some of Shardy's passes is partitioned from that state on. Its reshards are made
    again, and sharding rules that Shardy wrote for debugging are dropped.

    Raises a located ToolError for a reduction if it is not certain what it sums (P6).
    """
    _PLAIN.apply(module.operation)
    reductions = ops_named(module.operation, _REDUCTIONS)
    parts = _AxisPartialSums(shardings).of_each(with_rules(module)) if reductions else []
    for op, axes in zip(reductions, parts, strict=True):
        build = Builder(ir.InsertionPoint(op), op.location)
        if axes is not None and _within(_reduced_axes(op), axes, shardings):
            replace(op, [_reshard(op, build)])
        elif axes is not None and not shardings.axes.overlap(axes, _reduced_axes(op)):
            replace(op, [_of_equal_values(op, build, shardings)])
        else:
            raise ToolError(
                f"{op.name} sums a value, but the shardings do not state whether each device holds "
                "a part of the sum along all of its axes: partition needs this stated, by "
                'unreduced={"axis"} in the sharding of the value (P6)',
                op.location,
            )
    _MOVED.apply(module.operation)


def drop_barriers(module: ir.Module) -> None:
    """Removes the barriers to propagation, after propagation."""
    _BARRIERS.apply(module.operation)


class _AxisPartialSums:
    """Finds the axes along which each device holds only a part of the sum that a value is."""

    def __init__(self, shardings: ValueShardings) -> None:
        self._shardings = shardings
        self._known: dict[ir.Value, Axes | None] = {}

    def of_each(self, module: ir.Module) -> list[Axes | None]:
        """Returns these axes for the operand of each reduction, in the order of a module with
        sharding rules. An entry is None if the shardings do not determine it."""
        operands: list[Axes | None] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            if op.name in _REDUCTIONS:
                axes = self._partial_axes(op.operands[0])
                operands.append(axes)
                done = _reduced_axes(op)
                self._known[op.results[0]] = axes and tuple(
                    axis for axis in axes if not self._shardings.axes.overlap([axis], done)
                )
            elif op.name in _MOVES or op.name == RESHARD:
                self._known[op.results[0]] = self._partial_axes(op.operands[0])
            return ir.WalkResult.ADVANCE

        walk(module.operation, visit)
        return operands

    def _partial_axes(self, value: ir.Value) -> Axes | None:
        if value in self._known:
            return self._known[value]
        maker = producer(value)
        stated = self._shardings.partial_sum_axes(value)
        rule = None if maker is None else rule_of(maker)
        if stated or maker is None or rule is None:
            return stated
        axes: list[AxisRef] = []
        for number in range(rule.operands):
            dims = self._shardings.axes_by_dim(maker.operands[number])
            factors = project(rule, number, dims, self._shardings.axes) or {}
            axes += [a for factor in sorted(rule.reduced) for a in factors.get(factor, ())]
        return tuple(dict.fromkeys(axes)) or (None if rule.reduced else ())


def _within(axes: Axes, others: Axes, shardings: ValueShardings) -> bool:
    """Returns True if each group of devices along `axes` is within one group along `others`."""
    groups = shardings.axes.groups(others)
    number = {device: n for n, group in enumerate(groups) for device in group}
    return all(len({number[d] for d in group}) == 1 for group in shardings.axes.groups(axes))


def _reduced_axes(op: ir.Operation) -> Axes:
    return axes_in(str(op.attributes[_REDUCTIONS[op.name]]))


def _of_equal_values(op: ir.Operation, build: Builder, shardings: ValueShardings) -> ir.Value:
    """Replaces a reduction of values that are the same on all devices. A sum becomes a product with
    the number of devices.

    Raises a located ToolError for a sum of other elements than real numbers (P6).
    """
    element = element_of(op.results[0])
    summed = ir.IntegerAttr(op.attributes["reduction_op"]).value == _SUM
    if summed and element != ir.IntegerType.get_signless(1, op.context):
        if not isinstance(element, ir.FloatType | ir.IntegerType):
            raise ToolError(
                f"{op.name} sums {element} values that are the same on each device: partition can "
                "only multiply real numbers by the number of devices (P6)",
                op.location,
            )
        times = shardings.axes.size(_reduced_axes(op))
        count = build.splat(times, shape_of(op.operands[0]), element)
        op.operands[0] = build.same("multiply", op.operands[0], count)
    return _reshard(op, build)


def _reshard(op: ir.Operation, build: Builder) -> ir.Value:
    sharding = op.attributes["out_sharding"]
    return constrain_sharding(op.operands[0], sharding, build.point, op.location, RESHARD)


_PLAIN, _MOVED, _BARRIERS = Patterns(), Patterns(), Patterns()


# sdy.constant -> stablehlo.constant
@_PLAIN.on("sdy.constant")
def _write_constant(op: ir.Operation, build: Builder) -> ir.Value:
    return build.create(CONSTANT, [], [op.results[0].type], dict(op.attributes.items())).results[0]


# sdy.data_flow_edge(x) {sharding} -> sdy.sharding_constraint(x) {sharding}, x without a sharding
@_PLAIN.on("sdy.data_flow_edge", "sdy.func_data_flow_edge")
def _constrain_edge(op: ir.Operation, build: Builder) -> ir.Value:
    attribute = op.attributes.get("sharding")
    if attribute is None and SHARDING in op.attributes:
        attribute = sharding_per_value(op.attributes[SHARDING])[0]
    if attribute is None:
        return op.operands[0]
    return constrain_sharding(op.operands[0], attribute, build.point, op.location)


# sdy.all_gather(x), sdy.all_slice(x), … -> sdy.reshard(x): they do not change the value
_MOVED.on(*sorted(_MOVES))(_reshard)


# sdy.propagation_barrier(x) {sharding} -> sdy.reshard(x) {sharding}, x without a sharding
@_BARRIERS.on("sdy.propagation_barrier")
def _reshard_barrier(op: ir.Operation, build: Builder) -> ir.Value:
    attribute, value = result_sharding(op, 0), op.operands[0]
    if attribute is None:
        return value
    return constrain_sharding(value, attribute, build.point, op.location, RESHARD)

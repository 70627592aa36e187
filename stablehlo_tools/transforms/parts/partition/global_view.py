"""Brings what Shardy's own passes leave behind back into the view that all devices share.

    sdy.constant                                        ==>  stablehlo.constant
    sdy.data_flow_edge, sdy.func_data_flow_edge         ==>  a constraint, if they are sharded
    sdy.all_gather, all_slice, all_to_all,              ==>  sdy.reshard: the value is the same
      collective_permute, …_to_unreduced
    sdy.all_reduce, reduce_scatter                      ==>  sdy.reshard, where they complete a sum
                                                             of parts; else a multiple of it

A program that has been through some of Shardy's passes is partitioned from there on: its reshards
are made anew, and sharding rules that Shardy wrote for debugging are dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Axes,
    ValueShardings,
    axes_in,
    project,
    result_sharding,
    rule_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CONSTANT, RESHARD
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, constrained, element_of, shape_of
from stablehlo_tools.ir.rewriter import Patterns, replace
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import FUNCTION, drop_attributes, ops_named, walk

# What Shardy notes about its own work.
_DEBUG = frozenset({"sdy.propagation_edges", "sdy.sharding_origins"})
_REDUCTIONS = {"sdy.all_reduce": "reduction_axes", "sdy.reduce_scatter": "reduce_scatter_axes"}
_SUM = 0  # as Shardy's reductions say that they sum; the others are maximum and minimum
# What moves parts between devices, and leaves the value as it is.
_MOVES = ops_with(Trait.RESHARDING) - _REDUCTIONS.keys()

# A module's copy whose ops have Shardy's sharding rules.
WithRules = Callable[[ir.Module], ir.Module]


def drop_propagation_notes(module: ir.Module) -> None:
    """Takes out what Shardy noted for debugging, which its passes read in some places only."""
    drop_attributes(module.operation, _DEBUG)
    for op in ops_named(module.operation, {FUNCTION}):
        for name in ("arg_attrs", "res_attrs"):
            if name in op.attributes:
                kept = [
                    {each.name: each.attr for each in ir.DictAttr(entry) if each.name not in _DEBUG}
                    for entry in ir.ArrayAttr(op.attributes[name])
                ]
                dicts = [ir.DictAttr.get(entry, op.context) for entry in kept]
                op.attributes[name] = ir.ArrayAttr.get(dicts, op.context)


def restore_global_view(
    module: ir.Module, shardings: ValueShardings, with_rules: WithRules
) -> None:
    """Rewrites what Shardy's passes left in the module, in place.

    Raises a located ToolError for a reduction of which it is not certain what it sums.
    """
    _PLAIN.apply(module.operation)
    reductions = ops_named(module.operation, _REDUCTIONS)
    parts = _PartialSums(shardings).of_each(with_rules(module)) if reductions else []
    for op, axes in zip(reductions, parts, strict=True):
        if axes is not None and _within(_reduced_axes(op), axes, shardings):
            replace(op, [_reshard(op)])
        elif axes is not None and not shardings.axes.overlap(axes, _reduced_axes(op)):
            replace(op, [_of_equal_values(op, shardings)])
        else:
            raise ToolError(
                f"{op.name} sums a value of which the shardings do not say whether each device "
                "holds a part of the sum along all of its axes: partition needs that stated, by "
                'unreduced={"axis"} in its sharding (P6)',
                op.location,
            )
    _MOVED.apply(module.operation)


def drop_barriers(module: ir.Module) -> None:
    """Takes out the barriers to propagation, when it is over."""
    _BARRIERS.apply(module.operation)


class _PartialSums:
    """Over which axes each device holds a part only of the sum that a value is."""

    def __init__(self, shardings: ValueShardings) -> None:
        self._shardings = shardings
        self._known: dict[ir.Value, Axes | None] = {}

    def of_each(self, module: ir.Module) -> list[Axes | None]:
        """Of the operand of each reduction, in the order of a module whose ops have their rules;
        None where the shardings do not tell."""
        operands: list[Axes | None] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            if op.name in _REDUCTIONS:
                axes = self._of(op.operands[0])
                operands.append(axes)
                done = _reduced_axes(op)
                overlap = self._shardings.axes.overlap
                self._known[op.results[0]] = axes and tuple(
                    axis for axis in axes if not overlap([axis], done)
                )
            elif op.name in _MOVES or op.name == RESHARD:
                self._known[op.results[0]] = self._of(op.operands[0])
            return ir.WalkResult.ADVANCE

        walk(module.operation, visit)
        return operands

    def _of(self, value: ir.Value) -> Axes | None:
        if value in self._known:
            return self._known[value]
        maker = producer(value)
        stated = self._shardings.unreduced(value)
        rule = None if maker is None else rule_of(maker)
        if stated or maker is None or rule is None:
            return stated
        axes: list[AxisRef] = []
        for number in range(rule.operands):
            dims = self._shardings.of(maker.operands[number])
            factors = project(rule, number, dims, self._shardings.axes) or {}
            axes += [a for factor in sorted(rule.reduced) for a in factors.get(factor, ())]
        return tuple(dict.fromkeys(axes)) or (None if rule.reduced else ())


def _within(axes: Axes, others: Axes, shardings: ValueShardings) -> bool:
    """Whether devices that differ along the axes alone differ along the others alone."""
    groups = shardings.axes.groups(others)
    number = {device: n for n, group in enumerate(groups) for device in group}
    return all(len({number[d] for d in group}) == 1 for group in shardings.axes.groups(axes))


def _reduced_axes(op: ir.Operation) -> Axes:
    return axes_in(str(op.attributes[_REDUCTIONS[op.name]]))


def _of_equal_values(op: ir.Operation, shardings: ValueShardings) -> ir.Value:
    """A reduction of values that are the same on all devices: that value, as many times."""
    element = element_of(op.results[0])
    summed = ir.IntegerAttr(op.attributes["reduction_op"]).value == _SUM
    if summed and element != ir.IntegerType.get_signless(1, op.context):
        if not isinstance(element, ir.FloatType | ir.IntegerType):
            raise ToolError(
                f"{op.name} sums {element} values, of which each device holds the same one: "
                "partition multiplies real numbers only (P6)",
                op.location,
            )
        build = Builder(ir.InsertionPoint(op), op.location)
        times = shardings.axes.size(_reduced_axes(op))
        count = build.splat(times, shape_of(op.operands[0]), element)
        op.operands[0] = build.same("multiply", op.operands[0], count)
    return _reshard(op)


def _reshard(op: ir.Operation) -> ir.Value:
    place = ir.InsertionPoint(op)
    return constrained(op.operands[0], op.attributes["out_sharding"], place, op.location, RESHARD)


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
    value = op.operands[0]
    return value if attribute is None else constrained(value, attribute, build.point, op.location)


# sdy.all_gather(x), sdy.all_slice(x), … -> sdy.reshard(x): they leave the value as it is
@_MOVED.on(*sorted(_MOVES))
def _reshard_moved(op: ir.Operation, build: Builder) -> ir.Value:
    return _reshard(op)


# sdy.propagation_barrier(x) {sharding} -> sdy.reshard(x) {sharding}, x without a sharding
@_BARRIERS.on("sdy.propagation_barrier")
def _reshard_barrier(op: ir.Operation, build: Builder) -> ir.Value:
    attribute, value = result_sharding(op, 0), op.operands[0]
    if attribute is None:
        return value
    return constrained(value, attribute, build.point, op.location, RESHARD)

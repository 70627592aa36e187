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
from stablehlo_tools.dialect.names import RESHARD
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, constrained, element_of, shape_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import FUNCTION, ops_named, walk

_EDGES = frozenset({"sdy.data_flow_edge", "sdy.func_data_flow_edge"})
_BARRIER = "sdy.propagation_barrier"
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

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in _DEBUG:
            if name in op.attributes:
                del op.attributes[name]
        if op.name == FUNCTION:
            for name in ("arg_attrs", "res_attrs"):
                if name in op.attributes:
                    op.attributes[name] = _without_notes(op.attributes[name])
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _without_notes(attribute: ir.Attribute) -> ir.Attribute:
    kept = [
        {entry.name: entry.attr for entry in ir.DictAttr(each) if entry.name not in _DEBUG}
        for each in ir.ArrayAttr(attribute)
    ]
    context = attribute.context
    return ir.ArrayAttr.get([ir.DictAttr.get(each, context) for each in kept], context)


def restore_global_view(
    module: ir.Module, shardings: ValueShardings, with_rules: WithRules
) -> None:
    """Rewrites what Shardy's passes left in the module, in place.

    Raises a located ToolError for a reduction of which it is not certain what it sums.
    """
    for op in ops_named(module.operation, {*_EDGES, "sdy.constant"}):
        _replace(op, _constant(op) if op.name == "sdy.constant" else _after_edge(op))
    reductions = ops_named(module.operation, _REDUCTIONS)
    parts = _PartialSums(shardings).of_each(with_rules(module)) if reductions else []
    for op, axes in zip(reductions, parts, strict=True):
        if axes is not None and _within(_reduced_axes(op), axes, shardings):
            _replace(op, _reshard(op))
        elif axes is not None and not shardings.axes.overlap(axes, _reduced_axes(op)):
            _replace(op, _of_equal_values(op, shardings))
        else:
            raise ToolError(
                f"{op.name} sums a value of which the shardings do not say whether each device "
                "holds a part of the sum along all of its axes: partition needs that stated, by "
                'unreduced={"axis"} in its sharding (P6)',
                op.location,
            )
    for op in ops_named(module.operation, _MOVES):
        _replace(op, _reshard(op))


def drop_barriers(module: ir.Module) -> None:
    """Takes out the barriers to propagation, when it is over."""
    for op in ops_named(module.operation, {_BARRIER}):
        attribute = result_sharding(op, 0)
        value = op.operands[0]
        _replace(op, value if attribute is None else _reshard(op, attribute))


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


def _replace(op: ir.Operation, value: ir.Value) -> None:
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _constant(op: ir.Operation) -> ir.Value:
    return ir.Operation.create(
        "stablehlo.constant",
        results=[op.results[0].type],
        attributes=dict(op.attributes.items()),
        loc=op.location,
        ip=ir.InsertionPoint(op),
    ).results[0]


def _after_edge(op: ir.Operation) -> ir.Value:
    """The value itself, held to the sharding that the edge has."""
    attribute = op.attributes.get("sharding")
    if attribute is None and SHARDING in op.attributes:
        attribute = sharding_per_value(op.attributes[SHARDING])[0]
    if attribute is None:
        return op.operands[0]
    return _reshard(op, attribute, "sdy.sharding_constraint")


def _reshard(
    op: ir.Operation, attribute: ir.Attribute | None = None, name: str = RESHARD
) -> ir.Value:
    sharding = attribute or op.attributes["out_sharding"]
    return constrained(op.operands[0], sharding, ir.InsertionPoint(op), op.location, name)

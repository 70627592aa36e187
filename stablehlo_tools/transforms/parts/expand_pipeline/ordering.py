"""Puts the stacks of a program's arguments and results into the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.analysis.dimension_propagation.graph import Graph
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.analysis.tensor_shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.constants import value_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.divided import divided_first
from stablehlo_tools.transforms.parts.expand_pipeline.layouts import StackOrder, stack_orders
from stablehlo_tools.transforms.parts.expand_pipeline.phases import Phase
from stablehlo_tools.transforms.parts.expand_pipeline.planning import Plan
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis

_CONSTRAINT = "sdy.sharding_constraint"


@dataclass(frozen=True)
class StackOrders:
    """The stacks of a program, one for each number of layers, and the axis that has the ranks."""

    axis: Axis
    orders: tuple[StackOrder, ...]


def orders_of(plan: Plan) -> tuple[StackOrder, ...]:
    """The stacks of each number of layers. Raises ToolError for a program with a stack of which
    layers cannot be put into another order."""
    by_layers: dict[int, list[Phase]] = {}
    for phase in plan.cut.phases:
        by_layers.setdefault(phase.loop.trips, []).append(phase)
    found: list[StackOrder] = []
    for layers, phases in by_layers.items():
        chunks = Chunks(plan.axis.size, plan.options.repeats, layers)
        order = stack_orders(plan.cut.trial.dims, phases, chunks)
        for other in found:
            _check_apart(order, other, phases[0])
        found.append(order)
    return tuple(found)


def _check_apart(one: StackOrder, other: StackOrder, phase: Phase) -> None:
    if one.layouts.keys().isdisjoint(other.layouts):
        return
    raise ToolError(
        "expand-pipeline: layout=pipeline cannot order a stack that belongs to loops over "
        f"{other.chunks.trips} and over {one.chunks.trips} layers (P8); use layout=layers",
        phase.loop.op.location,
    )


def put_in_order(module: ir.Module, graph: Graph, axis: Axis, orders: Sequence[StackOrder]) -> None:
    """Writes constants in the new order, and divides arguments, results and what is constrained
    over the axis."""
    main = entry_function(module)
    for each in orders:
        for node in each.constants:
            number = node.results[0]
            new = _permuted(node.op, each.layouts[number], each)
            graph.values[number].replace_all_uses_with(new)
            graph.values[number] = new
        for number, layout in each.layouts.items():
            _constrain(graph.values[number], layout, axis)
        for kind, places in (("arg_attrs", each.arguments), ("res_attrs", each.results)):
            if places:
                _divide(main, kind, places, axis)


def _permuted(op: ir.Operation, layout: DimTiling, order: StackOrder) -> ir.Value:
    """What a constant or an iota is with its layers in the new order."""
    build = Builder(ir.InsertionPoint(op), op.location)
    result = op.results[0]
    shape, layers = shape_of(result), order.chunks.trips
    inner = shape[layout.dim] // (layout.outer * layers)
    if op.name == "stablehlo.iota":
        along = np.arange(shape[layout.dim]).reshape(layout.outer, layers, inner)
        numbers = build.table(along[:, order.order].reshape(-1).tolist())
        element = build.convert(numbers, element_of(result))
        return build.broadcast(element, shape, [layout.dim])
    apart = [*shape[: layout.dim], layout.outer, layers, inner, *shape[layout.dim + 1 :]]
    value = value_of(op)
    elements = None if value is None else np.array(ir.DenseElementsAttr(value))
    if elements is None or elements.dtype.kind not in "iuf":
        return _pieced(build, op.clone(ip=build.point).results[0], apart, layout.dim + 1, order)
    taken = elements.reshape(apart).take(order.order, axis=layout.dim + 1).reshape(shape)
    dense = ir.DenseElementsAttr.get(np.ascontiguousarray(taken), type=result.type)
    return build.op("constant", [], result.type, value=dense)


def _pieced(
    build: Builder, value: ir.Value, apart: list[int], dim: int, order: StackOrder
) -> ir.Value:
    """A value with its layers in the new order, where NumPy has no such elements."""
    rows = build.reshape(value, apart)
    pieces = [
        build.slice_along(rows, dim, first, first + order.chunks.longest)
        for first in order.order[:: order.chunks.longest]
    ]
    return build.reshape(build.concatenate(pieces, dim), shape_of(value))


def _constrain(value: ir.Value, layout: DimTiling, axis: Axis) -> None:
    op = producer(value)
    if op is None or op.name != _CONSTRAINT or layout.outer != 1:
        return
    rank = len(shape_of(value))
    op.attributes["sharding"] = divided_first(
        op.attributes["sharding"], axis, rank, layout.dim, op.context
    )


def _divide(main: ir.Operation, kind: str, places: dict[int, int], axis: Axis) -> None:
    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    types = function.inputs if kind == "arg_attrs" else function.results
    if kind in main.attributes:
        entries = [ir.DictAttr(each) for each in ir.ArrayAttr(main.attributes[kind])]
    else:
        entries = [ir.DictAttr.get({}, main.context)] * len(types)
    found: list[ir.Attribute] = []
    for number, (entry, type_) in enumerate(zip(entries, types, strict=True)):
        named = {each.name: each.attr for each in entry}
        if number in places:
            rank = ir.RankedTensorType(type_).rank
            named[SHARDING] = divided_first(
                named.get(SHARDING), axis, rank, places[number], main.context
            )
        found.append(ir.DictAttr.get(named, main.context))
    main.attributes[kind] = ir.ArrayAttr.get(found, main.context)

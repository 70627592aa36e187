"""With layout=pipeline, keeps a program's stacks of layers in the order of the ranks.

The layers of a rank are then contiguous in the program's own arguments and results: weights,
gradients, moments of an optimizer. `Follower` finds these values, from the stacks that layer loops
read and write, from op to op, in both directions. An op that treats every layer in the same way
computes a stack in one order from stacks in that order. A sum over all layers is the same in any
order. An op that needs single layers, or their order, is refused. No data moves: constants are
written in the new order, and arguments, results and constraints are divided over the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, reshape_tiling
from stablehlo_tools.analysis.entry import counted_name
from stablehlo_tools.analysis.loop_carries import StackRows
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    dimension_axes,
    function_sharding,
    open_dims,
    tensor_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    BARRIER,
    BROADCAST,
    IOTA,
    RESHAPE,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.shardy_round_trip import set_entry
from stablehlo_tools.ir.values import CONSTANTS, is_float, is_splat, producer, value_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import (
    ExpansionPlan,
    LayerChunks,
)
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import LayerPhase
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis


def is_whole(phase: LayerPhase, rows: StackRows, value: ir.Value) -> bool:
    """Returns True if a loop reads or writes all rows of a stack."""
    return rows.first == 0 and rows.span * phase.loop.trips == shape_of(value)[0]


class Follower:
    """Follows stacks from value to value.

    `layouts` are the stacks found, by number, each with its dimension divided into as many parts as
    there are layers. `constants` are the ops that create stacks, in the order of the layers.
    """

    def __init__(self, graph: Graph, phases: Sequence[LayerPhase], layers: int) -> None:
        self._graph = graph
        self._layers = layers
        self._phases = {phase.node: phase for phase in phases}
        self.layouts: dict[int, DimTiling] = {}
        self.constants: dict[Node, None] = {}
        self._near: dict[int, list[Node]] = {}
        self._inside: set[Node] = set()
        self._pending: list[Node] = []
        for phase in phases:
            self._inside |= {node for body in phase.node.bodies for node in body.all_nodes()}
        for node in graph.nodes:
            bodies = () if node in self._phases else node.bodies
            inner = (n for body in bodies for n in (*body.arguments, *body.returned))
            for number in dict.fromkeys((*node.inputs, *node.results, *inner)):
                self._near.setdefault(number, []).append(node)

    def copy(self) -> Follower:
        """Returns a copy with the same state."""
        other = object.__new__(Follower)
        # Share the indices of the graph, which never change; copy what `follow` adds to.
        other.__dict__.update(self.__dict__)
        other.layouts = dict(self.layouts)
        other.constants = dict(self.constants)
        other._pending = []
        return other

    def follow(self, number: int, node: Node) -> None:
        """Follows a stack that a loop accesses. Raises ToolError if an op needs single layers."""
        self._put(number, DimTiling(0), node)
        while self._pending:
            self._visit(self._pending.pop())

    def rows(self) -> Iterable[StackRows]:
        """Yields the rows that the loops access of the stacks found."""
        for node, phase in self._phases.items():
            for stacks, numbers in (
                (phase.loop.reads, node.operands),
                (phase.loop.writes, node.results),
            ):
                for carry, rows in stacks.items():
                    if numbers[carry] in self.layouts:
                        yield rows

    def dimensions(self, numbers: Sequence[int]) -> dict[int, int]:
        """Returns the dimension of the layers for each of these values that is a stack, by its
        place. Raises ToolError if the layers of one are not contiguous along a dimension."""
        dimensions: dict[int, int] = {}
        for place, number in enumerate(numbers):
            layout = self.layouts.get(number)
            if layout is None:
                continue
            if layout.outer != 1:
                is_taken = number in self._graph.root.arguments
                value = self._graph.values[number]
                named = counted_name(value) if is_taken else f"result {place}"
                raise ToolError(
                    f"expand-pipeline: layout=pipeline cannot order {named}, {value.type}: "
                    f"its dimension {layout.dim} holds the layers {layout.outer} times (P8); "
                    "stack them separately, or use layout=layers",
                    next(iter(self._phases)).op.location,
                )
            dimensions[place] = layout.dim
        return dimensions

    def _put(self, number: int, layout: DimTiling, node: Node) -> None:
        known = self.layouts.get(number)
        if known == layout:
            return
        if known is not None:
            raise self._refusal(node)
        maker = next((n for n in self._near.get(number, ()) if number in n.results), None)
        # Every layer has the same value, so another order changes nothing.
        if maker is not None and _is_alike(maker, layout):
            return
        shape = self._graph.shape(number)
        if shape is None or not layout.fits(shape, self._layers):
            raise self._refusal(node)
        self.layouts[number] = layout
        self._pending += self._near.get(number, [])

    def _visit(self, node: Node) -> None:
        if node in self._phases:
            self._loop(node, self._phases[node])
        elif node in self._inside:
            raise self._refusal(node)
        elif node.name == WHILE:
            condition, body = node.bodies
            for place, operand in enumerate(node.operands):
                arguments = condition.arguments[place], body.arguments[place]
                self._alike((operand, node.results[place], *arguments, body.returned[place]), node)
        elif node.name in BRANCHES:
            for place, result in enumerate(node.results):
                self._alike((result, *(body.returned[place] for body in node.bodies)), node)
        elif node.name == BARRIER:
            for operand, result in zip(node.operands, node.results, strict=True):
                self._alike((operand, result), node)
        elif any(number in self.layouts for number in node.operands):
            self._forwards(node)
        elif any(number in self.layouts for number in node.captures):
            raise self._refusal(node)
        else:
            self._backwards(node)

    def _loop(self, node: Node, phase: LayerPhase) -> None:
        """Follows a layer loop: it reads and writes stacks row by row, and carries the stacks read
        unchanged."""
        loop = phase.loop
        for carry, numbers in enumerate(zip(node.operands, node.results, strict=True)):
            if not any(number in self.layouts for number in numbers):
                continue
            rows = loop.reads.get(carry) or loop.writes.get(carry)
            value = self._graph.values[numbers[0]]
            all_rows = rows is not None and is_whole(phase, rows, value)
            if not all_rows or loop.trips != self._layers:
                raise self._refusal(node)
            for number in numbers:
                self._put(number, DimTiling(0), node)

    def _alike(self, numbers: Sequence[int], node: Node) -> None:
        """Follows values that control flow passes on unchanged."""
        layout = next((self.layouts[n] for n in numbers if n in self.layouts), None)
        if layout is None:
            return
        for number in numbers:
            self._put(number, layout, node)

    def _forwards(self, node: Node) -> None:
        taken = tuple(map(self.layouts.get, node.operands))
        step = self._graph.tiling(node, taken, self._layers)
        captured = any(number in self.layouts for number in node.captures)
        if step is None or step.chained or captured:
            raise self._refusal(node)
        for number, layout in zip(node.operands, step.operands, strict=True):
            if layout is not None:
                self._put(number, layout, node)
            elif number in self.layouts:
                raise self._refusal(node)
        for number, layout in zip(node.results, step.results, strict=True):
            if layout is not None:
                self._put(number, layout, node)
            elif number in self.layouts:
                raise self._refusal(node)

    def _backwards(self, node: Node) -> None:
        """Follows operands: those from which an op computes a stack as its result."""
        wanted = tuple(map(self.layouts.get, node.results))
        if node.name == IOTA or node.name in CONSTANTS:
            self.constants[node] = None
            return
        for place, number in enumerate(node.operands):
            for layout in self._candidates(node, number, wanted):
                given = tuple(layout if i == place else None for i in range(len(node.operands)))
                step = self._graph.tiling(node, given, self._layers)
                if step is None or step.combine is not None or step.results != wanted:
                    continue
                self._put(number, layout, node)
                if number in self.layouts:
                    self._forwards(node)
                    return
                # This operand is the same for all layers: follow the divided operands instead.
                for other, own in zip(node.operands, step.operands, strict=True):
                    if own is not None:
                        self._put(other, own, node)
                return
        raise self._refusal(node)

    def _candidates(
        self, node: Node, number: int, wanted: Sequence[DimTiling | None]
    ) -> list[DimTiling]:
        shape = self._graph.shape(number)
        first = next(layout for layout in wanted if layout is not None)
        if shape is None:
            return []
        if node.name == RESHAPE:
            after = self._graph.shape(node.results[0]) or ()
            back = reshape_tiling(first, after, shape, self._layers)
            return [] if back is None else [back]
        candidates = [DimTiling(dim, first.outer) for dim in range(len(shape))]
        return [layout for layout in candidates if layout.fits(shape, self._layers)]

    def _refusal(self, node: Node) -> ToolError:
        loop = next(iter(self._phases)).op
        return ToolError(
            "expand-pipeline: layout=pipeline cannot put the stacked layers into the order of the "
            f"ranks: {node.name} needs single layers, or their order (P8); apply it to all layers "
            "in the same way, or use layout=layers",
            node.op.location,
            (note(f"the {self._layers} layers of this loop", loop.location),),
        )


def _is_alike(node: Node, layout: DimTiling) -> bool:
    """Returns True if the result of an op is the same for each layer, for any operands."""
    if node.name in CONSTANTS:
        return is_splat(node.op)
    if node.name == IOTA:
        return integer(node.op, "iota_dimension") != layout.dim
    if node.name != BROADCAST:
        return False
    dims = integers(node.op, "broadcast_dimensions")
    return layout.dim not in dims or shape_of(node.op.operands[0])[dims.index(layout.dim)] == 1


@dataclass(frozen=True)
class StackOrder:
    """The stacks with the same number of layers, in a program without calls.

    `layouts` is the dimension of the layers in each such value, by number. `arguments` and
    `results` are those of `main`, with that dimension. `constants` create stacks and are written in
    the order of the layers. `rows` are the loops' accesses to stacks, by identity.
    """

    chunks: LayerChunks
    layouts: dict[int, DimTiling]
    arguments: dict[int, int]
    results: dict[int, int]
    constants: tuple[Node, ...]
    rows: frozenset[int]

    @property
    def order(self) -> list[int]:
        """For each row of a stack in the order of the ranks, the number of its layer."""
        return self.chunks.order()


def stack_orders(dims: BatchDims, phases: Sequence[LayerPhase], chunks: LayerChunks) -> StackOrder:
    """Returns the stacks that loops over the same number of layers read and write, and all values
    connected with them. Raises a located ToolError for an op that needs the order of the layers.

    Values without a batch that depend on float arguments count as weights. Other stacks keep the
    order of the layers if they cannot be followed: random keys, residuals of each sample.
    """
    if not chunks.is_even:
        raise ToolError(
            f"expand-pipeline: layout=pipeline cannot cut {chunks.trips} layers into "
            f"{chunks.ranks * chunks.repeats} equal chunks, {chunks.repeats} on each of "
            f"{chunks.ranks} ranks (P8); layout=layers allows chunks of different lengths",
            phases[0].loop.op.location,
        )
    follower = Follower(dims.graph, phases, chunks.trips)
    optional: list[tuple[int, LayerPhase]] = []
    for phase in phases:
        stacks = {read.rows.carry: read.rows for read in phase.reads}
        stacks |= {write.rows.carry: write.rows for write in phase.writes}
        for carry, rows in sorted(stacks.items(), key=itemgetter(0)):
            for number in (phase.node.operands[carry], phase.node.results[carry]):
                value = dims.graph.values[number]
                is_weight = number in dims.graph.data and is_float(value.type)
                if not is_weight or phase.body.arguments[carry] in dims.tilings:
                    optional.append((number, phase))
                    continue
                if not is_whole(phase, rows, value):
                    raise ToolError(
                        f"expand-pipeline: layout=pipeline cannot order {value.type}: the loop "
                        f"accesses {rows.span * phase.loop.trips} of its rows, from {rows.first} "
                        "on (P8); stack the layers of the loop separately, or use layout=layers",
                        phase.loop.op.location,
                    )
                follower.follow(number, phase.node)
    root = dims.graph.root
    for number, phase in optional:
        trial = follower.copy()
        try:
            trial.follow(number, phase.node)
            trial.dimensions(root.arguments)
            trial.dimensions(root.returned)
        except ToolError:
            continue
        follower = trial
    return StackOrder(
        chunks,
        follower.layouts,
        follower.dimensions(root.arguments),
        follower.dimensions(root.returned),
        tuple(follower.constants),
        frozenset(map(id, follower.rows())),
    )


@dataclass(frozen=True)
class StackOrders:
    """The stacks of a program, one order for each number of layers, and the axis of the ranks."""

    axis: Axis
    orders: tuple[StackOrder, ...]


def orders_of(plan: ExpansionPlan) -> tuple[StackOrder, ...]:
    """Returns the stacks for each number of layers. Raises ToolError if the layers of a stack
    cannot be put into another order."""
    by_layers: dict[int, list[LayerPhase]] = {}
    for phase in plan.cut.phases:
        by_layers.setdefault(phase.loop.trips, []).append(phase)
    orders: list[StackOrder] = []
    for layers, phases in by_layers.items():
        chunks = LayerChunks(plan.axis.size, plan.options.repeats, layers)
        order = stack_orders(plan.cut.trial.dims, phases, chunks)
        for other in orders:
            if not order.layouts.keys().isdisjoint(other.layouts):
                raise ToolError(
                    "expand-pipeline: layout=pipeline cannot order a stack that belongs to loops "
                    f"over {other.chunks.trips} and over {layers} layers (P8); use layout=layers",
                    phases[0].loop.op.location,
                )
        orders.append(order)
    return tuple(orders)


def put_in_order(module: ir.Module, graph: Graph, axis: Axis, orders: Sequence[StackOrder]) -> None:
    """Writes constants in the new order, and divides arguments, results and constrained values over
    the axis."""
    main = entry_function(module)
    for each in orders:
        for node in each.constants:
            number = node.results[0]
            new = _permute_layers(node.op, each.layouts[number], each)
            graph.values[number].replace_all_uses_with(new)
            graph.values[number] = new
        for number, layout in each.layouts.items():
            op = producer(graph.values[number])
            if op is not None and op.name == SHARDING_CONSTRAINT and layout.outer == 1:
                rank, sharding = len(shape_of(op.results[0])), op.attributes["sharding"]
                op.attributes["sharding"] = divided_first(
                    sharding, axis, rank, layout.dim, op.context
                )
        sides = (
            ("arg_attrs", each.arguments, list(Function(main).body.arguments)),
            ("res_attrs", each.results, Function(main).yields),
        )
        for side, places, values in sides:
            for number, dim in places.items():
                stated, rank = function_sharding(main, side, number), len(shape_of(values[number]))
                sharding = divided_first(stated, axis, rank, dim, main.context)
                set_entry(main, side, number, SHARDING, sharding)


def _permute_layers(op: ir.Operation, layout: DimTiling, order: StackOrder) -> ir.Value:
    """Returns a constant or an iota with its layers in the new order."""
    build = Builder(ir.InsertionPoint(op), op.location)
    result = op.results[0]
    shape, layers = shape_of(result), order.chunks.trips
    inner = shape[layout.dim] // (layout.outer * layers)
    if op.name == IOTA:
        along = np.arange(shape[layout.dim]).reshape(layout.outer, layers, inner)
        numbers = build.table(along[:, order.order].reshape(-1).tolist())
        element = build.convert(numbers, element_of(result))
        return build.broadcast(element, shape, [layout.dim])
    apart = [*shape[: layout.dim], layout.outer, layers, inner, *shape[layout.dim + 1 :]]
    value = value_of(op)
    elements = None if value is None else np.array(ir.DenseElementsAttr(value))
    if elements is None or elements.dtype.kind not in "iuf":  # NumPy has no such elements
        dim, size = layout.dim + 1, order.chunks.longest
        rows = build.reshape(op.clone(ip=build.point).results[0], apart)
        firsts = order.order[::size]
        pieces = [build.slice_along(rows, dim, first, first + size) for first in firsts]
        return build.reshape(build.concatenate(pieces, dim), shape)
    taken = elements.reshape(apart).take(order.order, axis=layout.dim + 1).reshape(shape)
    dense = ir.DenseElementsAttr.get(np.ascontiguousarray(taken), type=result.type)
    return build.op("constant", [], result.type, value=dense)


def divided_first(
    sharding: ir.Attribute | None, axis: Axis, rank: int, dimension: int, context: ir.Context
) -> ir.Attribute:
    """Returns a sharding in which the axis divides this dimension, as its first axis, and no other.

    If `sharding` is None, the other dimensions are open.
    """
    dims = open_dims(rank) if sharding is None else dimension_axes(sharding)
    dims = [(tuple(a for a in axes if a.name != axis.name), rest) for axes, rest in dims]
    dims[dimension] = ((AxisRef(axis.name), *dims[dimension][0]), False)
    return tensor_sharding(axis.mesh_name, dims, context)

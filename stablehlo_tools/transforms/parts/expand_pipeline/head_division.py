"""Decides if the head of a pipeline can be divided over its ranks, and how.

The head is the ops between the last forward loop and the first backward one: a projection to the
vocabulary, and the loss. It runs when a microbatch ends its forward, on one rank, and all others
wait for it. Its ops may allow a cut along a dimension of the last layer's result: tokens of a
sequence, or samples. Then each rank can run them on a part.

The head is written once on one microbatch, to a separate block. The cut is propagated through that
block as the batch is through a program. The inputs of the backward must then be in parts, or sums
over them, and all products must be of parts. Sums over the batch become sums over the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from stablehlo_tools.analysis.dataflow import inputs_of
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import (
    Seeds,
    try_seeds,
    with_needed,
    work_of,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS, DimTiling
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.clone import alike_clone
from stablehlo_tools.ir.values import is_spread_constant, maker_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.transforms.parts.block_rewriter import part_type, part_type_of
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis, without_axis
from stablehlo_tools.transforms.parts.expand_pipeline.training_plan import (
    LayerGap,
    Training,
    results_of_link,
)
from stablehlo_tools.transforms.parts.one_part import OnePartWriter

# The head is divided from this number of multiplications for each element that is sent. An
# accelerator does a few thousand of them while an all_reduce sends one element. Besides, XLA no
# longer overlaps a permute of the ring with a branch that contains collectives. With a vocabulary
# of 8,192, that cost made 1F1B 1 % slower in total; with one of 32,000, it is 14 % faster.
_WORTH = 16384


class HeadInput(NamedTuple):
    """An input of a head. If it `waits`, it is a value of a microbatch on the last rank. Otherwise
    it is a value of the program; with a layout, one microbatch of that value."""

    number: int
    layout: DimTiling | None
    waits: bool


@dataclass(frozen=True)
class HeadDivision:
    """A head on one microbatch, and its division into one part for each rank.

    `dims` are of a block, which is in the op `holder`. Its first argument is the number of the
    microbatch, the others are the `inputs`. It returns the values that the link passes on, the
    terms of its sums, and values that the program needs of all samples. `sums` are those of them
    that are sums over the ranks. `cut` is the last layer's result, with the dimension that is
    divided.
    """

    holder: ir.Operation
    inputs: tuple[HeadInput, ...]
    dims: BatchDims
    sums: frozenset[int]
    cut: tuple[int, DimTiling]

    @property
    def arguments(self) -> dict[int, HeadInput]:
        """The inputs, by the number of the argument."""
        return dict(zip(self.dims.graph.root.arguments[1:], self.inputs, strict=True))

    @property
    def account(self) -> str:
        """A description of the division, for notes."""
        number, layout = self.cut
        size = (self.dims.graph.shape(number) or ())[layout.dim]
        share = size // self.dims.parts
        of = f"{size} along dimension {layout.dim} of the last layer's result"
        return f"each rank runs the head on {share} of {of}"

    def sent(self, link: LayerGap) -> int:
        """Returns the number of elements that are sent for a microbatch. Terms of the link's sums
        do not count, since each rank accumulates its own."""
        root = self.dims.graph.root
        waiting = [number for number, each in self.arguments.items() if each.waits]
        made = len(root.returned) - len(link.sums) - len(link.finals)
        joined = (*root.returned[:made], *root.returned[made + len(link.sums) :])
        return sum(prod(self.dims.graph.shape(n) or ()) for n in (*waiting, *joined))


def divide_head(plan: Training, axis: Axis, wanted: str) -> HeadDivision | None:
    """Returns the division of a plan's head over the ranks of an axis. Returns None if the last
    rank is to run it: if `wanted` is `last`, or is `auto` and the gain is small. Raises ToolError
    if `wanted` is `divided` and the head cannot be."""
    if wanted == "last":
        return None
    holder, inputs = _on_one_microbatch(plan, axis)
    graph = Graph.from_block(Function(holder).body)
    products = {node for node in graph.nodes if node.name in CONTRACTIONS}
    work = work_of(graph, products)
    best: HeadDivision | None = None
    for seeds in _candidates(plan, graph, inputs, axis):
        trial = with_needed(try_seeds(graph, seeds, axis.size, to_the_end=False))
        # A product that is not in parts would run whole on every rank.
        if not trial.independent or not trial.dims.op_tilings.keys() >= products:
            continue
        sums = _sums(trial.dims, graph)
        if sums is None:
            continue
        found = HeadDivision(holder, inputs, trial.dims, sums, *seeds.items())
        if best is None or found.sent(plan.head) < best.sent(plan.head):
            best = found
    if wanted != "divided":
        return best if best is not None and best.sent(plan.head) * _WORTH <= work else None
    if best is None:
        raise ToolError(
            f"expand-pipeline: head=divided, but no dimension that {axis.size} ranks divide cuts "
            "all of the head: its products, the inputs of the backward, and the loss as a sum "
            "(P7); use head=last to run it on the last rank",
            plan.backward.loop.op.location,
        )
    return best


def _on_one_microbatch(plan: Training, axis: Axis) -> tuple[ir.Operation, tuple[HeadInput, ...]]:
    """Returns the block of a head, in an op that is in no module, and the inputs of its
    arguments."""
    context = plan.backward.loop.op.context
    location = ir.Location.unknown(context)
    holder = ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get("head", context),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get([], [], context), context),
        },
        regions=1,
        loc=location,
    )
    block = holder.regions[0].blocks.append()
    inputs = _Inputs(plan, block, axis.name)
    build = Builder(ir.InsertionPoint(block), location)
    scalar = build.tensor([], ir.IntegerType.get_signless(32, context))
    counter = block.add_argument(scalar, location)
    writing = OnePartWriter(plan.dims, counter, inputs.outside, inputs.finish)
    used = {number for node in plan.head.nodes for number in inputs_of(node)}
    for number in sorted(used.intersection(plan.head.takes)):  # the others are only passed on
        writing.values[number] = inputs.argument(HeadInput(number, None, waits=True))
    writing.write(plan.head.nodes, build.point)
    results = results_of_link(plan.head, plan.dims, plan.made(plan.stacks - 1), writing, build)
    returned = [*results.made.values(), *results.terms, *results.finals]
    ir.Operation.create("func.return", operands=returned, loc=location, ip=build.point)
    return holder, tuple(inputs.found)


class _Inputs:
    """The arguments of a head's block, added while the block is written."""

    def __init__(self, plan: Training, block: ir.Block, axis: str) -> None:
        self._dims = plan.dims
        self._block = block
        self._axis = axis
        self._arguments: dict[HeadInput, ir.Value] = {}
        self._constants: dict[ir.Value, ir.Value] = {}
        self._front: ir.Operation | None = None  # the last of the constants before the ops

    @property
    def found(self) -> list[HeadInput]:
        """The inputs of the arguments."""
        return list(self._arguments)

    def finish(self, copy: ir.Operation) -> None:
        """Removes the axis from a copied op's shardings: it is manual where the op runs."""
        without_axis(copy, self._axis)

    def argument(self, each: HeadInput) -> ir.Value:
        """Returns the argument for an input."""
        if each not in self._arguments:
            value, dims = self._dims.graph.values[each.number], self._dims
            type_ = part_type_of(dims, each.number)
            if not each.waits:
                type_ = part_type(value, each.layout, dims.parts)
            location = ir.Location.unknown(self._block.owner.context)
            self._arguments[each] = self._block.add_argument(type_, location)
        return self._arguments[each]

    def outside(self, number: int, layout: DimTiling | None) -> ir.Value:
        """Returns a value of the program; values made of constants alone are copied into the
        block."""
        value = self._dims.graph.values[number]
        if layout is None:
            return self._whole(value)
        type_ = part_type(value, layout, self._dims.parts)
        alike = alike_clone(value, layout.dim, type_, ir.InsertionPoint.at_block_begin(self._block))
        if alike is None:
            return self.argument(HeadInput(number, layout, waits=False))
        copy = maker_of(alike)
        inner = [self._whole(copy.operands[i]) for i in range(len(copy.operands))]
        return self._in_front(copy, inner)

    def _whole(self, value: ir.Value) -> ir.Value:
        if value in self._constants:
            return self._constants[value]
        if not is_spread_constant(value):
            number = self._dims.graph.numbers[value]
            return self.argument(HeadInput(number, None, waits=False))
        made = maker_of(value)
        inner = [self._whole(made.operands[i]) for i in range(len(made.operands))]
        copy = made.clone(ip=ir.InsertionPoint.at_block_begin(self._block))
        self._constants[value] = self._in_front(copy, inner)
        return self._constants[value]

    def _in_front(self, copy: ir.Operation, operands: Sequence[ir.Value]) -> ir.Value:
        for position, operand in enumerate(operands):
            copy.operands[position] = operand
        # Keep the constants in the order in which they are made, before all other ops.
        if self._front is not None:
            copy.move_after(self._front)
        self._front = copy
        self.finish(copy)
        return copy.results[0]


def _candidates(
    plan: Training, graph: Graph, inputs: Sequence[HeadInput], axis: Axis
) -> Iterator[Seeds]:
    """Yields dimensions of the last layer's result that could be divided. Dimensions other than
    that of samples come first, since other axes of the mesh divide the samples. If samples are
    divided, each device keeps a part of its own samples."""
    flows = plan.passes[plan.stacks - 1].phase.node.results
    others = axis.mesh.size // axis.size
    for number, each in zip(graph.root.arguments[1:], inputs, strict=True):
        samples = plan.dims.tilings.get(each.number)
        shape = graph.shape(number) or ()
        if not each.waits or each.number not in flows or samples is None:
            continue
        layouts = [DimTiling(dim) for dim in range(len(shape)) if dim != samples.dim]
        for layout in (*layouts, DimTiling(samples.dim, others)):
            if layout.fits(shape, axis.size):
                yield {number: layout}


def _sums(dims: BatchDims, graph: Graph) -> frozenset[int] | None:
    """Returns the results of a head that are sums over the parts. Returns None if a result is
    neither in parts, nor such a sum, nor the same for all parts."""
    partial = PartialSums(dims)
    partial.visit(graph.root.nodes)
    for number in graph.root.returned:
        if number in partial.blocked or partial.terms.get(number, "add") != "add":
            return None
    return frozenset(number for number in graph.root.returned if number in partial.terms)

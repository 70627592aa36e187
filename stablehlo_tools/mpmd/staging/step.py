"""Reads a training step around its loop over microbatches, and classifies the values of its body.

The loop is recognised by its carries. Its trip count is known, and a carry is a counter, a
constant, or accumulated. Each iteration adds a term to an accumulated carry (or takes the maximum,
…), or writes rows of it that no other iteration writes. So the iterations can run in any order, and
in parts. Values of its body are

    invariant   the same for every microbatch: weights, and values computed from them alone
    free        cheap to compute from the number of the microbatch: a slice of the batch, a mask
    staged      all others: the work of the forward and the backward, with a stage and a phase
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import AccumulationLink, Accumulator, LoopCarries
from stablehlo_tools.analysis.loops import COSTLY, LoopBody, count_trips, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import (
    CONVOLUTION,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    GATHER,
    SCATTER,
    WHILE,
)
from stablehlo_tools.ir.values import is_float, key_of, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import ops_named, ops_where

_HEAVY = frozenset({DOT_GENERAL, CONVOLUTION, SCATTER})  # the ops that count as units of work
_FEW_ROWS = 8  # the most indices of a gather that reads a sample rather than a table


class TrainingStep:
    """The computation of the body of the loop over microbatches, for one microbatch."""

    def __init__(self, loop: MicrobatchLoop, outer: Dataflow, effects: Effects) -> None:
        self.loop, self.outer, self.effects = loop, outer, effects
        self.flow = Dataflow.from_block(loop.block, opened=())
        self._communicates = classify_communication(loop.op.context)
        self._links = {
            key_of(link.op) for each in loop.accumulators.values() for link in each.links
        }
        self._arguments = frozenset(self.flow.root.arguments)
        self._outer_arguments = frozenset(outer.root.arguments)
        self._samples: dict[int, frozenset[int]] = {}
        self._roots: dict[int, frozenset[int]] = {}
        self.invariant: set[int] = set()
        self.free: set[int] = set()
        self.staged: list[Node] = []
        self._classify()

    @cached_property
    def constants(self) -> dict[int, ir.Value]:
        """The values outside the loop that constant arguments of the body are equal to."""
        return {
            self.flow.root.arguments[carry]: self.loop.op.operands[carry]
            for carry in sorted(self.loop.constants)
        }

    @cached_property
    def counters(self) -> dict[int, int]:
        """The carries of the arguments of the body that are counters."""
        return {self.flow.root.arguments[carry]: carry for carry in sorted(self.loop.counters)}

    @cached_property
    def needed(self) -> set[int]:
        """The indices of the staged nodes that some accumulator depends on."""
        staged = {node.index for node in self.staged}
        return self.flow.ancestors(n for term in self.terms for n in term.inputs) & staged

    @cached_property
    def chains(self) -> list[list[Node]]:
        """The links of each accumulator. Their inputs do not include the accumulator."""
        return [list(map(self._link, each.links)) for each in self.loop.accumulators.values()]

    @cached_property
    def terms(self) -> list[Node]:
        """The links of all accumulators, in program order."""
        links = [link for links in self.chains for link in links]
        return sorted(links, key=lambda link: link.index)

    def _link(self, link: AccumulationLink) -> Node:
        node = self.flow.maker[self.flow.numbers[link.op.results[0]]]
        carried = self.flow.numbers[link.op.operands[link.place]]
        inputs = tuple(n for n in node.inputs if n != carried)
        return replace(node, operands=inputs, captures=())

    def is_staged(self, number: int) -> bool:
        """Returns True if a staged op yields a value."""
        maker = self.flow.maker.get(number)
        return maker is not None and number not in self.invariant and number not in self.free

    def is_weight(self, number: int) -> bool:
        """Returns True if a value is an invariant tensor of floats that depends on an argument."""
        if number not in self.invariant:
            return False
        type_ = self.flow.values[number].type
        return is_float(type_) and ir.RankedTensorType(type_).rank > 0 and bool(self.roots(number))

    def samples(self, number: int) -> frozenset[int]:
        """Returns the nodes that read the samples of a free value from arrays, by index."""
        if number not in self._samples:
            maker = self.flow.maker.get(number)
            takers: frozenset[int] = frozenset()
            if number in self.free and maker is not None:
                above = [self.samples(n) for n in maker.inputs]
                taken = (n for n in maker.inputs if n in self.invariant)
                arrays = [n for n in taken if ir.RankedTensorType(self.flow.values[n].type).rank]
                takers = frozenset({maker.index} if arrays else ()).union(*above)
            self._samples[number] = takers
        return self._samples[number]

    def roots(self, number: int) -> frozenset[int]:
        """Returns the arguments of the block around the loop that an invariant value depends on."""
        if number not in self._roots:
            maker = self.flow.maker.get(number)
            arguments: set[int] = set()
            if maker is None:
                value = self.constants.get(number, self.flow.values[number])
                outer = self.outer.number(value)
                nodes = self.outer.ancestors([outer])
                read = {n for index in nodes for n in self.outer.nodes[index].inputs} | {outer}
                arguments.update(read & self._outer_arguments)
            else:
                for source in maker.inputs:
                    arguments |= self.roots(source)
            self._roots[number] = frozenset(arguments)
        return self._roots[number]

    def _classify(self) -> None:
        flow = self.flow
        self.invariant |= set(self.constants)
        self.free |= set(self.counters)
        for node in flow.nodes:
            if key_of(node.op) in self._links:
                for number in node.inputs:
                    self._is_fixed(number)
                continue
            if self.effects.has_effect(node.op):
                raise ToolError(
                    f"expand-mpmd: {node.name} has an effect, and a schedule would change the "
                    "order of effects over the microbatches (P3)",
                    node.op.location,
                )
            fixed = [self._is_fixed(n) for n in node.inputs]
            if all(fixed) and not self._has_collective(node.op):
                self.invariant.update(node.results)
            elif self._is_free(node):
                self.free.update(node.results)
            else:
                self.staged.append(node)

    def _is_fixed(self, number: int) -> bool:
        """Returns True if a value is invariant: from outside the loop, or computed from that."""
        if number in self.invariant:
            return True
        is_outside = number not in self.flow.maker and number not in self._arguments
        if is_outside:
            self.invariant.add(number)
        return is_outside

    def _is_free(self, node: Node) -> bool:
        if node.name in COSTLY or self._has_collective(node.op):
            return False
        if not all(n in self.free or n in self.invariant for n in node.inputs):
            return False
        if node.name == DYNAMIC_SLICE:
            return True
        if node.name == GATHER:
            return prod(ir.RankedTensorType(node.op.operands[1].type).shape) <= _FEW_ROWS
        return not any(map(self.is_weight, node.inputs))

    def _has_collective(self, op: ir.Operation) -> bool:
        return bool(ops_where(op, lambda inner: self._communicates(inner) is not None))


def staged_inputs(step: TrainingStep, node: Node) -> Iterator[int]:
    """Returns the inputs of a node that staged ops yield."""
    return (n for n in node.inputs if step.is_staged(n))


def find_microbatch_loop(block: ir.Block, effects: Effects) -> MicrobatchLoop:
    """Returns the loop over microbatches of a block: the heaviest one that qualifies.

    Raises a located ToolError if there is none, with the reason for the likeliest loop.
    """
    loops = [view.operation for view in block.operations if view.operation.name == WHILE]
    readable: list[MicrobatchLoop] = []
    refusals: list[ToolError] = []
    for loop in loops:
        read = read_microbatch_loop(loop, effects)
        if isinstance(read, ToolError):
            refusals.append(read)
        else:
            readable.append(read)
    if readable:
        return max(readable, key=lambda each: heavy_ops(each.op))
    heavy = [loop for loop in loops if heavy_ops(loop)]
    if len(heavy) == 1:  # of several, one is a forward over layers and one its backward
        raise refusals[loops.index(heavy[0])]
    raise ToolError(
        "expand-mpmd: the program has no loop over microbatches (P1); --microbatches M makes one",
        block.owner.location,
        added=("--microbatches", "4"),
    )


def read_microbatch_loop(loop: ir.Operation, effects: Effects) -> MicrobatchLoop | ToolError:
    """Returns the loop as one over microbatches, or the error that says why it is not one."""
    count = count_trips(loop, known_integer)
    if isinstance(count, str) or len(set(count.trips)) != 1:
        why = count if isinstance(count, str) else "it differs by device"
        return _loop_error(f"how often this loop runs is not known: {why}", loop)
    if not heavy_ops(loop):
        return _loop_error("this loop computes too little to be the loop over microbatches", loop)
    carries = LoopCarries(LoopBody(loop, effects), count.trips[0])
    body = carries.body
    accumulators: dict[int, Accumulator] = {}
    for carry in range(len(body.arguments)):
        if carry in body.invariant or carry in body.steps:
            continue
        accumulator = carries.accumulator(carry)
        if accumulator is None:
            return _carry_error(loop, carry, body)
        accumulators[carry] = accumulator
    if not accumulators:
        return _loop_error("this loop accumulates no values over its iterations", loop)
    return MicrobatchLoop(
        loop, carries.trips, dict(body.steps), frozenset(body.invariant), accumulators
    )


@dataclass(frozen=True)
class MicrobatchLoop:
    """A `while` over `trips` microbatches. `counters` has the step of each counter by carry."""

    op: ir.Operation
    trips: int
    counters: dict[int, int]
    constants: frozenset[int]
    accumulators: dict[int, Accumulator]

    @property
    def block(self) -> ir.Block:
        """The block of an iteration."""
        return While(self.op).body


def _carry_error(loop: ir.Operation, carry: int, body: LoopBody) -> ToolError:
    maker = producer(body.ends[carry])
    place = loop.location if maker is None else maker.location
    return ToolError(
        f"expand-mpmd: carry {carry} of the loop over microbatches, {loop.operands[carry].type}, "
        "is not a sum: each iteration uses the value of the one before, so the microbatches "
        "cannot run at once (P2)",
        place,
        (
            note("the loop is here", loop.location),
            note("for a step without a loop over microbatches, --microbatches M makes one"),
        ),
    )


def _loop_error(why: str, loop: ir.Operation) -> ToolError:
    return ToolError(f"expand-mpmd: {why} (P1)", loop.location)


def heavy_ops(loop: ir.Operation) -> int:
    """Returns the number of matrix products, convolutions and scatters in an op and its regions."""
    return len(ops_named(loop, _HEAVY))

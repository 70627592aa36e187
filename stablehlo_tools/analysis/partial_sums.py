"""Finds the values in a loop's body, run on one microbatch, that are terms of a sum over all of
them.

A gradient of weights is a sum over the batch. On a microbatch, the op that sums computes one term
of it. A linear op on such a term returns a term, so terms can be added up at the end of the chain.
An op that is not linear, or mixes samples without summing them, needs the whole batch: it blocks
all values that depend on it.

    value         on one microbatch
    early         its value for these samples, or for all of them (no entry here)
    partial       one term: the whole is their sum (`add`), maximum, …
    blocked       no usable value; the op is the reason
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import OpTiling
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.microbatch_marks import Mark, mark_of
from stablehlo_tools.dialect.names import (
    BARRIER,
    BROADCAST,
    CONVERT,
    DIVIDE,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    MANUAL_COMPUTATION,
    PAD,
    REDUCE,
    RESHAPE,
    SCATTER,
    SELECT,
    SHARDING_CONSTRAINT,
    SLICE,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import BRANCHES, LAYOUT, Trait, ops_with, ops_with_any
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import is_identity_of, producer, splat_of
from stablehlo_tools.ir.views import Combining

_SHAPE = LAYOUT | {SLICE, SHARDING_CONSTRAINT}
_UNARY = ops_with(Trait.UNARY | Trait.LINEAR_IN_FIRST)
_KEEPS_ZERO = frozenset({BROADCAST, CONVERT, RESHAPE, SHARDING_CONSTRAINT})
_EXACT_COUNT = 32  # bits of an integer in which counts do not wrap around
_PRODUCTS = ops_with(Trait.LINEAR_IN_EACH) - {"stablehlo.dot"}
_COMBINING = ops_with(Trait.ACROSS_DEVICES) | {REDUCE, SCATTER}
_ALL_TERMS = ops_with_any(Trait.LINEAR_IN_ALL | Trait.EXCHANGE | Trait.ACROSS_DEVICES)


@dataclass
class PartialSums:
    """The outcome, by the numbers of values: `terms` has the reduction that combines the terms,
    `blocked` the op that makes a value unavailable. `inside` has the outcomes in the bodies of
    manual computations."""

    dims: BatchDims
    terms: dict[int, str] = field(default_factory=dict[int, str])
    blocked: dict[int, Node] = field(default_factory=dict[int, Node])
    inside: dict[Node, PartialSums] = field(default_factory=dict["Node", "PartialSums"])

    def visit(self, nodes: Sequence[Node]) -> None:
        """Follows ops in order; their operands from outside keep the states they have."""
        for node in nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        for result in node.results:
            self.terms.pop(result, None)
            self.blocked.pop(result, None)
        if node.name == BARRIER:
            for operand, result in zip(node.operands, node.results, strict=True):
                if operand in self.blocked:
                    self.blocked[result] = self.blocked[operand]
                elif operand in self.terms:
                    self.terms[result] = self.terms[operand]
            return
        stopper = next((self.blocked[n] for n in node.inputs if n in self.blocked), None)
        if node.name == MANUAL_COMPUTATION:
            self._manual(node)
        elif stopper is not None:
            self._block(node, stopper)
        elif node.name == WHILE:
            self._loop(node)
        elif node.name in BRANCHES:
            self._branches(node)
        else:
            self._op(node)

    def _op(self, node: Node) -> None:
        layouts = self.dims.tilings
        in_parts = any(number in layouts for number in node.inputs)
        reducers = {self.terms[n] for n in node.inputs if n in self.terms}
        mark = mark_of(node.op)
        if not in_parts and not reducers and mark is None:
            return
        if mark is not None:
            if mark is Mark.MEAN:
                self.terms[node.results[0]] = "add"
            return
        step = self.dims.op_tilings.get(node)
        if in_parts and (step is None or reducers):
            self._block(node, node)
        elif in_parts:
            assert step is not None
            self._step(node, step)
        elif len(reducers) > 1 or not self._is_linear(node, next(iter(reducers))):
            self._block(node, node)
        else:
            self.terms.update(dict.fromkeys(node.results, next(iter(reducers))))

    def _manual(self, node: Node) -> None:
        """Follows the body of a manual computation, the program of one device."""
        in_parts = any(number in self.dims.tilings for number in node.inputs)
        if in_parts and node not in self.dims.op_tilings:
            self._block(node, node)
            return
        inside = self.inside[node] = PartialSums(self.dims.inside(node))
        body = inside.dims.graph.root
        for operand, argument in zip(node.operands, body.arguments, strict=True):
            if operand in self.terms:
                inside.terms[argument] = self.terms[operand]
            if operand in self.blocked:
                inside.blocked[argument] = self.blocked[operand]
        # The body returns the results, each as one device has it.
        inside.visit(body.nodes)
        for result, number in zip(node.results, body.returned, strict=True):
            if number in inside.blocked:
                self.blocked[result] = inside.blocked[number]
            elif number in inside.terms:
                self.terms[result] = inside.terms[number]

    def _step(self, node: Node, step: OpTiling) -> None:
        """Follows an op on samples. If it reduces over them, its results are terms."""
        reducer = step.combine
        if step.chained:
            reducer = reducer_kind(Combining(node.op).combiner)
            if reducer is None or not is_identity_of(reducer, node.op.operands[0]):
                self._block(node, node)
                return
        element = element_of(node.op.results[0])
        if reducer == "add" and isinstance(element, ir.IntegerType) and element.width == 1:
            reducer = "or"
        if reducer is not None:
            self.terms.update(dict.fromkeys(node.results, reducer))

    def _block(self, node: Node, why: Node) -> None:
        self.blocked.update(dict.fromkeys(node.results, why))

    def is_term(self, number: int, reducer: str) -> bool:
        """Returns True if a value can be combined with terms: it is a term, or the identity of the
        reduction."""
        if number in self.terms:
            return self.terms[number] == reducer
        return number not in self.dims.tilings and self._is_identity(number, reducer)

    def _is_identity(self, number: int, reducer: str) -> bool:
        value = self.dims.graph.values[number]
        if is_identity_of(reducer, value):
            return True
        while reducer == "add" and (maker := producer(value)) and maker.name in _KEEPS_ZERO:
            value = maker.operands[0]  # a conversion or a broadcast of 0 is 0
        return reducer == "add" and splat_of(value) == 0

    def _is_linear(self, node: Node, reducer: str) -> bool:
        """Returns True if an op on terms returns a term."""
        op, name = node.op, node.name
        if name in _SHAPE:
            return True
        if reducer != "add":
            return False
        if name in _UNARY:
            return True
        terms = [n in self.terms for n in node.operands]
        if name in _PRODUCTS:
            return terms.count(True) == 1
        if name == DIVIDE:  # of floats: integers round towards 0
            return terms == [True, False] and not isinstance(
                element_of(op.results[0]), ir.IntegerType
            )
        if name == CONVERT:
            return _keeps_sums(op)
        if name in _COMBINING and reducer_kind(Combining(op).combiner) != "add":
            return False
        if name == REDUCE:
            starts_from_zero = len(terms) == 2 and is_identity_of("add", op.operands[1])
            return starts_from_zero and terms == [True, False]
        if name in (DYNAMIC_SLICE, GATHER):  # linear in the operand, not in the indices
            return terms[0] and not any(terms[1:])
        # A device that receives no part in an exchange gets 0, which is a term as well.
        if name in _ALL_TERMS:
            among = range(len(terms))
        elif name in (DYNAMIC_UPDATE_SLICE, PAD):
            among = (0, 1)
        elif name == SELECT:
            among = (1, 2)
        elif name == SCATTER and len(terms) == 3:
            among = (0, 2)
        else:
            return False
        if any(is_term for place, is_term in enumerate(terms) if place not in among):
            return False
        return all(self.is_term(node.operands[place], "add") for place in among)

    def _loop(self, node: Node) -> None:
        condition, body = node.bodies
        carried = [self.terms.get(n) for n in node.operands]
        stopped: list[Node | None] = [None] * len(carried)
        tried: set[int] = set()
        while True:
            for inner in (condition, body):
                self._put(inner.arguments, carried, stopped)
                self.visit(inner.nodes)
            after = [self.terms.get(n) for n in body.returned]
            ends = [self.blocked.get(n) for n in body.returned]
            joined = [
                self._carry_reduction(node, place, before, now)
                for place, (before, now) in enumerate(zip(carried, after, strict=True))
            ]
            spread = [
                old or end or (node if isinstance(reducer, Node) else None)
                for old, end, reducer in zip(stopped, ends, joined, strict=True)
            ]
            reducers = [None if isinstance(reducer, Node) else reducer for reducer in joined]
            for place in self._hopeful(node, carried, ends, tried):
                reducers[place], spread[place] = "add", None
            if reducers == carried and spread == stopped:
                break
            carried, stopped = reducers, spread
        decides = condition.returned[0]
        if decides in self.terms or decides in self.blocked:
            self._block(node, self.blocked.get(decides, node))
            return
        self._put(node.results, carried, stopped)

    def _hopeful(
        self,
        node: Node,
        carried: Sequence[str | None],
        ends: Sequence[Node | None],
        tried: set[int],
    ) -> list[int]:
        """Returns the blocked carries that may be sums that start from 0. The loop is then followed
        again under that assumption."""
        hopeful = [
            place
            for place, (reducer, stop) in enumerate(zip(carried, ends, strict=True))
            if reducer is None
            and stop is not None
            and place not in tried
            and node.bodies[1].arguments[place] not in self.dims.tilings
            and self.is_term(node.operands[place], "add")
        ]
        tried.update(hopeful)
        return hopeful

    def _carry_reduction(
        self, node: Node, place: int, before: str | None, now: str | None
    ) -> str | Node | None:
        """Returns the reduction of a carry, from its states before the loop and after an iteration.
        Returns the loop if they do not fit together."""
        if before == now:
            return before
        reducer = before or now
        assert reducer is not None
        if before is not None:
            returned = node.bodies[1].returned[place]
            return before if now is None and self.is_term(returned, reducer) else node
        starts = node.operands[place]
        return reducer if self.is_term(starts, reducer) else node

    def _put(
        self, numbers: Sequence[int], carried: Sequence[str | None], stopped: Sequence[Node | None]
    ) -> None:
        """Sets the states of a loop's carries, in the loop or after it."""
        for number, reducer, stop in zip(numbers, carried, stopped, strict=True):
            self.terms.pop(number, None)
            self.blocked.pop(number, None)
            if stop is not None:
                self.blocked[number] = stop
            elif reducer is not None:
                self.terms[number] = reducer

    def _branches(self, node: Node) -> None:
        if node.operands[0] in self.terms or node.operands[0] in self.dims.tilings:
            self._block(node, node)
            return
        for body in node.bodies:
            self.visit(body.nodes)
        for place, result in enumerate(node.results):
            numbers = [body.returned[place] for body in node.bodies]
            stop = next((self.blocked[n] for n in numbers if n in self.blocked), None)
            reducers = {self.terms[n] for n in numbers if n in self.terms}
            if stop is not None:
                self.blocked[result] = stop
            elif reducers:
                reducer = next(iter(reducers))
                if len(reducers) == 1 and all(self.is_term(n, reducer) for n in numbers):
                    self.terms[result] = reducer
                else:
                    self.blocked[result] = node


def _keeps_sums(convert: ir.Operation) -> bool:
    """Returns True if a conversion of terms returns terms: float to float (up to rounding), integer
    to an integer that is not wider, counts to floats.

    Unsigned integers wrap around below 0.
    """
    before, after = element_of(convert.operands[0]), element_of(convert.results[0])
    if not isinstance(before, ir.IntegerType):
        return not isinstance(after, ir.IntegerType)
    if isinstance(after, ir.IntegerType):
        return 1 < after.width <= before.width and after.is_unsigned == before.is_unsigned
    return before.width >= _EXACT_COUNT and not before.is_unsigned


def source_of(sums: PartialSums, node: Node) -> Node | None:
    """Returns the op that made the first term among an op's inputs; None if there is none."""
    terms = next((each for each in _with_inner(sums) if node in each.dims.graph.nodes), sums)
    pending = [n for n in node.inputs if n in terms.terms]
    seen: set[int] = set()
    while pending:
        number = pending.pop()
        maker = terms.dims.graph.maker.get(number)
        if maker is None or number in seen:
            continue
        seen.add(number)
        step = terms.dims.op_tilings.get(maker)
        if step is not None and (step.combine is not None or step.chained):
            return maker
        pending += [n for n in maker.inputs if n in terms.terms]
    return None


def _with_inner(sums: PartialSums) -> Iterator[PartialSums]:
    """Yields the outcome of a block and those of the manual computations in it."""
    yield sums
    for inside in sums.inside.values():
        yield from _with_inner(inside)

"""Lets each microbatch compute statistics of the batch for itself, as frameworks do.

The auxiliary loss of a mixture of experts needs the mean router probabilities of all samples before
the backward of any of them. Megatron, MaxText and JaxPP compute it for each microbatch:

    m = sum(p) / N;  aux = f(m)           // over the batch
  ==>
    m_k = sum(p_k) / (N / microbatches);  aux = mean over k of f(m_k)

The export has the first form. A sum over samples is a *term* on a microbatch. If an op needs a term
whole, and samples depend on it, the op reads an *estimate*: the term times the number of
microbatches. A value computed from estimates is *own* to the microbatch. Own values that are added
to terms, or returned, count with their share of the mean. So all gradients are those of the
averaged loss: no rule of differentiation is needed.

Sums that no sample depends on, such as gradients of weights and their norm, are not estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dataflow import Node, carries
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import (
    SeedTrial,
    outermost,
    search,
    stride_samples,
    try_seeds,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, ToolError, note
from stablehlo_tools.dialect.microbatch_marks import Mark, mark_of
from stablehlo_tools.dialect.names import (
    ADD,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    MANUAL_COMPUTATION,
    SUBTRACT,
    WHILE,
)
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import append, append_arguments, append_to_terminator
from stablehlo_tools.ir.values import has_uses, is_float, producer
from stablehlo_tools.ir.views import While
from stablehlo_tools.ir.walk import enclosing, ops_named, terminator

_ADDING = frozenset({ADD, SUBTRACT})
_MOST_ROUNDS = 8


def estimate_sums(
    block: ir.Block, parts: int, given: tuple[Sequence[ir.Value], int], *, asks: str, stacks: bool
) -> list[Diagnostic]:
    """Marks the values of a block that each of `parts` microbatches computes for itself, in place.

    The batch is the dimension of the arguments in `given`, or of those that a search finds.
    With `stacks`, stacks between loops get a row for each microbatch. Returns notes of the pass
    `asks` on the values that differ from those of the batch. Raises a located ToolError.
    """
    graph = Graph.from_block(block)
    trial: SeedTrial | None = None
    seeds = {graph.numbers[value]: DimTiling(given[1]) for value in given[0]}
    if seeds:
        trial = try_seeds(graph, stride_samples(graph, seeds, parts), parts)
    else:
        for trials in search(graph, parts, lambda *cut: [stride_samples(*cut)], to_the_end=True):
            trial = outermost([each for each in trials if each.work])
            if trial is not None:
                break
    if trial is None or trial.independent:
        return []
    # Samples depend on the values that they meet, and on all that these are computed from.
    estimates = _Estimates(trial.dims)
    estimates.near = graph.ancestors(
        number
        for meeting in trial.dims.meetings
        for number in meeting.used.inputs
        if number not in trial.dims.tilings
    )
    # Values become own in one round that ops before them read in the next one, through loops.
    for _ in range(_MOST_ROUNDS):
        known = len(estimates.own)
        estimates.visit(graph.root.nodes)
        if len(estimates.own) == known:
            break
    told = _write_marks(graph, estimates, asks)
    if stacks:
        _keep_rows(block, graph, estimates.own, parts, asks)
    return told


@dataclass
class _Estimates(PartialSums):
    """Follows terms, and values that are own to a microbatch.

    `near` are the indices of ops that samples depend on. `marks` has the operands of each op that
    get a mark.
    """

    own: set[int] = field(default_factory=set[int])
    near: set[int] = field(default_factory=set[int])
    marks: dict[Node, dict[int, Mark]] = field(default_factory=dict[Node, dict[int, Mark]])

    def _visit(self, node: Node) -> None:
        if node.name == WHILE:
            for carry in carries(node):
                if carry.operand in self.own or carry.returned in self.own:
                    self.own.update((carry.condition, carry.argument, carry.result))
        super()._visit(node)
        if node.name == MANUAL_COMPUTATION and not self.own.isdisjoint(node.inputs):
            self.own.update(node.results)
        elif node.bodies and node.name != WHILE:
            for place, result in enumerate(node.results):
                chosen = (body.returned[place] for body in node.bodies)
                if not self.own.isdisjoint((*node.inputs, *chosen)):
                    self.own.add(result)
        for result in node.results:
            if result in self.terms or result in self.dims.tilings:
                self.own.discard(result)

    def _op(self, node: Node) -> None:
        self.marks.pop(node, None)
        tilings, terms = self.dims.tilings, [n in self.terms for n in node.operands]
        in_parts = any(number in tilings for number in node.inputs)
        is_own = any(number in self.own for number in node.inputs)
        # A mean of integers would be rounded.
        others = [n for n in node.operands if n not in self.terms]
        is_sum = node.name in _ADDING and {self.terms.get(n, "add") for n in node.operands} == {
            "add"
        }
        adds_own = (
            is_sum and any(n in self.own for n in others) and is_float(node.op.results[0].type)
        )
        if self._stacks_means(node):
            return
        if not any(terms):
            if is_own and not in_parts and self._grows(node):
                return
            super()._op(node)
        elif node.name == DYNAMIC_UPDATE_SLICE and terms[1] and node.index in self.near:
            # A row that samples depend on is read before all microbatches have run.
            self._mark(node, Mark.ESTIMATE, [place == 1 for place in range(len(terms))])
            self.own.update(node.results)
        elif not in_parts and adds_own:
            self._mark(node, Mark.MEAN, [not is_term for is_term in terms])
            self.terms.update(dict.fromkeys(node.results, "add"))
        else:
            # An op that is not linear is blocked, or one that reads terms together with samples.
            super()._op(node)
            makers = [
                self.dims.graph.maker.get(n) or self.dims.graph.owner.get(n)
                for n in node.operands
                if n in self.terms
            ]
            are_near = all(maker is not None and maker.index in self.near for maker in makers)
            # Only a sum grows with the batch; a maximum of a part estimates nothing.
            are_near &= {self.terms[n] for n in node.operands if n in self.terms} == {"add"}
            if are_near and any(n in self.blocked for n in node.results):
                self._estimate(node, terms)
                is_own = True
        if is_own or in_parts:
            made = (n for n in node.results if n not in self.terms and n not in self.blocked)
            self.own.update(n for n in made if n not in tilings)

    def _estimate(self, node: Node, terms: Sequence[bool]) -> None:
        """Lets an op read estimates in place of terms."""
        step = self.dims.op_tilings.get(node)
        in_parts = any(number in self.dims.tilings for number in node.inputs)
        if in_parts and step is None:
            return
        for result in node.results:
            self.blocked.pop(result, None)
        self._mark(node, Mark.ESTIMATE, terms)
        if step is not None:
            self._step(node, step)

    def _stacks_means(self, node: Node) -> bool:
        """Lets an own row count with its share of the mean, if it enters a stack that no sample
        depends on; returns True then. The loop first has to try the stack as a sum."""
        if node.name != DYNAMIC_UPDATE_SLICE or node.index in self.near:
            return False
        stack, row, *_ = node.operands
        if row not in self.own or not is_float(node.op.results[0].type):
            return False
        if stack in self.terms:
            self._mark(node, Mark.MEAN, [place == 1 for place in range(len(node.operands))])
            self.terms[node.results[0]] = "add"
        else:
            self._block(node, node)
        return True

    def _grows(self, node: Node) -> bool:
        """Blocks an op that adds an own value to a carry of a loop, and returns True. `_loop` then
        tries the carry as a sum."""
        if node.name != ADD or len(self.own.intersection(node.operands)) != 1:
            return False
        (other,) = (n for n in node.operands if n not in self.own)
        loop = self.dims.graph.owner.get(other)
        if loop is None or loop.name != WHILE or other not in loop.bodies[1].arguments:
            return False
        returned = loop.bodies[1].returned[loop.bodies[1].arguments.index(other)]
        if returned not in node.results:
            return False
        self._block(node, node)
        return True

    def _mark(self, node: Node, mark: Mark, chosen: Sequence[bool]) -> None:
        self.marks[node] = {place: mark for place, is_one in enumerate(chosen) if is_one}


def _write_marks(graph: Graph, estimates: _Estimates, asks: str) -> list[Diagnostic]:
    """Writes the marks before the ops that read them; own results of the block are means."""
    told: list[Diagnostic] = []
    for node, marks in estimates.marks.items():
        for place, mark in marks.items():
            value = node.op.operands[place]
            node.op.operands[place] = _write_mark(mark, value, value.type, node.op)
            if mark is Mark.ESTIMATE:
                maker = producer(value) or node.op
                told.append(
                    note(
                        f"{asks}: {node.name} reads this sum over the batch as each microbatch "
                        "has it, times the number of microbatches; what follows is averaged",
                        maker.location,
                    )
                )
    # A result that is own to a microbatch becomes the mean over all.
    end = terminator(graph.root.block)
    for place, number in enumerate(graph.root.returned):
        if number in estimates.own:
            value = end.operands[place]
            if not is_float(value.type):
                raise ToolError(
                    f"{asks}: result {place} is an integer that each microbatch computes for "
                    "itself, which has no mean",
                    (producer(value) or end).location,
                )
            end.operands[place] = _write_mark(Mark.MEAN, value, value.type, end)
    return told


def _write_mark(mark: Mark, value: ir.Value, type_: ir.Type, before: ir.Operation) -> ir.Value:
    build = Builder(ir.InsertionPoint(before), before.location)
    name = ir.StringAttr.get(mark.value, build.context)
    return build.create(CUSTOM_CALL, [value], [type_], {"call_target_name": name}).results[0]


_OWN_ROW = "stablehlo_tools.own_row"  # on an op that writes own values to a row of a stack


def _keep_rows(block: ir.Block, graph: Graph, own: set[int], parts: int, asks: str) -> None:
    """Gives each microbatch a row in stacks of own values that a loop writes and others read: a
    stack of one row a layer becomes one of `parts` rows a layer."""
    for node in graph.root.nodes:
        for carry in carries(node) if node.name == WHILE else ():
            writer = producer(graph.values[carry.returned])
            if carry.result in own and writer and writer.name == DYNAMIC_UPDATE_SLICE:
                writer.attributes[_OWN_ROW] = ir.UnitAttr.get(writer.context)
    while True:
        # Each round rebuilds loops, after which no handle to them is valid.
        written = (
            op
            for op in ops_named(block.owner.operation, {DYNAMIC_UPDATE_SLICE})
            if _OWN_ROW in op.attributes
        )
        writer = next(written, None)
        if writer is None:
            break
        del writer.attributes[_OWN_ROW]
        _widen_stack(writer, parts, asks)


def _widen_stack(writer: ir.Operation, parts: int, asks: str) -> None:
    """Adds a stack with a row for each microbatch beside that of a writer, and reads it instead."""
    stack, row, first, *starts = writer.operands
    loop = enclosing(writer, WHILE)
    assert loop is not None
    place = list(terminator(While(loop).body).operands).index(writer.results[0])
    readers = [(use.owner.operation, use.operand_number) for use in loop.results[place].uses]
    whole, rest = shape_of(stack), shape_of(row)[1:]
    understood = rest == whole[1:] and all(
        reader.name == WHILE
        and not has_uses(reader.results[number])
        and all(
            use.owner.operation == terminator(While(reader).body)
            or (
                use.owner.operation.name == DYNAMIC_SLICE
                and shape_of(use.owner.operation.results[0]) == [1, *rest]
            )
            for use in While(reader).carries[number].uses
        )
        for reader, number in readers
    )
    if not understood:
        raise ToolError(
            f"{asks}: an op after the loop over layers reads the statistics of all layers, and "
            "samples depend on them (P4): compute the auxiliary loss of a layer in its body",
            writer.location,
        )
    build = Builder(ir.InsertionPoint(loop), loop.location)
    start = build.splat(0, [whole[0], parts, *rest], element_of(stack))
    inside = Builder(ir.InsertionPoint(writer), writer.location)
    rows = _write_mark(
        Mark.EACH, inside.reshape(row, rest), inside.tensor([parts, *rest], element_of(row)), writer
    )
    zero = inside.splat_like(0, first)
    # The former stack stays beside it, and is unused in the end.
    loop, wide = _add_carry(loop, start)
    written = inside.update(wide, inside.reshape(rows, [1, parts, *rest]), [first, zero, *starts])
    append_to_terminator(While(loop).body, [written])
    for reader, number in readers:
        slices = [use.owner.operation for use in While(reader).carries[number].uses]
        rebuilt, wide = _add_carry(reader, loop.results[len(loop.results) - 1])
        for op in slices:
            if op.name != DYNAMIC_SLICE:
                continue
            _, first, *starts = op.operands
            build = Builder(ir.InsertionPoint(op), op.location)
            at = [first, build.splat_like(0, first), *starts]
            read = build.dynamic_slice(wide, at, [1, parts, *rest])
            type_ = build.tensor(rest, element_of(read))
            mine = _write_mark(Mark.OWN, build.reshape(read, [parts, *rest]), type_, op)
            op.results[0].replace_all_uses_with(build.reshape(mine, [1, *rest]))
        append_to_terminator(While(rebuilt).body, [wide])
        # No op reads the former stack now; a pipeline would wait for all of it.
        before = Builder(ir.InsertionPoint(rebuilt), rebuilt.location)
        rebuilt.operands[number] = before.splat_like(0, rebuilt.operands[number])


def _add_carry(loop: ir.Operation, start: ir.Value) -> tuple[ir.Operation, ir.Value]:
    """Returns a loop rebuilt with one more carry, and its argument; the body does not yield it
    yet."""
    rebuilt = append(loop, [start], [start.type])
    append_arguments(While(rebuilt).condition, [start.type])
    (argument,) = append_arguments(While(rebuilt).body, [start.type])
    return rebuilt, argument


def drop_marks(block: ir.Block) -> None:
    """Replaces the marks that are left, on values of the whole batch."""
    for op in ops_named(block.owner.operation, {CUSTOM_CALL}):
        mark = mark_of(op)
        if mark is None:
            continue
        value = op.operands[0]
        build, shape = Builder(ir.InsertionPoint(op), op.location), shape_of(op.results[0])
        if mark is Mark.EACH:
            value = build.broadcast(value, shape, range(1, len(shape)))
        elif mark is Mark.OWN:
            value = build.reshape(build.slice_along(value, 0, 0, 1), shape)
        op.results[0].replace_all_uses_with(value)
        op.erase()

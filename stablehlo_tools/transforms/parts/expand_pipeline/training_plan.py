"""Plans loops over layers that one pipeline runs forward and backward, and the ops between them.

A model has one *stack* of layers or several in sequence: an encoder and its decoder, or dense
layers followed by another kind. Each stack has a forward loop, and a backward loop that reads its
residuals. The backward loops run in the reverse order.

The ops between two loops that depend on the first are a *link*. The link between the last forward
loop and the first backward one is the head with the loss. Ops on samples, and sums over samples,
can run on each microbatch, between one loop and the next. All other ops need the whole batch: they
wait for the end of the pipeline. No loop may need the result of one of those.

A value of samples may be needed after the loop that follows its link. It is then sent from rank to
rank along with that loop's flows, as an encoder's result is sent to every layer of the decoder.
Backward loops find it on the rank where the forward loops kept it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from stablehlo_tools.analysis.dataflow import Body, Node, inputs_of, needed_nodes
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.partial_sums import PartialSums, source_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import BROADCAST
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.values import has_uses, is_spread_constant
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import LayerPhase
from stablehlo_tools.transforms.parts.one_part import OnePartWriter

_CHEAP = ELEMENTWISE | LAYOUT


@dataclass(frozen=True)
class StackPass:
    """One loop of the pipeline: a stack of layers, forward or backward.

    `whole_flows` are the carries that the rest of the program needs of the whole batch. `along` are
    values of samples that are sent from rank to rank with the flows. `kept` are values that the
    loop's layers read from slots of the forward of the same chunk and microbatch. `residuals` maps
    carries of this loop to the carries of the forward loop that write those stacks.
    """

    phase: LayerPhase
    whole_flows: tuple[int, ...]
    along: tuple[int, ...]
    kept: tuple[int, ...]
    residuals: dict[int, int]


@dataclass(frozen=True)
class LayerGap:
    """The ops after a loop and before the next one that run on each microbatch.

    `takes` are its inputs: flows after the loop, values sent along, and the `held` ones. Those are
    kept for it by the link before the same stack's forward. `starts` are the values that the next
    loop starts from, by carry. `sums` are terms whose sums the rest of the program needs. `finals`
    are values of samples that it needs of the whole batch.
    """

    nodes: tuple[Node, ...]
    takes: tuple[int, ...]
    held: tuple[int, ...]
    starts: dict[int, int]
    sums: tuple[int, ...]
    finals: tuple[int, ...]


@dataclass(frozen=True)
class Training:
    """The forward loops, then the backward ones, in the order in which they run, and the links
    between them.

    `gone` are all ops that are erased. `late` are the ops that wait for the whole pipeline, in
    order, grouped by the last loop that they depend on.
    """

    passes: tuple[StackPass, ...]
    links: tuple[LayerGap, ...]
    gone: tuple[Node, ...]
    late: tuple[tuple[Node, ...], ...]

    @property
    def stacks(self) -> int:
        """The number of stacks of layers."""
        return len(self.passes) // 2

    @property
    def forward(self) -> LayerPhase:
        """The first loop."""
        return self.passes[0].phase

    @property
    def backward(self) -> LayerPhase:
        """The last loop."""
        return self.passes[-1].phase

    @property
    def head(self) -> LayerGap:
        """The link between the last forward loop and the first backward one."""
        return self.links[self.stacks - 1]

    @property
    def dims(self) -> BatchDims:
        """The batch dimension of each value."""
        return self.forward.dims

    def mirror(self, i: int) -> int:
        """Returns the backward loop of a forward one, and the reverse."""
        return len(self.passes) - 1 - i

    def link_outputs(self, i: int) -> tuple[int, ...]:
        """Returns the values that a link passes on: to the next loop, and to the link after that
        loop's backward."""
        following = self.passes[i + 1]
        given = [*self.links[i].starts.values(), *following.along]
        if i + 1 < self.stacks:
            given += self.links[self.mirror(i + 1)].held
        return tuple(dict.fromkeys(given))

    def made(self, i: int) -> tuple[int, ...]:
        """Returns those of the values passed on that the link computes itself."""
        own = {number for node in self.links[i].nodes for number in node.results}
        return tuple(number for number in self.link_outputs(i) if number in own)


def plan_training(
    body: Body, forwards: Sequence[LayerPhase], backwards: Sequence[LayerPhase]
) -> Training:
    """Returns the plan for the loops of a block, one pair for each stack, in the order in which
    they run. Raises a located ToolError if a loop needs a value of the whole batch."""
    return _TrainingPlanner(body, forwards, backwards).plan()


class _TrainingPlanner:
    """Plans the links: loop i is followed by link i, and link `stacks - 1` is the head."""

    def __init__(
        self, body: Body, forwards: Sequence[LayerPhase], backwards: Sequence[LayerPhase]
    ) -> None:
        self._body = body
        self._loops = (*forwards, *backwards)
        self._stacks = len(forwards)
        self._last = backwards[-1]
        # The last loop that each value depends on; values that depend on none are left out.
        self._place: dict[int, int] = {}
        self._hanging = self._follow()
        self._terms = PartialSums(self._last.dims)
        self._terms.visit(self._hanging)
        self._made = {number: node for node in self._hanging for number in node.results}
        self._flows = {n for phase in self._loops for n in activations(phase)}
        # The values passed from place to place, by the number of the loop before it.
        self._along_with, self._kept, self._held, self._taken = (
            [set[int]() for _ in self._loops] for _ in range(4)
        )

    def plan(self) -> Training:
        """Returns the plan. Raises ToolError."""
        residuals = [dict[int, int]() for _ in self._loops]
        for stack in range(self._stacks):
            backward = self._mirror(stack)
            residuals[backward] = self._residuals(stack)
        for each, left in zip(self._loops, residuals, strict=True):
            self._check_stacks(each, left)
        run = self._on_samples()
        starts = [self._starts(i, run) for i in range(len(self._loops))]
        read = [self._read(phase, run) for phase in self._loops]
        handed = [n for of_loop in starts for n in of_loop.values()] + [n for r in read for n in r]
        run = self._without_ends(run, handed)
        gone = tuple(node for node in self._hanging if node in run)
        made = {number: node for node in gone for number in node.results}
        outside = self._used_outside(run)
        wanted = [n for n in made if n in outside]
        nodes = needed_nodes(gone, [*wanted, *handed])
        self._route(nodes, starts, read)
        passes = tuple(
            StackPass(
                phase,
                tuple(c for c in phase.flows if phase.node.results[c] in outside),
                tuple(sorted(self._along_with[i])),
                tuple(sorted(self._kept[i])),
                residuals[i],
            )
            for i, phase in enumerate(self._loops)
        )
        return Training(
            passes,
            tuple(self._link(i, nodes, starts[i + 1], wanted) for i in range(len(passes) - 1)),
            gone,
            self._late(run),
        )

    def _link(
        self, i: int, nodes: Sequence[Node], starts: dict[int, int], wanted: Sequence[int]
    ) -> LayerGap:
        own = tuple(node for node in nodes if self._place[node.results[0]] == i)
        results = {n for node in own for n in node.results}
        ends = [n for n in wanted if n in results]
        return LayerGap(
            (*self._made_again(own), *own),
            tuple(sorted(self._taken[i] - results)),
            tuple(sorted(self._held[i])),
            starts,
            tuple(n for n in ends if n in self._terms.terms),
            tuple(n for n in ends if n not in self._terms.terms),
        )

    def _made_again(self, own: Sequence[Node]) -> Iterator[Node]:
        """Yields ops before the pipeline that make large values of small ones for a link, such as a
        one-hot of labels. The link computes them again for one microbatch."""
        dims, body = self._last.dims, self._body
        made = {n: node for node in body.nodes for n in node.results if node in dims.op_tilings}
        again: set[Node] = set()
        for number in {n for node in own for n in inputs_of(node)} - self._place.keys():
            ops, read, pending = set[Node](), set[int](), [number]
            while pending:
                each = pending.pop()
                node = made.get(each)
                if node is not None and node.name in _CHEAP and not len(node.op.regions):
                    ops.add(node)
                    pending += node.operands
                elif not is_spread_constant(dims.graph.values[each]):
                    # Count the stored operand; for a broadcast of a whole value, that value.
                    maker = dims.graph.maker.get(each)
                    repeats = maker is not None and maker.name == BROADCAST
                    is_whole = each not in dims.tilings
                    read.add(maker.operands[0] if maker and repeats and is_whole else each)
            # Computing a small result again saves little memory and traffic.
            if _elements(dims, [number]) > 2 * _elements(dims, read):
                again |= ops
        return (node for node in body.nodes if node in again)

    def _mirror(self, i: int) -> int:
        """Returns the backward loop of a forward one, and the reverse."""
        return len(self._loops) - 1 - i

    def _follow(self) -> list[Node]:
        """Returns the ops that depend on some loop and not on the last one."""
        index = {phase.node: i for i, phase in enumerate(self._loops)}
        last = len(self._loops) - 1
        hanging: list[Node] = []
        for node in self._body.nodes:
            found = max((self._place.get(n, -1) for n in inputs_of(node)), default=-1)
            place = index.get(node, found)
            if place < 0:
                continue
            self._place.update(dict.fromkeys(node.results, place))
            if node not in index and place < last:
                hanging.append(node)
        return hanging

    def _residuals(self, stack: int) -> dict[int, int]:
        """Returns the carries of a backward loop that read stacks of its forward loop, each with
        the carry that writes it. Raises ToolError if the stack is not a plain residual."""
        forward, backward = self._loops[stack], self._loops[self._mirror(stack)]
        written = {forward.node.results[carry]: carry for carry in forward.loop.writes}
        reads = {read.rows.carry: read.rows for read in backward.reads}
        residuals: dict[int, int] = {}
        for carry, rows in reads.items():
            number = backward.node.operands[carry]
            if number not in written:
                continue
            source = forward.loop.writes[written[number]]
            if (source.first, source.span) != (rows.first, rows.span):
                raise _not_separable(forward.node, backward, "writes other rows than those read by")
            residuals[carry] = written[number]
        for source in residuals.values():
            users = [use.owner.operation for use in forward.loop.op.results[source].uses]
            if any(op != backward.loop.op for op in users):
                what = "writes a stack that is also used outside of"
                raise _not_separable(forward.node, backward, what)
            if any(
                write.update in forward.terms.terms
                for write in forward.writes
                if write.rows.carry == source
            ):
                what = "writes a sum over the whole batch for"
                raise _not_separable(forward.node, backward, what)
        return residuals

    def _check_stacks(self, phase: LayerPhase, residuals: dict[int, int]) -> None:
        """Raises ToolError if a loop reads stacks of earlier loops other than residuals, or if its
        counter starts from a result of theirs."""
        for carry, number in enumerate(phase.node.operands):
            free = carry in residuals or carry in phase.loop.flows
            if free or carry in phase.loop.constants or number not in self._place:
                continue
            if carry in phase.loop.reads and number in self._made:
                what = "rewrites residuals of the forward loop for"
            else:
                what = "needs a whole-batch result of another loop or the head for"
            raise _not_separable(self._made.get(number, phase.node), phase, what)

    def _on_samples(self) -> set[Node]:
        """Returns the ops that can run on one microbatch. Their results are samples, sums over
        samples, or the same for all; no operand needs the whole batch."""
        on_samples: set[Node] = set()
        # Stacks and sums of a loop are complete only after its last microbatch.
        late = {n for phase in self._loops for n in phase.node.results} - self._flows
        alike = self._flows - self._terms.dims.tilings.keys()
        mixed = self._terms.terms.keys() | self._terms.blocked.keys()
        for node in self._hanging:
            used = inputs_of(node)
            if not late.isdisjoint(used):
                late.update(node.results)
            elif _runs_on_samples(self._terms, node):
                on_samples.add(node)
            elif used & self._place.keys() <= alike and mixed.isdisjoint(node.results):
                alike.update(node.results)
                on_samples.add(node)
            else:
                late.update(node.results)
        return on_samples

    def _starts(self, i: int, run: set[Node]) -> dict[int, int]:
        """Returns the values that a loop starts from, by carry, if they depend on another loop."""
        phase = self._loops[i]
        starts: dict[int, int] = {}
        for carry in phase.flows:
            number = phase.node.operands[carry]
            if number in self._place:
                self._check_samples(number, phase, run)
                starts[carry] = number
        return starts

    def _read(self, phase: LayerPhase, run: set[Node]) -> set[int]:
        """Returns the values that depend on another loop and that the layers of a loop read."""
        given = {phase.body.arguments[c]: phase.node.operands[c] for c in phase.loop.constants}
        used = {n for node in phase.nodes for n in inputs_of(node)}
        used.update(write.update for write in phase.writes)
        used.update(phase.body.returned[c] for c in (*phase.flows, *phase.sums))
        read = {given.get(n, n) for n in used} & self._place.keys()
        for number in sorted(read):
            self._check_samples(number, phase, run)
        return read

    def _check_samples(self, number: int, phase: LayerPhase, run: set[Node]) -> None:
        """Raises ToolError if a value that a loop needs does not exist for each microbatch."""
        node = self._made.get(number)
        if node is None and number not in self._flows:
            raise self._whole(self._loops[self._place[number]].node, number, phase)
        if node is not None and (node not in run or number in self._terms.terms):
            raise self._whole(node, number, phase)

    def _whole(self, node: Node, number: int, phase: LayerPhase) -> ToolError:
        blocked = self._terms.blocked.get(number, node)
        source = source_of(self._terms, blocked) or blocked
        if phase in self._loops[: self._stacks]:
            which = "next loop over layers"
            why = "none of its layers can begin before the loop before it has run all microbatches"
        else:
            which = "backward loop"
            why = (
                "the loss is not a sum over microbatches, so no backward can begin before all "
                "forwards are done"
            )
        return ToolError(
            f"expand-pipeline: {source.name} combines all samples of the batch, and the {which} "
            f"depends on its result: {why} (P7); use schedule=gpipe or schedule=circular",
            source.op.location,
            (note(f"the {which}", phase.loop.op.location),),
        )

    def _without_ends(self, run: set[Node], handed: Sequence[int]) -> set[Node]:
        """Returns `run` without ops that depend on a backward loop alone and that no other loop
        needs. Gradients of an embedding can wait, as can all ops after the last loop. Ops that also
        read activations stay, since otherwise these would be needed of the whole batch."""
        ordered = [node for node in self._hanging if node in run]
        kept = set(needed_nodes(ordered, handed))
        deep: set[int] = set()
        for node in ordered:
            taken = inputs_of(node) & self._place.keys()
            if any(self._place[n] < self._stacks or n in deep for n in taken):
                deep.update(node.results)
                kept.add(node)
        return kept

    def _used_outside(self, run: set[Node]) -> set[int]:
        """Returns the values that ops outside of the pipeline use, or that sums start from."""
        loops = {phase.node for phase in self._loops}
        used: set[int] = set()
        for node in self._body.nodes:
            if node not in run and node not in loops:
                used |= inputs_of(node)
        for phase in self._loops:
            used.update(phase.node.operands[carry] for carry in phase.sums)
        return used | set(self._body.returned)

    def _late(self, run: set[Node]) -> tuple[tuple[Node, ...], ...]:
        """Returns the ops before the last loop that wait, by the last loop that they depend on."""
        order = {node: i for i, node in enumerate(self._body.nodes)}
        end = order[self._last.node]
        waiting = [node for node in self._hanging if node not in run and order[node] < end]
        return tuple(
            tuple(node for node in waiting if self._place[node.results[0]] == i)
            for i in range(len(self._loops))
        )

    def _route(
        self, nodes: Sequence[Node], starts: Sequence[dict[int, int]], read: Sequence[set[int]]
    ) -> None:
        """Notes the path of each value from the loop or link that makes it to those that use it."""
        for node in nodes:
            for number in inputs_of(node) & self._place.keys():
                self._to_link(number, self._place[node.results[0]])
        for i, of_loop in enumerate(starts):
            for number in of_loop.values():
                self._to_link(number, i - 1)
        for i, numbers in enumerate(read):
            for number in numbers:
                made, stack = self._place[number], self._mirror(i)
                if i < self._stacks or made >= stack:
                    self._along(number, made, i)
                else:
                    self._along(number, made, stack)
                    self._kept[i].add(number)

    def _to_link(self, number: int, link: int) -> None:
        made, stack = self._place[number], self._mirror(link)
        self._taken[link].add(number)
        if link < self._stacks or made >= stack:
            self._along(number, made, link)
        else:  # the link runs on the rank that began this stack's forward, after another link
            self._to_link(number, stack - 1)
            self._held[link].add(number)

    def _along(self, number: int, made: int, until: int) -> None:
        """Sends a value along from the link after loop `made` through all loops up to `until`."""
        for loop in range(made + 1, until + 1):
            self._along_with[loop].add(number)
            self._taken[loop - 1].add(number)


def _elements(dims: BatchDims, numbers: Iterable[int]) -> int:
    return sum(prod(dims.graph.shape(number) or ()) for number in numbers)


def activations(phase: LayerPhase) -> set[int]:
    """Returns the flows after the last layer that are of samples, or the same for all of them."""
    return {phase.node.results[c] for c in phase.flows if c not in phase.term_flows}


def _runs_on_samples(terms: PartialSums, node: Node) -> bool:
    dims = terms.dims
    if not any(number in dims.tilings for number in inputs_of(node)):
        return False
    used = [number for number in node.results if has_uses(dims.graph.values[number])]
    return bool(used) and all(
        number not in terms.blocked and (number in dims.tilings or terms.terms.get(number) == "add")
        for number in used
    )


def _not_separable(node: Node, phase: LayerPhase, what: str) -> ToolError:
    return ToolError(
        f"expand-pipeline: {node.name} {what} the backward loop, so the two loops cannot alternate "
        "(P7); use schedule=gpipe or schedule=circular",
        node.op.location,
        (note("the backward loop", phase.loop.op.location),),
    )


Values = dict[int, ir.Value]  # of one microbatch, by number


class LinkResults(NamedTuple):
    """The results of a link on one microbatch: values passed on, by number; terms of its sums; and
    values that the program needs of all samples."""

    made: Values
    terms: list[ir.Value]
    finals: list[ir.Value]


def results_of_link(
    link: LayerGap, dims: BatchDims, made: Sequence[int], writing: OnePartWriter, build: Builder
) -> LinkResults:
    """Returns the results of a link whose ops are written."""

    def part(number: int) -> ir.Value:
        return writing.operand(number, dims.tilings.get(number), build)

    return LinkResults(
        {number: part(number) for number in made},
        [writing.operand(number, None, build) for number in link.sums],
        [part(number) for number in link.finals],
    )

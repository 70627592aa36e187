"""Assigns a stage and a phase to every op of a microbatch, and finds the values between stages.

The stages of the forward are given; later stages are above earlier ones. A value of the forward is
available on all stages from its op to its last reader, because it is sent with the activations.

An op of the backward gets the highest stage that these limits allow:

- Not above the op that yields a gradient that it reads, because gradients are sent down.
- Not above the last stage at which a forward value or weight that it reads is available. A mask
  that every layer uses does not limit it, but the activations of one layer do.
- A product is not above the last stage whose forward reads the same samples. So the gradient of the
  first layer's weights is computed on the stage of the samples.

An op that reads values of the forward and no gradient, such as the slope of an activation, is on
the stage of its reader.

In a stage's backward, the ops that lower stages depend on are the input gradient. The rest is the
weight gradient. If no value goes further down, the input gradient is the ops that other products of
the stage depend on.

Values of the forward go up with the activations as far as an op reads them. If the backward reads
them on lower stages, they go down with the gradients. A rank that already has a value does not
receive it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CONVERT, WHILE
from stablehlo_tools.mpmd.staging.forward_ops import Forward
from stablehlo_tools.mpmd.staging.step import TrainingStep, heavy_ops, staged_inputs
from stablehlo_tools.schedules.table import ActionKind, Placement

_BACKWARD = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
Boundary = tuple[int, int]


class PhaseWork(NamedTuple):
    """The phase that an op belongs to: F, I or W of a stage."""

    kind: ActionKind
    stage: int


@dataclass(frozen=True)
class Assignment:
    """The phase of every needed staged node, and of every link of an accumulator, by index."""

    stages: int
    of: Mapping[int, PhaseWork]


def assign(
    step: TrainingStep, forward: Forward, stage_of: Mapping[int, int], stages: int
) -> Assignment:
    """Returns the phases; `stage_of` has the stage of each node of the forward."""
    where = positions(step, forward, stage_of)
    works: dict[int, PhaseWork] = {
        index: PhaseWork(ActionKind.FORWARD, where[index]) for index in sorted(forward)
    }
    backward = [index for index in sorted(step.needed) if index not in forward]
    links = _links(step, forward, where, stages)
    chain = _input_gradients(step, backward, where, links)
    for index in backward:
        kind = ActionKind.INPUT_GRADIENT if index in chain else ActionKind.WEIGHT_GRADIENT
        works[index] = PhaseWork(kind, where[index])
    # Only the finish needs a sum, so it belongs to the phase that can be deferred.
    for term in step.terms:
        stage, is_forward = links[term.index]
        works[term.index] = PhaseWork(
            ActionKind.FORWARD if is_forward else ActionKind.WEIGHT_GRADIENT, stage
        )
    return Assignment(stages, works)


def positions(
    step: TrainingStep,
    forward: Forward,
    stage_of: Mapping[int, int],
    spans: Mapping[int, tuple[int, int]] | None = None,
) -> dict[int, int]:
    """Returns the position of every needed node, in any numbering that grows along the forward.

    `spans` has the positions of nodes that have several.
    """
    return _Positions(step, forward, stage_of, spans or {}).run()


class _Positions:
    def __init__(
        self,
        step: TrainingStep,
        forward: Forward,
        stage_of: Mapping[int, int],
        spans: Mapping[int, tuple[int, int]],
    ) -> None:
        self._step = step
        self._forward = forward
        self._place_of = dict(stage_of)
        self._spans = spans
        self._last: dict[int, int] = {}  # of a value: its last forward read
        self._last_taken: dict[int, int] = {}  # of a node that reads samples: their last use

    def run(self) -> dict[int, int]:
        step = self._step
        nodes = [step.flow.nodes[index] for index in sorted(step.needed)]
        # The forward comes first: its last reads of values determine the positions of the backward.
        for node in nodes:
            if node.index in self._forward:
                self._note_uses(node)
        unplaced: list[Node] = []
        for node in nodes:
            if node.index not in self._forward:
                place = self._place(node)
                if place is None:
                    unplaced.append(node)
                else:
                    self._place_of[node.index] = place
        for node in reversed(unplaced):  # readers first
            self._place_of[node.index] = self._by_users(node)
        self._lower([node for node in nodes if node.index not in self._forward])
        return self._place_of

    def _lower(self, backward: list[Node]) -> None:
        """Moves ops that read values of the forward and no gradient down to their readers.

        An example is the slope of an activation. Its operands are available there anyway, while its
        result would have to be sent.
        """
        least: dict[int, int] = {}  # of such an op: the highest position of its operands' ops
        for node in backward:
            makers = [self._step.flow.maker[n] for n in staged_inputs(self._step, node)]
            # The first position of each operand; None for one that depends on a gradient.
            made = [
                self._span(maker)[1] if maker.index in self._forward else least.get(maker.index)
                for maker in makers
            ]
            known = [place for place in made if place is not None]
            if node.name != WHILE and known and len(known) == len(made):
                least[node.index] = max(known)
        for node in reversed(backward):
            if node.index in least:
                wanted = max(least[node.index], self._by_users(node))
                self._place_of[node.index] = min(self._place_of[node.index], wanted)

    def _note_uses(self, node: Node) -> None:
        first, last = self._span(node)
        for number in node.inputs:
            is_weight = self._step.is_weight(number)
            if is_weight or self._step.is_staged(number):
                self._last[number] = max(self._last.get(number, 0), last if is_weight else first)
            for taking in self._step.samples(number):
                self._last_taken[taking] = max(self._last_taken.get(taking, 0), first)
        for number in node.results:
            self._last[number] = max(self._last.get(number, 0), last)

    def _span(self, node: Node) -> tuple[int, int]:
        span = self._spans.get(node.index)
        place = self._place_of[node.index]
        return (place, place) if span is None else (span[0], span[1] - 1)

    def _place(self, node: Node) -> int | None:
        """Returns the highest position of a backward op; None if no operand has a position."""
        places: list[int] = []
        is_product = bool(heavy_ops(node.op)) and node.name != WHILE
        for number in node.inputs:
            if is_product:
                taking = self._step.samples(number) & self._last_taken.keys()
                places += [self._last_taken[index] for index in taking]
            maker = self._step.flow.maker.get(number)
            is_backward = maker is not None and maker.index not in self._forward
            if self._step.is_staged(number) and is_backward and maker is not None:
                if maker.index in self._place_of:
                    places.append(self._place_of[maker.index])
            elif number in self._last:
                places.append(self._last[number])
                span = None if maker is None else self._spans.get(maker.index)
                if span is not None and node.name == WHILE:
                    places.append(span[0])  # a backward loop covers all of them
        return min(places, default=None)

    def _by_users(self, node: Node) -> int:
        """Returns the highest position of its readers, from which it is sent down."""
        users = [u for n in node.results for u in self._step.flow.users.get(n, ())]
        places = [self._place_of[user.index] for user in users if user.index in self._place_of]
        return max(places, default=max(self._place_of.values(), default=0))


def _links(
    step: TrainingStep, forward: Forward, where: Mapping[int, int], stages: int
) -> dict[int, tuple[int, bool]]:
    """Returns the stage of each link of an accumulator, and True if the forward can run it.

    The stage is that of the term's op, or the last stage if no term has one.
    """
    stage_of: dict[int, tuple[int, bool]] = {}
    for links in step.chains:
        adding: dict[int, tuple[int, bool] | None] = {}
        for link in filter(lambda each: each.inputs, links):
            makers = {step.flow.maker[n].index for n in staged_inputs(step, link)}
            places = [where[index] for index in makers]
            if makers <= forward:
                adding[link.index] = (max(places), True) if places else None
            else:
                adding[link.index] = min(places), False
        known = [work for work in adding.values() if work is not None]
        usual = known[-1] if known else (stages - 1, True)
        if len(links) > len(adding) and len(set(known)) > 1:
            raise ToolError(
                "expand-mpmd: this sum has terms of several stages and a conversion between "
                "them, so it cannot be split over ranks (P6)",
                links[0].op.location,
            )
        for link in links:
            stage_of[link.index] = adding.get(link.index) or usual
    return stage_of


def _input_gradients(
    step: TrainingStep,
    backward: list[int],
    where: Mapping[int, int],
    links: Mapping[int, tuple[int, bool]],
) -> set[int]:
    """Returns the nodes of the backward that are input gradients."""
    flow = step.flow
    below: set[int] = set()  # nodes that lower stages need
    ahead: set[int] = set()  # nodes that heavy work of the same stage needs
    for term in step.terms:
        stage, _ = links[term.index]
        for number in staged_inputs(step, term):
            if where[flow.maker[number].index] > stage:
                below.add(flow.maker[number].index)
    for index in reversed(backward):
        users = [user for n in flow.nodes[index].results for user in flow.users.get(n, ())]
        for user in users:
            if user.index not in where:
                continue
            if where[user.index] < where[index] or user.index in below:
                below.add(index)
            if user.index in ahead or heavy_ops(user.op):
                ahead.add(index)
    leads_down = {where[index] for index in below}
    return {
        index
        for index in backward
        if index in below or (where[index] not in leads_down and index in ahead)
    }


@dataclass(frozen=True)
class StagedValue:
    """A staged value: the phase that computes it, and the other phases that read it."""

    number: int
    made: PhaseWork
    read: frozenset[PhaseWork]

    def stages_above(self) -> list[int]:
        """Returns the stages above its own that read it: it is sent up with the activations."""
        if self.made.kind is not ActionKind.FORWARD:
            return []
        return sorted(work.stage for work in self.read if work.stage > self.made.stage)

    def stages_below(self) -> list[int]:
        """Returns the stages below its own that read it: it is sent down with the gradients."""
        return sorted(work.stage for work in self.read if work.stage < self.made.stage)


def staged_values(step: TrainingStep, assignment: Assignment) -> list[StagedValue]:
    """Returns the values that a phase other than their own reads, in program order.

    A value that was converted from a narrower type is replaced by the narrower one. Its readers
    convert it.
    """
    crossing: list[StagedValue] = []
    nodes = [step.flow.nodes[index] for index in sorted(step.needed)]
    read: dict[int, set[PhaseWork]] = {}
    # Last ops first: the reads of a conversion are complete before they move to its operand.
    for node in reversed(nodes):
        for number in node.results:
            users = step.flow.users.get(number, ())
            works = {assignment.of[u.index] for u in users if u.index in assignment.of}
            read.setdefault(number, set()).update(works)
        if node.name == CONVERT and step.is_staged(node.inputs[0]):
            before, after = node.op.operands[0], node.op.results[0]
            if bytes_of(before) < bytes_of(after):
                read.setdefault(node.inputs[0], set()).update(read.pop(node.results[0]))
    for node in nodes:
        made = assignment.of[node.index]
        for number in node.results:
            works = read.get(number, set()) - {made}
            if works:
                crossing.append(StagedValue(number, made, frozenset(works)))
    return crossing


def route(
    values: Iterable[StagedValue], placement: Placement, number: int
) -> dict[Boundary, list[int]]:
    """Returns the values that a microbatch sends over each boundary, in program order.

    The microbatch runs on route `number` of the placement. A boundary is a pair of stages, from the
    first to the second.
    """
    ranks = placement.routes[number]
    messages: dict[Boundary, list[int]] = {}
    for value in values:
        has = {ranks[value.made.stage]}
        for stages, way in ((value.stages_above(), 1), (value.stages_below()[::-1], -1)):
            # Send it from its stage to the last stage that lacks it, nearest first.
            missing = [stage for stage in stages if ranks[stage] not in has]
            last = missing[-1] if missing else value.made.stage
            for stage in range(value.made.stage, last, way):
                if ranks[stage + way] not in has:
                    messages.setdefault((stage, stage + way), []).append(value.number)
                    has.add(ranks[stage + way])
    return messages


@dataclass(frozen=True)
class Ends:
    """The numbers of the values that a phase reads from other phases, and yields for them."""

    takes: tuple[int, ...]
    gives: tuple[int, ...]


def ends_of(
    values: Iterable[StagedValue], works: Mapping[PhaseWork, PhaseWork]
) -> dict[PhaseWork, Ends]:
    """Returns the ends of every phase. `works` has the phase that each phase runs as: I and W as
    themselves, or both as B."""
    takes: dict[PhaseWork, list[int]] = {work: [] for work in works.values()}
    gives: dict[PhaseWork, list[int]] = {work: [] for work in works.values()}
    for value in values:
        maker = works[value.made]
        readers = {works[work] for work in value.read}
        for reader in sorted(readers, key=lambda work: (work.stage, work.kind.value)):
            if reader != maker:
                takes[reader].append(value.number)
        if readers - {maker}:
            gives[maker].append(value.number)
    return {work: Ends(tuple(takes[work]), tuple(gives[work])) for work in takes}


def run_as(assignment: Assignment, *, split: bool) -> dict[PhaseWork, PhaseWork]:
    """Returns the phase that each phase runs as: with `split` itself, else both gradients as B."""
    works: dict[PhaseWork, PhaseWork] = {}
    for stage in range(assignment.stages):
        works[PhaseWork(ActionKind.FORWARD, stage)] = PhaseWork(ActionKind.FORWARD, stage)
        for kind in _BACKWARD:
            works[PhaseWork(kind, stage)] = PhaseWork(kind if split else ActionKind.BACKWARD, stage)
    return works

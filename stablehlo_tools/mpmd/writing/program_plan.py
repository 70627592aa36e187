"""Plans what the programs of the ranks share: phases, messages, channels, the finish.

The finish is the part of the step after the loop over microbatches: the optimizer, norms, and the
results. Each op of it runs on the rank that holds most bytes of its operands. So sums of gradients
and the ops that read them stay on the ranks of their stages. Values that depend on arguments alone
are recomputed on every rank that reads them.

The finish runs in rounds. In a round each rank computes all that it can, then values are sent,
sorted by sender and receiver. This order is the same on all ranks, so no two ranks deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.loop_carries import ROWS
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CONCATENATE
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import producer, skip_constraints, splat_of
from stablehlo_tools.mpmd.manifest import ManifestTransfer
from stablehlo_tools.mpmd.staging.assignment import (
    Assignment,
    PhaseWork,
    ends_of,
    route,
    run_as,
    staged_values,
)
from stablehlo_tools.mpmd.staging.split_stage_sums import is_spread
from stablehlo_tools.mpmd.staging.step import TrainingStep
from stablehlo_tools.mpmd.writing.fixed import FEW, BlockRows, Fixed, Key, elements_in
from stablehlo_tools.mpmd.writing.phases import PhaseFunction, phases_of
from stablehlo_tools.schedules.table import Action, Table, actions_of
from stablehlo_tools.schedules.validator import other_end


@dataclass(frozen=True)
class MessageChannel:
    """A tensor of a message, by its `value` number in the step, and its channel `number`."""

    number: int
    value: int


class RankPlan:
    """A step that is cut into stages, under a schedule whose table contains the transfers."""

    def __init__(self, step: TrainingStep, assignment: Assignment, table: Table) -> None:
        self.step, self.assignment, self.table = step, assignment, table
        self.fixed = Fixed(step)
        values = staged_values(step, assignment)
        self.phases: dict[PhaseWork, PhaseFunction] = {}
        for split in (True, False):
            works = run_as(assignment, split=split)
            self.phases |= phases_of(step, assignment, works, ends_of(values, works), self.fixed)
        routes = len(table.placement.routes)
        self._messages = [route(values, table.placement, number) for number in range(routes)]
        self.transfers: list[ManifestTransfer] = []
        # the values that a pack holds
        self.packed: dict[EpilogueValue, tuple[EpilogueValue, ...]] = {}
        self._channels: dict[Action, list[MessageChannel]] = {}
        for rank, row in enumerate(self.table.rows):
            for action in actions_of(row):
                if action.kind.is_send:
                    self._channels[action] = self._of_send(action, rank)

    def phase_of(self, action: Action) -> PhaseFunction:
        """Returns the phase that an action runs."""
        return self.phases[PhaseWork(action.kind, action.stage)]

    def channels(self, action: Action) -> list[MessageChannel]:
        """Returns the tensors of a send or a receive of the schedule, in order."""
        return self._channels.get(action if action.kind.is_send else other_end(action), [])

    @cached_property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks that add to each carry, in order."""
        holders: dict[int, set[int]] = {carry: set() for carry in self.step.loop.accumulators}
        for rank, row in enumerate(self.table.rows):
            for action in actions_of(row):
                if action.kind.is_compute:
                    for carry in self.phase_of(action).accumulators:
                        holders[carry].add(rank)
        return {carry: tuple(sorted(ranks)) for carry, ranks in holders.items()}

    def starts_on(self, carry: int) -> int | None:
        """Returns the rank whose sum starts from the program's initial value of the carry.

        The other ranks start from the identity of the reducer. Returns None if several ranks
        replace rows and the initial value has no effect. Raises a located ToolError if several
        ranks write rows of a carry whose other rows may be nonzero.
        """
        accumulator = self.step.loop.accumulators[carry]
        ranks = self.ranks_of[carry]
        start = self.step.loop.op.operands[carry]
        if accumulator.reducer != ROWS or len(ranks) == 1 or splat_of(start) == 0:
            return ranks[0]
        if accumulator.replaced:
            return None
        raise ToolError(
            f"expand-mpmd: ranks {', '.join(map(str, ranks))} write rows of carry {carry}, "
            f"{start.type}, whose other rows keep nonzero values, so the ranks' parts cannot be "
            "added up (P6)",
            accumulator.links[0].op.location,
        )

    def phases_on(self, rank: int) -> list[PhaseFunction]:
        """Returns the phases that a rank runs, in the order of `phases`."""
        actions = actions_of(self.table.rows[rank])
        works = {PhaseWork(a.kind, a.stage) for a in actions if a.kind.is_compute}
        return [phase for work, phase in self.phases.items() if work in works]

    @cached_property
    def finish(self) -> Finish:
        """The plan of the ops after the loop."""
        held: dict[int, set[int]] = {}
        given = self.fixed.argument_rows
        for rank in range(self.table.ranks):
            for phase in self.phases_on(rank):
                for key in self.fixed.cone(phase.fixed, lambda key: given(key) is not None):
                    if (rows := given(key)) is not None:
                        held.setdefault(rows.argument, set()).add(rank)
        ranks = {argument: sorted(ranks_of) for argument, ranks_of in sorted(held.items())}
        return _FinishPlanner(self.step, self.ranks_of, ranks).plan()

    @cached_property
    def finish_messages(self) -> Sequence[FinishMessage]:
        """The messages after the schedule, in order. Their transfers are appended to `transfers`.

        Small values of one element type share a message: a norm needs a scalar of every weight's
        gradient.
        """
        together: dict[tuple[int, int, int, str], list[EpilogueValue]] = {}
        for round_, source, target, made in self.finish.sendings:
            value = self.value_of(made)
            kind, type_ = str(made), value.type
            # Parts are not packed: the receiver adds them up.
            if made.what == "value" and isinstance(type_, ir.RankedTensorType):
                is_small = type_.has_static_shape and 0 < elements_in(value) <= FEW
                kind = str(type_.element_type) if is_small else kind
            together.setdefault((round_, source, target, kind), []).append(made)
        messages: list[FinishMessage] = []
        for (round_, source, target, _), values in together.items():
            sent, channel = values[0], len(self.transfers) + 1
            if len(values) > 1:
                sent = EpilogueValue("pack", channel, source)
                self.packed[sent] = tuple(values)
            type_ = str(self.type_of(sent))
            self.transfers.append(ManifestTransfer(channel, "finish", 0, source, target, type_))
            messages.append(FinishMessage(round_, source, target, channel, sent))
        return messages

    @cached_property
    def pack_with(self) -> Mapping[tuple[EpilogueValue, int], EpilogueValue]:
        """The packs, by a packed value and the rank that receives it."""
        return {
            (made, message.target): message.sent
            for message in self.finish_messages
            for made in self.packed.get(message.sent, ())
        }

    def type_of(self, made: EpilogueValue) -> ir.Type:
        """Returns the type of a value after the loop. The type of a pack is 1-D."""
        if made.what != "pack":
            return self.value_of(made).type
        values = [self.value_of(each) for each in self.packed[made]]
        size = sum(map(elements_in, values))
        return ir.RankedTensorType.get([size], element_of(values[0]), loc=values[0].location)

    def value_of(self, made: EpilogueValue) -> ir.Value:
        """Returns the value in the original program; for a part, the loop's result."""
        if made.what == "part":
            return self.step.loop.op.results[made.number]
        return self.step.outer.values[made.number]

    def total_of(self, carry: int) -> int:
        """Returns the number of the loop's result for a carry."""
        return self.step.outer.numbers[self.step.loop.op.results[carry]]

    @cached_property
    def carry_of(self) -> Mapping[int, int]:
        """The carry of each result of the loop, by the number of the result."""
        return {self.total_of(carry): carry for carry in self.step.loop.accumulators}

    def is_read_later(self, number: int, round_: int, rank: int) -> bool:
        """Returns True if a rank needs a value that it computes in `round_` after that round.

        This holds if a later round on this rank reads it, or if it is sent alone or returned.
        """
        readers = self._readers.get(number, set())
        return number in self._leaving or any(r == rank and n != round_ for n, r in readers)

    @cached_property
    def _leaving(self) -> set[int]:
        """The values after the loop that are sent alone or returned."""
        sent = {each.sent.number for each in self.finish_messages if each.sent.what == "value"}
        return sent | {returned.number for returned in self.finish.returned}

    @cached_property
    def _readers(self) -> Mapping[int, set[tuple[int, int]]]:
        """The pairs of round and rank that read each value after the loop."""
        readers: dict[int, set[tuple[int, int]]] = {}
        for place, nodes in self.finish.ops.items():
            for node in nodes:
                for number in node.inputs:
                    readers.setdefault(number, set()).add(place)
        return readers

    def fixed_results(self, rank: int) -> list[Key]:
        """Returns the results of a rank that depend on arguments alone."""
        return [
            self.fixed.key_outside(each.number)
            for each in self.finish.returned
            if each.rank == rank and each.number not in self.finish.home
        ]

    def _of_send(self, send: Action, rank: int) -> list[MessageChannel]:
        following = other_end(send).stage
        # Microbatches use the routes of the placement in turn.
        messages = self._messages[send.microbatch % len(self._messages)]
        values = messages.get((send.stage, following), ())
        target = self.table.placement.rank_of(following, send.microbatch)
        channels: list[MessageChannel] = []
        for tensor, number in enumerate(values):
            channel = MessageChannel(len(self.transfers) + 1, number)
            type_ = str(self.step.flow.values[number].type)
            self.transfers.append(
                ManifestTransfer(channel.number, str(send), tensor, rank, target, type_)
            )
            channels.append(channel)
        return channels


class EpilogueValue(NamedTuple):
    """A value of the finish.

    `number` is the value in the block for a "value", the carry for a "part", and the channel for a
    "pack". A part is the sum of one rank for a carry. A pack holds several values of one
    message.
    """

    what: Literal["value", "part", "pack"]
    number: int
    rank: int  # that computes it


class Sending(NamedTuple):
    """A value that one rank sends to another after a round."""

    round: int
    source: int
    target: int
    value: EpilogueValue


class FinishMessage(NamedTuple):
    """A transfer from one rank to another after a round."""

    round: int
    source: int
    target: int
    channel: int
    sent: EpilogueValue


class Returned(NamedTuple):
    """Value `number`, which a rank returns as rows of a result of the program."""

    rank: int
    number: int
    rows: BlockRows


@dataclass
class Finish:
    """The rank and the round of each value, the messages, and the results of each rank.

    `home` has the rank that computes a value. `ops` has the nodes of each round and rank, in order.
    `totals` has the carries that a rank combines from parts, with these parts.
    """

    home: dict[int, int] = field(default_factory=dict[int, int])
    round_of: dict[EpilogueValue, int] = field(default_factory=dict[EpilogueValue, int])
    ops: dict[tuple[int, int], list[Node]] = field(
        default_factory=dict[tuple[int, int], list[Node]]
    )
    totals: dict[tuple[int, int], list[tuple[int, list[EpilogueValue]]]] = field(
        default_factory=dict[tuple[int, int], list[tuple[int, list[EpilogueValue]]]]
    )
    sendings: list[Sending] = field(default_factory=list[Sending])
    returned: list[Returned] = field(default_factory=list[Returned])

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return 1 + max(
            [0, *(r for r, _ in self.ops), *(r for r, _ in self.totals)]
            + [sending.round + 1 for sending in self.sendings]
        )


class _FinishPlanner:
    """Plans the finish. `parts` has the ranks that add to each carry. `held` has the ranks that
    already hold an argument of the block, by its position."""

    def __init__(
        self,
        step: TrainingStep,
        parts: Mapping[int, Sequence[int]],
        held: Mapping[int, Sequence[int]],
    ) -> None:
        self._step, self._outer, self._parts, self._held = step, step.outer, parts, held
        self._finish = Finish()
        self._sent: dict[tuple[EpilogueValue, int], None] = {}
        self._spread: dict[int, Node] = {}  # broadcasts, placed at their readers, by result number

    def plan(self) -> Finish:
        outer, finish = self._outer, self._finish
        loop = next(n for n in outer.nodes if n.op == self._step.loop.op)
        for carry, ranks in self._parts.items():
            # The sum of a carry is on its only rank, or on the first of several.
            total, home = loop.results[carry], ranks[0]
            parts = [EpilogueValue("part", carry, rank) for rank in ranks]
            finish.round_of.update(dict.fromkeys(parts, 0))
            finish.home[total] = home
            # Parts of other ranks arrive only after round 0.
            round_ = 0 if len(parts) == 1 else 1
            self._sent.update(((part, home), None) for part in parts[1:])
            finish.round_of[EpilogueValue("value", total, home)] = round_
            finish.totals.setdefault((round_, home), []).append((carry, parts))
        wanted = outer.ancestors(outer.root.returned)
        joined = set(filter(self._concatenation, outer.root.returned))
        for node in outer.nodes:
            if node.index not in wanted or node.index == loop.index:
                continue
            if len(node.results) == 1 and node.results[0] in joined:
                continue
            self._place(node)
        for number in outer.root.returned:
            self._place_spread(number, None)
        for result, number in enumerate(outer.root.returned):
            self._return(result, number)
        finish.sendings = sorted(
            Sending(finish.round_of[made], made.rank, rank, made) for made, rank in self._sent
        )
        return finish

    def _place(self, node: Node) -> None:
        """Places an op that reads the loop's results. Broadcasts of few elements wait for a
        reader."""
        finish = self._finish
        placed = [number for number in node.inputs if number in finish.home]
        spread = [number for number in node.inputs if number in self._spread]
        if not placed and not spread:
            return
        if is_spread(node.op):
            self._spread[node.results[0]] = node
            return
        rank = self._heaviest(placed) if placed else None
        for number in spread:
            rank = self._place_spread(number, rank)
        assert rank is not None, "it reads something that is placed"
        self._compute(node, rank)

    def _place_spread(self, number: int, rank: int | None) -> int | None:
        """Places an op that spreads a value, and its operands of that kind. Returns the rank.

        The rank is `rank`, or that of the source if `rank` is None.
        """
        node = self._spread.pop(number, None)
        if node is None:
            return self._finish.home.get(number, rank)
        source = next(n for n in node.inputs if n in self._finish.home or n in self._spread)
        if rank is None and source in self._finish.home:
            rank = self._finish.home[source]
        rank = self._place_spread(source, rank) if source in self._spread else rank
        assert rank is not None, "spread values have a place"
        self._compute(node, rank)
        return rank

    def _compute(self, node: Node, rank: int) -> None:
        """Places an op on a rank, in the first round in which its operands are there."""
        finish = self._finish
        round_ = max((self._arrives(n, rank) for n in node.inputs if n in finish.home), default=0)
        for number in node.results:
            finish.home[number] = rank
            finish.round_of[EpilogueValue("value", number, rank)] = round_
        finish.ops.setdefault((round_, rank), []).append(node)

    def _heaviest(self, numbers: Iterable[int]) -> int:
        """Returns the rank with most bytes of some values. Scalars count 0; ties go to the
        first."""
        held: dict[int, float] = {}
        for number in numbers:
            rank = self._finish.home[number]
            value = self._outer.values[number]
            held[rank] = held.get(rank, 0.0) + (bytes_of(value) if shape_of(value) else 0.0)
        return min(held, key=lambda rank: (-held[rank], rank))

    def _arrives(self, number: int, rank: int) -> int:
        """Returns the first round in which a rank has a value, and sends it there if necessary."""
        home = self._finish.home[number]
        made = EpilogueValue("value", number, home)
        round_ = self._finish.round_of[made]
        if home == rank:
            return round_
        self._sent[made, rank] = None
        return round_ + 1

    def _concatenation(self, number: int) -> ir.Operation | None:
        """Returns the concatenate op of a returned value, if it has no other use; else None."""
        maker = producer(skip_constraints(self._outer.values[number]))
        if maker is None or maker.name != CONCATENATE or len(list(maker.results[0].uses)) != 1:
            return None
        return maker

    def _return(self, result: int, number: int) -> None:
        maker, returned = self._concatenation(number), self._finish.returned
        if maker is None:
            returned.append(Returned(self._rank_of(number), number, BlockRows(result)))
            return
        dim = ir.IntegerAttr(maker.attributes["dimension"]).value
        start = 0
        for operand in maker.operands:
            piece = self._outer.number(operand)
            limit = start + shape_of(operand)[dim]
            rows = BlockRows(result, dim, start, limit)
            returned.append(Returned(self._rank_of(piece), piece, rows))
            start = limit

    def _rank_of(self, number: int) -> int:
        """Returns the rank that returns a value: the rank that computes it.

        A value that depends on arguments alone is returned by the rank that holds most of these
        arguments.
        """
        if number in self._finish.home:
            return self._finish.home[number]
        nodes = self._outer.ancestors([number])
        read = {n for index in nodes for n in self._outer.nodes[index].inputs} | {number}
        counts: dict[int, int] = {0: 0}
        for place, argument in enumerate(self._outer.root.arguments):
            if argument in read:
                for rank in self._held.get(place, ()):
                    counts[rank] = counts.get(rank, 0) + 1
        return min(counts, key=lambda rank: (-counts[rank], rank))

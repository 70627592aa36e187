"""What a rank holds at each of its calls and messages, and the bound that its schedule puts on it.

A value lives from the call or the message that makes it to the last one that takes it; barriers
make nothing. Arguments and what is returned live to the end. What a microbatch leaves for later,
received tensors and those not yet sent included, is `held`, which the schedule bounds.

The bound follows from the schedule and what the manifest has of its stages: a stage holds its
activation from F to B or I, and what is kept of it from I to W; a message is held from its receive
to the phase that it is for, and from the phase that makes it to its send. What goes from a stage to
another one on the same rank is held from the one to the other. Without messages and what goes
between stages, the most of it is at most what `simulate` has for the rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.walk import ENTRY, copy_referenced_symbols, functions_by_name, ops_named
from stablehlo_tools.mpmd.manifest import Manifest, Stage
from stablehlo_tools.mpmd.origins import RETURN, Origin
from stablehlo_tools.mpmd.proof.flow import InSums
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.reading import Call, Event, Message, Reading
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.schedules.table import Action, Kind

_GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
_FORWARDS = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
_ANY_HARDWARE = "h100"  # bytes are the same on each
_WHOLE_NUMBER = re.compile(r"(?<=stablehlo\.constant dense<)-?[1-9]\d*(?=> : tensor<u?i\d+>)")


def bounds(
    reading: Reading,
    actions: Sequence[Action | None],
    stages: Sequence[Stage],
    sizes: Sequence[Sequence[float]],
) -> list[float]:
    """What the schedule holds behind each event, of which `actions` are those of the schedule, and
    `sizes` the bytes of their results."""
    return _ScheduledBytes(reading, actions, stages, sizes).held()


class _ScheduledBytes:
    """The bytes that the schedule holds, of a rank."""

    def __init__(
        self,
        reading: Reading,
        actions: Sequence[Action | None],
        stages: Sequence[Stage],
        sizes: Sequence[Sequence[float]],
    ) -> None:
        self._reading, self._actions, self._stages, self._sizes = reading, actions, stages, sizes
        self._position = {
            action: index
            for index, action in enumerate(actions)
            if action is not None and action.kind.is_compute
        }

    def held(self) -> list[float]:
        """The bytes held behind each event."""
        changes = [0.0] * (len(self._actions) + 1)
        for index, (event, action) in enumerate(
            zip(self._reading.events, self._actions, strict=True)
        ):
            if action is None:
                continue
            if action.kind.is_compute:
                changes[index] += self._change(action)
                when, change = self._for_want_of_a_phase(action, index)
                changes[when] += change
            for first, last, size in self._waiting(event, action):
                changes[first] += size
                changes[last] -= size
        return list(accumulate(changes[:-1]))

    def _change(self, action: Action) -> float:
        """By how many bytes a phase changes what its stage holds. Where nothing is to be computed
        for the input gradient, all of it is held until the weight gradient."""
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
            return stage.activation
        if action.kind is Kind.BACKWARD:
            return -stage.activation
        if action.kind is Kind.INPUT_GRADIENT:
            return stage.kept - stage.activation
        return -stage.kept if self._has(Kind.INPUT_GRADIENT, action) else -stage.activation

    def _for_want_of_a_phase(self, action: Action, index: int) -> tuple[int, float]:
        """When, and how, what a stage holds changes where it has nothing to compute for a phase:
        with no gradients it gives its activation up as it sends, with no forward it has it as it
        receives."""
        activation = self._stages[action.stage].activation
        if action.kind is Kind.FORWARD:
            if any(self._has(kind, action) for kind in _GRADIENTS):
                return index, 0.0
            return self._last(Kind.SEND_BACKWARD, action, index), -activation
        is_second = action.kind is Kind.WEIGHT_GRADIENT and self._has(Kind.INPUT_GRADIENT, action)
        if self._has(Kind.FORWARD, action) or is_second:
            return index, 0.0
        return self._last(Kind.RECEIVE_FORWARD, action, index), activation

    def _has(self, kind: Kind, of: Action) -> bool:
        return Action(kind, of.stage, of.microbatch) in self._position

    def _last(self, kind: Kind, of: Action, default: int) -> int:
        wanted = Action(kind, of.stage, of.microbatch)
        places = (at for at, action in enumerate(self._actions) if action == wanted)
        return max(places, default=default)

    def _waiting(self, event: Event, action: Action) -> list[tuple[int, int, float]]:
        """What waits because of an event: from when, until when, and its bytes."""
        if isinstance(event, Message) and event.is_send:
            made, sent = self._maker_of_sent(action), event.operand
            if made is None or sent is None:
                return []
            takers = [use.event for use in self._reading.origins.uses(sent)]
            if event.index <= self._kept(takers, action):
                return []
            return [(made, event.index, self._sizes[sent.event][sent.number])]
        waiting: list[tuple[int, int, float]] = []
        for numbers, takers in self._reading.origins.bundles[event.index]:
            last = self._waits(takers, action)
            if isinstance(event, Message):
                # The phase that reads a received value keeps it in its stage, or uses it up.
                is_forward = action.kind is Kind.RECEIVE_FORWARD
                reader = self._first((Kind.FORWARD,) if is_forward else _GRADIENTS, action)
                last = max(last, (event.index if reader is None else max(reader, event.index)))
            if last > event.index:
                size = sum([self._sizes[event.index][number] for number in numbers])
                waiting.append((event.index, last, size))
        return waiting

    def _waits(self, takers: Sequence[int], action: Action) -> int:
        """Until when what an action makes waits for others than the gradients of its stage; -1
        where it does not."""
        last = -1
        for event in takers:
            taker = None if event == RETURN else self._actions[event]
            if taker is not None and (taker.stage != action.stage or taker.kind.is_send):
                last = max(last, self._needed(action, event, taker))
        return last if last >= 0 and last > self._kept(takers, action) else -1

    def _kept(self, takers: Sequence[int], action: Action) -> int:
        """Until when what an action makes is part of what its stage holds for gradients of its own;
        -1 if it is not."""
        later = _GRADIENTS if action.kind in _FORWARDS else (Kind.WEIGHT_GRADIENT,)
        last = -1
        for event in takers:
            taker = None if event == RETURN else self._actions[event]
            if taker is not None and taker.stage == action.stage and taker.kind in later:
                last = max(last, event)
        return last

    def _needed(self, maker: Action, event: int, taker: Action) -> int:
        """Until when a value waits for another stage that takes it in an event; -1 where it does
        not.

        From its forward on, a stage's activation counts what its gradients take of forwards up to
        it; what is kept counts from its input gradient on, a message from the phase before its send
        on.
        """
        if taker.stage == maker.stage:
            is_passed = taker.kind.is_send and self._maker_of_sent(taker) is None
            return event if is_passed and maker.kind in _RECEIVES else -1
        if taker.kind.is_send:
            made = self._maker_of_sent(taker)
            return event if made is None else made
        counts_from = Kind.INPUT_GRADIENT
        is_counted = taker.kind is Kind.WEIGHT_GRADIENT
        if maker.kind in (Kind.FORWARD, Kind.RECEIVE_FORWARD):
            counts_from = Kind.FORWARD
            is_counted = taker.kind is not Kind.FORWARD and taker.stage > maker.stage
        if not is_counted:
            return event
        return self._position.get(Action(counts_from, taker.stage, taker.microbatch), event)

    def _maker_of_sent(self, send: Action) -> int | None:
        gradients = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        is_forward = send.kind is Kind.SEND_FORWARD
        return self._first((Kind.FORWARD,) if is_forward else gradients, send)

    def _first(self, kinds: Sequence[Kind], of: Action) -> int | None:
        places = (self._position.get(Action(kind, of.stage, of.microbatch)) for kind in kinds)
        return next((place for place in places if place is not None), None)


class Moment(NamedTuple):
    """What is held of microbatches behind an event of a rank, and what its schedule holds then."""

    event: int
    held: float
    bound: float


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank, in bytes.

    `peak` is all that is alive at once, the temporaries of functions included, while event
    `peak_at` runs; `arguments` are those of `main`. `weights` are parameters and sums of gradients,
    each once: stages of the rank may share one. `fixed` is the most that is alive of what belongs
    to no microbatch, `temporary` the most that a function takes while it runs.
    """

    rank: int
    peak: float
    peak_at: int
    arguments: float
    weights: float
    fixed: float
    temporary: float
    moments: tuple[Moment, ...]

    @property
    def held(self) -> float:
        """The most that is held of microbatches."""
        return max((moment.held for moment in self.moments), default=0.0)

    @property
    def bound(self) -> float:
        """The most that the schedule holds of microbatches."""
        return max((moment.bound for moment in self.moments), default=0.0)

    @property
    def limit(self) -> float:
        """What the peak cannot exceed while no more is held than by the schedule."""
        return self.fixed + self.bound + self.temporary


def rank_memory(
    reading: Reading, labels: Labels, sums: InSums, manifest: Manifest, temporaries: Temporaries
) -> RankMemory:
    """The memory of a rank whose program runs its row of the manifest's table, and has these sums.

    Raises a located ToolError for a tensor of unknown size, and for an op whose memory is unknown.
    """
    actions = labels.actions(reading)
    sizes = _sizes(reading)
    parts = _parts(reading, sums, sizes)
    begun, ended = _changes(parts)
    taken, given = _changes(_of_microbatches(actions, parts))
    arguments = sum(bytes_of(argument) for argument in reading.block.arguments)
    called = dict.fromkeys(e.function for e in reading.events if isinstance(e, Call))
    temporary = {name: temporaries.of(reading.module, name) for name in called}
    longest = max(temporary.values(), default=0.0)
    peak, peak_at = arguments, -1
    fixed = arguments
    held: list[float] = []
    alive = arguments
    now = 0.0
    for event in reading.events:
        index, during = event.index, alive
        if isinstance(event, Call):
            during += temporary[event.function]
        alive += begun[index]
        now += taken[index]
        fixed = max(fixed, alive - now)
        if max(during, alive) > peak:
            peak, peak_at = max(during, alive), index
        alive -= ended[index]
        now -= given[index]
        held.append(now)
    allowed = bounds(reading, actions, manifest.stages, sizes)
    moments = tuple(map(Moment, range(len(held)), held, allowed))
    weights = _weights(reading, actions, sums)
    return RankMemory(reading.rank, peak, peak_at, arguments, weights, fixed, longest, moments)


def _weights(reading: Reading, actions: Sequence[Action | None], sums: InSums) -> float:
    """The bytes of what phases take that is of no microbatch, the same in all calls, and of the
    sums that they add to. A sum begins where no other phase has added to what a first call takes.
    """
    first = {call.function: call for call in reversed(reading.calls)}
    fixed: dict[Origin, float] = {}
    begun = 0.0
    for call in first.values():
        for slot, origin in enumerate(call.operands[1:], 1):
            maker = reading.events[origin.event] if origin.event >= 0 else None
            size = bytes_of(call.op.operands[slot])
            if (call.function, slot) in sums.operands:
                name = maker.function if isinstance(maker, Call) else ""
                begun += 0.0 if (name, origin.number) in sums.results else size
            elif maker is None or actions[origin.event] is None:
                fixed[origin] = size
    return begun + sum(fixed.values())


def _sizes(reading: Reading) -> list[list[float]]:
    """The bytes of what each event makes, alike for all calls of a function."""
    known: dict[tuple[bool, str], list[float]] = {}
    sizes: list[list[float]] = []
    for event, results in zip(reading.events, reading.origins.results, strict=True):
        is_call = isinstance(event, Call)
        key = is_call, event.function if is_call else f"{event.is_send} {event.type}"
        if key not in known:
            known[key] = [bytes_of(event.op.results[number]) for number in range(len(results))]
        sizes.append(known[key])
    return sizes


class _Part(NamedTuple):
    """Results of an event that live alike: their bytes, and the events that take them."""

    bytes: float
    takers: tuple[int, ...]
    is_sum: bool


def _parts(reading: Reading, sums: InSums, sizes: Sequence[Sequence[float]]) -> list[list[_Part]]:
    """The results of each event, in parts; sums are parts of their own."""
    known: dict[tuple[str, tuple[int, ...]], list[tuple[float, bool]]] = {}
    parts: list[list[_Part]] = []
    for event, bundles, own in zip(reading.events, reading.origins.bundles, sizes, strict=True):
        parts.append([])
        for numbers, takers in bundles:
            if isinstance(event, Message):
                parts[-1].append(_Part(own[0], takers, is_sum=False))
                continue
            key = (event.function, numbers)
            if key not in known:
                # The bytes of some results of a function that are in no sum, and of those that are.
                in_sums = [number for number in numbers if (event.function, number) in sums.results]
                others = [number for number in numbers if number not in in_sums]
                known[key] = [
                    (sum([own[number] for number in chosen]), is_sum)
                    for chosen, is_sum in ((others, False), (in_sums, True))
                    if chosen
                ]
            parts[-1] += [_Part(size, takers, is_sum) for size, is_sum in known[key]]
    return parts


def _changes(parts: Sequence[Sequence[_Part]]) -> tuple[list[float], list[float]]:
    """The bytes of some parts that each event makes, and those that it is the last to take."""
    count = len(parts)
    begun, ended = [0.0] * count, [0.0] * (count + 1)  # what is returned lives to the end
    for event, each in enumerate(parts):
        for part in each:
            last = event
            if part.takers:
                last = count if part.takers[-1] == RETURN else max(event, part.takers[-1])
            begun[event] += part.bytes
            ended[last] += part.bytes
    return begun, ended


def _of_microbatches(
    actions: Sequence[Action | None], parts: Sequence[Sequence[_Part]]
) -> list[list[_Part]]:
    """The parts that are of one microbatch: taken by actions of it alone.

    Not sums, which go on to other microbatches and behind the schedule.
    """
    return [
        [
            part
            for part in each
            if maker is not None
            and not part.is_sum
            and all(_is_of(maker.microbatch, event, actions) for event in part.takers)
        ]
        for maker, each in zip(actions, parts, strict=True)
    ]


def _is_of(microbatch: int, event: int, actions: Sequence[Action | None]) -> bool:
    action = None if event == RETURN else actions[event]
    return action is not None and action.microbatch == microbatch


class Temporaries:
    """The most that functions take while they run, beside their arguments. Their results are in it.

    Each is read once, and so are those of several modules that differ in their own name alone, or
    in the numbers that their loops count between, as the same phases of stages do.
    """

    _hardware = load_hardware(_ANY_HARDWARE)

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], float] = {}

    def of(self, module: ir.Module, function: str) -> float:
        """Bytes of a function. Raises a located ToolError where they are not known."""
        # A module with a function as its entry, and with what it refers to.
        attributes = module.operation.attributes
        with module.context, ir.Location.unknown():
            alone = ir.Module.create()
            for name in attributes:
                alone.operation.attributes[name] = attributes[name]
            entry = functions_by_name(module)[function].clone(ip=ir.InsertionPoint(alone.body))
            entry.attributes["sym_name"] = ir.StringAttr.get(ENTRY)
            entry.attributes["sym_visibility"] = ir.StringAttr.get("public")
            copy_referenced_symbols(module.operation, alone)
        # The memory of a function follows from its text, in which whole numbers do not count where
        # they are known to matter only by how often its loops run.
        text = str(alone)
        runs = [constant_trips(loop) for loop in ops_named(alone.operation, {WHILE})]
        known = tuple(count for count in runs if count is not None)
        is_known = len(known) == len(runs)
        key = (_WHOLE_NUMBER.sub("#", text), known) if is_known else (text, ())
        if key not in self._known:
            clock = Clock(self._hardware, ModuleFacts.of(alone).grid.size)
            graph = module_task_graph(alone, clock, function)
            self._known[key] = memory_profile(graph, in_loop=True).peak_bytes
        return self._known[key]

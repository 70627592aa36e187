"""Computes the bytes that a rank holds at each event, and the bound that its schedule sets.

A value is live from the call or message that yields it to its last reader. Barriers make no copy.
Arguments and results are live to the end. `held` is the memory of microbatches, which the schedule
bounds. It includes received tensors, and tensors that are not yet sent.

The bound follows from the schedule and the stages in the manifest:

- A stage holds its activation from F to B or I, and the part that is kept from I to W.
- A message is held from its receive to the phase that reads it, or from the phase that computes it
  to its send.
- A value that goes to another stage of the same rank is held from its maker to its reader.

Without messages and values between stages, the maximum is at most that of `simulate` for the rank.
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
from stablehlo_tools.mpmd.manifest import Manifest, ManifestStage
from stablehlo_tools.mpmd.origins import RETURN, Origin
from stablehlo_tools.mpmd.proof.flow import InSums
from stablehlo_tools.mpmd.proof.labels import MessageLabels
from stablehlo_tools.mpmd.reading import Event, RankCall, RankMessage, RankReading
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.schedules.table import Action, ActionKind

_GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
_FORWARDS = (ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
_ANY_HARDWARE = "h100"  # bytes are the same on each
_WHOLE_NUMBER = re.compile(r"(?<=stablehlo\.constant dense<)-?[1-9]\d*(?=> : tensor<u?i\d+>)")


def bounds(
    reading: RankReading,
    actions: Sequence[Action | None],
    stages: Sequence[ManifestStage],
    sizes: Sequence[Sequence[float]],
) -> list[float]:
    """Returns the bytes that the schedule holds after each event.

    `actions` has the action of each event; None outside the schedule. `sizes` has the bytes of the
    results of each event.
    """
    return _ScheduledBytes(reading, actions, stages, sizes).held()


class _ScheduledBytes:
    """The bytes that the schedule holds on a rank."""

    def __init__(
        self,
        reading: RankReading,
        actions: Sequence[Action | None],
        stages: Sequence[ManifestStage],
        sizes: Sequence[Sequence[float]],
    ) -> None:
        self._reading, self._actions, self._stages, self._sizes = reading, actions, stages, sizes
        self._position = {
            action: index
            for index, action in enumerate(actions)
            if action is not None and action.kind.is_compute
        }

    def held(self) -> list[float]:
        """Returns the bytes held after each event."""
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
        """Returns the bytes by which a phase changes the memory of its stage.

        If the stage has no input gradient, the whole activation is held until the weight gradient.
        """
        stage = self._stages[action.stage]
        if action.kind is ActionKind.FORWARD:
            return stage.activation
        if action.kind is ActionKind.BACKWARD:
            return -stage.activation
        if action.kind is ActionKind.INPUT_GRADIENT:
            return stage.kept - stage.activation
        return -stage.kept if self._has(ActionKind.INPUT_GRADIENT, action) else -stage.activation

    def _for_want_of_a_phase(self, action: Action, index: int) -> tuple[int, float]:
        """Returns the event and the bytes of a change that belongs to a phase with no call.

        A stage without gradients frees its activation after its gradient is sent. A stage without a
        forward holds its activation from the receive on.
        """
        activation = self._stages[action.stage].activation
        if action.kind is ActionKind.FORWARD:
            if any(self._has(kind, action) for kind in _GRADIENTS):
                return index, 0.0
            return self._last(ActionKind.SEND_BACKWARD, action, index), -activation
        is_second = action.kind is ActionKind.WEIGHT_GRADIENT and self._has(
            ActionKind.INPUT_GRADIENT, action
        )
        if self._has(ActionKind.FORWARD, action) or is_second:
            return index, 0.0
        return self._last(ActionKind.RECEIVE_FORWARD, action, index), activation

    def _has(self, kind: ActionKind, of: Action) -> bool:
        return Action(kind, of.stage, of.microbatch) in self._position

    def _last(self, kind: ActionKind, of: Action, default: int) -> int:
        wanted = Action(kind, of.stage, of.microbatch)
        places = (at for at, action in enumerate(self._actions) if action == wanted)
        return max(places, default=default)

    def _waiting(self, event: Event, action: Action) -> list[tuple[int, int, float]]:
        """Returns the values that wait because of an event, as (first event, last event, bytes)."""
        if isinstance(event, RankMessage) and event.is_send:
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
            if isinstance(event, RankMessage):
                # The phase that reads a received value frees it, or keeps it in its activation.
                is_forward = action.kind is ActionKind.RECEIVE_FORWARD
                reader = self._first((ActionKind.FORWARD,) if is_forward else _GRADIENTS, action)
                last = max(last, (event.index if reader is None else max(reader, event.index)))
            if last > event.index:
                size = sum([self._sizes[event.index][number] for number in numbers])
                waiting.append((event.index, last, size))
        return waiting

    def _waits(self, takers: Sequence[int], action: Action) -> int:
        """Returns the last event at which a result of an action waits for a reader other than its
        stage's gradients; -1 if there is none."""
        last = -1
        for event in takers:
            taker = None if event == RETURN else self._actions[event]
            if taker is not None and (taker.stage != action.stage or taker.kind.is_send):
                last = max(last, self._end_of_wait(action, event, taker))
        return last if last >= 0 and last > self._kept(takers, action) else -1

    def _kept(self, takers: Sequence[int], action: Action) -> int:
        """Returns the last event at which a gradient of the same stage reads a result; -1 if there
        is none. Until then the result is part of what the stage holds."""
        later = _GRADIENTS if action.kind in _FORWARDS else (ActionKind.WEIGHT_GRADIENT,)
        last = -1
        for event in takers:
            taker = None if event == RETURN else self._actions[event]
            if taker is not None and taker.stage == action.stage and taker.kind in later:
                last = max(last, event)
        return last

    def _end_of_wait(self, maker: Action, event: int, taker: Action) -> int:
        """Returns the event until which a value waits for `taker`; -1 if it does not wait.

        An activation counts from its stage's forward on, and contains the operands of its
        gradients. The part that is kept counts from the input gradient on, a message from the phase
        before its send on.
        """
        if taker.stage == maker.stage:
            is_passed = taker.kind.is_send and self._maker_of_sent(taker) is None
            return event if is_passed and maker.kind in _RECEIVES else -1
        if taker.kind.is_send:
            made = self._maker_of_sent(taker)
            return event if made is None else made
        counts_from = ActionKind.INPUT_GRADIENT
        is_counted = taker.kind is ActionKind.WEIGHT_GRADIENT
        if maker.kind in (ActionKind.FORWARD, ActionKind.RECEIVE_FORWARD):
            counts_from = ActionKind.FORWARD
            is_counted = taker.kind is not ActionKind.FORWARD and taker.stage > maker.stage
        if not is_counted:
            return event
        return self._position.get(Action(counts_from, taker.stage, taker.microbatch), event)

    def _maker_of_sent(self, send: Action) -> int | None:
        gradients = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        is_forward = send.kind is ActionKind.SEND_FORWARD
        return self._first((ActionKind.FORWARD,) if is_forward else gradients, send)

    def _first(self, kinds: Sequence[ActionKind], of: Action) -> int | None:
        places = (self._position.get(Action(kind, of.stage, of.microbatch)) for kind in kinds)
        return next((place for place in places if place is not None), None)


class Moment(NamedTuple):
    """The bytes of microbatches that a rank holds after an event, and the bound of its schedule."""

    event: int
    held: float
    bound: float


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank, in bytes.

    `peak` is the most that is live at once, including temporaries of functions. It occurs during
    event `peak_at`, -1 for the start. `arguments` is the size of the arguments of `main`. `weights`
    is the size of parameters and sums of gradients; one that several stages share counts once.
    `fixed` is the peak of the values that belong to no microbatch. `temporary` is the peak within a
    function.
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
        """The maximum of the bytes held for microbatches."""
        return max((moment.held for moment in self.moments), default=0.0)

    @property
    def bound(self) -> float:
        """The maximum of the bytes that the schedule allows for microbatches."""
        return max((moment.bound for moment in self.moments), default=0.0)

    @property
    def limit(self) -> float:
        """The upper bound of the peak if no more is held than by the schedule."""
        return self.fixed + self.bound + self.temporary


def rank_memory(
    reading: RankReading,
    labels: MessageLabels,
    sums: InSums,
    manifest: Manifest,
    temporaries: Temporaries,
) -> RankMemory:
    """Returns the memory of a rank whose program runs its row of the manifest's table.

    Raises a located ToolError for a tensor of unknown size, and for an op whose memory is unknown.
    """
    actions = labels.actions(reading)
    sizes = _sizes(reading)
    parts = _parts(reading, sums, sizes)
    begun, ended = _changes(parts)
    taken, given = _changes(_of_microbatches(actions, parts))
    arguments = sum(bytes_of(argument) for argument in reading.block.arguments)
    called = dict.fromkeys(e.function for e in reading.events if isinstance(e, RankCall))
    temporary = {name: temporaries.function_bytes(reading.module, name) for name in called}
    longest = max(temporary.values(), default=0.0)
    peak, peak_at = arguments, -1
    fixed = arguments
    held: list[float] = []
    alive = arguments
    now = 0.0
    for event in reading.events:
        index, during = event.index, alive
        if isinstance(event, RankCall):
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


def _weights(reading: RankReading, actions: Sequence[Action | None], sums: InSums) -> float:
    """Returns the bytes of operands of phases that belong to no microbatch, and of the sums.

    Each value and each sum counts once. A sum counts at the first call that reads it from no other
    phase.
    """
    first = {call.function: call for call in reversed(reading.calls)}
    fixed: dict[Origin, float] = {}
    begun = 0.0
    for call in first.values():
        for slot, origin in enumerate(call.operands[1:], 1):
            maker = reading.events[origin.event] if origin.event >= 0 else None
            size = bytes_of(call.op.operands[slot])
            if (call.function, slot) in sums.operands:
                name = maker.function if isinstance(maker, RankCall) else ""
                begun += 0.0 if (name, origin.number) in sums.results else size
            elif maker is None or actions[origin.event] is None:
                fixed[origin] = size
    return begun + sum(fixed.values())


def _sizes(reading: RankReading) -> list[list[float]]:
    """Returns the bytes of the results of each event, computed once per function."""
    known: dict[tuple[bool, str], list[float]] = {}
    sizes: list[list[float]] = []
    for event, results in zip(reading.events, reading.origins.results, strict=True):
        is_call = isinstance(event, RankCall)
        key = is_call, event.function if is_call else f"{event.is_send} {event.type}"
        if key not in known:
            known[key] = [bytes_of(event.op.results[number]) for number in range(len(results))]
        sizes.append(known[key])
    return sizes


class _EventPart(NamedTuple):
    """Results of an event with the same lifetime: their bytes, and the events that read them."""

    bytes: float
    takers: tuple[int, ...]
    is_sum: bool


def _parts(
    reading: RankReading, sums: InSums, sizes: Sequence[Sequence[float]]
) -> list[list[_EventPart]]:
    """Returns the results of each event, in parts; sums are separate parts."""
    known: dict[tuple[str, tuple[int, ...]], list[tuple[float, bool]]] = {}
    parts: list[list[_EventPart]] = []
    for event, bundles, own in zip(reading.events, reading.origins.bundles, sizes, strict=True):
        parts.append([])
        for numbers, takers in bundles:
            if isinstance(event, RankMessage):
                parts[-1].append(_EventPart(own[0], takers, is_sum=False))
                continue
            key = (event.function, numbers)
            if key not in known:
                # The bytes of the results outside sums, and of those in sums.
                in_sums = [number for number in numbers if (event.function, number) in sums.results]
                others = [number for number in numbers if number not in in_sums]
                known[key] = [
                    (sum([own[number] for number in chosen]), is_sum)
                    for chosen, is_sum in ((others, False), (in_sums, True))
                    if chosen
                ]
            parts[-1] += [_EventPart(size, takers, is_sum) for size, is_sum in known[key]]
    return parts


def _changes(parts: Sequence[Sequence[_EventPart]]) -> tuple[list[float], list[float]]:
    """Returns the bytes that each event allocates, and the bytes that it reads last."""
    count = len(parts)
    begun, ended = [0.0] * count, [0.0] * (count + 1)  # results of main live to the end
    for event, each in enumerate(parts):
        for part in each:
            last = event
            if part.takers:
                last = count if part.takers[-1] == RETURN else max(event, part.takers[-1])
            begun[event] += part.bytes
            ended[last] += part.bytes
    return begun, ended


def _of_microbatches(
    actions: Sequence[Action | None], parts: Sequence[Sequence[_EventPart]]
) -> list[list[_EventPart]]:
    """Returns the parts that belong to one microbatch: only its own actions read them.

    Sums are excluded, because other microbatches and the finish read them.
    """
    return [
        [
            part
            for part in each
            if maker is not None
            and not part.is_sum
            and all(
                action is not None and action.microbatch == maker.microbatch
                for action in (None if e == RETURN else actions[e] for e in part.takers)
            )
        ]
        for maker, each in zip(actions, parts, strict=True)
    ]


class Temporaries:
    """The peak bytes of functions while they run, including results and excluding arguments.

    Each function is analysed once. Functions of several modules share an analysis if they differ
    only in their name, or in whole numbers that do not affect trip counts. Phases of equal stages
    are such functions.
    """

    _hardware = load_hardware(_ANY_HARDWARE)

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], float] = {}

    def function_bytes(self, module: ir.Module, function: str) -> float:
        """Returns the bytes of a function. Raises a located ToolError if they are unknown."""
        # A module that holds the function as its entry, and the symbols that it refers to.
        attributes = module.operation.attributes
        with module.context, ir.Location.unknown():
            alone = ir.Module.create()
            for name in attributes:
                alone.operation.attributes[name] = attributes[name]
            entry = functions_by_name(module)[function].clone(ip=ir.InsertionPoint(alone.body))
            entry.attributes["sym_name"] = ir.StringAttr.get(ENTRY)
            entry.attributes["sym_visibility"] = ir.StringAttr.get("public")
            copy_referenced_symbols(module.operation, alone)
        # The memory of a function follows from its text. Whole numbers do not count if all loops
        # have known trip counts, which are then part of the key.
        text = str(alone)
        runs = [constant_trips(loop) for loop in ops_named(alone.operation, {WHILE})]
        known = tuple(count for count in runs if count is not None)
        is_known = len(known) == len(runs)
        key = (_WHOLE_NUMBER.sub("#", text), known) if is_known else (text, ())
        if key not in self._known:
            clock = Clock(self._hardware, ModuleFacts.from_module(alone).grid.size)
            graph = module_task_graph(alone, clock, function)
            self._known[key] = memory_profile(graph, in_loop=True).peak_bytes
        return self._known[key]

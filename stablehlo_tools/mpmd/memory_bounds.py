"""What a rank may hold of microbatches behind each of its calls and messages, by its schedule and
what the manifest has of its stages: see `memory`."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.mpmd.manifest import Stage
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.reading import RETURN, Call, Event, Message, Origin, Reading, Source
from stablehlo_tools.schedules.table import Action, Kind

_GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
_FORWARDS = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


def made_by(event: Event) -> list[Origin]:
    """The values that an event makes."""
    if isinstance(event, Call):
        return [Origin(Source.CALL, i, event.index) for i in range(len(event.op.results))]
    return [] if event.is_send else [Origin(Source.MESSAGE, 0, event.index)]


def action_of(reading: Reading, labels: Labels, event: Event) -> Action | None:
    """The phase of a call, or what a message belongs to; None behind the schedule."""
    if isinstance(event, Call):
        return event.action
    label = labels.of(reading, event.index)
    return None if label is None else label.action


def bounds(
    reading: Reading,
    labels: Labels,
    stages: Sequence[Stage],
    sizes: dict[Origin, float],
) -> list[float]:
    """What the schedule holds behind each event."""
    changes = [0.0] * (len(reading.events) + 1)
    actions = [action_of(reading, labels, event) for event in reading.events]
    position = {
        action: index
        for index, action in enumerate(actions)
        if action is not None and action.kind.is_compute
    }
    for index, (event, action) in enumerate(zip(reading.events, actions, strict=True)):
        if action is None:
            continue
        if action.kind.is_compute:
            stage = stages[action.stage]
            changes[index] += _change(action, stage, position)
            when, change = _for_want_of_a_phase(action, index, stage, actions, position)
            changes[when] += change
        for first, last, size in _waiting(reading, event, action, actions, position, sizes):
            changes[first] += size
            changes[last] -= size
    total, found = 0.0, list[float]()
    for change in changes[:-1]:
        total += change
        found.append(total)
    return found


def _change(action: Action, stage: Stage, position: dict[Action, int]) -> float:
    """By how many bytes a phase changes what its stage holds. Where nothing is to be computed for
    the input gradient, all of it is held until the weight gradient."""
    if action.kind is Kind.FORWARD:
        return stage.activation
    if action.kind is Kind.BACKWARD:
        return -stage.activation
    if action.kind is Kind.INPUT_GRADIENT:
        return stage.kept - stage.activation
    return -stage.kept if _has(Kind.INPUT_GRADIENT, action, position) else -stage.activation


def _for_want_of_a_phase(
    action: Action,
    index: int,
    stage: Stage,
    actions: Sequence[Action | None],
    position: dict[Action, int],
) -> tuple[int, float]:
    """When, and how, what a stage holds changes where it has nothing to compute for a phase: with
    no gradients it gives its activation up as it sends, with no forward it has it as it receives.
    """
    if action.kind is Kind.FORWARD:
        if any(_has(kind, action, position) for kind in _GRADIENTS):
            return index, 0.0
        return _last(Kind.SEND_BACKWARD, action, actions, index), -stage.activation
    is_second = _has(Kind.INPUT_GRADIENT, action, position)
    if _has(Kind.FORWARD, action, position) or (action.kind is Kind.WEIGHT_GRADIENT and is_second):
        return index, 0.0
    return _last(Kind.RECEIVE_FORWARD, action, actions, index), stage.activation


def _has(kind: Kind, of: Action, position: dict[Action, int]) -> bool:
    return Action(kind, of.stage, of.microbatch) in position


def _last(kind: Kind, of: Action, actions: Sequence[Action | None], default: int) -> int:
    wanted = Action(kind, of.stage, of.microbatch)
    return max((at for at, action in enumerate(actions) if action == wanted), default=default)


def _waiting(
    reading: Reading,
    event: Event,
    action: Action,
    actions: Sequence[Action | None],
    position: dict[Action, int],
    sizes: dict[Origin, float],
) -> list[tuple[int, int, float]]:
    """What waits because of an event: from when, until when, and its bytes."""
    if isinstance(event, Message) and event.is_send:
        made = _maker_of_sent(action, position)
        size = bytes_of(event.op.operands[0])
        kept = -1 if event.operand is None else _kept(reading, event.operand, action, actions)
        return [] if made is None or event.index <= kept else [(made, event.index, size)]
    found: list[tuple[int, int, float]] = []
    for origin in made_by(event):
        users = [use.event for use in reading.uses.get(origin, []) if use.event != RETURN]
        kept = _kept(reading, origin, action, actions)
        needed = (_needed(action, u, actions[u], position) for u in users)
        last = max((until for until in needed if until > kept), default=-1)
        if isinstance(event, Message):
            last = max(last, _reader_of_received(action, position, event.index))
        if last > event.index:
            found.append((event.index, last, sizes[origin]))
    return found


def _kept(
    reading: Reading, origin: Origin, action: Action, actions: Sequence[Action | None]
) -> int:
    """Until when a value is part of what its stage holds for gradients of its own; -1 if it is
    not."""
    later = _GRADIENTS if action.kind in _FORWARDS else (Kind.WEIGHT_GRADIENT,)
    found = -1
    for use in reading.uses.get(origin, []):
        taker = None if use.event == RETURN else actions[use.event]
        if taker is not None and taker.stage == action.stage and taker.kind in later:
            found = max(found, use.event)
    return found


def _needed(maker: Action, event: int, taker: Action | None, position: dict[Action, int]) -> int:
    """Until when a value waits for another stage that takes it in an event; -1 where it does not.

    From its forward on, a stage's activation counts what its gradients take of forwards up to it;
    what is kept counts from its input gradient on, a message from the phase before its send on.
    """
    if taker is None:
        return -1
    if taker.stage == maker.stage:
        is_passed = taker.kind.is_send and _maker_of_sent(taker, position) is None
        return event if is_passed and maker.kind in _RECEIVES else -1
    if taker.kind.is_send:
        made = _maker_of_sent(taker, position)
        return event if made is None else made
    counts_from = Kind.INPUT_GRADIENT
    is_counted = taker.kind is Kind.WEIGHT_GRADIENT
    if maker.kind in (Kind.FORWARD, Kind.RECEIVE_FORWARD):
        counts_from = Kind.FORWARD
        is_counted = taker.kind is not Kind.FORWARD and taker.stage > maker.stage
    if not is_counted:
        return event
    return position.get(Action(counts_from, taker.stage, taker.microbatch), event)


def _maker_of_sent(send: Action, position: dict[Action, int]) -> int | None:
    kinds = (
        (Kind.FORWARD,) if send.kind is Kind.SEND_FORWARD else (Kind.BACKWARD, Kind.INPUT_GRADIENT)
    )
    return _first(kinds, send, position)


def _reader_of_received(receive: Action, position: dict[Action, int], index: int) -> int:
    """Where what is received has become part of what its stage holds, or has been used up."""
    kinds = (
        (Kind.FORWARD,)
        if receive.kind is Kind.RECEIVE_FORWARD
        else (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    )
    found = _first(kinds, receive, position)
    return index if found is None else max(found, index)


def _first(kinds: Sequence[Kind], of: Action, position: dict[Action, int]) -> int | None:
    actions = (Action(kind, of.stage, of.microbatch) for kind in kinds)
    return next((position[action] for action in actions if action in position), None)

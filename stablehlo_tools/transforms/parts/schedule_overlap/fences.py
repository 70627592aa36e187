"""Which barriers hold a schedule: from when to when each collective is in flight.

A fence is one barrier at an anchor. The operands of the collectives that begin there go through
it, so that none begins earlier; so do the results of those that have to be over there, which keeps
their slot free for the next. Compute that was moved is linked to what runs before it. What follows
from the program's own dependences needs no fence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_future
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.transforms.parts.schedule_overlap.anchors import Anchor
from stablehlo_tools.transforms.parts.schedule_overlap.block_plan import BlockPlan, Places

_MOST_LOOKED_AT = 200  # values that are made of a collective's result
_SLACK = 5_000.0  # ns: anchors so close to each other are the same moment


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective of the block: when it begins, and how long it takes, in ns.

    One that is `fixed` lies in a region of `op`, and begins where that stands.
    """

    op: ir.Operation
    begin: float
    ns: float
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Fence:
    """A barrier at an anchor: what begins there, and values that have to be there by then."""

    anchor: Anchor
    begins: list[ir.Operation] = field(default_factory=list[ir.Operation])
    awaits: list[ir.Value] = field(default_factory=list[ir.Value])


def plan_fences(
    plan: BlockPlan,
    anchors: Sequence[Anchor],
    flights: Sequence[Flight],
    moved: Sequence[tuple[Anchor, Anchor]],
    *,
    one_slot: bool,
) -> list[Fence]:
    """The fences of a block in order.

    `flights` are in issue order; with `one_slot` one must be over before the next can begin.
    `moved` are pairs of anchors of which the second must not run before the first.
    """
    at = _Anchored(plan, anchors)
    fences: dict[Anchor, Fence] = {}

    def fence(anchor: Anchor) -> Fence:
        return fences.setdefault(anchor, Fence(anchor))

    before: Flight | None = None
    since = -1  # the place where it begins
    for flight in flights:
        anchor = at.begin(flight)
        if one_slot and anchor is not None and anchor.place <= since:
            anchor = None
        if anchor is not None:
            fence(anchor).begins.append(flight.op)
            at.move(flight.op, anchor)
        where = anchor or at.itself(flight)
        if one_slot and before is not None and where.place > since:
            fence(where).awaits.extend(at.alive_behind(before.op, where.served_from))
        before, since = flight, where.place
    for first, second in moved:
        if second in fences:
            fence(second).awaits.extend(at.alive_behind(first.op, second.served_from))
    return sorted(fences.values(), key=lambda found: found.anchor.place)


class _Anchored:
    """Where the ops of a block stand, and between which anchors."""

    def __init__(self, plan: BlockPlan, anchors: Sequence[Anchor]) -> None:
        self._places = {key_of(op): place for place, op in enumerate(plan.order)}
        self._anchors = anchors
        self._times = [anchor.time for anchor in anchors]

    def begin(self, flight: Flight) -> Anchor | None:
        """The last anchor before a flight begins, if it can begin there and is used later."""
        number = bisect_right(self._times, flight.begin + _SLACK) - 1
        if number < 0 or flight.fixed:
            return None
        anchor = self._anchors[number]
        if anchor.place >= self.first_use(flight.op) or not self._is_ready(flight.op, anchor.place):
            return None
        return anchor

    def move(self, op: ir.Operation, anchor: Anchor) -> None:
        """Lets a collective stand at an anchor."""
        self._places[key_of(op)] = anchor.served_from

    def itself(self, flight: Flight) -> Anchor:
        """A collective as an anchor, for what has to be over before it begins."""
        place = self._places[key_of(flight.op)]
        return Anchor(-1, flight.op, place, (0,), flight.begin)

    def alive_behind(self, op: ir.Operation, place: int) -> list[ir.Value]:
        """A tensor that an op makes, or that is made of one, and that is used from a place on.

        None is found where all that is made of it is used up before, or not there yet: the future
        of an async_start stays in flight.
        """
        pending = list(op.results)
        seen = set(pending)
        for value in pending:
            users = [use.owner.operation for use in value.uses]
            before = [user for user in users if self._stands_before(user, place)]
            can_wait = isinstance(value.type, ir.RankedTensorType) and not is_future(value)
            if len(before) < len(users) and can_wait:
                return [value]
            for user in before:
                fresh = [result for result in user.results if result not in seen]
                seen.update(fresh)
                pending += fresh
            if len(pending) > _MOST_LOOKED_AT:
                break
        return []

    def _stands_before(self, op: ir.Operation, place: int) -> bool:
        at = place_of(op, self._places)
        return at is not None and at < place

    def first_use(self, op: ir.Operation) -> int:
        """The place of the first op that uses an op's results; far behind all if none does."""
        places = [
            place_of(use.owner.operation, self._places)
            for result in op.results
            for use in result.uses
        ]
        return min((place for place in places if place is not None), default=len(self._places))

    def _is_ready(self, op: ir.Operation, place: int) -> bool:
        """Whether all that an op reads is made before a place."""
        makers = (producer(operand) for operand in op.operands)
        made = (self._places.get(key_of(maker), -1) for maker in makers if maker is not None)
        return all(at < place for at in made)


def place_of(op: ir.Operation, places: Places) -> int | None:
    """The place of an op, or of the op of the block around it."""
    current: ir.Operation | None = op
    while current is not None:
        place = places.get(key_of(current))
        if place is not None:
            return place
        parent = current.parent
        current = None if parent is None else parent.operation
    return None

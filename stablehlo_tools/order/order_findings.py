"""The result of a check: the verdict, and a counterexample that can be printed and replayed."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.diagnostics import Place, table_lines
from stablehlo_tools.order.program import (
    NOWHERE,
    CollectiveIssue,
    CompiledOrder,
    Node,
    ProgramLoop,
    decision_of,
)
from stablehlo_tools.order.simulation import Arrival, Choice


class Verdict(enum.Enum):
    """The answers of check-order."""

    ORDERED = "ordered"
    ORDERED_UNLESS_REWRITTEN = "ordered-unless-rewritten"
    MAY_DEADLOCK = "may-deadlock"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class Actor:
    """One end of a counterexample: a device and the node that it issues, waits in or decides."""

    program: int
    device: int
    what: str
    place: Place = NOWHERE
    issue: int | None = None


@dataclass(frozen=True)
class OrderFinding:
    """A counterexample.

    `rule` names the broken rule. `sentences` describe the interleaving. `choice` is the order in
    which programs issue, if it is not their text order. `confirmed`: a run in that order has ended
    as described.
    """

    verdict: Verdict
    rule: str
    message: str
    actors: tuple[Actor, ...] = ()
    sentences: tuple[str, ...] = ()
    choice: Choice = field(default_factory=dict)
    confirmed: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the actors, ascending."""
        return tuple(sorted({actor.device for actor in self.actors}))


def describe(node: Node) -> str:
    """`all_gather tensor<4xf32> -> tensor<8xf32> …`, `while loop` or `branch`."""
    if isinstance(node, CollectiveIssue):
        if node.transfer:
            return f"{node.transfer} {' '.join(node.signature.types)} {node.signature.details}"
        return node.signature.text
    return "while loop" if isinstance(node, ProgramLoop) else "branch"


def name(node: Node) -> str:
    """`all_gather`, `send`, `while loop`, `branch`."""
    if isinstance(node, CollectiveIssue):
        return node.transfer or node.signature.kind
    return "while loop" if isinstance(node, ProgramLoop) else "branch"


def actor_at(arrival: Arrival) -> Actor:
    """A device that waits at a node."""
    return actor_of(arrival.program, arrival.device, arrival.node)


def actor_of(program: int, device: int, node: Node) -> Actor:
    """A device and a node of its program."""
    number = node.id if isinstance(node, CollectiveIssue) else None
    return Actor(program, device, describe(node), node.place, number)


def devices_text(devices: Sequence[int]) -> str:
    """`device 3`, `devices 0 and 1`, `devices 0 to 7`."""
    listed = sorted(devices)
    if len(listed) == 1:
        return f"device {listed[0]}"
    if len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"devices {listed[0]} to {listed[-1]}"
    return f"devices {', '.join(map(str, listed[:-1]))} and {listed[-1]}"


def place_text(programs: Sequence[CompiledOrder], program: int, place: Place) -> str:
    """Renders a place of a program for a sentence."""
    return place.render(programs[program].name)


def waits(
    programs: Sequence[CompiledOrder], waiting: Mapping[int, Arrival], cycle: Sequence[int]
) -> tuple[str, ...]:
    """Returns an aligned row for each device of a cycle: its op, the awaited device, the place."""
    rows: list[tuple[str, ...]] = []
    for position, device in enumerate(cycle):
        arrival = waiting[device]
        inside = ""
        if arrival.iteration:
            inside = f" (iteration {' of '.join(str(i + 1) for i in reversed(arrival.iteration))})"
        rows.append(
            (
                f"device {device}",
                f"waits in {name(arrival.node)}{inside}",
                f"for device {cycle[(position + 1) % len(cycle)]}",
                f"at {place_text(programs, arrival.program, arrival.node.place)}",
            )
        )
    return tuple(table_lines(rows, left=rows[0])) if rows else ()


def cycle_of_waits(waiting: Mapping[int, Arrival]) -> list[int]:
    """Finds a shortest cycle of devices that each wait for the next.

    Empty if there is none: some device waits for a device that has ended.
    """
    gone_on = {
        device: [
            other
            for other in arrival.members
            if other in waiting and not _met(arrival, waiting[other])
        ]
        for device, arrival in waiting.items()
    }
    best: list[int] = []
    for start in waiting:
        path = _path_back(start, gone_on, len(best) - 1 if best else len(waiting))
        if path and (not best or len(path) < len(best)):
            best = path
        # No cycle is shorter than two devices that wait for each other.
        if len(best) == 2:
            break
    return best


def _met(one: Arrival, other: Arrival) -> bool:
    """Returns True if two devices wait in the same rendezvous."""
    if one.members != other.members:
        return False
    if isinstance(one.node, CollectiveIssue) and isinstance(other.node, CollectiveIssue):
        return one.node.signature == other.node.signature
    if isinstance(one.node, CollectiveIssue) or isinstance(other.node, CollectiveIssue):
        return False
    symbol = decision_of(one.node).symbols.get(one.device)
    return one.node is other.node or (
        symbol is not None and symbol == decision_of(other.node).symbols.get(other.device)
    )


def _path_back(start: int, following: Mapping[int, Sequence[int]], longest: int) -> list[int]:
    """Finds a shortest path from a device back to itself, of at most `longest` devices; else []."""
    came_from: dict[int, int] = {}
    frontier = [start]
    for _ in range(longest):
        next_frontier: list[int] = []
        for device in frontier:
            for other in following[device]:
                if other == start:
                    path = [device]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                if other not in came_from:
                    came_from[other] = device
                    next_frontier.append(other)
        frontier = next_frontier
    return []

"""Finds one order of the collectives that every program can use.

The n-th collectives, in text order, with the same signature and members meet across programs.
Loops meet if they run equally often and contain the same collectives. A constraint of one program
applies to all. A topological sort of the union of all constraints is the order.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.order.order_findings import OrderFinding, Verdict, actor_of, name, place_text
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CompiledOrder,
    Node,
    ProgramBlock,
    ProgramLoop,
    bit_positions,
    connected_components,
    decision_of,
    footprint,
    inner_blocks,
)

# For each node of a block, the earlier nodes that it cannot be moved before.
type Constraints = Mapping[ProgramBlock, Sequence[int]]
type _Position = tuple[int, int]  # a program, and the position of a node in its block


def align(
    programs: Sequence[CompiledOrder],
    constraints: Constraints,
    relation: str = "is computed from",
    *,
    first_leads: bool = False,
) -> dict[tuple[int, ProgramBlock], list[int]] | OrderFinding:
    """Returns the order of the nodes of each program and block, or a finding if there is none.

    `relation` is the verb of a constraint in messages: a node … an earlier one. Unordered nodes
    keep their position in the text, over all programs in turn. With `first_leads`, they keep the
    position in the first program that has them.
    """
    aligned = _Alignment(programs, constraints, relation, first_leads)
    finding = aligned.level({i: program.block for i, program in enumerate(programs)})
    return aligned.orders if finding is None else finding


@dataclass
class _Alignment:
    programs: Sequence[CompiledOrder]
    constraints: Constraints
    relation: str
    first_leads: bool
    orders: dict[tuple[int, ProgramBlock], list[int]] = field(
        default_factory=dict[tuple[int, ProgramBlock], list[int]]
    )

    def level(self, blocks: Mapping[int, ProgramBlock]) -> OrderFinding | None:
        """Aligns blocks that run together, and the blocks nested in them."""
        classes = _classes(blocks)
        members: defaultdict[int, list[_Position]] = defaultdict(list)
        for place, number in classes.items():
            members[number].append(place)
        following: defaultdict[int, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        for program, block in blocks.items():
            for later, before in enumerate(self.constraints[block]):
                for earlier in bit_positions(before):
                    source, target = classes[program, earlier], classes[program, later]
                    following[source].setdefault(target, (program, earlier, later))
        rank = _sort(members, following, first_leads=self.first_leads)
        if len(rank) < len(members):
            return self._conflict(blocks, following, set(members) - set(rank))
        for program, block in blocks.items():
            positions = range(len(block.nodes))
            self.orders[program, block] = sorted(positions, key=lambda p: rank[classes[program, p]])
        for places in members.values():
            nested = {program: inner_blocks(blocks[program].nodes[p]) for program, p in places}
            # Nodes of one class have one form, so equally many blocks.
            for parts in zip(*nested.values(), strict=True):
                finding = self.level(dict(zip(nested, parts, strict=True)))
                if finding is not None:
                    return finding
        return None

    def _conflict(
        self,
        blocks: Mapping[int, ProgramBlock],
        following: Mapping[int, Mapping[int, tuple[int, int, int]]],
        stuck: set[int],
    ) -> OrderFinding:
        """Reports a cycle of constraints through the programs."""
        told: list[str] = []
        actors: list[tuple[int, Node]] = []
        for source, target in _cycle(following, stuck):
            program, earlier, later = following[source][target]
            nodes = blocks[program].nodes[earlier], blocks[program].nodes[later]
            first, second = (
                f"{name(node)} at {place_text(self.programs, program, node.place)}"
                for node in nodes
            )
            told.append(
                f"in {self.programs[program].name}, {second} {self.relation} {first}, so it "
                "comes after it"
            )
            actors.append((program, nodes[0]))
        return OrderFinding(
            Verdict.MAY_DEADLOCK,
            "no-common-order",
            "no order of the collectives suits all programs: one program computes first what "
            "another one computes last",
            tuple(actor_of(p, self.programs[p].devices[0], node) for p, node in actors),
            tuple(told),
        )


def _classes(blocks: Mapping[int, ProgramBlock]) -> dict[_Position, int]:
    """Numbers the nodes of all blocks; nodes that meet have the same number."""
    places: list[_Position] = []
    alike: defaultdict[object, list[int]] = defaultdict(list)  # indices into `places` that meet
    for program, block in blocks.items():
        seen: Counter[object] = Counter()
        for position, node in enumerate(block.nodes):
            keys: list[object]
            if isinstance(node, CollectiveIssue):
                keys = [(node.signature, meeting.members) for meeting in node.rendezvous]
            elif (decision := decision_of(node)).values is None and not decision.symbols:
                keys = [(program, id(node))]  # unique, so it meets no node of another program
            else:
                keys = [_form(node)]
            for key in keys:  # nodes of two programs meet if they share one
                alike[key, seen[key]].append(len(places))
                seen[key] += 1
            places.append((program, position))
    classes = connected_components(alike.values(), range(len(places)))
    return {places[at]: number for number, part in enumerate(classes) for at in part}


def _form(node: Node) -> object:
    """The part of a node that must match: how often it runs and its nodes, in any order."""
    if isinstance(node, CollectiveIssue):
        return node.signature
    inside = [Counter(_form(inner) for inner in block.nodes) for block in inner_blocks(node)]
    decision = decision_of(node)
    often: object = frozenset(decision.symbols.values())
    if decision.values is not None:
        often = frozenset(decision.values.values()) if isinstance(node, ProgramLoop) else ()
    reach = frozenset(m.members for m in footprint(node) if len(m.members) > 1)
    return often, tuple(frozenset(counts.items()) for counts in inside), reach


def _sort(
    members: Mapping[int, Sequence[_Position]],
    following: Mapping[int, Mapping[int, object]],
    *,
    first_leads: bool,
) -> dict[int, int]:
    """Sorts the classes topologically, the earliest in the text first; a cycle is left out."""
    waiting = Counter(target for targets in following.values() for target in targets)
    early = {
        # (program, position): the first program leads. (position, program): all take turns.
        number: min(places if first_leads else [(p, i) for i, p in places])
        for number, places in members.items()
    }
    ready = [(early[number], number) for number in members if not waiting[number]]
    heapq.heapify(ready)
    rank: dict[int, int] = {}
    while ready:
        _, number = heapq.heappop(ready)
        rank[number] = len(rank)
        for target in following.get(number, ()):
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (early[target], target))
    return rank


def _cycle(following: Mapping[int, Mapping[int, object]], stuck: set[int]) -> list[tuple[int, int]]:
    """Returns the edges of a cycle among the classes that could not be sorted."""
    leading: dict[int, int] = {}
    for source in stuck:
        for target in following.get(source, ()):
            if target in stuck:
                leading.setdefault(target, source)
    at_class = next(iter(sorted(leading)))
    seen: list[int] = []
    # Every class left over waits for another one, so walking back closes a cycle.
    while at_class not in seen:
        seen.append(at_class)
        at_class = leading[at_class]
    cycle = [*seen[seen.index(at_class) :], at_class]
    return [(cycle[i + 1], cycle[i]) for i in range(len(cycle) - 1)][::-1]

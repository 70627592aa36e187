"""Decides if any interleaving of the programs can deadlock or mismatch.

The steps run in this order, because each relies on the previous one:

1. *divergence*: in one program, all participants of a collective decide the loops and branches
   around it identically, and every participant runs a program;
2. *run time*: decisions made at run time concern no other program;
3. *agreement*: every participant issues every collective, and equally often;
4. *one run*: with each program in its text order, all end;
5. *pairs* that are unordered and share devices of two programs;
6. *cycles* through three or more devices;
7. *rewriting*: a collective that a compiler may rewrite in one program, it may in the others;
8. *communicators*: XLA:GPU can open those of separately compiled programs.

One program for all devices is compiled once, so all devices issue in one order. Then only transfers
can fail after the first step, because their two ends are two ops. The verdict `ordered` is meant to
hold for every schedule that respects the forced order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.order.agreement import (
    find_disagreement,
    find_divergence,
    find_foreign_decision,
    find_missing_program,
    pair_transfers,
)
from stablehlo_tools.order.coarsening import by_classes, in_single_steps
from stablehlo_tools.order.communicators import find_communicator_conflict
from stablehlo_tools.order.cycles import TooManyError, WaitStep, choice_for, find_cycles
from stablehlo_tools.order.hazards import HazardPair, flip_pair, hazardous_pairs, nested_doubt
from stablehlo_tools.order.order_findings import (
    Actor,
    OrderFinding,
    Verdict,
    actor_at,
    actor_of,
    cycle_of_waits,
    name,
    place_text,
    waits,
)
from stablehlo_tools.order.program import (
    UNKNOWN_CALL,
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    ProgramLoop,
    blocks_of,
    decision_of,
    issues_of,
)
from stablehlo_tools.order.simulation import (
    Choice,
    LoopMismatchError,
    Meeting,
    SimulationOutcome,
    Simulator,
)

_MOST_CANDIDATES = 32  # unconfirmed cycles, after which the first of them is reported


@dataclass(frozen=True)
class Decided:
    """The verdict on a set of programs: a counterexample, or a run to which all others are equal.

    `meetings` are those of the run in text order; empty if no run was needed.
    """

    programs: tuple[CompiledOrder, ...]
    finding: OrderFinding | None
    meetings: tuple[Meeting, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict of the counterexample; `ordered` if there is none."""
        return Verdict.ORDERED if self.finding is None else self.finding.verdict

    @property
    def collectives(self) -> int:
        """The number of collectives in the texts of all programs."""
        return sum(1 for program in self.programs for _ in issues_of(program.block))


def decide(programs: Sequence[CompiledOrder], *, strict: bool = False) -> Decided:
    """Returns the verdict on separately compiled programs, each for its devices.

    With `strict`, each device counts as a separately compiled program. Raises LoopMismatchError if
    loops that do not match need too many steps.
    """
    if strict:
        programs = [replace(program, devices=(d,)) for program in programs for d in program.devices]
    decided = _by_order(programs)
    finding = decided.finding
    if finding is None:
        return replace(decided, finding=find_communicator_conflict(decided.programs))
    # If a custom call of the finding is not understood, report that as the cause.
    kinds = {
        issue.signature.kind
        for actor in finding.actors
        for issue in issues_of(decided.programs[actor.program].block)
        if issue.id == actor.issue
    }
    if UNKNOWN_CALL in kinds:
        finding = replace(
            finding, verdict=Verdict.MAY_DEADLOCK, rule="not-understood", confirmed=False
        )
    return replace(decided, finding=finding)


def judge_rewriting(decided: Decided) -> Decided:
    """Weakens `ordered` if no compiler ran and a shared collective may be rewritten by one."""
    if decided.finding is not None or len(decided.programs) == 1:
        return decided
    for number, program in enumerate(decided.programs):
        own = set(program.devices)
        shared = (
            issue
            for issue in issues_of(program.block)
            if not all(own.issuperset(meeting.members) for meeting in issue.rendezvous)
        )
        issue = next((issue for issue in shared if issue.doubt), None)
        if issue is not None:
            place = place_text(decided.programs, number, issue.place)
            message = f"ordered unless a compiler rewrites {name(issue)} at {place}: {issue.doubt}"
            actor = actor_of(number, program.devices[0], issue)
            verdict = Verdict.ORDERED_UNLESS_REWRITTEN
            return replace(decided, finding=OrderFinding(verdict, "rewritable", message, (actor,)))
    return decided


def judge_origins(decided: Decided) -> Decided:
    """Returns the verdict on schedules, in which collectives of one form must not be swapped.

    The n-th collective of a form in one program's text must meet the n-th in the others. Only
    collectives that the schedules still have are counted.
    """
    if decided.finding is not None:
        return decided
    forms: dict[tuple[int, CollectiveSignature, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for number, program in enumerate(decided.programs):
        for issue in issues_of(program.block):
            for meeting in issue.rendezvous:
                form = forms.setdefault((number, issue.signature, meeting.members), [])
                if issue.origins not in form:
                    form.append(issue.origins)
    for form in forms.values():
        form.sort()
    for meeting in decided.meetings:
        arrivals = [(a, a.node) for a in meeting.arrivals if isinstance(a.node, CollectiveIssue)]
        met = [(a, node) for a, node in arrivals if node.origins]  # without origins: text unknown
        counts = [
            forms[a.program, node.signature, a.members].index(node.origins) for a, node in met
        ]
        other = next((i for i, count in enumerate(counts) if count != counts[0]), None)
        if other is None:
            continue
        (one, issue), (two, its) = met[0], met[other]
        places = [
            place_text(decided.programs, a.program, node.place) for a, node in (met[0], met[other])
        ]
        message = (
            f"{name(issue)} at {places[0]} meets {name(its)} at {places[1]}, another one of the "
            "same form in the programs' texts: no device hangs, but the devices silently exchange "
            "the wrong data"
        )
        actors = (actor_at(one), actor_at(two))
        finding = OrderFinding(Verdict.MISMATCH, "swapped", message, actors, confirmed=True)
        return replace(decided, finding=finding)
    return decided


def _by_order(programs: Sequence[CompiledOrder]) -> Decided:
    """Returns the verdict of steps 1 to 7, by the order of the collectives."""
    judged, finding = pair_transfers(programs)
    finding = finding or find_divergence(judged) or find_missing_program(judged)
    if finding is not None:
        return Decided(judged, finding)
    # One compilation, one order: only the two ends of a transfer are two ops.
    if len(judged) == 1 and not any(issue.transfer for issue in issues_of(judged[0].block)):
        return Decided(judged, None)
    finding = find_foreign_decision(judged)
    has_loops = any(
        isinstance(node, ProgramLoop)
        for program in judged
        for block in blocks_of(program.block)
        for node in block.nodes
    )
    if finding is None and has_loops:  # a run may have to step through loops that do not match
        finding = find_disagreement(judged)
    if finding is not None:
        return Decided(judged, finding)
    simulator = Simulator(judged)
    outcome = simulator.run()
    if not outcome.ended:
        finding = find_disagreement(judged) or _conflict(judged, outcome)
        return Decided(judged, finding, outcome.meetings)
    finding = _find_unordered_pair(simulator) or _cyclic(simulator, outcome.meetings)
    finding = finding or _find_rewrite(judged, outcome.meetings)
    return Decided(judged, finding, outcome.meetings)


def _conflict(
    programs: Sequence[CompiledOrder], outcome: SimulationOutcome, choice: Choice | None = None
) -> OrderFinding:
    """Reports the waits in which a run ended."""
    cycle = cycle_of_waits(outcome.waiting)
    waiting = [outcome.waiting[device] for device in cycle] or list(outcome.waiting.values())
    actors = tuple(actor_at(arrival) for arrival in waiting)
    names = " and ".join(
        f"{name(a.node)} at {place_text(programs, a.program, a.node.place)}" for a in waiting[:3]
    )
    message = f"the programs issue {names} in conflicting orders"
    told = waits(programs, outcome.waiting, cycle)
    rule = "conflicting-order" if len(cycle) == 2 else "cyclic-wait"
    # A decision at run time may still be such that no device waits.
    nodes = [arrival.node for arrival in outcome.waiting.values()]
    is_certain = all(
        isinstance(node, CollectiveIssue) or decision_of(node).values is not None for node in nodes
    )
    return OrderFinding(
        Verdict.MAY_DEADLOCK,
        rule if is_certain else "decided-at-run-time",
        message,
        actors,
        told,
        choice or {},
        confirmed=is_certain,
    )


def _find_rewrite(
    programs: Sequence[CompiledOrder], meetings: Sequence[Meeting]
) -> OrderFinding | None:
    """Finds the first collective that a compiler may rewrite in one program and not in another."""
    for meeting in meetings:
        met = [(a, a.node) for a in meeting.arrivals if isinstance(a.node, CollectiveIssue)]
        one = next(((arrival, issue) for arrival, issue in met if issue.beside), None)
        if one is None:
            continue
        arrival, issue = one
        other = next((pair for pair in met if pair[1].beside != issue.beside), None)
        if other is None:
            continue
        places = [place_text(programs, a.program, node.place) for a, node in (one, other)]
        message = (
            f"a compiler may rewrite or delete the {name(issue)} at {places[0]}, but not the one "
            f"at {places[1]}, in {programs[other[0].program].name}, that must meet it"
        )
        told = tuple(
            f"the one at {place} is {node.beside or 'kept unchanged'}"
            for place, (_, node) in zip(places, (one, other), strict=True)
        )
        actors = (actor_at(arrival), actor_at(other[0]))
        return OrderFinding(Verdict.MISMATCH, "rewritten", message, actors, told)
    return None


def _find_unordered_pair(simulator: Simulator) -> OrderFinding | None:
    """Finds the first unordered pair that shares devices of two programs; deadlocks first."""
    swapped: OrderFinding | None = None
    for pair in hazardous_pairs(simulator.programs):
        finding = _of_pair(simulator, pair)
        if finding.verdict is Verdict.MAY_DEADLOCK:
            return finding
        swapped = swapped or finding
    return swapped


def _of_pair(simulator: Simulator, pair: HazardPair) -> OrderFinding:
    programs = simulator.programs
    first, second = pair.nodes
    ours, theirs = pair.shared
    other = simulator.program_of[theirs]
    actors = tuple(actor_of(pair.program, ours, node) for node in dict.fromkeys(pair.nodes))
    if other != pair.program:
        actors = (*actors, Actor(other, theirs, "compiled separately", programs[other].place))
    places = [place_text(programs, pair.program, node.place) for node in pair.nodes]
    if first is second:
        apart = f"devices {ours} and {theirs} are compiled separately"
        if other == pair.program:
            apart = f"the transfers from device {ours} to device {theirs} may run in any order"
        message = (
            f"nothing orders the iterations of the loop at {places[0]}: a compiler that unrolls it "
            f"may let them overlap, or move a collective out of it, and {apart}"
        )
        return OrderFinding(Verdict.MAY_DEADLOCK, "overlapping-iterations", message, actors)
    message = (
        f"nothing orders {name(first)} at {places[0]} and {name(second)} at {places[1]} in "
        f"{programs[pair.program].name}, and devices {ours} and {theirs}, which take part in both, "
        "are compiled separately"
    )
    choice: Choice = {(pair.program, pair.block): flip_pair(pair)}
    try:
        outcome = simulator.run(choice)
    except LoopMismatchError:
        return OrderFinding(Verdict.MAY_DEADLOCK, "unordered", message, actors, (), choice)
    if not outcome.ended:
        conflict = _conflict(programs, outcome, choice)
        return replace(conflict, rule="unordered", message=message)
    if not (isinstance(first, CollectiveIssue) and isinstance(second, CollectiveIssue)):
        return OrderFinding(Verdict.MAY_DEADLOCK, "unordered", message, actors, (), choice)
    told = (
        f"{programs[pair.program].name} issues the one at {places[1]} first",
        f"device {theirs}, in {programs[other].name}, issues them in its own order",
        "no device hangs: the two have the same form, and the devices silently exchange the wrong "
        "data",
    )
    return OrderFinding(Verdict.MISMATCH, "swapped", message, actors, told, choice, confirmed=True)


def _cyclic(simulator: Simulator, meetings: Sequence[Meeting]) -> OrderFinding | None:
    """Finds a deadlock through three or more devices that some schedule of each program allows."""
    programs = simulator.programs
    if _is_ordered(by_classes(programs)):
        return None
    doubtful: OrderFinding | None = None
    try:
        for count, cycle in enumerate(find_cycles(simulator, meetings)):
            finding = _of_cycle(simulator, meetings, cycle)
            if finding.confirmed:
                return finding
            doubtful = doubtful or finding
            # Each candidate costs a run of all programs.
            if count == _MOST_CANDIDATES:
                return doubtful
    except TooManyError:
        return doubtful or OrderFinding(
            Verdict.MAY_DEADLOCK,
            "not-decided",
            "too many unordered collectives to search all cycles of waits: run thread-tokens first",
        )
    if doubtful is not None:
        return doubtful
    # Cycles are searched in the outermost blocks; inside loops and branches only pairs are.
    nested = nested_doubt(programs)
    if nested is None or _is_ordered(in_single_steps(programs)):
        return None
    number, block, first, second = nested
    nodes = block.nodes[first], block.nodes[second]
    places = [place_text(programs, number, node.place) for node in nodes]
    message = (
        f"nothing orders {name(nodes[0])} at {places[0]} and {name(nodes[1])} at {places[1]}, "
        "inside a loop or branch, and other groups link their devices too"
    )
    device = programs[number].devices[0]
    actors = tuple(actor_of(number, device, node) for node in nodes)
    return OrderFinding(Verdict.MAY_DEADLOCK, "unordered", message, actors)


def _is_ordered(coarser: Sequence[CompiledOrder] | None) -> bool:
    """Returns True if coarser programs, in which devices wait for more, exist and are ordered."""
    try:
        return coarser is not None and _by_order(coarser).finding is None
    except LoopMismatchError:
        return False


def _of_cycle(
    simulator: Simulator, meetings: Sequence[Meeting], cycle: Sequence[WaitStep]
) -> OrderFinding:
    programs = simulator.programs
    choice = choice_for(simulator, cycle)
    if choice is not None:
        try:
            outcome = simulator.run(choice)
        except LoopMismatchError:
            outcome = None
        if outcome is not None and not outcome.ended:
            conflict = _conflict(programs, outcome, choice)
            message = "unordered collectives can close a cycle of waits: " + conflict.message
            return replace(conflict, rule="cyclic-wait", message=message)
    actors: list[Actor] = []
    for step in cycle:
        arrivals = meetings[step.first].arrivals
        node = next(a.node for a in arrivals if a.device == step.device)
        actors.append(actor_of(step.program, step.device, node))
    names = ", ".join(
        f"{actor.what.split()[0]} at {place_text(programs, actor.program, actor.place)}"
        for actor in actors
    )
    message = f"unordered collectives may close a cycle of waits through {names}"
    return OrderFinding(
        Verdict.MAY_DEADLOCK, "cyclic-wait", message, tuple(actors), (), choice or {}
    )

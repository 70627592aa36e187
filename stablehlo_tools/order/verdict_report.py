"""Renders a verdict as sentences and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stablehlo_tools.order.communicators import find_component_conflict
from stablehlo_tools.order.order_findings import (
    OrderFinding,
    Verdict,
    devices_text,
    name,
    place_text,
)
from stablehlo_tools.order.program import (
    UNKNOWN_CALL,
    CollectiveIssue,
    CompiledOrder,
    ProgramBlock,
    blocks_of,
    decision_of,
    issues_of,
)
from stablehlo_tools.order.simulation import Meeting
from stablehlo_tools.order.verdict import Decided

_MOST_MEETINGS = 10_000  # listed in a proof
_CERTAIN = frozenset({"no-common-order", "unmatched-transfer"})  # without a replay


def as_text(decided: Decided, *, is_scheduled: bool = False) -> str:
    """Renders the verdict and its reasons; `is_scheduled`: the programs are schedules."""
    if decided.finding is not None:
        return finding_text(decided.programs, decided.finding)
    lines = [*_reasons(decided, is_scheduled=is_scheduled), *_assumptions(decided.programs)]
    lines += [f"not judged: {message}" for message in _not_judged(decided, is_scheduled)]
    devices = [d for program in decided.programs for d in program.devices]
    count, programs = decided.collectives, len(decided.programs)
    headline = (
        f"{Verdict.ORDERED.value}: {programs} program{'s' * (programs > 1)} on "
        f"{devices_text(devices)}, {count} collective{'s' * (count != 1)}"
    )
    return "\n".join([headline, *(f"  {line}" for line in lines)])


def _not_judged(decided: Decided, is_scheduled: bool) -> list[str]:
    """Returns the hazards of an XLA:GPU option that the verdict `ordered` does not cover."""
    may_hang = decided.finding is None and not is_scheduled
    if not may_hang or not all(program.may_run_on_gpu for program in decided.programs):
        return []
    conflict = find_component_conflict(decided.programs)
    return [conflict.message] if conflict else []


def finding_text(programs: Sequence[CompiledOrder], finding: OrderFinding) -> str:
    """Renders a counterexample as sentences."""
    is_open = finding.verdict is Verdict.ORDERED_UNLESS_REWRITTEN
    lines = [finding.message if is_open else f"{finding.verdict.value}: {finding.message}"]
    lines += [f"  {sentence}" for sentence in finding.sentences]
    lines += _order_lines(programs, finding)
    if not finding.confirmed and not is_open and finding.rule not in _CERTAIN:
        lines.append("  not replayed: this may be a false alarm (see the page of check-order)")
    lines += [f"  {line}" for line in _assumptions(programs)]
    return "\n".join(lines)


def _assumptions(programs: Sequence[CompiledOrder]) -> list[str]:
    """Returns the assumptions about unknown custom calls, one line for each target."""
    first: dict[str, str] = {}
    for program in programs:
        for issue in issues_of(program.block):
            if issue.signature.kind == UNKNOWN_CALL:
                place = issue.place.render(program.name)
                first.setdefault(issue.signature.details, place)
    return [
        f"custom_call @{target} at {place} is not understood, so it counts as waiting for all "
        f"devices (pass --local {target} if it reaches no other device)"
        for target, place in first.items()
    ]


def as_json(decided: Decided, *, is_scheduled: bool = False) -> dict[str, Any]:
    """Returns the verdict as JSON, with its proof or its counterexample; `is_scheduled` as in
    `as_text`."""
    report: dict[str, Any] = {
        "verdict": decided.verdict.value,
        "programs": [
            {
                "name": program.name,
                "devices": list(program.devices),
                "collectives": sum(1 for _ in issues_of(program.block)),
                "deleted": [issue.place.render(program.name) for issue in program.dead],
            }
            for program in decided.programs
        ],
        "not_judged": _not_judged(decided, is_scheduled),
    }
    if decided.finding is None:
        report["proof"] = _proof(decided)
    else:
        report["counterexample"] = _counterexample(decided.programs, decided.finding)
    return report


def _reasons(decided: Decided, *, is_scheduled: bool) -> list[str]:
    if len(decided.programs) == 1:
        reasons = ["one program, compiled once: every device issues in the same order"]
        if any(True for _ in _decisions(decided.programs[0].block)):
            reasons.append("all participants inside a loop or branch decide it the same way")
        return reasons
    return [
        "every participant issues every collective, equally often",
        f"run once in text order, all {len(decided.meetings)} meetings take place",
        "a device issues in the order of its schedule"
        if is_scheduled
        else "every other order that tokens and dataflow allow ends the same way",
    ]


def _order_lines(programs: Sequence[CompiledOrder], finding: OrderFinding) -> list[str]:
    """Returns a line for each program whose order in the counterexample is not the text order."""
    lines: list[str] = []
    for (number, block), order in finding.choice.items():
        moved = [p for place, p in enumerate(order) if p != place]
        if not moved:
            continue
        names = ", ".join(
            f"{name(block.nodes[p])} at {place_text(programs, number, block.nodes[p].place)}"
            for p in moved[:4]
        )
        more = ", …" if len(moved) > 4 else ""
        lines.append(f"  a schedule of {programs[number].name} that allows it: {names}{more}")
    return lines


def _proof(decided: Decided) -> dict[str, Any]:
    """Returns the steps of the proof, with the meetings in the order of the run."""
    steps: list[dict[str, Any]] = [
        {
            "step": "uniform-control-flow",
            "decisions": [
                {"place": place_text(decided.programs, number, node_place), "known": known}
                for number, program in enumerate(decided.programs)
                for node_place, known in _decisions(program.block)
            ],
        }
    ]
    if decided.meetings:
        # For each set of participants, the largest number of its collectives in one program.
        counts: Counter[tuple[int, ...]] = Counter()
        for program in decided.programs:
            counts |= Counter(m.members for i in issues_of(program.block) for m in i.rendezvous)
        communicators = [{"members": list(m), "collectives": n} for m, n in sorted(counts.items())]
        steps.append({"step": "agreement", "communicators": communicators})
        steps.append(
            {
                "step": "run",
                "meetings": len(decided.meetings),
                "order": [_meeting(meeting) for meeting in decided.meetings[:_MOST_MEETINGS]],
            }
        )
    unordered = sum(
        not block.has_order(position - 1, position)
        for program in decided.programs
        for block in blocks_of(program.block)
        for position in range(1, len(block.nodes))
    )
    steps.append({"step": "no-hazard", "unordered_neighbours": unordered})
    if assumed := _assumptions(decided.programs):
        steps.append({"step": "assumed", "custom_calls": assumed})
    return {"steps": steps}


def _decisions(block: ProgramBlock) -> list[tuple[Any, bool]]:
    decisions: list[tuple[Any, bool]] = []
    for inner in blocks_of(block):
        for node in inner.nodes:
            if not isinstance(node, CollectiveIssue):
                decisions.append((node.place, decision_of(node).values is not None))
    return decisions


def _meeting(meeting: Meeting) -> dict[str, Any]:
    arrivals = meeting.arrivals
    ids = {
        str(a.program): a.node.id for a in arrivals if isinstance(a.node, CollectiveIssue)
    }  # devices of one program are at one op
    return {
        "kind": name(arrivals[0].node),
        "members": sorted(arrival.device for arrival in arrivals),
        "collectives": ids,
    }


def _counterexample(programs: Sequence[CompiledOrder], finding: OrderFinding) -> dict[str, Any]:
    orders: list[dict[str, Any]] = []
    for (number, block), order in finding.choice.items():
        nodes = [block.nodes[position] for position in order]
        listed = [node.id if isinstance(node, CollectiveIssue) else name(node) for node in nodes]
        orders.append({"program": number, "collectives": listed})
    return {
        "rule": finding.rule,
        "message": finding.message,
        "devices": list(finding.devices),
        "collectives": [
            {
                "program": actor.program,
                "device": actor.device,
                "what": actor.what,
                "place": place_text(programs, actor.program, actor.place),
                "collective": actor.issue,
            }
            for actor in finding.actors
        ],
        "interleaving": list(finding.sentences),
        "orders": orders,
        "replayed": finding.confirmed,
    }

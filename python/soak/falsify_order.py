"""Looks for a program that check-order calls ordered and that a compiler puts into another order.

    python falsify_order.py cpu|gpu|tpu COUNT SEED [DIRECTORY]

Tries programs until COUNT of them are `ordered` with each device compiled apart, and compiles them;
and with each a slightly different one, where the two together are `ordered` too. Exits 1 at the
first program that is scheduled in another order. Prints one line of JSON: how many were tried, with
which verdicts, and what the compiler did besides: collectives it deleted or put others in place of,
and pairs of which it deleted or replaced one in one program alone (`apart`). DIRECTORY is where
programs are left for which something is to be reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tempting_programs import DEVICES, tempting_program, with_other_constant

from stablehlo_tools.targets.preparation import PreparedModule
from stablehlo_tools.targets.schedule_order import Item, Repeat, ScheduleBranch, ScheduledIssue
from stablehlo_tools.targets.scheduled_hlo import (
    CollectiveEvent,
    Conditional,
    HloSchedule,
    Node,
    ScheduledLoop,
)
from stablehlo_tools.targets.topologies import Target, environment, topology

_ARRAY = re.compile(r"\w+\[[\d,]*\]")


class RefusedError(Exception):
    """A program that a compiler refuses."""


@dataclass(frozen=True)
class Compiled:
    """A schedule, without collectives on groups of one device: what is odd about it, what it is."""

    oddities: tuple[str, ...]
    issued: tuple[tuple[str, str, str], ...]  # kind, type, groups


@dataclass(frozen=True)
class Compiler:
    """A compiler in this process; it writes what is read back to `dump`."""

    target: Target
    devices: list[Any]
    dump: Path

    def compile(self, text: str) -> Compiled:
        """What becomes of a program. Raises RefusedError."""
        from stablehlo_tools.targets.schedule_order import compare_order

        prepared, schedule = self._scheduled(text)
        meeting = _meeting(text)
        schedule = HloSchedule(tuple(_kept(schedule.nodes, meeting)), schedule.events)
        events = [e for e in schedule.events if e.issues and not {*e.ids} - meeting]
        schedule = HloSchedule(schedule.nodes, tuple(events))
        order = compare_order(tuple(_items(prepared.program, meeting)), schedule)
        kinds = {op.id: op.kind for op in prepared.tagged}
        is_disorder = not order.same_order and not order.undecided
        outside = {i for event in events for i in event.ids if not _is_in_loop(event)}
        is_disorder |= not _issued(text, unknown_loops=True).isdisjoint(outside)
        found = ["disorder"] if is_disorder else []
        found += ["merged"] if order.merged else []
        found += [f"deleted {kinds[i]}" for i in order.deleted if i in _issued(text)]
        found += [
            f"replaced {kinds[i]} by {event.kind}"
            for event in events
            for i in event.ids
            if event.kind != kinds[i].replace("_", "-")
        ]
        return Compiled(tuple(found), tuple(map(_form, events)))

    def deleted(self, text: str) -> set[int]:
        """The collectives, by text order, that are not in the schedule. Raises RefusedError."""
        from stablehlo_tools.targets.schedule_order import compare_order

        prepared, schedule = self._scheduled(text)
        return {*compare_order(tuple(prepared.program), schedule).deleted}

    def issues(self, text: str) -> bool:
        """Whether any collective is left, in whatever form. Raises RefusedError."""
        return bool(self._scheduled(text)[1].events)

    def _scheduled(self, text: str) -> tuple[PreparedModule, HloSchedule]:
        import jax

        from stablehlo_tools import bindings
        from stablehlo_tools.artifacts import artifact
        from stablehlo_tools.targets.preparation import prepare
        from stablehlo_tools.targets.scheduled_hlo import parse_schedule
        from stablehlo_tools.targets.tagging import read_combined

        prepared = prepare(artifact.parse(text.encode()), self.target)
        module = bindings.parse_module(prepared.bytecode, bindings.new_context())
        shutil.rmtree(self.dump, ignore_errors=True)
        self.dump.mkdir()
        grid = prepared.grid
        try:
            compiled, _ = bindings.compile_ahead_of_time(
                module, grid.num_replicas, grid.num_partitions, self.devices, tuple_arguments=False
            )
        except jax.errors.JaxRuntimeError as error:
            raise RefusedError(str(error)[:60]) from None
        return prepared, parse_schedule(compiled, read_combined(self.dump))


def run(compiler: Compiler, count: int, seed: int, directory: Path | None) -> dict[str, Any]:
    """Compiles `count` programs that are called ordered; raises AssertionError on disorder."""
    totals: Counter[str] = Counter()
    number = 0
    while totals["ordered"] < count:
        number += 1
        drawn = f"{seed} {number}"
        text = tempting_program(drawn)
        totals["programs"] += 1
        rule = judged([text])
        totals[f"rule {rule}"] += 1
        if rule != "ordered" or len(_issued(text)) < 2:
            continue
        other = (
            tempting_program(drawn, more=True) if number % 2 else with_other_constant(text, drawn)
        )
        try:
            compiled = compiler.compile(text)
            totals["ordered"] += 1
            totals["collectives"] += len(_issued(text))
            for what in compiled.oddities:
                totals[what] += 1
            assert "disorder" not in compiled.oddities, text
            if judged([text, other]) == "ordered":
                totals["pairs"] += 1
                if compiler.compile(other).issued != compiled.issued:
                    totals["apart"] += 1
                    _leave(directory, f"{compiler.target.value}-{seed}-{number}", text, other)
        except RefusedError as error:
            totals[f"refused {error}"] += 1
    return {"target": compiler.target.value, "seed": seed, **dict(sorted(totals.items()))}


def judged(texts: Sequence[str]) -> str:
    """The rule that check-order says is broken; one program is compiled apart for each device."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
    from stablehlo_tools.order.simulation import LoopMismatchError
    from stablehlo_tools.order.verdict import decide

    job = ProgramJob(tuple(artifact.parse(text.encode()) for text in texts), JobOptions())
    try:
        decided = decide([part.program for part in job.read()], strict=len(texts) == 1)
    except LoopMismatchError:
        return "undecided"
    return "ordered" if decided.finding is None else decided.finding.rule


def _issued(text: str, *, unknown_loops: bool = False) -> set[int]:
    """The ids, by text order, of what check-order takes to be issued, and by more than one.

    With `unknown_loops`, only what stands in a loop of unknown length.
    """
    from stablehlo_tools.analysis.collectives import find_collectives
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
    from stablehlo_tools.order import program

    loaded = artifact.parse(text.encode())
    numbers = {c.inner: n for n, c in enumerate(find_collectives(loaded.module))}
    (part,) = ProgramJob((loaded,), JobOptions()).read()
    outermost = [part.program.block]
    if unknown_loops:
        outermost = [
            inner
            for block in program.reached_blocks_of(part.program.block)
            for node in block.nodes
            if isinstance(node, program.ProgramLoop) and node.trips.values is None
            for inner in program.reached_blocks(node)
        ]
    return {
        numbers[part.ops[node.id].inner]
        for whole in outermost
        for block in program.reached_blocks_of(whole)
        for node in block.nodes
        if isinstance(node, program.CollectiveIssue)
        and any(len(m.members) > 1 for m in node.rendezvous)
    }


def _meeting(text: str) -> set[int]:
    """The ids, by text order, of all collectives but those on groups of one device."""
    from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
    from stablehlo_tools.artifacts import artifact

    module = artifact.parse(text.encode()).module
    facts = ModuleFacts.from_module(module)
    return {
        n
        for n, collective in enumerate(find_collectives(module))
        if collective.kind == "collective_permute"
        or any(len(group) > 1 for group in facts.groups(collective) or ())
    }


def _items(items: Sequence[Item], meeting: set[int]) -> list[Item]:
    """A program without what does not meet."""

    def of(item: Item) -> Item:
        if isinstance(item, Repeat):
            return Repeat(tuple(_items(item.condition, meeting)), tuple(_items(item.body, meeting)))
        if isinstance(item, ScheduleBranch):
            return ScheduleBranch(tuple(tuple(_items(branch, meeting)) for branch in item.branches))
        return item

    return [
        of(item) for item in items if not isinstance(item, ScheduledIssue) or item.id in meeting
    ]


def _kept(nodes: Sequence[Node], meeting: set[int]) -> list[Node]:
    """A schedule without what does not meet."""

    def of(node: Node) -> Node:
        if isinstance(node, ScheduledLoop):
            condition, body = (tuple(_kept(p, meeting)) for p in (node.condition, node.body))
            return ScheduledLoop(condition, body, node.trip_count)
        if isinstance(node, Conditional):
            return Conditional(tuple(tuple(_kept(branch, meeting)) for branch in node.branches))
        return node

    return [of(n) for n in nodes if not isinstance(n, CollectiveEvent) or not {*n.ids} - meeting]


def _is_in_loop(event: CollectiveEvent) -> bool:
    return any(part.startswith("while") for part in event.nesting)


def _form(event: CollectiveEvent) -> tuple[str, str, str]:
    """What the participants of a collective must have alike: kind, type and groups."""
    arrays = [array for array in _ARRAY.findall(event.shape) if array != "u32[]"]
    return event.kind, arrays[-1] if arrays else "", event.groups


def _leave(directory: Path | None, name: str, one: str, other: str) -> None:
    if directory is not None:
        (directory / f"{name}-a.mlir").write_text(one)
        (directory / f"{name}-b.mlir").write_text(other)


def main(target: Target, count: int, seed: int, directory: Path | None) -> None:
    """Tries programs with one compiler."""
    with tempfile.TemporaryDirectory() as name:
        dump = Path(name) / "dump"
        os.environ.update(environment(topology(target, DEVICES), os.environ, dump))
        from random_order import _devices

        print(json.dumps(run(Compiler(target, _devices(target), dump), count, seed, directory)))


if __name__ == "__main__":
    left = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    main(Target(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), left)

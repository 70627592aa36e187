"""Goes through the loops of a module, inner ones first, and moves their collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.communication import BRANCHES
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import Key, LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.ir.copying import copy_module
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.pipelining.choices import Staged, pass_barriers, stages_for
from stablehlo_tools.transforms.pipelining.choosing import Budget, best_choice, possible
from stablehlo_tools.transforms.pipelining.hoisting import hoist, is_the_same
from stablehlo_tools.transforms.pipelining.holding import hold_loop, keep_back
from stablehlo_tools.transforms.pipelining.prediction import Prediction, predict
from stablehlo_tools.transforms.pipelining.sinking.merging import merge_sunk
from stablehlo_tools.transforms.pipelining.sinking.plan import Sinking, sinkings
from stablehlo_tools.transforms.pipelining.sinking.writing import write_sinkings
from stablehlo_tools.transforms.pipelining.survey import Survey, loops_of, survey
from stablehlo_tools.transforms.pipelining.writing import write_stages

_TO_HOLD = "stablehlo_tools.to_hold"  # unit: on the loops that are pipelined
_SUNK = "stablehlo_tools.sunk"  # unit: on the collectives that came out of a loop
_HOW = {
    "sum": "on the sum of what it sends",
    "last": "on what the last iteration sends, the others are overwritten",
    "batch": "on what all iterations send",
}
_SMALL = 1 << 22  # bytes: rows that `auto` lets a loop carry to its end
_NO_GAIN = "it is predicted to save no time within memory"
_TO_DO = "stablehlo_tools.to_pipeline"  # unit: on the loops that are not done yet


@dataclass(frozen=True)
class Wanted:
    """The options of the pass; `limit` in bytes, None if none is given."""

    direction: str
    distance: int
    hardware: Hardware
    limit: float | None
    hold: bool

    @property
    def most_bytes(self) -> float:
        """What a program may need."""
        return self.hardware.memory_bytes if self.limit is None else self.limit

    @property
    def holds(self) -> bool:
        """Whether fences are written: XLA:TPU keeps to none."""
        torus = any(network.kind == "torus" for network in self.hardware.networks)
        return self.hold and not torus

    def allows(self, direction: str) -> bool:
        """Whether collectives may move in a direction."""
        return self.direction in (direction, "auto")


@dataclass
class LoopPipelining:
    """Rewrites the loops of a module that has no calls."""

    module: ir.Module
    wanted: Wanted
    changed: bool = False
    notes: list[Diagnostic] = field(default_factory=list[Diagnostic])

    def run(self) -> None:
        """Rewrites what there is to rewrite."""
        facts = ModuleFacts.of(self.module)
        effects = Effects(functions_by_name(self.module))
        for loop in loops_of(self.module):
            if LoopBody(loop, effects).communicates(loop):
                loop.attributes[_TO_DO] = ir.UnitAttr.get(loop.context)
        while (loop := _next_loop(self.module)) is not None:
            _One(self, facts).run()
        self._merge()
        for loop in loops_of(self.module):
            if _TO_HOLD in loop.attributes:
                del loop.attributes[_TO_HOLD]
                hold_loop(self.module, loop, self.wanted.hardware)

    def _merge(self) -> None:
        """Merges the collectives that were sunk, once no loop around them is rewritten any more."""
        sunk: dict[ir.Block, list[ir.Operation]] = {}

        def visit(op: ir.Operation) -> ir.WalkResult:
            if _SUNK in op.attributes:
                del op.attributes[_SUNK]
                sunk.setdefault(op.block, []).append(op)
            return ir.WalkResult.ADVANCE

        walk(self.module.operation, visit)
        for ops in sunk.values():
            merge_sunk(self.module, ops)


class _One:
    """The next loop of a module that is not done."""

    def __init__(self, work: LoopPipelining, facts: ModuleFacts) -> None:
        self._work = work
        self._wanted = work.wanted
        self._facts = facts
        self._not_sunk: list[str] = []  # why each collective of the body is not sunk

    def run(self) -> None:
        """Rewrites the loop, kind by kind."""
        if self._wanted.allows("prefetch"):
            self._hoist()
        if self._wanted.allows("sink"):
            self._sink()
        self._stage()
        loop = _next_loop(self._work.module)
        if loop is not None:
            del loop.attributes[_TO_DO]

    def _survey(self, module: ir.Module) -> Survey:
        loop = _next_loop(module)
        assert loop is not None, "the loop is marked until it is done"
        return survey(loop, module, self._facts)

    def _hoist(self) -> None:
        found = self._survey(self._work.module)
        moves = [m for m in found.ahead if m.ops and is_the_same(found.body, m.ops)]
        if not moves or found.fewest < 1 or not self._pays(_hoist_all):
            return
        for move in moves:
            self._note(move.collective, "runs once, before the loop: it sends the same each time")
        _hoist_all(found)
        self._work.changed = True

    def _sink(self) -> None:
        """Lets collectives run behind the loop."""
        found = self._survey(self._work.module)
        plans = list(_sinkings(found).values())
        chosen = self._sunk_choice(plans)
        for collective, plan in zip(found.collectives, plans, strict=True):
            if isinstance(plan, str):
                self._not_sunk.append(plan)
            elif plan.group in chosen:
                self._note(collective, f"runs once, behind the loop: {_HOW[plan.how]}")
            else:
                self._not_sunk.append(_NO_GAIN)
        if chosen:
            _write_sunk(found, chosen)
            self._work.changed = True

    def _sunk_choice(self, plans: Sequence[Sinking | str]) -> frozenset[int]:
        """The groups that are sunk: all, or without those that are stacked, or none."""
        sunk = [plan for plan in plans if isinstance(plan, Sinking)]
        if self._wanted.direction == "sink":
            return frozenset(plan.group for plan in sunk)
        small = [p for p in sunk if p.how != "batch" or _is_small(p.extra_bytes)]
        summed = [p for p in sunk if p.how != "batch"]
        for chosen in (small, summed):
            groups = frozenset(plan.group for plan in chosen)
            added = sum(_added_bytes(plan) for plan in chosen)
            if groups and self._pays(partial(_write_sunk, groups=groups), added):
                return groups
        return frozenset()

    def _stage(self) -> None:
        """Moves collectives to iterations before or after their own."""
        found = self._survey(self._work.module)
        staged = self._choice(found)
        if staged and isinstance(stages_for(found, staged, self._wanted.distance), str):
            staged = Staged()
        for number, collective in enumerate(found.collectives):
            self._note(collective, self._said(found, number, staged))
        self._note_branches(found)
        if staged:
            self._write(self._work.module, found, staged)
            self._work.changed = True

    def _note_branches(self, found: Survey) -> None:
        for op in found.body.ops:
            if op.name in BRANCHES and found.body.communicates(op):
                text = "a collective in a branch stays in its iteration, with the branch"
                self._work.notes.append(note(text, op.location))

    def _choice(self, found: Survey) -> Staged:
        whole = possible(found)
        if self._wanted.direction == "prefetch":
            return Staged(ahead=whole.ahead)
        if self._wanted.direction == "delay":
            return Staged(late=whole.late)
        if self._wanted.direction == "sink" or not whole:
            return Staged()
        budget = Budget(self._wanted.limit, self._wanted.distance, self._wanted.holds)
        return best_choice(found, self._judge, budget)

    def _judge(self, staged: Staged) -> Prediction | None:
        """What a choice is predicted to make of the program."""
        copy = copy_module(self._work.module)
        if staged:
            found = self._survey(copy)
            if isinstance(stages_for(found, staged, self._wanted.distance), str):
                return None
            self._write(copy, found, staged)
        told = self._predicted(copy)
        return told if told.holds else None

    def _write(self, module: ir.Module, found: Survey, staged: Staged) -> None:
        """Writes a choice that the loop can have."""
        if pass_barriers(found, staged):
            found = self._survey(module)
        stages = stages_for(found, staged, self._wanted.distance)
        assert not isinstance(stages, str), stages
        written = write_stages(found.body, stages)
        if self._wanted.holds:
            written.loop.attributes[_TO_HOLD] = ir.UnitAttr.get(module.context)
            if self._wanted.limit is None:
                keep_back(written.ends)

    def _pays(self, change: Callable[[Survey], object], extra: float | None = None) -> bool:
        """Whether `auto` predicts that a change costs neither time nor too much memory.

        `extra`: bytes that it may add where no limit is given; None for what the device has.
        """
        if self._wanted.direction != "auto":
            return True
        own = self._predicted(self._work.module)
        copy = copy_module(self._work.module)
        change(self._survey(copy))
        told = self._predicted(copy)
        most = self._wanted.most_bytes
        if extra is not None and self._wanted.limit is None:
            most = own.peak_bytes + extra
        fits = told.peak_bytes <= max(most, own.peak_bytes)
        return fits and told.ns <= own.ns

    def _predicted(self, module: ir.Module) -> Prediction:
        held = _TO_HOLD if self._wanted.holds else None
        return predict(module, self._wanted.hardware, held)

    def _note(self, collective: Collective, text: str) -> None:
        self._work.notes.append(note(f"{collective.kind} {text}", collective.op.location))

    def _said(self, found: Survey, number: int, staged: Staged) -> str:
        """Where a collective runs, or why it stays."""
        distance = self._wanted.distance
        times = "one iteration" if distance == 1 else f"{distance} iterations"
        if number in staged.ahead:
            return f"is issued {times} ahead"
        if number in staged.late:
            return f"ends {times} late"
        return f"stays in its iteration: {'; '.join(self._reasons(found, number))}"

    def _reasons(self, found: Survey, number: int) -> Iterator[str]:
        """Why a collective stays, for each direction that is allowed."""
        one = frozenset({number})
        sides = {
            "prefetch": (found.ahead[number], Staged(ahead=one)),
            "delay": (found.late[number], Staged(late=one)),
        }
        for direction, (move, alone) in sides.items():
            if not self._wanted.allows(direction):
                continue
            reason = move.reason or stages_for(found, alone, self._wanted.distance)
            if not isinstance(reason, str):
                reason = _NO_GAIN
            yield reason if self._wanted.direction != "auto" else f"{direction}: {reason}"
        if self._not_sunk:
            reason = self._not_sunk[number]
            yield reason if self._wanted.direction != "auto" else f"sink: {reason}"


def _sinkings(found: Survey) -> dict[Key, Sinking | str]:
    return sinkings(found.body, found.indices, found.trips)


def _is_small(extra: int | None) -> bool:
    return extra is not None and extra <= _SMALL


def _added_bytes(plan: Sinking) -> int:
    """What a sunk collective may add: what the loop carries for it, and both its ends."""
    ends = (plan.collective.bytes_in or 0) + (plan.collective.bytes_out or 0)
    return ends + 2 * max(0, plan.extra_bytes or 0)


def _write_sunk(found: Survey, groups: frozenset[int]) -> None:
    """Sinks groups of collectives, and marks what then stands behind the loop."""
    plans = _sinkings(found).values()
    chosen = [p for p in plans if isinstance(p, Sinking) and p.group in groups]
    _, behind = write_sinkings(found.body, chosen)
    for op in behind:
        op.attributes[_SUNK] = ir.UnitAttr.get(op.context)


def _hoist_all(found: Survey) -> None:
    """Hoists whatever sends the same in every iteration."""
    moves = [m for m in found.ahead if m.ops and is_the_same(found.body, m.ops)]
    needed = {key_of(op) for move in moves for op in move.ops}
    hoist(found.body, [op for op in found.body.ops if key_of(op) in needed])


def _next_loop(module: ir.Module) -> ir.Operation | None:
    return next((loop for loop in loops_of(module) if _TO_DO in loop.attributes), None)

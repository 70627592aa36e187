"""The next loop of a module: its collectives run before it, behind it, or in other iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.communication import BRANCHES
from stablehlo_tools.analysis.loops import Key
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, note
from stablehlo_tools.ir.copying import copy_module
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import Move
from stablehlo_tools.transforms.parts.pipeline_collectives.choices import (
    Staged,
    pass_barriers,
    stages_for,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.choosing import (
    Budget,
    best_choice,
    possible,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.hoisting import hoist, is_the_same
from stablehlo_tools.transforms.parts.pipeline_collectives.holding import keep_back
from stablehlo_tools.transforms.parts.pipeline_collectives.marks import (
    SUNK,
    TO_HOLD,
    TO_PIPELINE,
    mark,
    next_loop,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.prediction import Prediction, predict
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.plan import Sinking, sinkings
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.writing import write_sinkings
from stablehlo_tools.transforms.parts.pipeline_collectives.survey import Survey, survey
from stablehlo_tools.transforms.parts.pipeline_collectives.wanted import Wanted
from stablehlo_tools.transforms.parts.pipeline_collectives.writing import write_stages

_HOW = {
    "sum": "on the sum of what it sends",
    "last": "on what the last iteration sends, the others are overwritten",
    "batch": "on what all iterations send",
}
_SMALL = 1 << 22  # bytes: rows that `auto` lets a loop carry to its end
_NO_GAIN = "it is predicted to save no time within memory"


class OneLoop:
    """The next loop of a module that is not done."""

    def __init__(self, module: ir.Module, wanted: Wanted, facts: ModuleFacts) -> None:
        self._module = module
        self._wanted = wanted
        self._facts = facts
        self.changed = False
        self.notes: list[Diagnostic] = []
        self._not_sunk: list[str] = []  # why each collective of the body is not sunk

    def run(self) -> None:
        """Rewrites the loop, kind by kind."""
        if self._wanted.allows("prefetch"):
            self._hoist()
        if self._wanted.allows("sink"):
            self._sink()
        self._stage()
        loop = next_loop(self._module)
        if loop is not None:
            del loop.attributes[TO_PIPELINE]

    def _survey(self, module: ir.Module) -> Survey:
        loop = next_loop(module)
        assert loop is not None, "the loop is marked until it is done"
        return survey(loop, module, self._facts)

    def _hoist(self) -> None:
        found = self._survey(self._module)
        moves = _unchanging(found)
        if not moves or found.fewest < 1 or not self._pays(_hoist_all):
            return
        for move in moves:
            self._note(move.collective, "runs once, before the loop: it sends the same each time")
        _hoist_all(found)
        self.changed = True

    def _sink(self) -> None:
        """Lets collectives run behind the loop."""
        found = self._survey(self._module)
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
            self.changed = True

    def _sunk_choice(self, plans: Sequence[Sinking | str]) -> frozenset[int]:
        """The groups that are sunk: all, or without those that are stacked, or none."""
        sunk = [plan for plan in plans if isinstance(plan, Sinking)]
        if self._wanted.direction == "sink":
            return frozenset(plan.group for plan in sunk)
        takes_rows = not self._wanted.holds  # XLA:GPU hides what is small
        summed = [p for p in sunk if p.how != "batch"]
        rows = [p for p in sunk if p.how == "batch" and takes_rows and _is_small(p.extra_bytes)]
        for chosen in ([*summed, *rows], summed) if rows else (summed,):
            groups = frozenset(plan.group for plan in chosen)
            added = sum(_added_bytes(plan) for plan in chosen)
            if groups and self._pays(partial(_write_sunk, groups=groups), added):
                return groups
        return frozenset()

    def _stage(self) -> None:
        """Moves collectives to iterations before or after their own."""
        found = self._survey(self._module)
        staged = self._choice(found)
        if staged and isinstance(stages_for(found, staged, self._wanted.distance), str):
            staged = Staged()
        for number, collective in enumerate(found.collectives):
            self._note(collective, self._said(found, number, staged))
        self._note_branches(found)
        if staged:
            self._write(self._module, found, staged)
            self.changed = True

    def _note_branches(self, found: Survey) -> None:
        for op in found.body.ops:
            if op.name in BRANCHES and found.body.communicates(op):
                text = "a collective in a branch stays in its iteration, with the branch"
                self.notes.append(note(text, op.location))

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
        copy = copy_module(self._module)
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
            mark(written.loop, TO_HOLD)
            if self._wanted.limit is None:
                keep_back(written.ends)

    def _pays(self, change: Callable[[Survey], object], extra: float | None = None) -> bool:
        """Whether `auto` predicts that a change costs neither time nor too much memory.

        `extra`: bytes that it may add where no limit is given; None for what the device has.
        """
        if self._wanted.direction != "auto":
            return True
        own = self._predicted(self._module)
        copy = copy_module(self._module)
        change(self._survey(copy))
        told = self._predicted(copy)
        most = self._wanted.most_bytes
        if extra is not None and self._wanted.limit is None:
            most = own.peak_bytes + extra
        fits = told.peak_bytes <= max(most, own.peak_bytes)
        return fits and told.ns <= own.ns

    def _predicted(self, module: ir.Module) -> Prediction:
        held = TO_HOLD if self._wanted.holds else None
        return predict(module, self._wanted.hardware, held)

    def _note(self, collective: Collective, text: str) -> None:
        self.notes.append(note(f"{collective.kind} {text}", collective.op.location))

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
        mark(op, SUNK)


def _unchanging(found: Survey) -> list[Move]:
    """The collectives that send the same in every iteration, with what they need."""
    return [move for move in found.ahead if move.ops and is_the_same(found.body, move.ops)]


def _hoist_all(found: Survey) -> None:
    """Hoists whatever sends the same in every iteration."""
    needed = {key_of(op) for move in _unchanging(found) for op in move.ops}
    hoist(found.body, [op for op in found.body.ops if key_of(op) in needed])

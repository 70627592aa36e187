"""Visits the loops of a module, inner ones first, and moves their collectives.

Each loop is rewritten in this order. Collectives that send the same in every iteration run before
it (`frame.hoist`). Those that can run once run after it (`sinking`). Of the others, some run in
other iterations (`stages`). The order matters: the fewer collectives are left in the body, the more
compute there is to hide each of them.

A rewrite replaces the loop. So it invalidates all handles to the loop, to its ops, and to the loops
around it. Therefore attributes mark the loops that are not done yet, those to be fenced at the end,
and the collectives that left a loop. Copies of a module, on which `auto` tries its choices, have
these marks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic, Severity, note, to_place
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import functions_by_name, ops_where
from stablehlo_tools.overlap.compilers.expected import Expected
from stablehlo_tools.transforms.parts.pipeline_collectives.frame import hoist, is_the_same
from stablehlo_tools.transforms.parts.pipeline_collectives.holding import hold_loop, keep_back
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    Move,
    loops_of,
    next_loop,
    survey_loop,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.once import (
    Lifted,
    best_lifting,
    forget_numbers,
    lift,
    liftable,
    number_collectives,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.shift_choice import (
    MotionBudget,
    Prediction,
    best_choice,
    possible,
    predict,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.sink_plan import (
    SUNK,
    Sinking,
    merge_sunk,
    sinkings,
    write_sinkings,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.stages import (
    StageChoice,
    StagedLoop,
    pass_barriers,
    stages_for,
)


@dataclass(frozen=True)
class PipeliningOptions:
    """The options of the pass; `limit` is in bytes, None if there is none.

    `as_compiled`: write no fences, and time choices as the compiler is expected to schedule them.
    `merges`: merge collectives of the same kind that left a loop into one message.
    """

    direction: str
    distance: int
    hardware: Hardware
    limit: float | None
    hold: bool
    as_compiled: bool = False
    merges: bool = True

    @property
    def most_bytes(self) -> float:
        """The bytes that a program may need on a device."""
        return self.hardware.memory_bytes if self.limit is None else self.limit

    @property
    def holds(self) -> bool:
        """True if fences are written; never for XLA:TPU, which ignores them."""
        return self.hold and not self.hardware.is_torus and not self.as_compiled

    def allows(self, direction: str) -> bool:
        """Returns True if collectives may move in a direction."""
        return self.direction in (direction, "auto")


TO_PIPELINE = "stablehlo_tools.to_pipeline"  # on the loops that are not done yet
TO_HOLD = "stablehlo_tools.to_hold"  # on the loops that are pipelined


def mark(op: ir.Operation, name: str) -> None:
    """Marks an op; copies of it have the mark too."""
    op.attributes[name] = ir.UnitAttr.get(op.context)


def remove_marks(module: ir.Module, name: str) -> list[ir.Operation]:
    """Removes a mark from all ops; returns those that had it, inner ones last."""
    marked = ops_where(module.operation, lambda op: name in op.attributes)
    for op in marked:
        del op.attributes[name]
    return marked


_NOT_ONCE = "no loop around it is known to repeat its operand, or to use its result only in a sum"
_SUNK_ON = {
    "sum": "on the sum of its operands",
    "last": "on the operand of the last iteration; the others are overwritten",
    "row sum": "on the sums of its operands, in rows",
    "batch": "on the operands of all iterations",
}
_SMALL = 1 << 22  # bytes: rows that `auto` lets a loop carry to its end
_HELD_IS_SAFER = 1.005  # a fenced program is preferred up to this ratio of expected times
_UNEXPECTED = 0.2  # of the exposed time: XLA exposes more, by the zoo's forward passes
_NO_GAIN = "it is predicted to save no time within the memory limit"


class OneLoop:
    """The rewriting of the next loop of a module that is not done."""

    def __init__(self, module: ir.Module, options: PipeliningOptions, facts: ModuleFacts) -> None:
        self._module = module
        self._options = options
        self._facts = facts
        self.notes: list[Diagnostic] = []
        self.changed = False
        self._not_sunk: list[str] = []  # why each collective of the body is not sunk
        self._as_it_is: LoopSurvey | None = None  # the loop, until it changes
        self._own: Prediction | None = None  # of the module, until it changes

    def run(self) -> None:
        """Rewrites the loop, kind by kind."""
        if self._options.allows("prefetch"):
            self._hoist()
        if self._options.allows("sink"):
            self._sink()
        # Moves collectives to iterations before or after their own.
        surveyed = self._current_survey()
        choice = self._choice(surveyed)
        # Moves that are possible alone may together need more trips than the loop has.
        if choice and isinstance(stages_for(surveyed, choice, self._options.distance), str):
            choice = StageChoice()
        for number, collective in enumerate(surveyed.collectives):
            self._note(collective, self._said(surveyed, number, choice))
        for op in surveyed.body.ops:
            if op.name in BRANCHES and surveyed.body.communicates(op):
                text = "a collective in a branch stays in its iteration, with the branch"
                self.notes.append(note(text, op.location))
        if choice:
            self._write(self._module, surveyed, choice)
            self._has_changed()
        loop = next_loop(self._module, TO_PIPELINE)
        if loop is not None:
            del loop.attributes[TO_PIPELINE]

    def _current_survey(self) -> LoopSurvey:
        """Returns the survey of the loop in the module; cached until the module changes."""
        if self._as_it_is is None:
            self._as_it_is = self._survey(self._module)
        return self._as_it_is

    def _has_changed(self) -> None:
        """Drops the cached survey and prediction after a rewrite."""
        self.changed = True
        self._as_it_is = self._own = None

    def _survey(self, module: ir.Module) -> LoopSurvey:
        """Surveys the loop in the module, or in a copy of it."""
        loop = next_loop(module, TO_PIPELINE)
        assert loop is not None, "the loop is marked until it is done"
        return survey_loop(loop, module, self._facts)

    def _hoist(self) -> None:
        surveyed = self._current_survey()
        moves = _unchanging(surveyed)
        if not moves or surveyed.fewest < 1 or not self._pays(_hoist_all):
            return
        for move in moves:
            self._note(move.collective, "runs once, before the loop: its operand never changes")
        _hoist_all(surveyed)
        self._has_changed()

    def _sink(self) -> None:
        """Sinks collectives after the loop."""
        surveyed = self._current_survey()
        plans = list(sinkings(surveyed).values())
        chosen = self._sunk_choice(plans)
        for collective, plan in zip(surveyed.collectives, plans, strict=True):
            if isinstance(plan, str):
                self._not_sunk.append(plan)
            elif plan.group in chosen:
                self._note(collective, f"runs once, after the loop: {_SUNK_ON[plan.way]}")
            else:
                self._not_sunk.append(_NO_GAIN)
        if chosen:
            _write_sunk(surveyed, chosen)
            self._has_changed()

    def _sunk_choice(self, plans: Sequence[Sinking | str]) -> frozenset[int]:
        """Returns the groups to sink: all, those without stacked rows, or none."""
        sunk = [plan for plan in plans if isinstance(plan, Sinking)]
        if self._options.direction == "sink":
            return frozenset(plan.group for plan in sunk)
        takes_rows = not self._options.holds  # held XLA:GPU hides small ones
        summed = [p for p in sunk if p.way in ("sum", "last")]
        batches = [p for p in sunk if p.way == "batch" and takes_rows]
        rows = [p for p in batches if p.extra_bytes is not None and p.extra_bytes <= _SMALL]
        for chosen in ([*summed, *rows], summed) if rows else (summed,):
            groups = frozenset(plan.group for plan in chosen)
            # The memory that sinking may add: operands, results, and twice the additional carries.
            added = sum(
                (plan.collective.bytes_in or 0)
                + (plan.collective.bytes_out or 0)
                + 2 * max(0, plan.extra_bytes or 0)
                for plan in chosen
            )
            if groups and self._pays(partial(_write_sunk, groups=groups), added):
                return groups
        return frozenset()

    def _choice(self, surveyed: LoopSurvey) -> StageChoice:
        whole = possible(surveyed)
        if self._options.direction == "prefetch":
            return StageChoice(ahead=whole.ahead)
        if self._options.direction == "delay":
            return StageChoice(late=whole.late)
        if self._options.direction in ("sink", "once") or not whole:
            return StageChoice()
        budget = MotionBudget(self._options.limit, self._options.distance, self._options.holds)
        return best_choice(surveyed, self._judge, budget)

    def _judge(self, choice: StageChoice) -> Prediction | None:
        """Predicts the program with a choice; None if the loop cannot have it or no fences hold
        it."""
        if choice:
            copy = copy_module(self._module)
            surveyed = self._survey(copy)
            if isinstance(stages_for(surveyed, choice, self._options.distance), str):
                return None
            self._write(copy, surveyed, choice)
            predicted = self._predict_run(copy)
        else:
            predicted = self._predicted_own()
        return predicted if predicted.holds else None

    def _write(self, module: ir.Module, surveyed: LoopSurvey, choice: StageChoice) -> None:
        """Writes a choice; the loop must be able to have it."""
        # Passing a barrier changes the body, so the survey is out of date.
        if pass_barriers(surveyed, choice):
            surveyed = self._survey(module)
        stages = stages_for(surveyed, choice, self._options.distance)
        assert not isinstance(stages, str), stages
        loop, ends = StagedLoop(surveyed.body, stages).write()
        if self._options.holds:
            mark(loop, TO_HOLD)
            if self._options.limit is None:
                keep_back(ends)

    def _pays(self, change: Callable[[LoopSurvey], object], extra: float | None = None) -> bool:
        """Returns True if `auto` predicts that a change costs neither time nor too much memory.

        `extra`: bytes that it may add if no limit is given; None allows the whole device.
        """
        if self._options.direction != "auto":
            return True
        own = self._predicted_own()
        copy = copy_module(self._module)
        change(self._survey(copy))
        predicted = self._predict_run(copy)
        most = self._options.most_bytes
        if extra is not None and self._options.limit is None:
            most = own.peak_bytes + extra
        fits = predicted.peak_bytes <= max(most, own.peak_bytes)
        return fits and predicted.ns <= own.ns

    def _predicted_own(self) -> Prediction:
        """Predicts the module without further changes; cached until it changes."""
        if self._own is None:
            self._own = self._predict_run(self._module)
        return self._own

    def _predict_run(self, module: ir.Module) -> Prediction:
        if self._options.as_compiled:
            run = expected_run(module, self._options.hardware)
            return Prediction(_weighted_ns(run), run.peak_bytes, holds=True)
        held = TO_HOLD if self._options.holds else None
        return predict(module, self._options.hardware, held)

    def _note(self, collective: Collective, text: str) -> None:
        self.notes.append(note(f"{collective.kind} {text}", collective.op.location))

    def _said(self, surveyed: LoopSurvey, number: int, choice: StageChoice) -> str:
        """Says where a collective runs, or why it stays."""
        distance = self._options.distance
        times = "one iteration" if distance == 1 else f"{distance} iterations"
        if number in choice.ahead:
            return f"is issued {times} ahead"
        if number in choice.late:
            return f"ends {times} late"
        return f"stays in its iteration: {'; '.join(self._reasons(surveyed, number))}"

    def _reasons(self, surveyed: LoopSurvey, number: int) -> Iterator[str]:
        """Yields why a collective stays, for each allowed direction."""
        one = frozenset({number})
        sides = {
            "prefetch": (surveyed.ahead[number], StageChoice(ahead=one)),
            "delay": (surveyed.late[number], StageChoice(late=one)),
        }
        for direction, (move, alone) in sides.items():
            if not self._options.allows(direction):
                continue
            reason = move.reason or stages_for(surveyed, alone, self._options.distance)
            if not isinstance(reason, str):
                reason = _NO_GAIN
            yield reason if self._options.direction != "auto" else f"{direction}: {reason}"
        if self._options.direction == "once":
            yield _NOT_ONCE
        if self._not_sunk:
            reason = self._not_sunk[number]
            yield reason if self._options.direction != "auto" else f"sink: {reason}"


def _write_sunk(surveyed: LoopSurvey, groups: frozenset[int]) -> None:
    """Sinks groups of collectives, and marks them."""
    plans = sinkings(surveyed).values()
    chosen = [p for p in plans if isinstance(p, Sinking) and p.group in groups]
    write_sinkings(surveyed.body, chosen)


def _unchanging(surveyed: LoopSurvey) -> list[Move]:
    """Returns the moves of collectives that send the same in every iteration."""
    return [move for move in surveyed.ahead if move.ops and is_the_same(surveyed.body, move.ops)]


def _hoist_all(surveyed: LoopSurvey) -> None:
    """Hoists all collectives that send the same in every iteration."""
    needed = {key_of(op) for move in _unchanging(surveyed) for op in move.ops}
    hoist(surveyed.body, [op for op in surveyed.body.ops if key_of(op) in needed])


def pipeline_loops(module: ir.Module, options: PipeliningOptions) -> LoopPipelining:
    """Rewrites the loops of a module that has no calls.

    `auto` tries four variants: with and without lifting out of several loops, and with fences or as
    the compiler is expected to schedule by itself. Returns the variant with the shortest expected
    time.
    """
    facts = ModuleFacts.from_module(module)
    number_collectives(module)
    if options.direction == "once":
        return _lift_then_pipeline(module, facts, options, liftable(module, facts))
    if options.direction != "auto":
        return _lift_then_pipeline(module, facts, options, [])
    found = best_lifting(module, facts, options.hardware, options.limit)
    tried: list[tuple[float, LoopPipelining]] = []
    for each in (options, replace(options, as_compiled=True)):
        for lifted in ([], found) if found else ([],):
            work = _lift_then_pipeline(copy_module(module), facts, each, lifted)
            ns = _weighted_ns(expected_run(work.module, options.hardware)) if work.changed else inf
            tried.append((ns if each.holds else ns * _HELD_IS_SAFER, work))
    return min(tried, key=lambda pair: pair[0])[1]


def is_better(draft: ir.Module, module: ir.Module, hardware: Hardware) -> bool:
    """Returns True if XLA is expected to run `draft` faster than `module`.

    Raises ToolError if a program cannot be timed.
    """
    own = _weighted_ns(expected_run(module, hardware))
    return _weighted_ns(expected_run(draft, hardware)) < own


def _weighted_ns(run: Expected) -> float:
    """Returns the ns that runs are compared by: XLA leaves more exposed than the model expects."""
    return run.contended_ns + _UNEXPECTED * run.exposed_ns


def _lift_then_pipeline(
    module: ir.Module, facts: ModuleFacts, options: PipeliningOptions, lifted: Sequence[Lifted]
) -> LoopPipelining:
    """Lifts the given collectives out of several loops, then rewrites each loop."""
    if lifted:
        lift(module, facts, frozenset(each.number for each in lifted))
    forget_numbers(module)
    work = LoopPipelining(module, options, bool(lifted), [each.note for each in lifted])
    work.run()
    return work


@dataclass
class LoopPipelining:
    """Rewrites the loops of a module that has no calls."""

    module: ir.Module
    options: PipeliningOptions
    changed: bool = False
    notes: list[Diagnostic] = field(default_factory=list[Diagnostic])

    def run(self) -> None:
        """Rewrites all loops that communicate."""
        facts = ModuleFacts.from_module(self.module)
        effects = Effects(functions_by_name(self.module))
        loops = loops_of(self.module)
        communicating = [loop for loop in loops if LoopBody(loop, effects).communicates(loop)]
        for loop in communicating:
            mark(loop, TO_PIPELINE)
        if not communicating and not self.notes:
            self.notes.append(_nothing_to_pipeline(self.module, len(loops)))
        while next_loop(self.module, TO_PIPELINE) is not None:
            one = OneLoop(self.module, self.options, facts)
            one.run()
            self.changed = self.changed or one.changed
            self.notes += one.notes
        # Sunk collectives are merged last: rewriting a loop around them would invalidate them.
        sunk: dict[ir.Block, list[ir.Operation]] = {}
        for op in remove_marks(self.module, SUNK):
            sunk.setdefault(op.block, []).append(op)
        for ops in sunk.values() if self.options.merges else ():
            merge_sunk(self.module, ops)
        for loop in reversed(remove_marks(self.module, TO_HOLD)):
            hold_loop(self.module, loop, self.options.hardware)


def _nothing_to_pipeline(module: ir.Module, loops: int) -> Diagnostic:
    """Returns the note for a program in which no loop communicates, with a remedy."""
    collectives = find_collectives(module)
    if not collectives:
        message = "nothing to pipeline: the program has no collective"
        return Diagnostic(Severity.NOTE, message, to_place(module.operation.location))
    has = "the program has no loop (its layers may be unrolled)"
    if loops:
        has = f"none of the program's {loops} loops has a collective"
    return Diagnostic(
        Severity.NOTE,
        f"no loop to pipeline: {has}, and its {len(collectives)} communicating ops run once each; "
        "the first is here. Run equal layers in a loop (jax.lax.scan over stacked weights) so that "
        "collectives can move between iterations; for a program without loops, use "
        "bucket-collectives and schedule-overlap",
        to_place(collectives[0].op.location),
    )

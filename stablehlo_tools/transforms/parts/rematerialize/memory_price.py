"""Finds the price of memory at which a program fits, and is fastest.

Each passage has a plan for each price of memory. Prices are tried on copies of the program. These
are timed as the compiler is expected to schedule them, because the cut sees single ops: it does not
know which ops become one kernel, or what hides a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.cleanup import drop_unused_carries, erase_unused, link_loops, trim_barriers
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, functions_by_name, ops_named
from stablehlo_tools.overlap.compilers.expected import Expected
from stablehlo_tools.transforms.parts.offload.fitting import offload_notes, offload_to_fit
from stablehlo_tools.transforms.parts.rematerialize.loop_constants import sink_broadcasts
from stablehlo_tools.transforms.parts.rematerialize.passages import (
    BlockPassage,
    LoopPassage,
    ResidualPassage,
    block_passage,
    blocks_of,
    loop_passages,
)
from stablehlo_tools.transforms.parts.rematerialize.problems import (
    RecomputationProblem,
    plan_notes,
    problem_of,
)
from stablehlo_tools.transforms.parts.rematerialize.recomputation_prices import (
    RecomputationPrices,
    number_ops,
    op_number,
)
from stablehlo_tools.transforms.parts.rematerialize.recomputation_writing import (
    BlockWriter,
    LoopWriter,
)
from stablehlo_tools.transforms.parts.rematerialize.residual_cut import RecomputationPlan

_CONTRACTIONS = ops_with(Trait.CONTRACTION)
_WORTH = 0.002  # of the time: the least that a rewrite has to save
_PATIENCE = 4  # settings in a row without improvement, after which the search ends
_LITTLE_PATIENCE = 2  # if the program is large, or if all fits: the first setting is fastest then
_STRIDES = (1, 2, 4)
_LARGE = 1500  # ops that can be repeated: beyond it, only some settings are tried, which differ
_NEAR = 0.2  # by at least this share of the most bytes that are kept
_CORNERS, _CORNERS_IF_LARGE = 64, 16


@dataclass(frozen=True, order=True)
class PlanSetting:
    """The parameters that decide all plans.

    `price`: of memory, in ns per byte. `stride`: which waists of blocks are kept (`problem_of`).
    `without`: values, by passage and position, that are not kept. `only_loops`: blocks do not
    change.
    """

    price: float
    stride: int = 1
    without: tuple[tuple[int, int], ...] = ()
    only_loops: bool = False

    def dropped_positions(self, passage: int) -> frozenset[int]:
        """Returns the positions of values that are not kept in a passage."""
        return frozenset(position for number, position in self.without if number == passage)


@dataclass(frozen=True)
class MemoryLevel:
    """A setting, and the bytes that its plans keep."""

    setting: PlanSetting
    kept_bytes: float


@dataclass(frozen=True)
class Tried:
    """A program with a setting, or unchanged, with its expected ns and peak bytes.

    `moved`: how many stacks are in the host's memory.
    """

    setting: PlanSetting | None
    module: ir.Module
    ns: float
    peak_bytes: float
    moved: int = 0

    def same_as(self, other: Tried) -> bool:
        """Returns True if both are the same choice for the same program."""
        return (self.setting, self.moved) == (other.setting, other.moved)


class RematerializationSearch:
    """Tries prices of memory on a program.

    `local` turns a copy into the program of one device. With `offload`, stacks that do not fit may
    be moved to the host's memory.
    """

    def __init__(
        self,
        module: ir.Module,
        prices: RecomputationPrices,
        hardware: Hardware,
        local: Callable[[ir.Module], ir.Module],
        *,
        offload: bool = False,
    ) -> None:
        self._module = module
        self._prices = prices
        self._hardware = hardware
        self._local = local
        self._offload = offload
        self._tried: dict[tuple[PlanSetting | None, float], Tried] = {}

    def settings(self) -> Iterator[list[MemoryLevel]]:
        """Yields the settings at which plans change, one list for each stride, most bytes kept
        first.

        For large programs, only settings whose kept bytes differ enough. If loops over layers are
        in a block with the loss, also settings that leave the block unchanged: recomputed logits
        may need more.
        """
        has_waists = any(isinstance(each, BlockPassage) and each.waists for each in self._whole)
        for stride in _STRIDES if has_waists else _STRIDES[:1]:
            yield self._of_stride(stride)
        if len({type(each) for each in self._whole}) > 1:
            yield self._of_stride(1, only_loops=True)

    @cached_property
    def _whole(self) -> list[ResidualPassage]:
        """The passages of the original program."""
        return [each for _, each in self._named]

    @cached_property
    def _named(self) -> list[tuple[_Name, ResidualPassage]]:
        return passages_of(self._module, self._prices)

    def apply_setting(
        self, setting: PlanSetting, notes: list[Diagnostic] | None = None
    ) -> ir.Module:
        """Returns a copy of the program with a setting; appends remarks on its plans to `notes`."""
        draft = copy_module(self._module)
        match self._named:
            case [(_, BlockPassage() as passage)]:
                blocks = zip(blocks_of(self._module), blocks_of(draft), strict=True)
                own = passage.backward[-1].block
                block = next(copied for each, copied in blocks if each == own)
                copied = passage.in_copy(block, Effects(functions_by_name(draft)))
            case _:
                copied = None
        loop_names = (name for name, each in self._named if isinstance(each, LoopPassage))
        loops = {number for name in loop_names for number in name}
        for number, (name, original) in enumerate(self._named):
            if setting.only_loops and isinstance(original, BlockPassage):
                continue
            # Read it now, because the passages before it rewrote ops of the draft.
            read = {} if copied else dict(passages_of(draft, self._prices, name, loops))
            passage = copied or read.get(name)
            if passage is None:
                continue
            problem = problem_of(passage, self._prices, setting.stride)
            plan = _plan(problem, number, setting)
            if notes is not None:
                notes += plan_notes(problem, plan, self._prices)
            kept = problem.kept(plan)
            with ir.Location.unknown(draft.context):
                if isinstance(passage, LoopPassage):
                    LoopWriter(passage, kept).run()
                elif isinstance(passage, BlockPassage):
                    BlockWriter(passage, frozenset(kept)).run()
            _erase_unused(draft)
        return draft

    @cached_property
    def _is_large(self) -> bool:
        return sum(len(each.makers) for each in self._whole) > _LARGE

    def _of_stride(self, stride: int, *, only_loops: bool = False) -> list[MemoryLevel]:
        problems = {
            number: problem_of(each, self._prices, stride)
            for number, each in enumerate(self._whole)
            if isinstance(each, LoopPassage) or not only_loops
        }
        most = _CORNERS_IF_LARGE if self._is_large else _CORNERS
        found: dict[PlanSetting, float] = {}
        for number, problem in problems.items():
            for plan in problem.choice.curve(most):
                without = tuple((number, position) for position in sorted(plan.without))
                setting = PlanSetting(plan.price, stride, without, only_loops)
                found[setting] = sum(_plan(p, n, setting).bytes for n, p in problems.items())
        near = _NEAR * max(found.values(), default=0.0) if self._is_large else 0.0
        apart: list[MemoryLevel] = []
        for setting in sorted(found, key=lambda setting: (-found[setting], setting)):
            if not apart or found[setting] < apart[-1].kept_bytes - near:
                apart.append(MemoryLevel(setting, found[setting]))
        return apart

    def fastest(self, module: ir.Module, safe: float) -> Tried:
        """Returns the fastest program with at most `safe` expected peak bytes.

        Returns `module` itself if no other is faster, and the smallest program if none fits.
        """
        best = self.try_setting(None, safe, module)
        all_fits = False
        for levels in self.settings():
            # Larger strides keep fewer waists, which only saves memory.
            if all_fits and levels and levels[0].setting.stride > 1:
                continue
            best = self._fastest_of(levels, safe, best)
            if self._is_large and best.peak_bytes <= safe:
                break
            all_fits = bool(levels) and self._fits(levels[0], safe)
        return best

    def _fits(self, level: MemoryLevel, safe: float) -> bool:
        return self.try_setting(level.setting, safe).peak_bytes <= safe

    def _fastest_of(self, levels: Sequence[MemoryLevel], safe: float, best: Tried) -> Tried:
        if not levels:
            return best
        waited, patience = 0, _PATIENCE
        if self._is_large or self._fits(levels[0], safe):
            patience = _LITTLE_PATIENCE
        # Finds the first setting that fits. Each trial shows how much is live besides the kept
        # values, so the search can skip settings.
        number = 0
        while number < len(levels) - patience:
            peak = self.try_setting(levels[number].setting, safe).peak_bytes
            if peak <= safe:
                break
            others = peak - levels[number].kept_bytes
            fitting = (n for n, level in enumerate(levels) if level.kept_bytes + others <= safe)
            number = max(number + 1, next(fitting, len(levels)))
        for level in levels[(max(0, min(number, len(levels) - patience))) :]:
            tried = self.try_setting(level.setting, safe)
            if best.peak_bytes > safe:
                is_better = tried.peak_bytes < best.peak_bytes
            else:
                is_better = tried.peak_bytes <= safe and tried.ns < (1.0 - _WORTH) * best.ns
            if is_better:
                best, waited = tried, 0
            else:
                waited += 1
            if waited == patience and best.peak_bytes <= safe:
                break
        return best

    def notes(self, tried: Tried) -> list[Diagnostic]:
        """Returns remarks on the plans of a setting, and on stacks in the host's memory."""
        notes: list[Diagnostic] = []
        setting = tried.setting
        draft = copy_module(self._module) if setting is None else self.apply_setting(setting, notes)
        return notes + offload_notes(draft, tried.moved)

    def try_setting(
        self, setting: PlanSetting | None, safe: float, module: ir.Module | None = None
    ) -> Tried:
        """Returns the program with a setting, expected time and memory; cached.

        `module`: the original program, if the setting is None. `safe`: the bytes that decide how
        many rows are moved to the host's memory.
        """
        key = (setting, safe if self._offload else 0.0)
        if key not in self._tried:
            inlined = self._module if setting is None else self.apply_setting(setting)
            module = inlined if module is None else module
            run = self._predict_run(module)
            self._tried[key] = Tried(setting, module, run.contended_ns, run.peak_bytes)
            if self._offload and run.peak_bytes > safe:
                # `offload_to_fit` finds rows only in programs with inlined calls.
                found = offload_to_fit(inlined, self._predict_run, safe)
                if found is not None and found.run.peak_bytes < run.peak_bytes:
                    run = found.run
                    self._tried[key] = Tried(
                        setting, found.module, run.contended_ns, run.peak_bytes, found.count
                    )
        return self._tried[key]

    def _predict_run(self, module: ir.Module) -> Expected:
        return expected_run(self._local(module), self._hardware)


def prepare(module: ir.Module) -> None:
    """Brings a program into the form that passages are read from, and numbers its ops."""
    inline_all_calls(module)
    fold_equal_branches(module)
    link_loops(module)
    sink_broadcasts(module)
    number_ops(module)


def _plan(problem: RecomputationProblem, number: int, setting: PlanSetting) -> RecomputationPlan:
    """Returns the plan of a setting for the passage with this number."""
    return problem.choice.cheapest(setting.price, setting.dropped_positions(number))


def _erase_unused(module: ir.Module) -> None:
    """Erases unused ops, loops that surely terminate, carries, and operands of barriers."""
    block = Function(entry_function(module)).body
    effects = Effects(functions_by_name(module))
    for loop in reversed(ops_named(block.owner.operation, {WHILE})):
        is_used = any(map(has_uses, loop.results))
        # A loop of unknown length may never end, which erasing it would change.
        if not is_used and constant_trips(loop) is not None and not effects.has_effect(loop):
            loop.erase()
    erase_unused(block)
    for inner in blocks_of(module):
        trim_barriers(inner)
    drop_unused_carries(block)


type _Name = tuple[int, int]  # the numbers of two loops; or of a block's parent op, and -1


def passages_of(
    module: ir.Module,
    prices: RecomputationPrices,
    only: _Name | None = None,
    layers: Set[int] = frozenset(),
) -> list[tuple[_Name, ResidualPassage]]:
    """Returns the passages of a program with numbered ops: blocks before the loops in them.

    `only`: the name of the one passage to read. `layers` are then the numbers of the loops of all
    passages.
    """
    effects = Effects(functions_by_name(module))
    blocks = blocks_of(module)
    loops: list[tuple[_Name, ResidualPassage]] = []
    for block in blocks:
        for passage in loop_passages(
            block, effects, lambda loop: not only or op_number(loop) in only
        ):
            name = op_number(passage.forward.loop), op_number(passage.backward.loop)
            loops.append((name, passage))
    numbers = layers if only else {number for name, _ in loops for number in name}
    inside = {
        loop.results[0]
        for loop in ops_named(module.operation, {WHILE})
        if loop.results and op_number(loop) in numbers
    }
    found: list[tuple[_Name, ResidualPassage]] = []
    for block in blocks:
        owner = block.owner.operation
        name = op_number(owner), -1
        is_layer = len(owner.results) > 0 and owner.results[0] in inside
        if (
            is_layer
            or (only and name != only)
            or not any(ops_named(view.operation, _CONTRACTIONS) for view in block.operations)
        ):
            continue
        passage = block_passage(block, effects, prices.bytes, inside)
        if passage is not None:
            found.append((name, passage))
    return found + loops

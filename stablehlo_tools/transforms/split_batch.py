"""Splits the batch of each device into parts, whose ops are next to each other in the text.

In tensor parallelism a layer waits for its collectives, while no other op of its batch can run.
With the batch in two parts, one part's compute can hide the other's collectives. This pass writes
the parts; `schedule-overlap` or the compiler orders them.

    %h = stablehlo.dot_general %x, %w                    // of tensor<8x64xf32>
    %y = "stablehlo.all_reduce"(%h)
    ==>
    %x0 = stablehlo.slice %x [0:4, 0:64]
    %x1 = stablehlo.slice %x [4:8, 0:64]
    %h0 = stablehlo.dot_general %x0, %w
    %h1 = stablehlo.dot_general %x1, %w
    %y0 = "stablehlo.all_reduce"(%h0)
    %y1 = "stablehlo.all_reduce"(%h1)
    %y = stablehlo.concatenate %y0, %y1, dim = 0

Preconditions:
  P1  There are at least two parts.
  P2  The work of one device is explicit: a manual computation, or a program for one device.
  P3  The program has no tokens: thread-tokens comes after this pass.
  P4  The arguments that `arguments` names have `dimension`, and the parts divide it on a device.
      Without `arguments` there is no `dimension`, and some dimension of some argument can be
      divided.
  P5  The batch is independent: no value computed from several samples at once is used together with
      samples again. Batch-norm, a softmax or a cumulative sum over the batch, a sort of tokens by
      expert, an auxiliary loss of the whole batch are refused by name. Counts that follow from
      integers alone (how many tokens are not padding) are allowed.

Guarantees: the signature stays. The same ops compute the values of samples, on fewer samples:
bitwise as before if the backend computes a row of a dot the same way for any number of rows. Sums
over the batch are sums of the parts' sums, in their own type. Maxima, minima and sums of integers
are exact.

Without `arguments`, the pass tries every dimension of every argument, and chooses the one that puts
the most work in parts. If none puts a collective in parts, or if XLA is expected to be as fast with
the whole, the program stays unchanged, with a warning. A second run splits the parts again. Calls
are inlined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.analysis.collectives import Channels, ModuleFacts
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph, MixingOp
from stablehlo_tools.analysis.dimension_propagation.seeds import (
    Seeds,
    SeedTrial,
    extend_trial,
    fewer_parts,
    find_seeds,
    no_dimension,
    seeds_text,
    sizes_undivided,
    try_seeds,
    why_undivided,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.analysis.tasks.graph import expected_run, module_task_graph
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, duration, note
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.platform_index import own_argument
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.all_parts import AllPartsWriter

_ANY_HARDWARE = "h100"  # bytes are the same on each


@dataclass(frozen=True)
class SplitBatchPass(Pass):
    """The batch of each device is in parts, so that one's compute can hide another's collectives.

    `parts`: the number of parts, consecutive pieces of equal size (default: 2). `arguments`: the
    numbers of the arguments that carry the batch, counted from 0 as in `main` (default: found by a
    search). `dimension`: the batch dimension of `arguments`. `join-mixed`: where samples are mixed,
    join the parts and go on, instead of refusing; the parts then wait for each other. `hardware`:
    the name or the file of the profile that times are predicted for. `against`: the program that
    the parts must be faster than: as XLA schedules it (`xla`), or none (`text`, and if `arguments`
    are given). `explain`: notes on the arguments that carry the batch, the ops in parts, and the
    memory before and after.
    """

    name: ClassVar[str] = "split-batch"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.SPLIT, ("parts=2 against=text", "parts=2 join-mixed against=text")
    )
    parts: int = 2
    arguments: tuple[int, ...] = ()
    dimension: int = 0
    join_mixed: bool = False
    hardware: str = "h100"
    against: Literal["xla", "text"] = "xla"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place; with `against=xla`, only if the parts should be faster."""
        hardware = load_hardware(self.hardware)
        if self.parts < 2:
            raise ToolError(
                f"split-batch: parts={self.parts} does not split the batch: use at least 2 (P1)",
                module.operation.location,
            )
        if self.dimension and not self.arguments:
            raise ToolError(
                f"split-batch: dimension={self.dimension} needs `arguments`, the numbers of the "
                "arguments that carry the batch (P4)",
                module.operation.location,
            )
        refuse_tokens(module, "split-batch", "P3")
        if self.against == "text" or self.arguments:
            self._split(module, diagnostics)
            return
        draft = copy_module(module)
        if not self._split(draft, diagnostics):
            return
        own, parts = (expected_run(each, hardware).contended_ns for each in (module, draft))
        if parts < own:
            take_over(module, draft)
            return
        diagnostics.warn(
            f"split-batch: not split, because XLA is expected to need {duration(parts)} for the "
            f"parts and {duration(own)} for the whole; `against=text` splits in any case",
            entry_function(module).location,
        )

    def _split(self, module: ir.Module, diagnostics: Diagnostics) -> bool:
        """Writes the parts. Returns True if there is anything to split."""
        if len(functions_by_name(module)) > 1:
            # Calls of a module that stays whole are not inlined.
            copy = copy_module(module)
            inline_all_calls(copy)
            if not self._choose_regions(copy):
                self._leave(module, diagnostics)
                return False
            inline_all_calls(module)
        chosen = self._choose_regions(module)
        if not chosen:
            self._leave(module, diagnostics)
            return False
        before = peak_bytes(module) if self.explain else 0.0
        if self.explain:
            diagnostics.collected += [self._account(c) for c in chosen]
        channels = Channels(module)
        with ir.Location.unknown(module.context):
            for each in chosen:
                AllPartsWriter(each.trial.dims, channels).run()
        if self.explain:
            after = peak_bytes(module)
            diagnostics.collected.append(
                note(
                    "split-batch: the peak of memory on a device, in textual order, goes "
                    f"from {before / 2**20:.1f} to {after / 2**20:.1f} MiB",
                    module.operation.location,
                )
            )
        return True

    def _choose_regions(self, module: ir.Module) -> list[Chosen]:
        """Returns the regions to rewrite. Raises ToolError."""
        regions = find_regions(module)
        chosen = choose(module, regions, self.arguments, self.dimension, self.parts)
        if not chosen:
            place = regions[0].op.location
            sizes = sizes_undivided(Graph.from_block(regions[0].block), self.parts)
            raise self._divisibility_error(regions[0]) or ToolError(
                f"no argument has a dimension that {self.parts} parts divide on a device (P4)",
                place,
                tuple(note(said, place) for said in sizes),
            )
        for each in chosen:
            if each.trial.dims.meetings and not self.join_mixed:
                undivided = None if self.arguments else self._divisibility_error(each.region)
                raise undivided or self._refusal(each)
        if self.arguments:
            return chosen
        return [each for each in chosen if each.trial.collectives]

    def _divisibility_error(self, region: Region) -> ToolError | None:
        """Returns the refusal of a batch that fewer parts divide, but so many do not; None if such
        a batch is not found."""
        graph = Graph.from_block(region.block)
        for fewer in fewer_parts(graph, self.parts):
            trial = find_seeds(graph, fewer)
            if trial is None or not trial.independent or not trial.collectives:
                continue
            said = why_undivided(graph, trial.seeds, self.parts, "parts")
            place = region.op.location
            return None if said is None else said.refusal("split-batch", "P4", place)
        return None

    def _refusal(self, chosen: Chosen) -> ToolError:
        """Returns the refusal that names the op that mixes samples, and the one that combines its
        result with samples again."""
        meeting: MixingOp = chosen.trial.dims.meetings[0]
        location = meeting.mixed.op.location
        seeds = seeds_text(chosen.trial)
        return ToolError(
            f"{meeting.mixed.name} mixes samples of the batch ({seeds}), and its result is used "
            "together with samples again: the parts would wait for each other (P5); join-mixed "
            "accepts that, `arguments` and `dimension` name another batch",
            location,
            (note("it meets samples again here", meeting.used.op.location),),
        )

    def _leave(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        diagnostics.warn(
            "split-batch: no collective carries a batch that could be split, so the program "
            "stays whole; naming `arguments` splits it in any case",
            entry_function(module).location,
        )

    def _account(self, chosen: Chosen) -> Diagnostic:
        trial = chosen.trial
        combined = sum(step.combine is not None for step in trial.dims.op_tilings.values())
        return note(
            f"split-batch: the batch is {seeds_text(trial)}; {len(trial.dims.op_tilings)} of "
            f"{len(trial.dims.graph.nodes)} ops run in {self.parts} parts, {trial.collectives} "
            f"collectives among them; {combined} results are combined from the parts",
            chosen.region.op.location,
        )


def peak_bytes(module: ir.Module) -> float:
    """Returns the most bytes alive at once, in textual order. Raises ToolError."""
    clock = Clock(load_hardware(_ANY_HARDWARE), ModuleFacts.from_module(module).grid.size)
    return memory_profile(module_task_graph(module, clock, "")).peak_bytes


@dataclass(frozen=True)
class Region:
    """A block that one device runs. `entries[i]` is the value of its argument i outside."""

    op: ir.Operation
    block: ir.Block
    entries: tuple[ir.Value, ...]


@dataclass(frozen=True)
class Chosen:
    """A region, and the batch in it."""

    region: Region
    trial: SeedTrial


def find_regions(module: ir.Module) -> list[Region]:
    """Returns the manual computations of `main`, or all of it if it is the program of one device.

    Raises ToolError if it is neither.
    """
    main = entry_function(module)
    block = Function(main).body
    manual = [op.operation for op in block.operations if op.operation.name == MANUAL_COMPUTATION]
    if manual:
        return [Region(op, ManualComputation(op).body, tuple(op.operands)) for op in manual]
    if is_per_device(module):
        return [Region(main, block, tuple(block.arguments))]
    raise ToolError(
        "the work of one device is not explicit: main itself has no manual computation and no "
        "collective; run partition first (P2)",
        main.location,
    )


def choose(
    module: ir.Module,
    regions: Sequence[Region],
    arguments: Sequence[int],
    dimension: int,
    parts: int,
) -> list[Chosen]:
    """Returns the batch in each region: as the arguments state, as earlier regions pass it on, or
    as a search finds it. Regions without a batch are left out. Raises ToolError for arguments that
    cannot be divided."""
    main = entry_function(module)
    given = {own_argument(main, number, "", "P4"): number for number in arguments}
    chosen: list[Chosen] = []
    for region in regions:
        graph = Graph.from_block(region.block)
        # A step of shard_map exports as two manual computations, with residuals between them.
        seeds = _handed_on(region, graph, chosen)
        for number, entry in zip(graph.root.arguments, region.entries, strict=True):
            if entry in given:
                seeds[number] = _argument_tiling(
                    graph, number, given[entry], dimension, parts, region
                )
        if not seeds and not given:
            trial = find_seeds(graph, parts)
        elif not seeds:
            trial = None
        else:
            trial = try_seeds(graph, seeds, parts)
            # Other arguments that the parts need pieces of, such as labels, are added.
            trial = trial if given else extend_trial(trial)
        if trial is not None:
            chosen.append(Chosen(region, trial))
    return chosen


def _argument_tiling(
    graph: Graph, number: int, argument: int, dimension: int, parts: int, region: Region
) -> DimTiling:
    missing = no_dimension(graph, number, dimension)
    if missing:
        raise ToolError(f"on a device {missing} (P4)", region.op.location)
    shape = graph.shape(number) or ()
    if not DimTiling(dimension).fits(shape, parts):
        raise ToolError(
            f"dimension {dimension} of argument {argument} has {shape[dimension]} elements on a "
            f"device, which {parts} parts do not divide (P4)",
            region.op.location,
        )
    return DimTiling(dimension)


def _handed_on(region: Region, graph: Graph, earlier: Sequence[Chosen]) -> Seeds:
    """Returns the tilings of arguments that are results, in parts, of an earlier region with the
    same sharding."""
    seeds: Seeds = {}
    for place, entry in enumerate(region.entries):
        maker = producer(entry)
        source = next((c for c in earlier if maker is not None and c.region.op == maker), None)
        if source is None:
            continue
        result = ir.OpResult(entry).result_number
        left = sharding_per_value(source.region.op.attributes["out_shardings"])[result]
        taken = sharding_per_value(region.op.attributes["in_shardings"])[place]
        dims = source.trial.dims
        layout = dims.tilings.get(dims.graph.root.returned[result])
        if layout is not None and left == taken:
            seeds[graph.root.arguments[place]] = layout
    return seeds

"""Expands one training step into a program for each pipeline rank, under any schedule.

First it finds or makes the loop over microbatches, and cuts the loops over layers in it at the
beginnings of stages. Each op gets a stage and a phase from its dependences. The phases become
functions. Each rank calls its functions in the order of its row of the schedule's table, with sends
and recvs in between.

Preconditions:
  P1  There is one loop over microbatches, which runs a known number of times. If a step has none,
      `microbatches` makes one (see accumulate-gradients).
  P2  Each carry of the loop is a counter, a constant, or a sum (a maximum, …; rows): no microbatch
      uses results of another one.
  P3  No op in the loop has side effects.
  P4  The loop has a backward: it computes gradients.
  P5  The forward can be cut into as many stages as the schedule has.
  P6  If several stages add to a sum, their contributions can be added up separately.
  P7  No stage needs a result of a later one.
  P8  `partition` accepts a program for several devices. Dimensions that its devices divide are not
      cut by layers. A mesh axis that ranks are laid along has as many devices as there are ranks,
      and the program has no code for single devices.
  P9  The schedule is of whole microbatches, whose activations stay on their devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath

from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, naming, size, warning
from stablehlo_tools.ir.cleanup import drop_unused_carries
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.grouped_products import hide_products, write_products
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import copy_referenced_symbols, entry_function, symbol_name
from stablehlo_tools.mpmd.manifest import (
    Manifest,
    ManifestEntry,
    ManifestPiece,
    ManifestStage,
    Rank,
    costs_of_stages,
    is_reserved,
    refusal,
)
from stablehlo_tools.mpmd.rank_set import argument_paths, digest_of, result_paths
from stablehlo_tools.mpmd.reading import read_rank, wiring
from stablehlo_tools.mpmd.staging.forward_ops import dissolve_named, forget_marks
from stablehlo_tools.mpmd.staging.loop_forms import carry_stacks, use_plain_forms
from stablehlo_tools.mpmd.staging.op_times import Weigher, total_ns
from stablehlo_tools.mpmd.staging.pipeline_axis import lay_along, usual_axis
from stablehlo_tools.mpmd.staging.stage_cuts import (
    Staged,
    own_loop,
    read_step,
    stage_step,
    useless_cut,
)
from stablehlo_tools.mpmd.writing.on_devices import OnDevices, RankDevices, take_off_devices
from stablehlo_tools.mpmd.writing.phases import hop, stage_costs
from stablehlo_tools.mpmd.writing.program_plan import RankPlan
from stablehlo_tools.mpmd.writing.rank import RankWriter, Written, pieces_of
from stablehlo_tools.schedules.catalogue import (
    Refusal,
    ScheduleCandidate,
    ScheduleComparison,
    build,
    candidate_of,
    entries,
    order,
)
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.named import MOST_CHUNKS, buildable
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, check_counts, unit_costs
from stablehlo_tools.schedules.table import Table, drop_idle_cells
from stablehlo_tools.schedules.table_simulator import peak_bytes, simulate
from stablehlo_tools.schedules.validator import check
from stablehlo_tools.transforms.accumulate_gradients import AccumulateGradientsPass
from stablehlo_tools.transforms.pipeline_collectives import communicate_once


@dataclass(frozen=True)
class ExpansionRequest:
    """A schedule of the catalogue over `ranks`, and the options of the expansion.

    `chunks` is the number of stages on each rank, if the schedule leaves it free. `microbatches` is
    for a step that has no loop over them. `given` is a schedule that replaces the catalogue's.
    `axis` is the mesh axis that the ranks are laid along: each rank is then a mesh of the other
    axes. Without it each rank is the whole mesh. With `per_microbatch`, each microbatch computes
    statistics of the batch for itself.

    Raises ToolError for counts that no schedule supports.
    """

    schedule: str
    ranks: int
    hardware: Hardware
    chunks: int | None = None
    microbatches: int | None = None
    given: Table | None = None
    axis: str | None = None
    per_microbatch: bool = False

    def __post_init__(self) -> None:
        check_counts(self.ranks, self.microbatches or 1, self.chunks)


@dataclass(frozen=True)
class PreparedStep:
    """A step that can be cut, as one device of a rank runs it, and the devices of a rank.

    `alone` is the time in seconds of the uncut step on one rank. `once` is True if collectives were
    moved out of the loop over microbatches. `told` says which values differ from the step's.
    """

    module: ir.Module
    devices: RankDevices
    alone: float
    once: bool
    told: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class TimedStages:
    """A step cut into stages, with their costs. `hop` is the time of a message in seconds."""

    staged: Staged
    stages: tuple[ManifestStage, ...]
    hop: float

    @cached_property
    def costs(self) -> Costs:
        """The costs by which schedules are built and timed."""
        return costs_of_stages(self.stages, self.hop)


@dataclass(frozen=True)
class Expansion:
    """The programs of the ranks and their manifest. `alone` is the time of the uncut step in
    seconds."""

    modules: tuple[ir.Module, ...]
    manifest: Manifest
    alone: float
    warnings: tuple[Diagnostic, ...]


def expand_mpmd(artifact: Artifact, request: ExpansionRequest) -> Expansion:
    """Returns the programs of the ranks. The artifact is not changed.

    Collectives with the same operands in every microbatch run once, if a device has room for the
    whole weights and gradients that this needs.

    Raises a located ToolError for a broken precondition, and for a schedule that does not exist for
    so many ranks, chunks and microbatches.
    """
    with naming(artifact.name):
        prepared = prepare(artifact, request)
        expansion = _expand_prepared(artifact, request, prepared)
        expansion = replace(expansion, warnings=(*prepared.told, *expansion.warnings))
        axis = "" if request.axis is not None else usual_axis(artifact.module, request.ranks)
        if axis:
            said = warning(
                f"expand-mpmd: each of the {request.ranks} ranks has all devices of the mesh, "
                f"including those along {axis!r}: --pipeline-axis {axis} places one rank at each "
                "position of that axis"
            )
            expansion = replace(expansion, warnings=(said, *expansion.warnings))
        needed = max(peak_bytes(expansion.manifest.table, expansion.manifest.costs))
        room = request.hardware.memory_bytes
        if not prepared.once or needed <= room:
            return expansion
        again = _expand_prepared(artifact, request, prepare(artifact, request, once=False))
        said = warning(
            "expand-mpmd: the collectives of weights and gradients stay in each microbatch: to "
            f"run them once, a rank would need {size(needed)} of {size(room)}"
        )
        return replace(again, warnings=(*again.warnings, said))


def _expand_prepared(
    artifact: Artifact, request: ExpansionRequest, prepared: PreparedStep
) -> Expansion:
    """Returns the programs of a prepared step."""
    loop = read_step(prepared.module).loop
    # Ranks cannot run schedules of sequence slices, or with copies to the host.
    given = request.given
    if given is None:
        sliced = any(each.sliced for each in entries() if each.name == request.schedule)
        why = refusal(request.schedule, sliced=sliced, offloads=False)
    else:
        why = refusal(given.name, sliced=given.sequence_slices > 1, offloads=given.offloads)
    if why is not None:
        instead = (request.schedule, "1f1b") if given is None else None
        raise ToolError(f"expand-mpmd: {why} (P9)", loop.op.location, instead=instead)
    microbatches = loop.trips
    # The costs of stages are known only after the cut, and the number of stages only after the
    # table is built. Unit costs are enough for the latter, unless the schedule is searched for.
    first = _table(request, microbatches, unit_costs(request.ranks))
    timed = time_stages(prepared, request, first.stages, splits=first.splits)
    table = _table(request, microbatches, timed.costs)
    if (table.stages, table.splits) != (first.stages, first.splits):
        # With these costs a search chose another placement.
        timed = time_stages(prepared, request, table.stages, splits=table.splits)
        table = _table(request, microbatches, timed.costs)
    if not table.communicates:
        table = with_communication(table, timed.costs)
    plan = RankPlan(timed.staged.step, timed.staged.assignment, drop_idle_cells(table))
    return _write_ranks(artifact, request, plan, timed, prepared)


def prepare(artifact: Artifact, request: ExpansionRequest, *, once: bool = True) -> PreparedStep:
    """Returns a copy of the program of one device of a rank, with a loop over microbatches.

    Calls are inlined. With `once`, collectives that can run once for all microbatches leave the
    loop. Raises a located ToolError if there is no such loop, or one with another number of
    microbatches.
    """
    module = artifact.copy().module
    wanted = request.microbatches
    with module.context, ir.Location.unknown():
        hide_products(module)
        inline_all_calls(module)
        names = {symbol_name(op) for op in module.body.operations}
        for name in sorted(filter(is_reserved, names)):
            free = next(
                new for n in range(len(names) + 1) if (new := f"own_{name}_{n}") not in names
            )
            names.add(free)
            ir.SymbolTable.replace_all_symbol_uses(name, free, module.operation)
            for op in module.body.operations:
                if symbol_name(op) == name:
                    op.operation.attributes["sym_name"] = ir.StringAttr.get(free)
        dissolve_named(module)
        if request.axis is not None:
            lay_along(module, request.axis, request.ranks)
        whole = copy_module(module) if wanted is not None else None
        _inline_products(module)
        told: tuple[Diagnostic, ...] = ()
        devices = take_off_devices(module)
        # The time without overlap between ops, as for the phases of stages.
        clock = Clock(request.hardware, devices.count)
        alone = total_ns(module_task_graph(module, clock, "expand-mpmd")) / 1e9
        use_plain_forms(module)
        if wanted is not None and whole is not None and not _has_own_loop(module, request):
            # Accumulate before the program is partitioned, as accumulate-gradients alone would. If
            # an axis divides no argument, the partitioned program selects samples by device number.
            told = _accumulate(whole, wanted, per_microbatch=request.per_microbatch)
            _inline_products(whole)
            module, devices = whole, take_off_devices(whole)
            use_plain_forms(module)
        is_once = once and devices.count > 1 and _communicate_once(module, request.hardware)
    return PreparedStep(module, devices, alone, is_once, told)


def _inline_products(module: ir.Module) -> None:
    """Inlines grouped products, which no partitioner divides."""
    write_products(module)
    inline_all_calls(module)


def _has_own_loop(module: ir.Module, request: ExpansionRequest) -> bool:
    """Returns True if the step has a loop over the requested number of microbatches.

    Returns False if it has none. Raises a located ToolError for a loop over another number.
    """
    own = own_loop(module, Weigher(request.hardware))
    if own is not None and own.trips != request.microbatches:
        raise ToolError(
            f"expand-mpmd: the step already has a loop over {own.trips} microbatches, and "
            f"--microbatches {request.microbatches} is for a step without one (P1)",
            own.op.location,
            instead=(f"microbatches={request.microbatches}", f"microbatches={own.trips}"),
        )
    return own is not None


def _accumulate(
    module: ir.Module, microbatches: int, *, per_microbatch: bool
) -> tuple[Diagnostic, ...]:
    """Makes the loop over microbatches; returns notes on values that are not the step's.

    If the pass needs its own option for the batch, which expand-mpmd lacks, the error has a hint.
    """
    diagnostics = Diagnostics()
    try:
        written = AccumulateGradientsPass(microbatches, per_microbatch=per_microbatch)
        written.accumulate(module, diagnostics, even=True)
    except ToolError as error:
        if "`arguments`" in error.diagnostic.message:
            passes = f"accumulate-gradients{{microbatches={microbatches} arguments=N}}"
            hint = (
                f"stablehlo-tools opt -p '{passes}' first, with N the number of the batch among "
                "the arguments; then this command without --microbatches"
            )
            error.diagnostic = replace(error.diagnostic, hint=hint)
        raise
    return tuple(diagnostics.collected) if per_microbatch else ()


def _communicate_once(module: ir.Module, hardware: Hardware) -> bool:
    """Gathers weights before the loop over microbatches, and reduces gradients after it.

    Each has its own collective, because they belong to different stages. Returns True if there are
    any.
    """
    changed = communicate_once(module, hardware)
    block = Function(entry_function(module)).body
    if changed:
        drop_unused_carries(block)
        carry_stacks(block)
    return changed


def time_stages(
    prepared: PreparedStep, request: ExpansionRequest, stages: int, *, splits: bool
) -> TimedStages:
    """Returns a copy of the step, cut into so many stages. `splits` is for a schedule with separate
    weight gradients. Raises a located ToolError."""
    module, devices = copy_module(prepared.module), prepared.devices
    with module.context, ir.Location.unknown():
        clock = Clock(request.hardware, devices.count)
        staged = stage_step(module, stages, clock, splits=splits)
    costs = stage_costs(staged.step, staged.assignment, request.hardware, devices.count)
    idle = next((each.stage for each in costs if not each.forward + each.backward), None)
    if idle is not None:
        raise ToolError(
            f"expand-mpmd: stage {idle} of {stages} has no work of a microbatch: use fewer ranks "
            "or chunks (P5)",
            staged.step.loop.op.location,
        )
    latency = hop(costs, request.hardware, devices.count, request.ranks)
    return TimedStages(staged, costs, latency)


def _table(request: ExpansionRequest, microbatches: int, costs: Costs) -> Table:
    if request.given is not None:
        return _check_given(request.given, request, microbatches)
    setting = ScheduleSetting(request.ranks, microbatches, costs, request.chunks)
    return build(request.schedule, setting)


def _check_given(table: Table, request: ExpansionRequest, microbatches: int) -> Table:
    """Returns a schedule from elsewhere. Raises ToolError if it is invalid or does not fit."""
    check(table)
    if not table.training:
        raise ToolError(f"expand-mpmd: {table.name} has no backward, but the step has one")
    asked = {"ranks": request.ranks, "microbatches": microbatches, "chunks": request.chunks}
    own = {
        "ranks": table.ranks,
        "microbatches": table.microbatches,
        "chunks": table.placement.chunks,
    }
    for what, count in asked.items():
        if count not in (None, own[what]):
            who = "the step has" if what == "microbatches" else f"--{what} is"
            raise ToolError(
                f"expand-mpmd: {table.name} is for {own[what]} {what}, but {who} {count}",
                instead=(f"{what}={count}", f"{what}={own[what]}"),
            )
    return table


def _write_ranks(
    artifact: Artifact,
    request: ExpansionRequest,
    plan: RankPlan,
    timed: TimedStages,
    prepared: PreparedStep,
) -> Expansion:
    alone, devices = prepared.alone, prepared.devices
    modules: list[ir.Module] = []
    written: list[Written] = []
    ranks: list[Rank] = []
    for rank in range(request.ranks):
        loop = plan.step.loop.op
        module = ir.Module.create(ir.Location.unknown(loop.context))
        i32 = ir.IntegerType.get_signless(32, loop.context)
        for name, count in (("mhlo.num_partitions", request.ranks), ("mhlo.num_replicas", 1)):
            module.operation.attributes[name] = ir.IntegerAttr.get(i32, count)
        modules.append(module)
        written.append(RankWriter(plan, rank, module, devices.count).write())
        copy_referenced_symbols(timed.staged.module.operation, module)
    shared = OnDevices(devices, request.ranks, len(plan.transfers))
    scheduled = {each.channel for each in plan.transfers if each.is_scheduled}
    for rank, (module, each) in enumerate(zip(modules, written, strict=True)):
        shared.write(module, rank, each.arguments, [part.rows for part in each.returned])
        forget_marks(module)
        with module.context:
            write_products(module)
        module.operation.verify()
        program = f"rank_{rank}.mlir"
        wired = wiring(read_rank(module, rank, program), scheduled)
        ranks.append(Rank(program, plan.table.placement.held[rank], wired))
    inputs, outputs = pieces_of(written)
    main = entry_function(artifact.module)
    main_type = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    stages = timed.stages
    manifest = Manifest(
        source=PurePath(artifact.name).name.encode(errors="replace").decode(),
        devices=devices.count,
        form="pairs",
        table=plan.table,
        ranks=tuple(ranks),
        stages=stages if plan.table.splits else tuple(replace(stage, kept=0.0) for stage in stages),
        hardware=request.hardware.name,
        hop=timed.hop,
        inputs=_entries(argument_paths(artifact), main_type.inputs, inputs),
        outputs=_entries(result_paths(artifact), main_type.results, outputs),
        transfers=tuple(plan.transfers),
        digest=digest_of(artifact),
    )
    makespan = simulate(plan.table, manifest.costs).makespan
    slow = useless_cut(timed.staged, makespan, alone, request.ranks, request.hardware)
    return Expansion(tuple(modules), manifest, alone, () if slow is None else (slow,))


def _entries(
    paths: Sequence[str], types: Sequence[ir.Type], pieces: dict[int, list[ManifestPiece]]
) -> tuple[ManifestEntry, ...]:
    return tuple(
        ManifestEntry(path, str(type_), tuple(pieces.get(number, ())))
        for number, (path, type_) in enumerate(zip(paths, types, strict=True))
    )


def compare_schedules(
    artifact: Artifact, request: ExpansionRequest, limit: float | None = None
) -> ScheduleComparison:
    """Returns the schedules of a training step, best first. Times are in seconds, memory in bytes.

    `limit` is the most bytes that a rank may hold. Raises a located ToolError for a step that
    cannot be cut for one stage on each rank.
    """
    with naming(artifact.name):
        candidates: dict[tuple[str, int], ScheduleCandidate] = {}
        why: dict[str, str] = {}
        setting: ScheduleSetting | None = None
        prepared = prepare(artifact, request)
        # The numbers of stages per rank for which schedules are tried.
        tried = [1, 2, MOST_CHUNKS] if request.chunks is None else [request.chunks]
        for chunks, splits in itertools.product(tried, (False, True)):
            try:
                timed = time_stages(prepared, request, chunks * request.ranks, splits=splits)
            except ToolError as error:
                if setting is None:
                    raise
                why.setdefault(f"{chunks} stages a rank", error.diagnostic.message)
                continue
            each = ScheduleSetting(
                request.ranks, timed.staged.step.loop.trips, timed.costs, request.chunks, limit
            )
            setting = setting or each
            for entry, built in buildable(each, MOST_CHUNKS):
                if entry.sliced:
                    said = refusal(entry.name, sliced=True, offloads=False) or ""
                    why[entry.name] = said.removeprefix(f"{entry.name} ")
                elif isinstance(built, ToolError):
                    why.setdefault(entry.name, built.diagnostic.message)
                elif (built.stages, built.splits) == (timed.costs.stages, splits):
                    candidates[entry.name, chunks] = candidate_of(entry.name, built, each)
    assert setting is not None, "one stage a rank is tried first"
    there = {name for name, _ in candidates}
    refusals = tuple(Refusal(name, reason) for name, reason in why.items() if name not in there)
    return ScheduleComparison(
        setting, tuple(sorted(candidates.values(), key=order)), refusals, None
    )

"""What each stage costs: times of its phases by the cost model, bytes by what it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.transfers import Transfer
from stablehlo_tools.ir.symbols import copy_referenced_symbols
from stablehlo_tools.mpmd.manifest import Stage
from stablehlo_tools.mpmd.staging.assignment import (
    Assignment,
    Value,
    Work,
    ends_of,
    run_as,
    staged_values,
)
from stablehlo_tools.mpmd.staging.op_times import total_ns
from stablehlo_tools.mpmd.staging.step import TrainingStep
from stablehlo_tools.mpmd.writing.fixed import Fixed
from stablehlo_tools.mpmd.writing.phases import Phase, Phases
from stablehlo_tools.schedules.table import Kind
from stablehlo_tools.transforms.parts.split_layers.marks import range_of

_SECONDS = 1e-9  # in a nanosecond
_GRADIENTS = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


def stage_costs(
    step: TrainingStep, assignment: Assignment, hardware: Hardware, devices: int
) -> tuple[Stage, ...]:
    """The stages, each timed on one of the devices of a rank."""
    values = staged_values(step, assignment)
    fixed = Fixed(step)
    clock = Clock(hardware, devices)
    times: dict[Work, float] = {}
    phases: dict[Work, Phase] = {}
    for split in (True, False):
        works = run_as(assignment, split=split)
        writer = Phases(step, assignment, works, ends_of(values, works), fixed)
        for work, phase in writer.of.items():
            phases[work] = phase
            if work not in times:
                times[work] = _seconds(writer, phase, step, clock)
    return tuple(
        _stage(stage, step, values, fixed, phases, times) for stage in range(assignment.stages)
    )


def hop(stages: Sequence[Stage], hardware: Hardware, devices: int, ranks: int) -> float:
    """Seconds that the largest message takes from a rank to the next; none where there is one."""
    if ranks == 1:
        return 0.0
    size = max((stage.message for stage in stages), default=0.0)
    pairs = tuple((device, device + devices) for device in range(devices))
    transfer = Transfer("collective_permute", size, pairs)
    return transfer_time(transfer, hardware, devices * ranks).ns * _SECONDS


def _seconds(writer: Phases, phase: Phase, step: TrainingStep, clock: Clock) -> float:
    """The time of a phase: its kernels one after the other, and its collectives."""
    if phase.is_empty:
        return 0.0
    context = step.loop.op.context
    with ir.Location.unknown(context):
        module = ir.Module.create()
        function = writer.write(phase, module.body)
        copy_referenced_symbols(_module_of(step.loop.op), module)
        ir.SymbolTable.set_symbol_name(function, "main")
        graph = module_task_graph(module, clock, phase.name)
    return total_ns(graph) * _SECONDS


def _module_of(op: ir.Operation) -> ir.Operation:
    outer = op
    while outer.parent is not None:
        outer = outer.parent.operation
    return outer


def _stage(
    stage: int,
    step: TrainingStep,
    values: Sequence[Value],
    fixed: Fixed,
    phases: dict[Work, Phase],
    times: dict[Work, float],
) -> Stage:
    own = [phase for work, phase in phases.items() if work.stage == stage]
    given = {key for phase in own for key in phase.fixed}
    sums = {carry for phase in own for carry in phase.accumulators}
    weights = sum(bytes_of(fixed.value(key)) for key in given)
    weights += sum(bytes_of(step.loop.op.results[carry]) for carry in sums)
    return Stage(
        stage=stage,
        what=_described(phases[Work(Kind.FORWARD, stage)]),
        forward=times[Work(Kind.FORWARD, stage)],
        input_gradient=times[Work(Kind.INPUT_GRADIENT, stage)],
        weight_gradient=times[Work(Kind.WEIGHT_GRADIENT, stage)],
        backward=times[Work(Kind.BACKWARD, stage)],
        activation=_bytes(step, (v for v in values if _is_kept(v, stage))),
        kept=_bytes(step, (v for v in values if _is_for_weights(v, stage))),
        weights=weights,
        message=_bytes(step, (v for v in values if _goes_up(v, stage))),
    )


def _is_kept(value: Value, stage: int) -> bool:
    """Whether a stage holds a value from its forward to its backward."""
    made, read = value.made, value.read
    if made.kind is not Kind.FORWARD or made.stage > stage:
        return False
    own = any(Work(kind, stage) in read for kind in _GRADIENTS)
    below = made.stage == stage and any(work.stage < stage for work in read)
    return own or below


def _is_for_weights(value: Value, stage: int) -> bool:
    """Whether a stage holds a value from its input gradient to its weight gradient."""
    return Work(Kind.WEIGHT_GRADIENT, stage) in value.read


def _goes_up(value: Value, stage: int) -> bool:
    above = value.stages_above()
    return bool(above) and value.made.stage <= stage < above[-1]


def _bytes(step: TrainingStep, values: Iterable[Value]) -> float:
    return sum(bytes_of(step.flow.values[value.number]) for value in values)


def _described(phase: Phase) -> str:
    """The forward of a stage, in words."""
    loops = [node.op for node in phase.nodes if range_of(node.op) is not None]
    words = [f"{len(phase.nodes)} ops"]
    words += [f"range {range_of(loop)} of a loop over layers" for loop in loops]
    return ", ".join(words)

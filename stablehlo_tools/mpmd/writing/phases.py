"""Writes the function of a phase, the work of a stage for one microbatch, and computes its costs.

    func.func private @stage_1_forward(%microbatch: tensor<i32>, <values of other phases>,
        <weights, and values prepared from them>, <accumulators>) -> (<values>, <accumulators>)

Times are those of the cost model for the function as written. Bytes are the values that a stage
keeps from one of its phases to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.layer_loops.linked_loops import range_of
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.dialect.names import CONVERT
from stablehlo_tools.ir.builder import Builder, barrier, element_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import copy_referenced_symbols
from stablehlo_tools.mpmd.manifest import ManifestStage, function_of
from stablehlo_tools.mpmd.staging.assignment import (
    Assignment,
    Ends,
    PhaseWork,
    StagedValue,
    ends_of,
    run_as,
    staged_values,
)
from stablehlo_tools.mpmd.staging.op_times import total_ns
from stablehlo_tools.mpmd.staging.step import TrainingStep
from stablehlo_tools.mpmd.writing.fixed import Fixed, Key
from stablehlo_tools.schedules.table import ActionKind

_SECONDS = 1e-9  # in a nanosecond
_GRADIENTS = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class PhaseFunction:
    """The function of a phase: its operands after the microbatch's number, and its results.

    They are values of the body, fixed values, and accumulators by their carry.
    """

    name: str
    work: PhaseWork
    takes: tuple[int, ...]
    fixed: tuple[Key, ...]
    accumulators: tuple[int, ...]
    gives: tuple[int, ...]
    nodes: tuple[Node, ...]
    links: tuple[tuple[int, Node], ...]  # each with its carry

    @property
    def is_empty(self) -> bool:
        """True if it computes nothing."""
        return not self.gives and not self.accumulators


def phases_of(
    step: TrainingStep,
    assignment: Assignment,
    works: dict[PhaseWork, PhaseWork],
    ends: dict[PhaseWork, Ends],
    fixed: Fixed,
) -> dict[PhaseWork, PhaseFunction]:
    """Returns the phases of a step."""
    nodes_of: dict[PhaseWork, list[Node]] = {work: [] for work in works.values()}
    for index in sorted(step.needed):
        nodes_of[works[assignment.of[index]]].append(step.flow.nodes[index])
    links_of: dict[PhaseWork, list[tuple[int, Node]]] = {work: [] for work in works.values()}
    for carry, links in zip(step.loop.accumulators, step.chains, strict=True):
        for link in links:
            links_of[works[assignment.of[link.index]]].append((carry, link))
    known: dict[int, frozenset[Key]] = {}

    def leaves(number: int) -> frozenset[Key]:
        """Returns the fixed values that are needed to write an invariant or a free value."""
        if number not in known:
            if number in step.invariant:
                found = fixed.leaves(fixed.key_in_body(number))
            elif number in step.counters:
                start = step.loop.op.operands[step.counters[number]]
                found = fixed.leaves(fixed.key_of(start))
            else:
                found = chain(*map(leaves, step.flow.maker[number].inputs))
            known[number] = frozenset(found)
        return known[number]

    phases: dict[PhaseWork, PhaseFunction] = {}
    for work, end in ends.items():
        nodes, links = nodes_of[work], links_of[work]
        needed: dict[Key, None] = {}
        for node in [*nodes, *(link for _, link in links)]:
            for number in node.inputs:
                if not step.is_staged(number):
                    needed.update(dict.fromkeys(sorted(leaves(number))))
        carries = tuple(dict.fromkeys(carry for carry, _ in links))
        name = function_of(work.kind, work.stage)
        phases[work] = PhaseFunction(
            name, work, end.takes, tuple(needed), carries, end.gives, tuple(nodes), tuple(links)
        )
    return phases


class StageWriter:
    """Writes the function of a phase."""

    def __init__(self, step: TrainingStep, fixed: Fixed, phase: PhaseFunction) -> None:
        self._step, self._fixed, self._phase = step, fixed, phase
        self._values: dict[int, ir.Value] = {}
        self._known: dict[Key, ir.Value] = {}

    def write(self, block: ir.Block) -> ir.Operation:
        """Writes the function at the end of a module's block. Returns it."""
        phase, step = self._phase, self._step
        place = step.loop.op.location
        i32 = ir.IntegerType.get_signless(32, place.context)
        taken: list[ir.Type] = [ir.RankedTensorType.get([], i32, loc=place)]
        taken += [step.flow.values[number].type for number in phase.takes]
        taken += [self._fixed.value(key).type for key in phase.fixed]
        sums = [step.loop.op.results[carry].type for carry in phase.accumulators]
        given = [step.flow.values[number].type for number in phase.gives]
        function = private_function(phase.name, [*taken, *sums], [*given, *sums], block, place)
        body = Function(function).body
        arguments: list[ir.Value] = list(body.arguments)
        self._microbatch: ir.Value = arguments[0]
        behind = 1 + len(phase.takes)
        self._values.update(zip(phase.takes, arguments[1:behind], strict=True))
        self._known.update(
            zip(phase.fixed, arguments[behind : behind + len(phase.fixed)], strict=True)
        )
        totals = dict(zip(phase.accumulators, arguments[behind + len(phase.fixed) :], strict=True))
        self._point = ir.InsertionPoint(body)
        for node in phase.nodes:
            self._node(node)
        for carry, link in phase.links:
            totals[carry] = self._link(carry, link, totals[carry])
        returned = [self._values[number] for number in phase.gives]
        returned += isolate_conversions(
            [totals[carry] for carry in phase.accumulators], self._point
        )
        ir.Operation.create("func.return", operands=returned, loc=place, ip=self._point)
        return function

    def _node(self, node: Node) -> None:
        values = self._step.flow.values
        stand_ins = {values[number]: self._value(number) for number in node.inputs}
        copy = copy_with(node.op, stand_ins, self._point)
        self._values.update(zip(node.results, copy.results, strict=True))

    def _link(self, carry: int, link: Node, total: ir.Value) -> ir.Value:
        values = self._step.flow.values
        stand_ins = {values[number]: self._value(number) for number in link.inputs}
        place = next(
            each.place
            for each in self._step.loop.accumulators[carry].links
            if self._step.flow.numbers[each.op.results[0]] in link.results
        )
        stand_ins[link.op.operands[place]] = total
        return copy_with(link.op, stand_ins, self._point).results[0]

    def _value(self, number: int) -> ir.Value:
        """Returns the copy of a body's value. Invariant and free values are written on first
        use."""
        known = self._values.get(number)
        if known is not None:
            return known
        if number in self._step.invariant:
            known = self._fixed.write(self._fixed.key_in_body(number), self._known, self._point)
            self._values[number] = known
        elif number in self._step.counters:
            known = self._values[number] = self._counter(number)
        else:
            self._node(self._step.flow.maker[number])
            known = self._values[number]
        return known

    def _counter(self, number: int) -> ir.Value:
        """Returns start + step * microbatch, in the type of the counter."""
        loop = self._step.loop
        carry = self._step.counters[number]
        initial = loop.op.operands[carry]
        start = self._fixed.write(self._fixed.key_of(initial), self._known, self._point)
        build = Builder(self._point, loop.op.location)
        count = build.convert(self._microbatch, element_of(initial))
        stride = build.splat(loop.counters[carry], [], element_of(initial))
        return build.same("add", start, build.same("multiply", count, stride))


def isolate_conversions(values: list[ir.Value], point: ir.InsertionPoint) -> list[ir.Value]:
    """Returns the values, with a barrier after each conversion.

    Without it a compiler could move the conversion to the other end of the message. The two ends
    would then differ in type.
    """
    makers = map(producer, values)
    return [
        add_barrier(value, point) if maker is not None and maker.name == CONVERT else value
        for value, maker in zip(values, makers, strict=True)
    ]


def add_barrier(value: ir.Value, point: ir.InsertionPoint) -> ir.Value:
    """Returns a value after a barrier, so that its sender cannot absorb a later conversion."""
    return barrier([value], point, value.location).results[0]


def private_function(
    name: str, taken: list[ir.Type], given: list[ir.Type], block: ir.Block, place: ir.Location
) -> ir.Operation:
    """Returns a new private function with an empty block, at the end of a module's block."""
    function = ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get(name, place.context),
            "sym_visibility": ir.StringAttr.get("private", place.context),
            "function_type": ir.TypeAttr.get(
                ir.FunctionType.get(taken, given, place.context), place.context
            ),
        },
        regions=1,
        loc=place,
        ip=ir.InsertionPoint(block),
    )
    function.regions[0].blocks.append(*taken, arg_locs=[place] * len(taken))
    return function


def stage_costs(
    step: TrainingStep, assignment: Assignment, hardware: Hardware, devices: int
) -> tuple[ManifestStage, ...]:
    """Returns the stages, each timed on one of the devices of a rank."""
    values = staged_values(step, assignment)
    fixed = Fixed(step)
    clock = Clock(hardware, devices)
    times: dict[PhaseWork, float] = {}
    phases: dict[PhaseWork, PhaseFunction] = {}
    for split in (True, False):
        works = run_as(assignment, split=split)
        made = phases_of(step, assignment, works, ends_of(values, works), fixed)
        for work, phase in made.items():
            phases[work] = phase
            if work not in times:
                times[work] = _seconds(step, fixed, phase, clock)
    return tuple(
        _stage(stage, step, values, fixed, phases, times) for stage in range(assignment.stages)
    )


def hop(stages: Sequence[ManifestStage], hardware: Hardware, devices: int, ranks: int) -> float:
    """Returns the seconds of the largest message to the next rank; 0 if there is one rank."""
    if ranks == 1:
        return 0.0
    size = max((stage.message for stage in stages), default=0.0)
    pairs = tuple((device, device + devices) for device in range(devices))
    transfer = DeviceTransfer("collective_permute", size, pairs)
    return transfer_time(transfer, hardware, devices * ranks).ns * _SECONDS


def _seconds(step: TrainingStep, fixed: Fixed, phase: PhaseFunction, clock: Clock) -> float:
    """Returns the seconds of a phase: its kernels and collectives, one after the other."""
    if phase.is_empty:
        return 0.0
    context = step.loop.op.context
    with ir.Location.unknown(context):
        module = ir.Module.create()
        function = StageWriter(step, fixed, phase).write(module.body)
        outer = step.loop.op
        while outer.parent is not None:
            outer = outer.parent.operation
        copy_referenced_symbols(outer, module)
        ir.SymbolTable.set_symbol_name(function, "main")
        graph = module_task_graph(module, clock, phase.name)
    return total_ns(graph) * _SECONDS


def _stage(
    stage: int,
    step: TrainingStep,
    values: Sequence[StagedValue],
    fixed: Fixed,
    phases: dict[PhaseWork, PhaseFunction],
    times: dict[PhaseWork, float],
) -> ManifestStage:
    own = [phase for work, phase in phases.items() if work.stage == stage]
    given = {key for phase in own for key in phase.fixed}
    sums = {carry for phase in own for carry in phase.accumulators}
    weights = sum(bytes_of(fixed.value(key)) for key in given)
    weights += sum(bytes_of(step.loop.op.results[carry]) for carry in sums)
    # the forward of a stage, in words
    phase = phases[PhaseWork(ActionKind.FORWARD, stage)]
    loops = [node.op for node in phase.nodes if range_of(node.op) is not None]
    words = [f"{len(phase.nodes)} ops"]
    words += [f"range {range_of(loop)} of a loop over layers" for loop in loops]
    return ManifestStage(
        stage=stage,
        what=", ".join(words),
        forward=times[PhaseWork(ActionKind.FORWARD, stage)],
        input_gradient=times[PhaseWork(ActionKind.INPUT_GRADIENT, stage)],
        weight_gradient=times[PhaseWork(ActionKind.WEIGHT_GRADIENT, stage)],
        backward=times[PhaseWork(ActionKind.BACKWARD, stage)],
        activation=_bytes(step, (v for v in values if _is_kept(v, stage))),
        kept=_bytes(
            step, (v for v in values if PhaseWork(ActionKind.WEIGHT_GRADIENT, stage) in v.read)
        ),
        weights=weights,
        message=_bytes(
            step,
            (
                value
                for value in values
                if (above := value.stages_above()) and value.made.stage <= stage < above[-1]
            ),
        ),
    )


def _is_kept(value: StagedValue, stage: int) -> bool:
    """Returns True if a stage holds a value from its forward to its backward."""
    made, read = value.made, value.read
    if made.kind is not ActionKind.FORWARD or made.stage > stage:
        return False
    own = any(PhaseWork(kind, stage) in read for kind in _GRADIENTS)
    below = made.stage == stage and any(work.stage < stage for work in read)
    return own or below


def _bytes(step: TrainingStep, values: Iterable[StagedValue]) -> float:
    return sum(bytes_of(step.flow.values[value.number]) for value in values)

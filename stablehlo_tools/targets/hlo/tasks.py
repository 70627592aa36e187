"""Scheduled HLO text as a task graph: the work of one device, in issue order.

A fusion is one kernel, and a `while` is a loop task with its body. A `conditional` is replaced by
its most expensive branch, and a `call` is inlined. A collective in any form that `async_forms`
lists is a start and a wait. So are copies that XLA:TPU prefetches, on a stream "dma", and kernels
that XLA:GPU runs asynchronously, on a stream "async".

Storages follow XLA's buffers. Tuples, bitcasts and loops keep the buffers of their operands, and
updates write in place. A computation writes its results to the buffers that the caller provides
(donated inputs, a loop's tuple). Only device memory counts: arrays in XLA:TPU's vector memory have
0 bytes. Results that are not donated are allocated from the start, as the runtimes do: they are
inputs named "result".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stablehlo_tools.cost.clock import Clock, Measured
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import WorkKind
from stablehlo_tools.hlo_input.async_forms import ISSUED, AsyncPhase, is_issued
from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.hlo_input.shapes import Array
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind, TaskLoop
from stablehlo_tools.targets.hlo.hlo_collectives import Fused, fused_collectives, issued_transfer
from stablehlo_tools.targets.hlo.hlo_loops import (
    after_loop,
    carries,
    length,
    mean_runs,
    pair_waits,
    trip_count,
)
from stablehlo_tools.targets.hlo.hlo_task_graph import (
    ArrayLeaf,
    Given,
    GraphBuilder,
    Path,
    Value,
    element,
    paths,
    rebuilt,
    storages_of,
    tasks_of,
    value_of_shape,
)
from stablehlo_tools.targets.hlo.issue import HOST, Issuer
from stablehlo_tools.targets.hlo.module import HloComputation, HloModule, parse_module
from stablehlo_tools.targets.hlo.work import FREE, aliases, describe_callee, homes, work, written_by

_NOTHING = {"constant", "partition-id", "replica-id", "after-all", "create-token"}
_SAME = {"bitcast", "optimization-barrier", "opt-barrier", "add-dependency", "domain"}
_ALLOCATING = ("AllocateBuffer", "CreateBuffer")
_WHOLE: Path = ()


@dataclass
class ScheduleReader:
    """Reads one computation at one place of the schedule.

    `arguments` are the values of its parameters. `placed` maps instructions to the existing
    storages that they write parts of their results to.
    """

    module: HloModule
    clock: Clock
    builder: GraphBuilder
    computation: HloComputation
    arguments: list[Value]
    placed: dict[str, Given] = field(default_factory=dict[str, Given])

    def __post_init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._issuer = Issuer(self.module, self.clock, self.builder, self.computation)

    def read(self) -> Value:
        """Adds the tasks of the computation and returns its result. Raises ToolError."""
        for instruction in self.computation.instructions:
            self._values[instruction.name] = self._value(instruction)
        return self._values[self.computation.root.name]

    def _value(self, instruction: HloInstruction) -> Value:
        opcode = instruction.opcode
        if opcode == "parameter":
            return self.arguments[int(instruction.literal)]
        if opcode in _NOTHING:
            return ArrayLeaf()
        operands = [self._values[name] for name in instruction.operands]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            part = element(operands[0], instruction.numbers("index"))
            return operands[0] if part is None else part
        if opcode in _SAME or opcode == "async-update":
            return operands[0]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._dearest(instruction, operands[1:])
        if opcode == "call":
            return self._inline_call(
                self.module.called_computation(instruction, "to_apply"), operands
            )
        if opcode.endswith("-done"):
            return self._issuer.done(instruction, operands[0])
        given = self._existing_storages(instruction, operands)
        if opcode.endswith("-start"):
            return self._issuer.start(instruction, operands, given)
        if opcode in ISSUED:
            flying = self._issuer.collective(instruction, operands, given)
            if opcode in ("send", "recv"):
                return flying
            return self._issuer.wait(instruction, flying, instruction.result)
        if opcode == "fusion" and (parts := fused_collectives(instruction, self.module)):
            return self._communicating(instruction, operands, parts)
        return self._kernel(instruction, operands)

    def _kernel(
        self, instruction: HloInstruction, operands: list[Value], after: tuple[int, ...] = ()
    ) -> Value:
        """Adds a kernel, or an instruction without time: a view or an allocation."""
        if instruction.opcode in HOST:
            _, ns = self._issuer.time_host_transfer(instruction)
            deps = tasks_of(*operands)
            return self.builder.produce(
                TaskKind.COMPUTE, instruction, instruction.result, {}, ns=ns, deps=deps
            )
        done = work(instruction, self.computation, self.module)
        if done is FREE and len(operands) == 1:
            return operands[0]
        given = self._existing_storages(instruction, operands)
        if done is FREE and not instruction.target.startswith(_ALLOCATING):
            given = {_WHOLE: storages_of(*operands)}
        ns = 0.0
        if done is not FREE:
            if self._issuer.touches_host(instruction):
                _, ns = self._issuer.between_memories(instruction)
            else:
                ns = self.clock.kernel(done, self._issuer.names(instruction))
        return self.builder.produce(
            TaskKind.VIEW if done is FREE else TaskKind.COMPUTE,
            instruction,
            instruction.result,
            given,
            ns=ns,
            shares=self.clock.shares(done),
            deps=tasks_of(*operands) + after,
            by_bytes=describe_callee(instruction) if done.kind is WorkKind.OTHER else "",
        )

    def _existing_storages(self, instruction: HloInstruction, operands: list[Value]) -> Given:
        """Returns the existing storages of parts of a result, which are not allocated for it.

        The result of a start is that of its done.
        """
        named = [instruction.name]
        if instruction.opcode.endswith("-start"):
            named = [user.name for user in self.computation.users.get(instruction.name, [])]
        given = dict(next((self.placed[n] for n in named if n in self.placed), {}))
        for path, (number, inside) in aliases(instruction, self.module).items():
            part = element(operands[number], inside)
            if part is not None:
                given[path] = storages_of(part)
        return given

    def _communicating(
        self, fusion: HloInstruction, operands: list[Value], parts: list[Fused]
    ) -> Value:
        """Adds a fusion with collectives; they come before or after its compute."""
        rest = work(fusion, self.computation, self.module)
        scattered = all(
            part.phase is AsyncPhase.SYNC
            and issued_transfer(part.collective, part.computation, self.module).transfer.kind
            == "reduce_scatter"
            for part in parts
        )
        computes = bool(rest.matmuls or rest.bytes) and not scattered
        early = [part for part in parts if part.early or not computes]
        value: Value = ArrayLeaf()
        made: tuple[int, ...] = ()
        for part in early:
            alone = not computes and part is early[-1]
            shape = fusion.result if alone else part.collective.result
            value = self._issuer.issue_fusion(fusion, part, operands, shape)
            made += tasks_of(value)
        if computes:
            value = self._kernel(fusion, operands, made)
        for part in parts:
            if part not in early:
                self._issuer.issue_fusion(fusion, part, [value], part.collective.result)
        return value

    def _inline_call(self, called: HloComputation, arguments: list[Value]) -> Value:
        reader = ScheduleReader(self.module, self.clock, self.builder, called, arguments)
        # Shared, because a loop around this pairs the waits of its whole body.
        reader._issuer.unpaired = self._issuer.unpaired
        return reader.read()

    def _dearest(self, instruction: HloInstruction, operands: list[Value]) -> Value:
        """Reads the branch with the longest time in place of the conditional."""
        names = instruction.branches
        if not names or len(operands) != len(names):
            raise instruction.error("the numbers of its branches and operands differ")
        branches = [self.module.computation(name, instruction) for name in names]
        costs: list[float] = []
        # Each branch is timed in a graph of its own; only the chosen one is added.
        for branch in branches:
            builder = GraphBuilder(self.module)
            arguments = [builder.inputs(p, persistent=False) for p in branch.parameters]
            ScheduleReader(self.module, self.clock, builder, branch, arguments).read()
            costs.append(length(builder.graph()))
        chosen = costs.index(max(costs))
        share = mean_runs(instruction)
        with self.builder.at_times(1.0 if share is None else share):
            return self._inline_call(branches[chosen], [operands[chosen]])

    def _loop(self, instruction: HloInstruction, initial: Value) -> Value:
        """Adds a loop task. The body's inputs use storages around it; its results reuse them."""
        trips = trip_count(instruction, self.computation, self.module)
        body = self.module.called_computation(instruction, "body")
        condition = self.module.called_computation(instruction, "condition")
        builder = GraphBuilder(self.module)
        argument = rebuilt(
            builder.inputs(body.parameters[0], persistent=False),
            lambda path, leaf: replace(leaf, carried=path),
        )
        inputs = dict(paths(argument))
        placed = homes(body, {path: leaf.storages for path, leaf in inputs.items()}, self.module)
        reader = ScheduleReader(self.module, self.clock, builder, body, [argument], placed)
        result = reader.read()
        # With a known count, a condition without collectives is only a comparison, with no time.
        communicates = any(
            is_issued(inner) or any(self.module.expand(inner, lambda each: not is_issued(each)))
            for inner in condition.instructions
        )
        if trips is None or communicates:
            reader._inline_call(condition, [result])
        last = dict(paths(result))
        carried = pair_waits(instruction, builder, reader._issuer.unpaired, result)
        first = dict(paths(initial))
        value = self.builder.produce(
            TaskKind.LOOP,
            instruction,
            instruction.result,
            {path: leaf.storages for path, leaf in first.items()},
            deps=tasks_of(initial),
            loop=TaskLoop.from_trips(
                builder.graph(), trips, mean_runs(instruction), carried, carries(inputs, last)
            ),
        )
        return after_loop(value, first, inputs, last)


# Results of these are not traced to the instruction that writes them; constants have no task.
_OPENED = frozenset({"call", "conditional", "constant"})


def hlo_task_graph(
    text: str,
    hardware: Hardware,
    devices: int,
    measured: Measured | None = None,
    *,
    one_stream: bool = False,
) -> TaskGraph:
    """Returns the task graph of a scheduled module on one of `devices` devices.

    `measured` times, by an instruction's name, op_name or source line, override the model's.
    `one_stream`: collectives of a communication domain run one after the other, whatever their
    links, see `CompilerOptions.one_stream`. Raises ToolError if the text is not a scheduled module
    or, naming the instruction, if the time of an instruction is not known.
    """
    module = parse_module(text)
    clock = Clock(hardware, devices, measured)
    builder = GraphBuilder(module)
    entry = module.entry
    # Inputs that are donated do not persist.
    returned: dict[int, list[Path]] = {}
    for number, path in module.donated.values():
        returned.setdefault(number, []).append(path)
    arguments = [
        builder.inputs(parameter, persistent=True, returned=returned.get(number, []))
        for number, parameter in enumerate(entry.parameters)
    ]
    # The parts of the result that reuse the buffer of an input.
    donated: dict[Path, tuple[int, ...]] = {}
    for output, (number, path) in module.donated.items():
        given = element(arguments[number], path) if number < len(arguments) else None
        if isinstance(given, ArrayLeaf):
            donated[output] = given.storages
    places = _results(module, builder, donated)
    placed = homes(entry, places, module)
    result = ScheduleReader(module, clock, builder, entry, arguments, placed).read()
    builder.add(TaskKind.OUTPUT, None, deps=tasks_of(result), name="output", op="output")
    graph = builder.graph()
    return _on_one_stream(graph) if one_stream else graph


def _on_one_stream(graph: TaskGraph) -> TaskGraph:
    """The graph with all collectives of a domain on one stream."""

    def assign_stream(task: Task) -> Task:
        if task.loop is not None:
            return replace(task, loop=replace(task.loop, body=_on_one_stream(task.loop.body)))
        sent = task.communication
        if sent is None or not sent.links:
            return task
        stream = f"collectives {sent.domain}".rstrip()
        return replace(task, communication=replace(sent, stream=stream))

    return replace(graph, tasks=tuple(map(assign_stream, graph.tasks)))


def _results(module: HloModule, builder: GraphBuilder, donated: Given) -> Given:
    """Returns the storages of the parts of the result: those of donated inputs, else new ones.

    The runtime allocates the latter before the program begins.
    """
    places = dict(donated)

    def place(array: Array, path: Path) -> Value:
        source = written_by(module.entry, path, module)
        if path not in donated and source is not None and source[0].opcode not in _OPENED:
            places[path] = builder.result(array, path)
        return ArrayLeaf()

    value_of_shape(module.entry.root.result, place)
    return places

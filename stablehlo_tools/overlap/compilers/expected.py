"""Predicts the time of a program as XLA schedules it, without the compiler.

For each block, inner loops first: collectives are rewritten as XLA does
(`cost.emitted_collectives`) and combined (`combining`). Then the block is sorted like the
latency-hiding scheduler does (`latency_hiding`) and timed. A loop lasts the sum of its iterations,
because XLA moves no op from one to another. Not modelled: XLA:GPU makes all collectives
synchronous if a program needs more memory than the device has.

python/benchmarks/passes_compiled.py compares the predictions with the compilers' schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stablehlo_tools.cost.contention import contention
from stablehlo_tools.cost.emitted_collectives import CompiledWork, as_compiled
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.compilers.combining import combine_collectives
from stablehlo_tools.overlap.compilers.latency_hiding import Scheduler, latency_hiding_order
from stablehlo_tools.overlap.compilers.memory_orders import in_order_of_memory
from stablehlo_tools.overlap.scheduling.scheduling_problem import (
    COMPUTE,
    OverlapProblem,
    problem_of,
)
from stablehlo_tools.overlap.scheduling.timing import time_order
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate

_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class _CompilerModel:
    """The rules by which a compiler combines and schedules.

    `combines`: the most bytes to combine, by kind. `at_once`: the most collectives in flight.
    `believes`: the compiler's estimate of a collective's time, from the cost model's `ns` and True
    if it stays within the innermost network. `synchronous`: a collective without compute beside it
    becomes synchronous, and no other runs beside it. `from_memory`: an `eager` scheduler starts
    from the order that needs the least memory. `waits_for_host`: copies to and from the host block
    compute, as in the command buffers of XLA:GPU.
    """

    combines: dict[str, float]
    at_once: int | None
    believes: Callable[[float, bool], float]
    synchronous: bool
    from_memory: bool
    waits_for_host: bool


_GPU = _CompilerModel(
    dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), 30 * _MIB),
    1,
    # Fitted to its estimates for the flagship's collectives, of 0.1 to 256 MiB, and Tunix' Qwen3's.
    lambda ns, is_near: 1.2 * ns if is_near else 2.0 * ns + 150_000.0,
    synchronous=True,
    from_memory=True,
    waits_for_host=True,
)
_TPU = _CompilerModel(
    {"all_reduce": 128 * _MIB - 1},
    None,
    # Fitted to the places at which it starts permutes that share a link, in a mixture of experts.
    lambda ns, _: 2.0 * ns,
    synchronous=False,
    from_memory=False,
    waits_for_host=False,
)


@dataclass(frozen=True, slots=True)
class Expected:
    """A run on a device: total ns, ns of compute, peak bytes, and ns of one run of each block.

    `blocks` is keyed by the loops that lead to a block (task ids, outermost first). `contended_ns`
    and `blocks` include the slowdown of compute by collectives in flight.
    """

    total_ns: float
    compute_ns: float
    contended_ns: float
    peak_bytes: float
    blocks: dict[tuple[int, ...], float]

    @property
    def exposed_ns(self) -> float:
        """The time in which the device does not compute."""
        return self.total_ns - self.compute_ns


def predict_run(
    graph: TaskGraph, hardware: Hardware, devices: int, *, streams: int = 1
) -> Expected:
    """Predicts the run of a graph as the compiler for this hardware would schedule it.

    `streams`: the number of collectives that XLA:GPU may have in flight, 0 for any number.
    """
    compiler = _TPU if hardware.is_torus else replace(_GPU, at_once=streams or None)
    return _Blocks(compiler, hardware, devices).run_program(graph)


@dataclass(frozen=True, slots=True)
class _CompiledBlock:
    """A block in the compiler's order: its ns, those of its compute, and its contended ns."""

    graph: TaskGraph
    order: Sequence[int]
    total: float
    compute: float
    contended: float


@dataclass
class _Blocks:
    """Times the blocks of a program.

    By the identity of a body: its loop's task before collectives were combined (`numbers`), and its
    tasks in the order of the text (`texts`).
    """

    compiler: _CompilerModel
    hardware: Hardware
    devices: int
    passages: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    texts: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])

    def run_program(self, graph: TaskGraph) -> Expected:
        """A run of a program."""
        graph = self._with_collectives_as_compiled(graph)
        if self.compiler.from_memory:
            self.texts = in_order_of_memory(graph)
        run = self.schedule_graph(graph, ())
        peak = memory_profile(run.graph, run.order).peak_bytes
        return Expected(run.total, run.compute, run.contended, peak, self.passages)

    def _with_collectives_as_compiled(self, graph: TaskGraph) -> TaskGraph:
        """Returns a block, including its loops, with the collectives that the compiler emits."""

        def change(task: Task) -> Task:
            if task.loop is None:
                made, sent = self._made(task), task.communication
                if made is None or sent is None or made.transfer.kind == sent.kind:
                    return task
                kind, time = made.transfer.kind, self._time(made.transfer)
                taken = contention(made.transfer, time, self.hardware)
                sent = replace(sent, kind=kind, latency_ns=time.latency_ns, contention=taken)
                return replace(task, ns=time.ns, communication=sent)
            body = self._with_collectives_as_compiled(task.loop.body)
            self.numbers[id(body)] = task.id
            return replace(task, loop=replace(task.loop, body=body))

        graph = combine_collectives(_each(graph, change), self.compiler.combines, self._time)
        return _on_compute_stream(graph, self._waits)

    def schedule_graph(self, graph: TaskGraph, path: tuple[int, ...]) -> _CompiledBlock:
        """A passage through a graph."""
        text = self.texts.get(id(graph))
        tasks: list[Task] = []
        compute = 0.0
        longer: dict[int, float] = {}  # contended, by the identity of the loop
        for task in graph.tasks:
            if task.loop is None:
                compute += task.ns if task.communication is None else 0.0
                tasks.append(task)
                continue
            body = task.loop.body
            inside = self.schedule_graph(body, (*path, self.numbers[id(body)]))
            times = iterations(task.loop)
            compute += times * inside.compute
            loop = replace(task.loop, body=inside.graph, order=tuple(inside.order))
            longer[id(loop)] = times * inside.contended
            tasks.append(replace(task, ns=times * inside.total, loop=loop))
        block = TaskGraph(tasks, graph.storages)
        problem = problem_of(_each(block, _as_kernel), in_loop=bool(path))
        compiler = self.compiler
        scheduler = Scheduler(compiler.at_once, self._believed_ns, eager=compiler.from_memory)
        order = latency_hiding_order(problem, scheduler, text)
        if compiler.synchronous:
            order = _without_idle_flights(problem, order)
        stretched = _each(
            block,
            lambda task: task if task.loop is None else replace(task, ns=longer[id(task.loop)]),
        )
        contended = simulate(_each(stretched, _as_kernel), order, contended=True).total_ns
        self.passages[path] = contended
        return _CompiledBlock(
            block, order, time_order(problem, order, ()).total, compute, contended
        )

    def _believed_ns(self, task: Task) -> float:
        sent = task.communication
        near = self.hardware.networks[0].name
        return self.compiler.believes(task.ns, sent is not None and sent.links == (near,))

    def _waits(self, task: Task) -> bool:
        """Returns True if compute cannot overlap with a collective or a copy."""
        sent, made = task.communication, self._made(task)
        if sent is not None and not sent.is_collective:
            return self.compiler.waits_for_host
        return made is not None and not made.overlaps

    def _made(self, task: Task) -> CompiledWork | None:
        """Returns the collective that XLA emits for a task; None if it is not a collective."""
        sent = task.communication
        if sent is None or not sent.is_collective:
            return None
        transfer = DeviceTransfer(sent.kind, sent.bytes, sent.groups)
        return as_compiled(transfer, self.hardware, self.devices)

    def _time(self, transfer: DeviceTransfer) -> TransferTime:
        return transfer_time(transfer, self.hardware, self.devices)


def _without_idle_flights(problem: OverlapProblem, order: Sequence[int]) -> list[int]:
    """Returns the order with every transfer that no compute overlaps moved to its wait.

    Such collectives become kernels of the compute stream, so that they do not overlap each other.
    (xla/service/gpu/gpu_convert_async_collectives_to_sync.cc)
    """
    open_: set[int] = set()
    idle: set[int] = set()
    for task in order:
        start = problem.starts[task]
        if start is not None:
            if start in open_:
                idle.add(start)
        elif problem.stream[task] != COMPUTE:
            open_.add(task)
        elif problem.ns[task]:
            open_.clear()
    result: list[int] = []
    for task in order:
        start = problem.starts[task]
        if start in idle:
            result.append(start)
            idle.remove(start)
        if task not in idle:
            result.append(task)
    return result


def _each(graph: TaskGraph, change: Callable[[Task], Task]) -> TaskGraph:
    return TaskGraph([change(task) for task in graph.tasks], graph.storages)


def _as_kernel(task: Task) -> Task:
    return task if task.loop is None else replace(task, kind=TaskKind.COMPUTE, loop=None)


def _on_compute_stream(graph: TaskGraph, waits: Callable[[Task], bool]) -> TaskGraph:
    """Returns the graph with the collectives that block compute as compute tasks."""
    held = {task.id for task in graph.tasks if waits(task)}

    def change(task: Task) -> Task:
        if task.id in held:
            return replace(task, kind=TaskKind.COMPUTE, communication=None)
        if task.start in held:
            # The start is now compute: the wait depends on it like any other reader.
            return replace(task, kind=TaskKind.VIEW, start=None, deps=task.needs)
        return task

    return _each(graph, change) if held else graph

"""The schedules that compilers make of real models, as task graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hlo_graphs import DEVICES, GPU, NETWORK, TPU
from models.zoo import ZOO

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.hlo_loops import trip_count
from stablehlo_tools.targets.hlo.module import HloComputation, HloModule, parse_module
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.targets.hlo.work import work
from stablehlo_tools.targets.scheduled_hlo import Conditional, Node, ScheduledLoop, parse_schedule
from stablehlo_tools.targets.topologies import Target, missing_package


def _needs(target: Target) -> pytest.MarkDecorator:
    package = missing_package(target)
    return pytest.mark.skipif(package is not None, reason=f"{package} is not installed")


def _loops(nodes: Sequence[Node]) -> list[int | None]:
    trip_counts: list[int | None] = []
    for node in nodes:
        if isinstance(node, ScheduledLoop):
            trip_counts += [node.trip_count, *_loops(node.condition), *_loops(node.body)]
        elif isinstance(node, Conditional):
            trip_counts += [count for branch in node.branches for count in _loops(branch)]
    return trip_counts


def _flops(module: HloModule, computation: HloComputation) -> float:
    """Of all products, loops as often as they run."""
    total = 0.0
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            body = module.called_computation(instruction, "body")
            trips = trip_count(instruction, computation, module)
            total += (trips or 0) * _flops(module, body)
        elif instruction.opcode in ("fusion", "custom-call", "dot", "convolution"):
            done = work(instruction, computation, module)
            total += sum(product.flops for product in done.matmuls)
    return total


@pytest.mark.parametrize(
    ("name", "target", "layers"),
    [
        pytest.param(
            "decoder-2d-scan-step", Target.GPU, 2, marks=[_needs(Target.GPU), pytest.mark.soak]
        ),
        pytest.param(
            "decoder-2d-step", Target.GPU, 2, marks=[_needs(Target.GPU), pytest.mark.soak]
        ),
        pytest.param("decoder-fsdp-forward", Target.GPU, 2, marks=_needs(Target.GPU)),
        pytest.param(
            "decoder-2d-step", Target.TPU, 2, marks=[_needs(Target.TPU), pytest.mark.soak]
        ),
        pytest.param("decoder-2d-step", Target.TPU, 1, marks=_needs(Target.TPU)),
        pytest.param("decoder-2d-step", Target.CPU, 2, marks=pytest.mark.soak),
    ],
)
def test_a_real_schedule_is_read_whole(name: str, target: Target, layers: int):
    model = ZOO[name]
    exported = model.build(layers=layers)
    assert not isinstance(exported, str)
    compiled = compile_artifact(artifact.from_exported(exported, name), target)
    hardware = TPU if target is Target.TPU else GPU
    task_graph = hlo_task_graph(compiled.text, hardware, DEVICES)

    # every collective of the schedule is a start, and has its wait
    issued = [event for event in parse_schedule(compiled.text).events if event.issues]
    starts = [
        task.communication.kind
        for inner in task_graph.walk()
        for task in inner.tasks
        if task.communication is not None and task.communication.kind in NETWORK
    ]
    waits = [
        start.communication.kind
        for inner in task_graph.walk()
        for task in inner.tasks
        if task.kind is TaskKind.WAIT and task.start is not None
        for start in [inner.tasks[task.start]]
        if start.communication is not None and start.communication.kind in NETWORK
    ]
    assert Counter(starts) == Counter(waits)
    assert len(starts) == len(issued)
    kinds = Counter(event.kind.replace("-", "_") for event in issued)
    for kind in ("all_gather", "all_to_all", "collective_permute"):
        assert Counter(starts)[kind] == kinds[kind]

    # loops run as often as the schedule says
    known = sorted(trips for trips in _loops(compiled.schedule.nodes) if trips is not None)
    loops = [t.loop.trips for inner in task_graph.walk() for t in inner.tasks if t.loop is not None]
    assert None not in loops
    assert Counter(known) <= Counter(loops)

    # as many operations as the model has: per token 2 for each weight, and those of attention
    # over all pairs; forward, and of a training step twice backward
    passes = 3 if model.training else 1
    tokens, sequence, width = 8 * 32, 32, 64
    weights = layers * (2 * width * 64 + 2 * width * 32 + 3 * width * 128) + width * 128
    attention = layers * 4 * tokens * sequence * 64
    expected = passes * (2 * tokens * weights + attention) / DEVICES
    module = parse_module(compiled.text)
    assert _flops(module, module.entry) == pytest.approx(expected, rel=0.02)

    # every task reads what is before it, and needs memory of the compiler's size
    for inner in task_graph.walk():
        assert all(dep < task.id for task in inner.tasks for dep in task.deps)
        assert all(task.place for task in inner.tasks if task.op == "dot_general")
    assert simulate(task_graph).total_ns > 0
    peak, memory = memory_profile(task_graph).peak_bytes, compiled.memory
    assert peak > memory.argument_bytes
    if target is Target.GPU:  # the others' temporaries hold more than the program's arrays
        assert 0.75 * memory.total_bytes < peak < 1.25 * memory.total_bytes

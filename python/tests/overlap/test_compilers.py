"""What XLA makes of a graph by itself: combined collectives, an order, and what a run takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from scheduler_graphs import FAMILIES, check, drawn
from soaking import first

import stablehlo_tools
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.overlap.compilers.combining import combine_collectives
from stablehlo_tools.overlap.compilers.expected import predict_run
from stablehlo_tools.overlap.compilers.latency_hiding import Scheduler, latency_hiding_order
from stablehlo_tools.overlap.compilers.memory_orders import in_order_of_memory
from stablehlo_tools.overlap.scheduling.scheduling_problem import problem_of
from stablehlo_tools.overlap.scheduling.timing import time_order
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

MIB = 2.0**20
LIMITS = {"all_gather": 30 * MIB, "all_reduce": 30 * MIB}
EIGHT = (tuple(range(8)),)


class Build:
    """A graph, task by task."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def compute(self, ns: float, *deps: int) -> int:
        return self._add(Task(len(self.tasks), TaskKind.COMPUTE, ns=ns, deps=deps))

    def collective(
        self,
        ns: float,
        *deps: int,
        kind: str = "all_gather",
        mib: float = 1.0,
        link: str = "NVLink",
        domain: str = "",
    ) -> int:
        """The number of its wait."""
        sent = Communication(
            kind, link, mib * MIB, 0.0, (link,), EIGHT, dtype="bf16", domain=domain
        )
        start = Task(
            len(self.tasks), TaskKind.COLLECTIVE_START, ns=ns, deps=deps, communication=sent
        )
        self._add(start)
        return self._add(Task(len(self.tasks), TaskKind.WAIT, start=start.id))

    def graph(self) -> TaskGraph:
        return TaskGraph(self.tasks)

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return task.id


def by_bytes(transfer: DeviceTransfer) -> TransferTime:
    return TransferTime(transfer.bytes, 0.0, "by bytes", ("NVLink",))


def kinds(graph: TaskGraph) -> list[tuple[str, float]]:
    return [
        (task.communication.kind, task.communication.bytes / MIB)
        for task in graph.tasks
        if task.communication is not None
    ]


def test_collectives_that_are_alike_become_one() -> None:
    build = Build()
    gathers = [build.collective(10.0, mib=4.0) for _ in range(3)]
    build.compute(5.0, *gathers)
    graph = combine_collectives(build.graph(), LIMITS, by_bytes)
    assert kinds(graph) == [("all_gather", 12.0)]
    whole = next(task for task in graph.tasks if task.communication is not None)
    assert whole.ns == 12 * MIB
    assert sum(task.kind is TaskKind.WAIT for task in graph.tasks) == 1


@pytest.mark.parametrize(
    ("first_mib", "second", "count"),
    [
        (4.0, {"mib": 4.0}, 1),
        (16.0, {"mib": 16.0}, 2),  # more than the limit together
        (31.0, {"mib": 1.0}, 2),  # one of them alone
        (4.0, {"mib": 4.0, "kind": "all_reduce"}, 2),
        (4.0, {"mib": 4.0, "kind": "all_to_all"}, 2),
    ],
)
def test_what_is_combined(first_mib: float, second: dict[str, object], count: int) -> None:
    build = Build()
    one = build.collective(10.0, mib=first_mib)
    other = build.collective(10.0, **second)  # pyright: ignore[reportArgumentType]
    build.compute(5.0, one, other)
    assert len(kinds(combine_collectives(build.graph(), LIMITS, by_bytes))) == count


def test_what_follows_from_another_is_not_combined_with_it() -> None:
    build = Build()
    one = build.collective(10.0)
    middle = build.compute(5.0, one)
    build.compute(5.0, build.collective(10.0, middle))
    assert len(kinds(combine_collectives(build.graph(), LIMITS, by_bytes))) == 2


def test_two_pairs_that_cross_are_not_both_combined() -> None:
    """a -> d and c -> b: one of {a, b} and {c, d} can be one, and then the other cannot."""
    build = Build()
    a = build.collective(10.0)
    c = build.collective(10.0, kind="all_reduce")
    b = build.collective(10.0, build.compute(1.0, c))
    d = build.collective(10.0, build.compute(1.0, a), kind="all_reduce")
    build.compute(1.0, b, d)
    assert len(kinds(combine_collectives(build.graph(), LIMITS, by_bytes))) == 3


@pytest.mark.parametrize("seed", range(300))
def test_random_graphs_are_combined_without_a_circle(seed: int) -> None:
    """All bytes stay, no collective is above the limit, and an order of the dependences is left."""
    rng, build = random.Random(seed), Build()
    ends: list[int] = []
    for _ in range(rng.randint(4, 40)):
        deps = rng.sample(ends, min(len(ends), rng.randint(0, 2)))
        if rng.random() < 0.6:
            kind = rng.choice(("all_gather", "all_reduce"))
            ends.append(build.collective(10.0, *deps, mib=float(rng.randint(1, 20)), kind=kind))
        else:
            ends.append(build.compute(5.0, *deps))
    graph = combine_collectives(build.graph(), LIMITS, by_bytes)
    assert all(dep < task.id for task in graph.tasks for dep in task.needs)
    for kind in LIMITS:
        sizes = [[mib for k, mib in kinds(each) if k == kind] for each in (graph, build.graph())]
        assert sum(sizes[0]) == sum(sizes[1])
        assert all(mib <= 30 for mib in sizes[0])


def orders(build: Build, patience: float = 1.0, at_once: int | None = 1) -> tuple[list[int], float]:
    problem = problem_of(build.graph())
    order = latency_hiding_order(problem, Scheduler(at_once, lambda task: patience * task.ns))
    return order, time_order(problem, order, ()).total


def test_a_gather_begins_no_earlier_than_it_has_to() -> None:
    build = Build()
    before = build.compute(50.0, build.collective(5.0))
    last = build.compute(20.0, before)
    wait = build.collective(15.0, build.collective(5.0))
    build.compute(10.0, last, wait)
    order, total = orders(build)
    assert order.index(before) < order.index(wait - 1) < order.index(last) < order.index(wait)
    assert total == 85.0


def test_a_gather_that_follows_from_none_begins_as_early_as_it_can() -> None:
    """Unless it is not eager: then where it takes as long as what it stands beside."""

    def order(*, eager: bool) -> list[int]:
        build = Build()
        last = build.compute(20.0, build.compute(50.0))
        build.compute(10.0, last, build.collective(15.0))
        scheduler = Scheduler(1, lambda task: task.ns, eager=eager)
        return latency_hiding_order(problem_of(build.graph()), scheduler)

    assert order(eager=True) == [2, 0, 1, 3, 4]
    assert order(eager=False) == [0, 2, 1, 3, 4]


def test_one_at_a_time_or_any_number() -> None:
    build = Build()
    x = build.compute(10.0)
    one, other = build.collective(30.0), build.collective(30.0)
    y = build.compute(30.0, x)
    build.compute(10.0, y, one, other)
    assert orders(build)[1] == 70.0  # one of them is in flight with y, and one with x
    assert orders(build, at_once=None)[1] == 70.0  # both stand first, and share a stream


def test_of_compute_beside_a_collective_what_is_as_long_as_it_comes_first() -> None:
    build = Build()
    x = build.compute(10.0)
    y, z = build.compute(31.0, x), build.compute(100.0, x)
    wait = build.collective(30.0, x)
    build.compute(10.0, y, z, wait)
    order, _ = orders(build)
    assert order == [x, wait - 1, z, y, wait, wait + 1]


def test_each_domain_has_a_slot() -> None:
    def total(domain: str) -> float:
        build = Build()
        x = build.compute(10.0)
        near = build.collective(30.0, x, domain=domain)
        far = build.collective(30.0, x, link="InfiniBand")
        build.compute(10.0, build.compute(40.0, x), near, far)
        return orders(build)[1]

    assert total("") == 90.0  # one beside the product, one alone
    assert total("scale_up_fabric") == 60.0


def test_what_leads_to_more_collectives_comes_first() -> None:
    """Of two that end at the same place the one behind a chain of others is taken first, so that
    the compute of the chain is there to hide the other."""
    build = Build()
    first = build.compute(40.0, build.collective(20.0))
    second = build.collective(20.0, first)
    weight = build.collective(20.0)
    build.compute(10.0, second, weight)
    assert orders(build)[1] == 90.0


def test_collectives_that_nothing_computes_beside_do_not_run_beside_each_other() -> None:
    def total(compute: float) -> float:
        build = Build()
        x = build.compute(10.0)
        near = build.collective(30.0, x, kind="all_to_all", domain="scale_up_fabric")
        far = build.collective(30.0, x, link="InfiniBand", kind="all_to_all")
        build.compute(10.0, build.compute(compute, x), near, far)
        return predict_run(build.graph(), load_hardware("h100"), 8).total_ns

    assert total(0.0) == 80.0
    assert total(5.0) == 50.0


def test_a_patient_compiler_leaves_gathers_over() -> None:
    """What it believes to take twice as long fills the time of two, and the rest stands first."""
    build = Build()
    waits = [build.collective(10.0) for _ in range(4)]
    x = build.compute(10.0)
    for wait in waits:
        x = build.compute(10.0, x, wait)
    believing, doubting = orders(build, 1.0)[1], orders(build, 2.0)[1]
    assert believing == 50.0
    assert doubting == 70.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", first(10, range(400)))
def test_random_graphs_keep_their_dependences(family: str, seed: int) -> None:
    chance = random.Random(seed)
    graph = drawn(family, seed)
    problem = problem_of(graph)
    for at_once in (1, chance.randint(2, 5), None):
        patience, text = chance.choice([1.0, 2.0]), in_order_of_memory(graph)[id(graph)]
        scheduler = Scheduler(
            at_once, lambda task, factor=patience: factor * task.ns, eager=chance.random() < 0.5
        )
        check(graph, text, ())
        check(graph, latency_hiding_order(problem, scheduler, text), ())
    hardware = load_hardware("h100")

    def time(transfer: DeviceTransfer) -> TransferTime:
        return transfer_time(replace(transfer, groups=EIGHT), hardware, 8)

    once = combine_collectives(
        graph, dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), 1e12), time
    )
    check(once, range(len(once.tasks)), ())
    sent = [sum(bytes_ for _, bytes_ in kinds(each)) for each in (graph, once)]
    assert sent[0] == pytest.approx(sent[1])


def test_a_gather_that_xla_tpu_sums_holds_up_compute() -> None:
    def program(devices: int) -> TaskGraph:
        build = Build()
        x = build.compute(1e6)
        wait = build.collective(1e5, mib=8.0)
        build.compute(1e5, x, wait)
        groups = (tuple(range(devices)),)
        return TaskGraph(
            [
                task
                if task.communication is None
                else replace(task, communication=replace(task.communication, groups=groups))
                for task in build.tasks
            ]
        )

    hardware = load_hardware("tpu-v5e")
    summed, gathered = (predict_run(program(devices), hardware, devices) for devices in (64, 32))
    assert gathered.exposed_ns == 0.0
    sum_ns = transfer_time(
        DeviceTransfer("all_reduce", 8 * MIB, (tuple(range(64)),)), hardware, 64
    ).ns
    assert summed.total_ns == pytest.approx(1.1e6 + sum_ns)


T = "t"


def stack(layers: int) -> Callable[..., jax.Array]:
    """Layers whose weights are gathered, one after the other."""

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for number in range(layers):
            whole = lax.all_gather(weights[number], T, axis=0, tiled=True)
            x = jnp.tanh(x @ whole)
        return x

    return run


def test_the_compiler_agrees() -> None:
    """Gathers larger than XLA combines, beside products: the schedule as read back from XLA:GPU."""
    mesh = jax.make_mesh((8,), (T,), axis_types=(AxisType.Auto,))
    body = jax.shard_map(
        stack(6), mesh=mesh, in_specs=(P(T), *[P(T)] * 6), out_specs=P(T), check_vma=False
    )
    x = jax.ShapeDtypeStruct((8 * 4096, 8192), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    given = artifact.from_exported(
        export.export(jax.jit(body), platforms=["cuda"])(x, *[w] * 6), "stack"
    )
    hardware = load_hardware("h100")
    text = compile_artifact(given, "gpu", 600.0).text
    found = simulate(hlo_task_graph(text, hardware, 8))
    told = expected_run(given.module, hardware)
    assert told.exposed_ns == pytest.approx(found.exposed_ns, rel=0.01)
    assert told.total_ns == pytest.approx(found.total_ns, rel=0.1)  # XLA fuses tanh into the dots
    after = stablehlo_tools.transform(given, "schedule-overlap")
    assert str(after.module) == str(given.module), "nothing is left to gain"

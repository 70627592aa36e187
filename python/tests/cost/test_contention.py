"""What collectives take of compute beside them, and what that makes of a program's time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.contention import NONE, Contention, contention, slowdown, together
from stablehlo_tools.cost.hardware import Hardware, known_hardware, load_hardware
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind, kernel_time
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_graph import Communication, Task, TaskGraph, TaskKind, TaskLoop
from stablehlo_tools.overlap.task_simulator import simulate

H100 = load_hardware("h100")
NODE = (tuple(range(8)),)
ACROSS = tuple((device, device + 8) for device in range(8))
MIB = 2.0**20


def taken(kind: str, size: float, groups: tuple[tuple[int, ...], ...], hardware: Hardware = H100):
    transfer = DeviceTransfer(kind, size, groups)
    return contention(transfer, transfer_time(transfer, hardware, 16), hardware)


@pytest.mark.parametrize(
    ("kind", "groups", "units"),
    [
        ("all_gather", NODE, 24),
        ("reduce_scatter", NODE, 24),
        ("all_reduce", NODE, 16),  # by the switch
        ("all_to_all", NODE, 32),
        ("collective_permute", ((0, 1), (1, 0)), 32),
        ("all_gather", ACROSS, 16),
    ],
)
def test_a_large_collective_holds_a_unit_for_each_channel(
    kind: str, groups: tuple[tuple[int, ...], ...], units: int
):
    assert taken(kind, 512 * MIB, groups).units == pytest.approx(units / 132)


def test_a_small_one_holds_no_more_than_its_bytes_keep_busy():
    assert taken("all_gather", 0.25 * MIB, NODE).units == pytest.approx(7 / 132)
    assert taken("all_gather", 8.0, NODE).units == pytest.approx(1 / 132)
    assert taken("all_gather", 0.25 * MIB, NODE).memory < 0.01  # nearly all of it is latency


def test_the_memory_that_it_moves_goes_with_the_rate_of_the_link():
    near, far = (taken("all_gather", 8192 * MIB, each) for each in (NODE, ACROSS))
    assert near.memory == pytest.approx(3 * 0.82 * 450 / 3350, rel=0.01)
    assert far.memory == pytest.approx(3 * 0.94 * 50 / 3350, rel=0.01)


def test_an_a100_slows_what_reads_memory_as_it_was_measured():
    """1.83 of attention beside an all_gather at 300 GB/s: https://github.com/NVIDIA/nccl/issues/1428"""
    a100 = load_hardware("a100")
    at_300 = replace(a100, networks=(replace(a100.networks[0], efficiency=1.0), a100.networks[1]))
    beside = taken("all_gather", 8192 * MIB, NODE, at_300)
    assert slowdown(0.2, 1.0, beside) == pytest.approx(1.83, rel=0.03)


@pytest.mark.parametrize("name", known_hardware())
def test_every_profile_has_figures_and_where_they_are_from(name: str):
    hardware = load_hardware(name)
    for network in hardware.networks:
        assert network.traffic >= 2, network
        assert hardware.sources[f"{network.name}.traffic"]
        assert (network.channels is None) == hardware.is_torus, network
    units = taken("all_gather", 512 * MIB, NODE, hardware).units
    assert (units == 0) == hardware.is_torus  # DMAs hold no unit


def test_a_profile_without_figures_takes_nothing(tmp_path: Path):
    path = tmp_path / "own.toml"
    text = Path(load_hardware.__code__.co_filename).parent / "profiles" / "h100.toml"
    kept = [
        line
        for line in text.read_text().splitlines()
        if not line.startswith(("traffic", "channel", "pair_channels", "in_network_channels"))
    ]
    path.write_text("\n".join(kept))
    assert taken("all_gather", 512 * MIB, NODE, load_hardware(str(path))) == NONE
    path.write_text(text.read_text().replace("traffic = { value = 3,", "traffic = { value = -3,"))
    with pytest.raises(ToolError, match=r"NVLink\.traffic is -3, but must be a number"):
        load_hardware(str(path))


def test_a_kernel_is_slowed_by_what_bounds_it():
    product = KernelWork(
        WorkKind.MATMUL, 3 * 2 * 8192.0**2, 0.0, (Matmul(1, 8192, 8192, 8192),), "bf16"
    )
    copy = KernelWork(WorkKind.COPY, bytes=1e9)
    tiny = KernelWork(WorkKind.ELEMENTWISE, bytes=1e3)
    beside = Contention(units=24 / 132, memory=0.33)
    shares = [kernel_time(work, H100).shares for work in (product, copy, tiny)]
    assert [Clock(H100, 8).shares(work) for work in (product, copy, tiny)] == shares
    slower = [slowdown(*each, beside) for each in shares]
    assert slower == [pytest.approx(132 / 108), pytest.approx(1 / 0.67), 1.0]


def test_several_together_leave_something():
    both = together([Contention(0.2, 0.3), Contention(0.1, 0.1)])
    assert (both.units, both.memory) == (pytest.approx(0.3), pytest.approx(0.4))
    assert together([Contention(0.6, 0.6)] * 2) == Contention(0.9, 0.9)
    assert together([]) == NONE


def graph(*, trips: int = 0, shared: bool = False) -> TaskGraph:
    """A gather of 100 ns beside a product of 300 ns, that takes a half of the units."""
    sent = Communication(
        "all_gather", "NVLink", 1.0, links=("NVLink",), contention=Contention(units=0.5)
    )
    other = replace(sent, stream="NVLink 2")
    tasks = [
        Task(0, TaskKind.COLLECTIVE_START, 100.0, communication=sent),
        Task(1, TaskKind.COLLECTIVE_START, 100.0, communication=other if shared else None)
        if shared
        else Task(1, TaskKind.VIEW),
        Task(2, TaskKind.COMPUTE, 300.0, shares=(1.0, 0.0)),
        Task(3, TaskKind.WAIT, start=0, deps=(2,)),
    ]
    whole = TaskGraph(tasks)
    if not trips:
        return whole
    return TaskGraph([Task(0, TaskKind.LOOP, loop=TaskLoop(whole, trips))])


def test_compute_runs_slower_for_as_long_as_something_is_in_flight():
    assert simulate(graph()).total_ns == 300
    contended = simulate(graph(), contended=True)
    assert contended.total_ns == contended.compute_ns == 350  # 50 of it in the first 100 ns
    assert contended.exposed_ns == 0


def test_two_on_one_link_take_longer_and_leave_less():
    contended = simulate(graph(shared=True), contended=True)
    # Both share the link, so 200 ns in flight; 0.9 of the units are taken: 20 ns of it are done.
    assert contended.total_ns == pytest.approx(200 + 280)


def test_a_loop_is_its_iterations():
    assert simulate(graph(trips=1000), contended=True).total_ns == pytest.approx(350_000)


def test_what_is_not_known_is_not_slowed():
    tasks = [replace(task, shares=(0.0, 0.0)) for task in graph().tasks]
    assert simulate(TaskGraph(tasks), contended=True).total_ns == 300

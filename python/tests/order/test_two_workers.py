"""Programs compiled apart, in processes of their own: what no common order does, and what one does.

XLA:CPU, with its default flags, orders the collectives of each program by how many ops stand before
them; one op more on one worker, and the two orders differ.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tree import FIXTURES
from workers import run
from workers.run import Array, State, Worker, run_workers

from stablehlo_tools.cli.main import main

PAIR = FIXTURES / "torch_xla" / "deadlock_pair"
RANKS = (0, 1)
ENDS = 600.0  # seconds, for what hangs only if something is wrong


def ordered(programs: Sequence[Path], directory: Path) -> list[Path]:
    """The programs, rewritten into `directory` with one order of collectives for all."""
    assert main(["align-order", "--target", "cpu", *map(str, programs), "-o", str(directory)]) == 0
    return [directory / program.name for program in programs]


def check_order(programs: Sequence[Path]) -> int:
    """What the command says of the programs, without running them: 0 ordered, 1 not."""
    return main(["check-order", "--target", "cpu", *map(str, programs)])


def pair(name: str) -> list[Path]:
    """Both ranks' programs: rank 1 sums the sine of its gradient, rank 0 the gradient itself."""
    return [PAIR / f"{name}_r{rank}.mlir" for rank in RANKS]


def states(workers: Sequence[Worker]) -> list[State]:
    return [worker.state for worker in workers]


def numbers(seed: int, *lengths: int) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(length).astype(np.float32) for length in lengths]


@pytest.fixture(scope="module")
def inputs() -> list[list[Array]]:
    """For each rank torch-xla's pseudo-token, a gradient, a shard of weights, another gradient."""
    return [[np.zeros((), np.float32), *numbers(rank, 64, 32, 48)] for rank in RANKS]


def assert_finished_with_right_values(workers: list[Worker], inputs: list[list[Array]]) -> None:
    assert states(workers) == [State.FINISHED] * 2, [worker.errors for worker in workers]
    (_, first, shard0, whole0), (_, second, shard1, whole1) = inputs
    for rank, worker in enumerate(workers):
        reduced, gathered, scattered = worker.outputs
        np.testing.assert_allclose(reduced, first + np.sin(second), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(gathered, np.concatenate([shard0, shard1]))
        np.testing.assert_array_equal(scattered, np.split(whole0 + whole1, 2)[rank])


def test_a_pair_without_a_common_order_hangs(
    inputs: list[list[Array]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tells these workers from all others
    assert check_order(pair("notoken")) == 1
    workers = run_workers(pair("notoken"), inputs)
    assert states(workers) == [State.HUNG] * 2, [worker.errors for worker in workers]
    assert not processes_that_name(tmp_path)


def processes_that_name(directory: Path) -> list[Path]:
    """Those that run with an argument inside the directory."""
    processes: list[Path] = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if bytes(directory) in command.read_bytes():
                processes.append(command)
    return processes


def test_the_same_pair_finishes_once_aligned(inputs: list[list[Array]], tmp_path: Path) -> None:
    aligned = ordered(pair("notoken"), tmp_path)
    assert check_order(aligned) == 0
    workers = run_workers(aligned, inputs, ENDS)
    assert_finished_with_right_values(workers, inputs)


def test_the_pair_that_torch_xla_ordered_finishes(inputs: list[list[Array]]) -> None:
    assert check_order(pair("token")) == 0
    assert_finished_with_right_values(run_workers(pair("token"), inputs, ENDS), inputs)


def gathers(value: str) -> str:
    """Two all_gathers of one size: of the sine of `%x` or of `%x` itself, and of `%y`."""
    groups = "all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"
    kind = "(tensor<32xf32>) -> tensor<64xf32>"
    return f"""
        func.func @main(%x: tensor<32xf32>, %y: tensor<32xf32>)
            -> (tensor<64xf32>, tensor<64xf32>) {{
          %sine = stablehlo.sine %x : tensor<32xf32>
          %0 = "stablehlo.all_gather"({value}) <{{{groups}}}> : {kind}
          %1 = "stablehlo.all_gather"(%y) <{{{groups}}}> : {kind}
          return %0, %1 : tensor<64xf32>, tensor<64xf32>
        }}"""


def test_swapped_collectives_of_one_size_exchange_the_wrong_data(tmp_path: Path) -> None:
    programs = [tmp_path / f"gathers_r{rank}.mlir" for rank in RANKS]
    for program, value in zip(programs, ("%x", "%sine"), strict=True):
        program.write_text(gathers(value))
    inputs = [numbers(rank, 32, 32) for rank in RANKS]
    (x0, y0), (x1, y1) = inputs

    assert check_order(programs) == 1
    before = run_workers(programs, inputs, ENDS)
    assert states(before) == [State.FINISHED] * 2  # and nobody notices
    assert_gathered(before[0], (x0, y1), (y0, np.sin(x1)))
    assert_gathered(before[1], (y0, np.sin(x1)), (x0, y1))

    aligned = ordered(programs, tmp_path / "aligned")
    assert check_order(aligned) == 0
    after = run_workers(aligned, inputs, ENDS)
    assert states(after) == [State.FINISHED] * 2, [worker.errors for worker in after]
    for worker in after:
        assert_gathered(worker, (x0, np.sin(x1)), (y0, y1))


def assert_gathered(worker: Worker, *expected: tuple[Array, Array]) -> None:
    for output, parts in zip(worker.outputs, expected, strict=True):
        np.testing.assert_allclose(output, np.concatenate(parts), rtol=1e-6, atol=1e-6)


def sum_and_gather(link: str) -> str:
    """`s = psum(tanh(a) @ ones)`, and an all_gather of `%v`, which a link makes of it and of b."""
    groups = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"
    kind = "tensor<8xf32>"
    return f"""
        func.func @main(%a: tensor<8x64xf32>, %b: {kind}) -> ({kind}, tensor<16xf32>) {{
          %tanh = stablehlo.tanh %a : tensor<8x64xf32>
          %ones = stablehlo.constant dense<1.0> : tensor<64xf32>
          %row = stablehlo.dot_general %tanh, %ones, contracting_dims = [1] x [0]
              : (tensor<8x64xf32>, tensor<64xf32>) -> {kind}
          %s = "stablehlo.all_reduce"(%row) <{{{groups}}}> ({{
            ^bb0(%l: tensor<f32>, %r: tensor<f32>):
              %t = stablehlo.add %l, %r : tensor<f32>
              stablehlo.return %t : tensor<f32>
            }}) : ({kind}) -> {kind}
          {link}
          %g = "stablehlo.all_gather"(%v) <{{all_gather_dim = 0 : i64, {groups}}}>
              : ({kind}) -> tensor<16xf32>
          return %s, %g : {kind}, tensor<16xf32>
        }}"""


OVERWRITTEN = """%zero = stablehlo.constant dense<0> : tensor<1xi32>
          %v = "stablehlo.scatter"(%s, %zero, %b) <{scatter_dimension_numbers =
              #stablehlo.scatter<update_window_dims = [0], scatter_dims_to_operand_dims = [0]>}> ({
            ^bb0(%l: tensor<f32>, %r: tensor<f32>):
              stablehlo.return %r : tensor<f32>
            }) : (tensor<8xf32>, tensor<1xi32>, tensor<8xf32>) -> tensor<8xf32>"""
ADDED = "%v = stablehlo.add %s, %b : tensor<8xf32>"


def test_an_order_that_rests_on_what_is_overwritten_is_none(tmp_path: Path) -> None:
    """Both say the sum first; XLA drops what worker 0 overwrites, and gathers first there."""
    programs = [tmp_path / f"overwritten_r{rank}.mlir" for rank in RANKS]
    for program, link in zip(programs, (OVERWRITTEN, ADDED), strict=True):
        program.write_text(sum_and_gather(link))
    inputs = [[a.reshape(8, 64), b] for a, b in (numbers(rank, 512, 8) for rank in RANKS)]

    assert check_order(programs) == 1
    assert states(run_workers(programs, inputs)) == [State.HUNG] * 2

    aligned = ordered(programs, tmp_path / "aligned")
    assert check_order(aligned) == 0
    after = run_workers(aligned, inputs, ENDS)
    assert states(after) == [State.FINISHED] * 2, [worker.errors for worker in after]
    (a0, b0), (a1, b1) = inputs
    total = (np.tanh(a0) + np.tanh(a1)).sum(1)
    for worker in after:
        found, gathered = worker.outputs
        np.testing.assert_allclose(found, total, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gathered, np.concatenate([b0, b1 + total]), rtol=1e-5, atol=1e-5)


def test_a_program_that_fails_is_not_one_that_hangs(
    inputs: list[list[Array]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.mlir"
    broken.write_text("func.func @main() { nonsense }")
    workers = run_workers([pair("token")[0], broken], inputs, ENDS)
    assert states(workers) == [State.STOPPED, State.FAILED]
    assert "nonsense" in workers[1].errors


def test_a_port_that_another_process_took_is_left_to_it(
    inputs: list[list[Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = [other.getsockname()[1], run.free_port()]
        monkeypatch.setattr(run, "free_port", lambda: ports.pop(0))
        assert_finished_with_right_values(run_workers(pair("token"), inputs, ENDS), inputs)
    assert not ports

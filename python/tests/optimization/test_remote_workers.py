"""Searches on the workers of an executor give the answer of one machine, also if a worker dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from distributed import Client, LocalCluster
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, from_exported
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization import remote_workers
from stablehlo_tools.optimization.candidate_search import Progress
from stablehlo_tools.optimization.optimizer import OptimizationRequest, Optimum, optimize
from stablehlo_tools.processes.child import decoded_error
from stablehlo_tools.processes.forks import REFUSED


@pytest.fixture(scope="module")
def given() -> Artifact:
    mesh = AbstractMesh((8,), ("data",), (AxisType.Auto,))
    rows, split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]

    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rows)
    weights = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32, sharding=split)
    return from_exported(export.export(jax.jit(layers), platforms=["cuda"])(x, weights), "layers")


@pytest.fixture(scope="module")
def expected(given: Artifact) -> Optimum:
    return optimize(given, request())


@pytest.fixture(scope="module")
def client(expected: Optimum, planned: dict[str, Any]) -> Iterator[Any]:
    """Of a cluster of two processes. This process compiles before that, not beside it."""
    assert expected
    assert planned
    before = dict(os.environ)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        os.environ.clear()
        os.environ.update(before)
        yield client


def request(executor: Executor | None = None) -> OptimizationRequest:
    return OptimizationRequest(
        "gpu", candidates=2, cache=False, try_options=False, executor=executor, workers=2
    )


def told(optimum: Optimum) -> list[tuple[Any, ...]]:
    return [(str(each.candidate), each.figures, each.refused) for each in optimum.trials]


@pytest.mark.soak  # Dask changes the environment of the process that starts workers
def test_a_cluster_gives_the_same_answer_although_a_worker_is_killed(
    given: Artifact, expected: Optimum, client: Any
):
    killed: list[int] = []

    def kill_a_worker(progress: Progress) -> None:
        if progress.known > 2 and not killed:
            killed.append(next(iter(client.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)

    found = optimize(given, request(client.get_executor(pure=False)), kill_a_worker)
    assert killed
    assert told(found) == told(expected)
    assert found.pipeline == expected.pipeline
    assert not found.remarks


@pytest.fixture(scope="module")
def step() -> export.Exported:
    def descend(weights: jax.Array, batch: jax.Array) -> jax.Array:
        return weights - jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weights)

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (8192, 512)))
    return export.export(jax.jit(descend), platforms=["cuda"])(*shapes)


@pytest.fixture(scope="module")
def planned(step: export.Exported) -> dict[str, Any]:
    return stablehlo_tools.plan(step, "h100", 4).to_json()


@pytest.mark.soak  # Dask changes the environment of the process that starts workers
def test_a_plan_is_the_same_on_a_cluster(
    step: export.Exported, planned: dict[str, Any], client: Any
):
    found = stablehlo_tools.plan(step, "h100", 4, executor=client.get_executor(pure=False))
    assert planned["timed_by"] == "XLA:GPU"
    assert found.to_json() | {"seconds": 0} == planned | {"seconds": 0}


MESSAGE = {"job": "rewrite", "seconds": 9}


class Losing(Executor):
    """Loses the first tasks, or is broken."""

    def __init__(self, lost: int, *, broken: bool = False) -> None:
        self._lost, self._broken = lost, broken

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._broken:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future[Any]()
        if self._lost:
            self._lost -= 1
            future.set_exception(OSError("the worker has gone"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def echoing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers answer with the message and the bytes of its file."""

    def ask(message: dict[str, Any], _: bytes) -> tuple[Any, bytes]:
        return {"job": message["job"]}, Path(message["module"]).read_bytes()

    monkeypatch.setattr(remote_workers, "_process", lambda: Mock(ask=ask))


@pytest.mark.usefixtures("echoing")
def test_a_lost_worker_costs_one_retry():
    workers = remote_workers.RemoteWorkers(Losing(1), "gpu")
    assert workers.ask(MESSAGE, {"module": b"ops"}) == ({"job": "rewrite"}, b"ops")
    with pytest.raises(ToolError, match="lost two times: OSError: the worker has gone"):
        remote_workers.RemoteWorkers(Losing(2), "gpu").ask(MESSAGE, {})


@pytest.mark.usefixtures("echoing")
def test_a_worker_with_another_version_refuses(monkeypatch: pytest.MonkeyPatch):
    digests = iter(["the first", "the second"])
    monkeypatch.setattr(remote_workers, "tool_digest", lambda: next(digests))
    answer, _ = remote_workers.RemoteWorkers(Losing(0), "gpu").ask(MESSAGE, {})
    message = decoded_error(answer[REFUSED]).diagnostic.message
    assert message.startswith("stablehlo-tools is 'the second' on the worker")
    assert message.endswith("and 'the first' in the process that asks")


def test_a_broken_executor_leaves_the_work_to_this_machine(given: Artifact, expected: Optimum):
    found = optimize(given, request(Losing(0, broken=True)))
    assert told(found) == told(expected)
    assert "the executor broke, so this machine did the rest: cannot schedule" in found.remarks[0]


def test_without_a_scheduler_nothing_is_written(
    given: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, output = tmp_path / "step.mlir", tmp_path / "fast.mlir"
    artifact.save(given, source)
    words = ["optimize", str(source), "--target", "gpu", "-o", str(output)]
    assert main([*words, "--cluster", "tcp://127.0.0.1:9"]) == 2
    assert "no Dask scheduler at tcp://127.0.0.1:9" in capsys.readouterr().err
    assert not output.exists()

"""schedule-overlap on programs of JAX: values on eight devices, options, refusals, compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import op_counts
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kept_values import run
from models.zoo import ZOO
from overlap_programs import PROFILE, peak, total

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.targets.topologies import Target, missing_package
from stablehlo_tools.transforms import schedule_overlap

BARRIER = "stablehlo.optimization_barrier"
LAYERS, WIDTH = 4, 16
PASS = f"schedule-overlap{{hardware={PROFILE}}}"
type Forward = Callable[[Any, Any], Any]


def _unrolled(weights: Any, x: Any) -> Any:
    for layer in range(LAYERS):
        x = jnp.abs(x @ _gathered(weights[2 * layer]))
        x = x @ _gathered(weights[2 * layer + 1])
    return x


def _scanned(weights: Any, x: Any) -> Any:
    pairs = weights.reshape(LAYERS, 2, *weights.shape[1:])

    def layer(h: Any, pair: Any) -> tuple[Any, None]:
        return jnp.abs(h @ _gathered(pair[0])) @ _gathered(pair[1]), None

    return lax.scan(layer, x, pairs)[0]


def _nested(weights: Any, x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, h: _scanned(weights, h), x)


def _gathered(weight: Any) -> Any:
    return lax.all_gather(weight, "data", tiled=True)


def _step(forward: Forward) -> Forward:
    def step(weights: Any, x: Any) -> Any:
        return jax.grad(lambda w: forward(w, x).sum())(weights)

    return step


def _two_computations(forward: Forward) -> Forward:
    """Forward and backward as JAX makes them of a `shard_map` that is differentiated."""
    loss = _mapped(lambda w, x: lax.psum(forward(w, x).sum(), "data"), P(), check_vma=True)
    return jax.grad(loss)


def _mapped(function: Forward, results: Any, *, check_vma: bool = False) -> Forward:
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("data",))
    specs = (P(None, "data"), P("data"))
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=check_vma
    )


def exported(function: Forward, **options: Any) -> Exported:
    shapes = (
        jax.ShapeDtypeStruct((2 * LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((32, WIDTH), jnp.float32),
    )
    return export.export(jax.jit(function), **options)(*shapes)


WEIGHTS = P(None, "data")
PROGRAMS: dict[str, Forward] = {
    "forward": _mapped(_unrolled, P("data")),
    "scan": _mapped(_scanned, P("data")),
    "nested loops": _mapped(_nested, P("data")),
    "step": _mapped(_step(_unrolled), WEIGHTS),
    "scanned step": _mapped(_step(_scanned), WEIGHTS),
    "two computations": _two_computations(_unrolled),
}


def whole_numbers() -> list[Any]:
    """Arguments that keep every sum exact."""
    random = np.random.default_rng(0)
    weights = np.zeros((2 * LAYERS, WIDTH, WIDTH), np.float32)
    for weight in weights:
        weight[np.arange(WIDTH), random.permutation(WIDTH)] = random.choice([-1, 1], WIDTH)
    return [weights, random.integers(-3, 4, (32, WIDTH)).astype(np.float32)]


def barriers(program: Exported) -> int:
    return op_counts(artifact.from_exported(program).module)[BARRIER]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_stay(name: str, monkeypatch: pytest.MonkeyPatch):
    from stablehlo_tools.transforms import schedule_overlap

    monkeypatch.setattr(schedule_overlap, "_HIDES", -1.0)
    monkeypatch.setattr(schedule_overlap, "_WORTH", float("inf"))
    before = exported(PROGRAMS[name])
    after = stablehlo_tools.transform(before, PASS)
    assert barriers(after) > barriers(before)
    first, second = run(before, whole_numbers()), run(after, whole_numbers())
    assert any(array.any() for array in first)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


def test_layers_hide_each_others_gathers():
    before = artifact.from_exported(exported(PROGRAMS["forward"]))
    after = artifact.from_exported(stablehlo_tools.transform(exported(PROGRAMS["forward"]), PASS))
    assert op_counts(after.module)[BARRIER] == 2 * LAYERS - 1
    assert total(after, PROFILE) < total(before, PROFILE)
    assert peak(after, PROFILE) <= peak(before, PROFILE) + 2**30


def test_an_artifact_for_two_platforms():
    before = exported(PROGRAMS["forward"], platforms=("cpu", "cuda"))
    after = stablehlo_tools.transform(before, PASS)
    first, second = run(before, whole_numbers()), run(after, whole_numbers())
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


def test_symbolic_shapes_are_refused_where_they_stand():
    (rows,) = export.symbolic_shape("b")
    shapes = (
        jax.ShapeDtypeStruct((2 * LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((8 * rows, WIDTH), jnp.float32),
    )
    symbolic = export.export(jax.jit(PROGRAMS["forward"]))(*shapes)
    with pytest.raises(ToolError) as refused:
        stablehlo_tools.transform(symbolic, PASS)
    assert refused.value.diagnostic.place.line is not None


def test_an_impossible_limit_names_what_is_enough():
    program = exported(PROGRAMS["forward"])
    with pytest.raises(ToolError, match=r"GiB is enough, and less than .* GiB is not") as refused:
        stablehlo_tools.transform(
            program, f"schedule-overlap{{hardware={PROFILE} memory-limit=1e-9}}"
        )
    said = refused.value.diagnostic.message
    enough = said.split(": ")[-1].split(" GiB is enough")[0]
    stablehlo_tools.transform(
        program, f"schedule-overlap{{hardware={PROFILE} memory-limit={enough}}}"
    )


def test_the_same_bytes_whatever_the_hash_seed(tmp_path: Path):
    program = tmp_path / "step.jax_export"
    program.write_bytes(exported(PROGRAMS["step"]).serialize())
    words = [sys.executable, "-m", "stablehlo_tools.cli.main", "opt", str(program), "-p", PASS]
    texts = [
        subprocess.run(
            words, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert texts[0] == texts[1]
    assert BARRIER.encode() in texts[0]


def test_an_error_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    program, output = tmp_path / "step.jax_export", tmp_path / "out.jax_export"
    program.write_bytes(exported(PROGRAMS["forward"]).serialize())
    text = f"schedule-overlap{{hardware={PROFILE} memory-limit=1e-9}}"
    assert main(["opt", str(program), "-p", text, "-o", str(output)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not output.exists()


GPU = missing_package(Target.GPU)


@pytest.mark.soak
@pytest.mark.skipif(GPU is not None, reason=f"{GPU} is not installed")
def test_xla_gpu_exposes_less():
    """Llama 3 8B on 64 devices: XLA alone leaves gathers over, and exposed at the start."""
    model = ZOO["decoder-fsdp-forward"].full()
    before = stablehlo_tools.transform(model, "partition,create-reduce-scatter")
    after = stablehlo_tools.transform(before, "schedule-overlap")
    assert barriers(after)
    (total_before, exposed_before), (total_after, exposed_after) = map(_compiled, (before, after))
    assert exposed_after < 0.6 * exposed_before
    assert total_after < 0.98 * total_before


@pytest.mark.soak
@pytest.mark.skipif(GPU is not None, reason=f"{GPU} is not installed")
def test_what_fences_would_make_slower_is_left(monkeypatch: pytest.MonkeyPatch):
    """Four layers of it: XLA has nothing left over, and fences cost a gather's time."""
    model = ZOO["decoder-fsdp-forward"].full(layers=4)
    before = stablehlo_tools.transform(model, "partition,create-reduce-scatter")
    assert not barriers(stablehlo_tools.transform(before, "schedule-overlap"))
    monkeypatch.setattr(schedule_overlap, "_WORTH", float("inf"))
    fenced = stablehlo_tools.transform(before, "schedule-overlap")
    assert barriers(fenced)
    assert _compiled(fenced)[0] > _compiled(before)[0]


def _compiled(program: Exported) -> tuple[float, float]:
    """The total and the exposed ns of XLA:GPU's schedule."""
    hardware = load_hardware("h100")
    compiled = compile_artifact(artifact.from_exported(program), "gpu")
    timeline = simulate(hlo_task_graph(compiled.text, hardware, compiled.topology.devices))
    return timeline.total_ns, timeline.exposed_ns

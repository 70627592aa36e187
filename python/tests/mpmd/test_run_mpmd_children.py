"""Running sets of rank programs: processes that die, hang or are interrupted, and random inputs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from rank_sets import table_of, write_set
from soaking import first
from test_run_mpmd import SMALL

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import new_context, parse_module
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.manifest import Manifest, ManifestEntry, ManifestPiece
from stablehlo_tools.mpmd.rank_set import load
from stablehlo_tools.mpmd.running.functions import as_module
from stablehlo_tools.mpmd.running.origin_inputs import make_inputs
from stablehlo_tools.mpmd.running.set_outcome import RunnerName, SetOptions, run_set
from stablehlo_tools.processes import child

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = "import time; time.sleep(10000)"
WAYS: list[RunnerName] = ["sequential", "processes"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go; none may be left."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    yield place
    assert not list(place.iterdir())
    assert not running_in(place)


def running_in(place: Path) -> list[str]:
    """The processes that were given a file there."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if f"{place}/" in words:
            found.append(words.replace("\0", " "))
    return found


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("code", "message"),
    [(DIES, "was ended by SIGSEGV while running"), (HANGS, r"within 0\.5 s|more than 0\.5 s")],
    ids=["dies", "hangs"],
)
def test_what_becomes_of_a_child_is_one_error(
    how: RunnerName,
    code: str,
    message: str,
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_set(tmp_path / "set", table_of(SMALL))

    def command(_: str, *words: str, traced: bool) -> list[str]:
        assert traced
        return [sys.executable, "-c", code, *words]

    monkeypatch.setattr(child, "command", command)
    timeout = 0.5 if code == HANGS else 600
    with pytest.raises(ToolError, match=message) as raised:
        run_set(load(tmp_path / "set"), None, SetOptions(how=how, timeout=timeout))
    assert raised.value.input_name == str(tmp_path / "set")
    assert temporary.exists()


@pytest.mark.parametrize("number", first(1, [signal.SIGINT, signal.SIGKILL]), ids=str)
def test_children_end_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    write_set(tmp_path / "set", table_of(SMALL))
    place = tmp_path / "temporary"
    place.mkdir()
    command = [sys.executable, "-m", "stablehlo_tools.cli.main", "run-mpmd", str(tmp_path / "set")]
    process = subprocess.Popen(
        [*command, "--how", "processes"],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: len(running_in(place)) == 2)
    process.send_signal(number)
    said, errors = process.communicate(timeout=600)
    assert not said
    wait_for(lambda: not running_in(place))
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, b"stablehlo-tools: interrupted\n")
        assert not list(place.iterdir())


def wait_for(holds: Any, seconds: float = 600) -> None:
    """Until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def manifest_of(step: export.Exported, tmp_path: Path) -> Manifest:
    """A manifest with the inputs and outputs of a step, all on one rank."""

    def entries(avals: Any) -> tuple[ManifestEntry, ...]:
        listed = enumerate(avals)
        return tuple(
            ManifestEntry(f"[{i}]", type_of(aval), (ManifestPiece(0, i),)) for i, aval in listed
        )

    found = write_set(tmp_path, table_of(SMALL))
    return replace(found, inputs=entries(step.in_avals), outputs=entries(step.out_avals))


def type_of(aval: Any) -> str:
    """`tensor<4x2xui32>`."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return f"tensor<{''.join(f'{size}x' for size in aval.shape)}2xui32>"
    names = {"float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint32": "ui32", "bool": "i1"}
    return f"tensor<{''.join(f'{size}x' for size in aval.shape)}{names[str(aval.dtype)]}>"


def test_inputs_of_all_kinds_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def step(w: Any, half: Any, tokens: Any, mask: Any, raw: Any, key: Any) -> Any:
        noise = jax.random.normal(key, (4,)) + jax.random.normal(jax.random.wrap_key_data(raw))
        return jnp.where(mask, w[tokens] + half.astype(jnp.float32) + noise, 0)

    shape = jax.ShapeDtypeStruct
    specs = (
        shape((64,), jnp.float32),
        shape((4,), jnp.bfloat16),
        shape((4,), jnp.int32),
        shape((4,), jnp.bool_),
        shape((2,), jnp.uint32),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    exported = export.export(jax.jit(step))(*specs)
    original, manifest = artifact.from_exported(exported), manifest_of(exported, tmp_path)
    one, again, other = (make_inputs(manifest, original, seed, {}).arrays for seed in (0, 0, 1))
    for array, same in zip(one, again, strict=True):
        np.testing.assert_array_equal(array, same)
    assert any((array != changed).any() for array, changed in zip(one, other, strict=True))
    assert ((one[2] >= 0) & (one[2] < 64)).all()  # indices that hit
    assert one[5].shape == (2,)
    assert (one[5] > 2**16).any()  # a key, and no small number


GROUPS = """
module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["rank"=2, "data"=2, "model"=2]>
  func.func private @f(%x: tensor<4xf32>) -> (tensor<8xf32>, tensor<4xf32>, tensor<ui32>) {
    %0 = "stablehlo.all_gather"(%x) <{
      all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh,
        axes = [#stablehlo.axis_ref<name = "model">]>, use_global_device_ids
    }> : (tensor<4xf32>) -> tensor<8xf32>
    %1 = "stablehlo.collective_permute"(%x) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      source_target_pairs = dense<[[0, 2], [2, 0], [4, 6], [6, 4]]> : tensor<4x2xi64>
    }> : (tensor<4xf32>) -> tensor<4xf32>
    %2 = stablehlo.partition_id : tensor<ui32>
    return %0, %1, %2 : tensor<8xf32>, tensor<4xf32>, tensor<ui32>
  }
}
"""


def test_functions_are_for_the_devices_of_their_rank() -> None:
    module = parse_module(GROUPS, new_context())
    texts = [str(as_module(module, "f", rank, 4)) for rank in range(2)]
    for text in texts:
        assert "replica_groups = dense<[[0, 1], [2, 3]]>" in text
        assert "source_target_pairs = dense<[[0, 2], [2, 0]]>" in text
        assert "mhlo.num_partitions = 4" in text
        assert "sdy.mesh" not in text
    assert "stablehlo.add" not in texts[0]
    assert "dense<4> : tensor<ui32>" in texts[1]


def test_a_collective_between_ranks_is_refused() -> None:
    module = parse_module(GROUPS.replace("[0, 2], [2, 0]", "[0, 7], [7, 0]"), new_context())
    with pytest.raises(ToolError, match="communicates with another rank"):
        as_module(module, "f", 0, 4)


def test_constraints_keep_the_mesh_that_they_name() -> None:
    text = """
      sdy.mesh @empty = <[]>
      func.func private @f(%x: tensor<4xf32>) -> tensor<4xf32> {
        %0 = sdy.sharding_constraint %x <@empty, [{}]> : tensor<4xf32>
        return %0 : tensor<4xf32>
      }
    """
    made = as_module(parse_module(text, new_context()), "f", 0, 1)
    assert made.operation.verify()
    assert "@empty" in str(made)

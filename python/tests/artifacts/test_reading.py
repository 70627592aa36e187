"""What is read, and what is refused in which words: versions, types, names, depths, old files."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from artifact_mutations import encoded, mutated
from jax import export
from jax._src.export import serialization_generated

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import ArtifactForm
from stablehlo_tools.diagnostics import ToolError

TOOL = [sys.executable, "-m", "stablehlo_tools.cli.main"]
ADD = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  BODY
  return %a : tensor<4xf32>
}
"""
QUANTIZED = """
!t = tensor<?xf32, #stablehlo.bounds<4>>
!q = tensor<?x!quant.uniform<i8:f32, 0.1234567890123:3>, #stablehlo.bounds<4>>
func.func @main(%x: !t) -> !t {
  %0 = stablehlo.uniform_quantize %x : (!t) -> !q
  %1 = stablehlo.uniform_dequantize %0 : (!q) -> !t
  return %1 : !t
}
"""
# A user's program, in which a bad artifact is an exception and no more.
LOADING = """
import json, sys, stablehlo_tools
outcomes = []
for path in sys.argv[1:]:
    try:
        loaded = stablehlo_tools.load(path)
        outcomes.append("read " + str(loaded.module)[:6])
    except stablehlo_tools.ToolError as error:
        outcomes.append(str(error))
print(json.dumps(outcomes))
"""


def portable(body: str = "%0 = stablehlo.add %a, %a : tensor<4xf32>") -> bytes:
    text = ADD.replace("BODY", body).replace("return %a", "return %0")
    return artifacts.encode(artifacts.parse(text.encode()), ArtifactForm.PORTABLE)


def future() -> bytes:
    """An artifact of a StableHLO to come, with an op that it added."""
    data = re.sub(rb"StableHLO_v[\d.]{6}", b"StableHLO_v9.87.6", portable())
    return data.replace(b"add_v1", b"add_v9")


def nested(depth: int) -> str:
    body = '"stablehlo.case"(%i) ({\n' * depth + "stablehlo.return\n"
    ends = "}) : (tensor<i32>) -> ()\nstablehlo.return\n" * (depth - 1)
    return f"func.func @main(%i: tensor<i32>) {{\n{body}{ends}}}) : (tensor<i32>) -> ()\nreturn\n}}"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOOL, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("form", [ArtifactForm.TEXT, ArtifactForm.BYTECODE, ArtifactForm.PORTABLE])
def test_quantized_types_are_read_and_written_in_every_form(form: ArtifactForm):
    once = artifacts.parse(QUANTIZED.encode())
    again = artifacts.parse(artifacts.encode(once, form))
    assert artifacts.to_text(again.module) == artifacts.to_text(once.module)
    assert "0.1234567890123" in artifacts.to_text(again.module)


def test_an_artifact_of_2023_names_no_version():
    data = re.sub(rb"StableHLO_v[\d.]{6}", b"MLIR17.0.0git_abc", portable())
    read = artifacts.parse(data)
    assert read.form is ArtifactForm.PORTABLE
    assert "stablehlo.add" in artifacts.to_text(read.module)


def test_an_artifact_of_a_future_version_says_which(tmp_path: Path):
    (tmp_path / "future.bc").write_bytes(future())
    result = run("opt", tmp_path / "future.bc", "-o", tmp_path / "out.mlir")
    assert result.returncode == 2
    assert result.stderr.count("error: ") == 1
    assert "an artifact of StableHLO 9.87.6, but this jaxlib reads StableHLO up to" in result.stderr
    assert not (tmp_path / "out.mlir").exists()


@pytest.mark.parametrize("depth", [3_000, 200_000])
def test_regions_without_end_are_refused(tmp_path: Path, depth: int):
    (tmp_path / "deep.mlir").write_text(nested(depth))
    result = run("inspect", tmp_path / "deep.mlir")
    assert result.returncode == 2
    assert re.search("error: (damaged, or nested too deeply|regions nest more than)", result.stderr)
    assert len([line for line in result.stderr.splitlines() if "error" in line]) == 1


def test_a_users_program_outlives_what_it_loads(tmp_path: Path):
    damaged = [
        mutated(data, seed)
        for form, programs in encoded().items()
        for seed, data in enumerate(programs * (1 if form is ArtifactForm.JAX_EXPORT else 8))
    ]
    inputs = [portable(), QUANTIZED.encode(), future(), nested(100_000).encode(), *damaged]
    paths: list[str] = []
    for number, data in enumerate(inputs):
        (tmp_path / f"{number}").write_bytes(data)
        paths.append(str(tmp_path / f"{number}"))
    command = [sys.executable, "-c", LOADING, *paths]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "XLA_FLAGS": ""}
    )
    assert result.returncode == 0, result.stderr
    good, quantized, newer, deep, *rest = json.loads(result.stdout)
    assert good.startswith("read")
    assert quantized.startswith("read")
    assert "an artifact of StableHLO 9.87.6" in newer
    assert "was ended by SIGSEGV" in deep
    assert all(outcome.startswith("read") or ": error: " in outcome for outcome in rest)


def test_what_was_written_here_is_read_at_once(monkeypatch: pytest.MonkeyPatch):
    from stablehlo_tools.artifacts import outside_reader
    from stablehlo_tools.processes import activity

    def refuse(*_: object) -> bytes:
        raise AssertionError("read in another process")

    monkeypatch.setattr(activity, "_dispensable", False)
    monkeypatch.setattr(outside_reader, "read_outside", refuse)
    data = portable_without_reading()
    assert artifacts.parse(data).form is ArtifactForm.PORTABLE
    with pytest.raises(AssertionError, match="another process"):
        artifacts.parse(data + b" ")


def portable_without_reading() -> bytes:
    from stablehlo_tools import bindings
    from stablehlo_tools.artifacts.module_bytes import write_module

    module = bindings.parse_module("module {}", bindings.new_context())
    return write_module(module, ArtifactForm.PORTABLE)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("%0 = mhlo.copy %a : tensor<4xf32>", "mhlo.copy"),
        (
            '%0 = "mhlo.all_to_all"(%a) <{replica_groups = dense<[[0], [1]]> : tensor<2x1xi64>}>'
            " : (tensor<4xf32>) -> tensor<4xf32>",
            "mhlo.all_to_all",
        ),
        (
            "%s = shape.const_shape [4] : tensor<1xindex> %f = stablehlo.constant dense<0.0> : "
            "tensor<f32> %0 = stablehlo.rng %f, %f, %s, distribution = UNIFORM : "
            "(tensor<f32>, tensor<f32>, tensor<1xindex>) -> tensor<4xf32>",
            "stablehlo.rng",
        ),
    ],
)
def test_what_a_portable_artifact_cannot_hold_is_named(tmp_path: Path, body: str, name: str):
    source, output = tmp_path / "in.mlir", tmp_path / "out.bc"
    source.write_text(ADD.replace("BODY", body))
    result = run("opt", source, "-o", output)
    assert (result.returncode, output.exists()) == (2, False)
    assert re.match(rf"{source}:2:\d+: error: {name} cannot be written as a ", result.stderr)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        ('%0 = stablehlo.add %a, %a {x = "\\FF"} : tensor<4xf32>', False),
        ('%0 = stablehlo.add %a, %a {x = "\\C3\\A9"} : tensor<4xf32>', True),
        (
            '%0 = stablehlo.custom_call @f(%a) {backend_config = "\\FF"} '
            ": (tensor<4xf32>) -> tensor<4xf32>",
            True,
        ),
        (  # as jax writes a kernel of Triton
            "%0 = stablehlo.custom_call @f(%a) {mhlo.backend_config = {grid = 1 : i32, "
            'ir = "ML\\EF", more = {x = "}\\FF"}, name = "my_add"}} '
            ": (tensor<4xf32>) -> tensor<4xf32>",
            True,
        ),
        (
            '%0 = stablehlo.custom_call @f(%a) {mhlo.backend_config = {ir = "a"}, x = "\\FF"} '
            ": (tensor<4xf32>) -> tensor<4xf32>",
            False,
        ),
    ],
)
def test_names_are_utf8_and_what_backends_are_told_is_any_bytes(body: str, accepted: bool):
    text = ADD.replace("BODY", body).encode()
    if accepted:
        artifacts.parse(text)
        return
    with pytest.raises(ToolError, match="not UTF-8"):
        artifacts.parse(text)


@pytest.fixture(scope="module")
def exported() -> export.Exported:
    def step(x: jax.Array, unused: jax.Array) -> jax.Array:
        del unused
        return jnp.sin(x)

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return export.export(jax.jit(step))(shape, shape)


def test_a_file_of_an_old_jax_says_which_jax_reads_it(
    exported: export.Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    short = serialization_generated.ExportedAddNrDevicesShort
    monkeypatch.setattr(serialization_generated, "ExportedAddNrDevices", short)
    (tmp_path / "old.jax_export").write_bytes(exported.serialize())
    result = run("inspect", tmp_path / "old.jax_export")
    assert result.returncode == 2
    assert "exported by a jax before 0.8.2" in result.stderr
    assert "read it with jax 0.8.1" in result.stderr
    assert "opt --module-only FILE -o FILE.bc" in result.stderr
    output = tmp_path / "module.mlir"
    result = run("opt", "--module-only", tmp_path / "old.jax_export", "-o", output)
    assert (result.returncode, result.stderr) == (0, f"wrote {output}\n")
    assert output.read_text() == artifacts.to_text(artifacts.from_exported(exported).module)
    again = run(
        "opt", "--module-only", tmp_path / "old.jax_export", "-o", tmp_path / "x.jax_export"
    )
    assert again.returncode == 2
    assert "only an artifact of jax.export can become a .jax_export file" in again.stderr


@pytest.mark.parametrize(
    "changes", [{"module_kept_var_idx": (0, 1)}, {"module_kept_var_idx": (7,)}, {"out_avals": ()}]
)
def test_an_export_that_describes_another_program_is_refused(
    exported: export.Exported, changes: dict[str, object]
):
    with pytest.raises(ToolError, match="damaged"):
        artifacts.from_exported(dataclasses.replace(exported, **changes))


def test_a_type_that_only_the_writer_registered_is_written_again(tmp_path: Path):
    """As the state of optax's optimizers is."""
    source = """
import sys, typing, jax, jax.numpy as jnp
from jax import export
class State(typing.NamedTuple):
    count: jax.Array
export.register_namedtuple_serialization(State, serialized_name="optax.State")
stepped = export.export(jax.jit(lambda s: State(s.count + 1)))(State(jnp.zeros(())))
open(sys.argv[1], "wb").write(stepped.serialize())
"""
    path = tmp_path / "step.jax_export"
    subprocess.run([sys.executable, "-c", source, str(path)], check=True)
    artifacts.save(artifacts.load(str(path)), tmp_path / "again.jax_export")
    assert b"optax.State" in (tmp_path / "again.jax_export").read_bytes()

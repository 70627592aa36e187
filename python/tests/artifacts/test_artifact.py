"""Artifacts: four forms told apart by content, replaced modules, atomic writes."""

import dataclasses
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from artifact_mutations import FORMS
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stablehlo_tools
from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import ArtifactForm
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files import atomic


def exported_sum() -> export.Exported:
    """Two inputs, one of them unused, on eight devices: a psum and a ppermute."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def local(a: jax.Array) -> jax.Array:
        return jax.lax.psum(a, "x") + jax.lax.ppermute(a, "x", [(0, 1), (1, 0)])

    def function(a: jax.Array, unused: jax.Array) -> dict[str, jax.Array]:
        del unused
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
        )
        return {"sum": mapped(a)}

    sharding = NamedSharding(mesh, PartitionSpec("x"))
    return export.export(jax.jit(function))(
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )


@pytest.fixture(scope="module")
def exported() -> export.Exported:
    return exported_sum()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_back_for_what_it_is(exported: export.Exported, form: ArtifactForm):
    original = artifacts.from_exported(exported)
    again = artifacts.parse(artifacts.encode(original, form))
    assert again.form is form
    assert artifacts.to_text(again.module) == artifacts.to_text(original.module)
    assert (again.exported is not None) == (form is ArtifactForm.JAX_EXPORT)


@pytest.mark.parametrize(
    "form", [ArtifactForm.BYTECODE, ArtifactForm.PORTABLE, ArtifactForm.JAX_EXPORT]
)
def test_binary_forms_keep_locations(exported: export.Exported, form: ArtifactForm):
    original = artifacts.from_exported(exported)
    again = artifacts.parse(artifacts.encode(original, form))
    wanted = artifacts.to_text(original.module, locations=True)
    assert "test_artifact.py" in wanted
    assert artifacts.to_text(again.module, locations=True) == wanted


def test_transform_keeps_all_but_module_and_vjp(exported: export.Exported):
    result = stablehlo_tools.transform(exported, "thread-tokens")
    changed = {
        field.name
        for field in dataclasses.fields(export.Exported)
        if getattr(result, field.name) is not getattr(exported, field.name)
    }
    assert changed == {"mlir_module_serialized", "_get_vjp"}
    assert exported.has_vjp()
    assert not result.has_vjp()


def test_transformed_artifact_serializes_and_runs(exported: export.Exported, tmp_path: Path):
    stablehlo_tools.save(
        stablehlo_tools.transform(exported, "thread-tokens"), tmp_path / "step.jax_export"
    )
    loaded = stablehlo_tools.load(tmp_path / "step.jax_export").to_exported()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    a = jax.device_put(
        np.arange(32, dtype=np.float32).reshape(8, 4), NamedSharding(mesh, PartitionSpec("x"))
    )
    unused = jax.device_put(np.zeros(3, np.int32), NamedSharding(mesh, PartitionSpec()))
    before, after = (np.asarray(jax.jit(e.call)(a, unused)["sum"]) for e in (exported, loaded))
    assert before.tobytes() == after.tobytes()
    assert before.any()


def test_transform_leaves_its_input_alone(exported: export.Exported):
    artifact = artifacts.from_exported(exported)
    text = artifacts.to_text(artifact.module)
    result = stablehlo_tools.transform(artifact, "thread-tokens")
    assert artifacts.to_text(artifact.module) == text
    assert artifacts.to_text(result.module) != text


def test_a_bare_module_cannot_become_an_export():
    artifact = artifacts.parse(b"func.func @main() { return }")
    with pytest.raises(ToolError, match=r"only an artifact of jax\.export"):
        artifacts.encode(artifact, ArtifactForm.JAX_EXPORT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_truncated_files_are_refused(exported: export.Exported, form: ArtifactForm, share: float):
    data = artifacts.encode(artifacts.from_exported(exported), form)
    with pytest.raises(ToolError) as caught:
        artifacts.parse(data[: int(len(data) * share)], "cut.bin")
    assert str(caught.value).startswith("cut.bin:")
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"\xff\xfe\xfd", b"\x00" * 100, b"hello", b"ML\xefR"]
)
def test_other_bytes_are_refused(data: bytes):
    with pytest.raises(ToolError):
        artifacts.parse(data)


def test_portable_artifacts_target_what_jax_export_targets(exported: export.Exported):
    data = artifacts.encode(artifacts.from_exported(exported), ArtifactForm.PORTABLE)
    original = bindings.portable_version(exported.mlir_module_serialized)
    assert bindings.portable_version(data) == original == bindings.export_version()


def test_writes_are_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "out.mlir"
    target.write_bytes(b"old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.mlir"]


def test_writes_follow_links_and_keep_modes(tmp_path: Path):
    real, link = tmp_path / "real.mlir", tmp_path / "link.mlir"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    atomic.write_atomically(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_devices_are_written_to_not_replaced():
    atomic.write_atomically("/dev/null", b"anything")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("name", ["out", "out.txt", "missing/out.mlir"])
def test_bad_outputs_are_refused(exported: export.Exported, tmp_path: Path, name: str):
    with pytest.raises(ToolError, match=r"output|cannot write"):
        artifacts.save(artifacts.from_exported(exported), tmp_path / name)
    assert not list(tmp_path.iterdir())

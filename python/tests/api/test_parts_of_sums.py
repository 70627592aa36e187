"""Exports of explicit meshes whose results stay in parts of sums."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.cli.main import main

_SPECS = {
    "one axis": (P("x", "y"), P("y", None), P("x", None, unreduced=frozenset({"y"}))),
    "both axes": (P(None, ("x", "y")), P(("x", "y"), None), P(unreduced=frozenset({"x", "y"}))),
}


@pytest.mark.parametrize("form", list(_SPECS))
def test_results_stay_in_parts(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right, result = _SPECS[form]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in (((8, 16), left), ((16, 4), right))
        )
        product = jax.jit(lambda x, w: jnp.einsum("ik,kj->ij", x, w, out_sharding=result))
        exported = export.export(product)(x, w)
    after = stablehlo_tools.transform(exported, "partition")
    assert not find_collectives(from_exported(after).module)
    again = export.deserialize(after.serialize())
    assert again._out_named_shardings == exported._out_named_shardings  # pyright: ignore[reportPrivateUsage]
    files = [tmp_path / name for name in ("before.jax_export", "after.jax_export")]
    for path, each in zip(files, (exported, after), strict=True):
        path.write_bytes(each.serialize())
    assert main(["verify", *map(str, files)]) == 0
    assert capsys.readouterr().out.startswith("identical in exact arithmetic: 1 output")
    assert main(["verify", "--floats", *map(str, files)]) == 0
    damaged = tmp_path / "damaged.mlir"
    assert main(["opt", str(files[1]), "-o", str(damaged)]) == 0
    text = damaged.read_text()
    line = next(line for line in text.splitlines() if "sdy.return" in line)
    value = line.split()[1]
    twice = f"%twice = stablehlo.add {value}, {value} : {line.split(' : ')[1]}"
    damaged.write_text(text.replace(line, f"{twice}\nsdy.return %twice : {line.split(' : ')[1]}"))
    assert main(["verify", str(files[0]), str(damaged)]) == 1

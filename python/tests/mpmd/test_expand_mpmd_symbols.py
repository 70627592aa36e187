"""What the ops of a step refer to, meshes and functions, goes with them into the programs of the
ranks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mpmd_programs import program

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir, new_context
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import (
    copy_referenced_symbols,
    erase_unused_meshes,
    referenced_symbols,
    symbol_name,
)
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set

TANH = """
func.func private @{name}(%x: tensor<2x8xf32>) -> tensor<2x8xf32> {{
  %0 = stablehlo.tanh %x : tensor<2x8xf32>
  return %0 : tensor<2x8xf32>
}}
"""


@cache
def data_parallel(*, placed: bool = True) -> Exported:
    """A step that writes its collectives itself: their groups are axes of a mesh. Where nothing is
    `placed`, jax says that it is a program for one device."""

    def local(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            h, _ = lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)
            count = lax.psum(jnp.sum(h > 2, 1).astype(jnp.float32), "data")  # in each microbatch
            return jnp.mean((h - y) ** 2 * (1 + lax.stop_gradient(count)[:, None]))

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * lax.pmean(gradient, "data"), lax.pmean(value, "data")

    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = (P(), P("data"), P("data"))
    step = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=(P(), P()), check_vma=False)
    shapes = ((2, 8, 8), (8, 8), (8, 8))
    given = [
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, axes) if placed else None
        )
        for shape, axes in zip(shapes, split, strict=True)
    ]
    return jax.export.export(jax.jit(step))(*given)


def test_a_shard_map_with_a_psum_becomes_programs_that_give_its_values(tmp_path: Path):
    step = artifact.from_exported(data_parallel())
    assert "replica_group_mesh_axes<mesh = @" in str(step.module)
    found = expand_mpmd(step, ExpansionRequest("1f1b", 2, load_hardware("h100"), None, 2))
    assert "replica_group_mesh_axes" not in "".join(map(str, found.modules))
    write(tmp_path, found.manifest, found.modules)
    written = load(tmp_path)
    assert not prove(written).findings
    assert run_set(written, step, SetOptions()).same


def test_devices_that_the_program_does_not_count_are_told():
    step = artifact.from_exported(data_parallel(placed=False))
    with pytest.raises(ToolError, match=r"states 1 device, but divides .* over 2") as no:
        expand_mpmd(step, ExpansionRequest("1f1b", 2, load_hardware("h100"), None, 2))
    assert "(P8)" in str(no.value)


def test_symbols_go_along_with_what_they_refer_to():
    with new_context():
        source = ir.Module.parse(
            """
            sdy.mesh @unused = <["a"=2]>
            sdy.mesh @mesh = <["a"=2]>
            func.func private @outer(%x: tensor<4xf32>) -> tensor<4xf32> {
              %0 = stablehlo.composite "own.inner" %x {decomposition = @"in ner"}
                : (tensor<4xf32>) -> tensor<4xf32>
              return %0 : tensor<4xf32>
            }
            func.func private @"in ner"(%x: tensor<4xf32>) -> tensor<4xf32> {
              %0 = "stablehlo.all_reduce"(%x) <{
                channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
                replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh,
                axes = [#stablehlo.axis_ref<name = "a">]>, use_global_device_ids}> ({
              ^bb0(%a: tensor<f32>, %b: tensor<f32>):
                %s = stablehlo.add %a, %b : tensor<f32>
                stablehlo.return %s : tensor<f32>
              }) : (tensor<4xf32>) -> tensor<4xf32>
              return %0 : tensor<4xf32>
            }
            """
        )
        target = ir.Module.parse(
            """
            func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
              %0 = stablehlo.composite "own.outer" %x {decomposition = @outer, note = "@unused"}
                : (tensor<4xf32>) -> tensor<4xf32>
              return %0 : tensor<4xf32>
            }
            func.func private @outer(%x: tensor<4xf32>) -> tensor<4xf32> {
              return %x : tensor<4xf32>
            }
            """
        )
        target.body.operations[1].operation.erase()
        assert referenced_symbols(target.operation) == {"outer"}
        copy_referenced_symbols(source.operation, target)
        assert {symbol_name(op) for op in target.body.operations} == {
            "main",
            "outer",
            "in ner",
            "mesh",
        }
        target.operation.verify()
        erase_unused_meshes(source)
        assert "@unused" not in str(source)


@pytest.mark.parametrize("name", ["prepare", "finish_0", "stage_1_forward", "some_tanh"])
def test_functions_of_composites_go_along_under_names_that_are_free(name: str, tmp_path: Path):
    plain = str(program("with-skips").module)
    text, count = re.subn(
        r"stablehlo.tanh (%\w+) : tensor<2x8xf32>",
        rf'stablehlo.composite "own.tanh" \1 {{decomposition = @{name}}} : '
        "(tensor<2x8xf32>) -> tensor<2x8xf32>",
        plain,
    )
    assert count
    end = text.rindex("}")
    step = artifact.parse(f"{text[:end]}{TANH.format(name=name)}}}".encode(), "step")
    found = expand_mpmd(step, ExpansionRequest("1f1b", 2, load_hardware("h100")))
    write(tmp_path, found.manifest, found.modules)
    assert not prove(load(tmp_path)).findings
    assert all("stablehlo.tanh" in str(module) for module in found.modules)

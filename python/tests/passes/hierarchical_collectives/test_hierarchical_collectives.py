"""hierarchical-collectives on exported programs: values, what is taken apart, and XLA's gathers."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from exact_comparison import assert_identical
from jax import export, lax
from jax.export import Exported
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.emitted_collectives import as_compiled
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.targets.compilation import compile_artifact

AXES = ("a", "b", "c")


def everything(x: jax.Array) -> tuple[jax.Array, ...]:
    """Collectives over all axes, in an order of their own, and over two of them."""
    whole = lax.all_gather(x, ("c", "a", "b"), axis=1, tiled=True)
    return (
        whole,
        lax.psum_scatter(jnp.sin(whole), ("b", "c", "a"), scatter_dimension=1, tiled=True),
        lax.psum(x, AXES),
        lax.pmax(x, ("a", "c")),
        lax.psum_scatter(whole, ("a", "b"), scatter_dimension=0, tiled=True),
    )


def exported(body: Callable[..., object], shape: tuple[int, ...], spec: P) -> Exported:
    """A function on 2 x 2 x 2 devices, whose results lie as its argument does."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    outer = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    argument = jax.ShapeDtypeStruct(shape, jnp.float64)
    with jax.enable_x64(new_val=True):
        return export.export(jax.jit(outer), platforms=["cpu"])(argument)


def count(text: str, kind: str) -> int:
    return len(re.findall(rf'"stablehlo\.{kind}"', text))


@pytest.mark.parametrize("rows", [2, 4])
def test_values_are_the_same(rows: int) -> None:
    before = artifact.from_exported(exported(everything, (8, 16), P(None, AXES)), "everything")
    after = stablehlo_tools.transform(before, f"hierarchical-collectives{{rows={rows}}}")
    text = str(after.module)
    assert count(text, "all_gather") > count(str(before.module), "all_gather")
    assert_identical(before, after)


def test_again_changes_nothing_where_rows_are_as_long_as_groups() -> None:
    before = artifact.from_exported(exported(everything, (8, 16), P(None, AXES)), "everything")
    once = stablehlo_tools.transform(before, "hierarchical-collectives{rows=2}")
    twice = stablehlo_tools.transform(once, "hierarchical-collectives{rows=2}")
    thrice = stablehlo_tools.transform(twice, "hierarchical-collectives{rows=2}")
    assert str(twice.module) == str(thrice.module)


@pytest.mark.soak
def test_a_tpu_program_has_fewer_sums_and_more_gathers() -> None:
    """XLA:TPU makes sums of small gathers over 64 chips; of those in two steps it does not."""
    given = MODELS["vit-forward"].full(layers=2)
    program = artifact.from_exported(given, "vit")
    steps = "partition{hardware=tpu-v5e},create-reduce-scatter"
    before = stablehlo_tools.transform(program, steps)
    after = stablehlo_tools.transform(before, "hierarchical-collectives{hardware=tpu-v5e}")
    counts = [
        {
            kind: sum(e.kind.replace("-", "_") == kind for e in made.schedule.events if e.issues)
            for kind in ("all_gather", "all_reduce")
        }
        for made in (compile_artifact(each, "tpu", 600.0) for each in (before, after))
    ]
    assert counts[0]["all_reduce"] > counts[1]["all_reduce"] == 0
    assert counts[1]["all_gather"] > counts[0]["all_gather"]


@pytest.mark.parametrize(
    ("hardware", "kind", "devices", "mib", "compiled", "overlaps"),
    [
        ("tpu-v5e", "all_gather", 64, 16, "all_reduce", False),
        ("tpu-v5e", "all_gather", 64, 17, "all_gather", True),
        ("tpu-v5e", "all_gather", 32, 1, "all_gather", True),
        ("tpu-v5e", "reduce_scatter", 64, 1, "reduce_scatter", False),
        ("tpu-v6e", "collective_permute", 64, 1, "collective_permute", True),
        ("h100", "all_gather", 64, 1, "all_gather", True),
        ("h100", "all_reduce", 64, 1, "all_reduce", True),
    ],
)
def test_what_compilers_make_of_a_collective(
    hardware: str, kind: str, devices: int, mib: int, compiled: str, *, overlaps: bool
) -> None:
    transfer = DeviceTransfer(kind, mib * 2.0**20, (tuple(range(devices)),))
    told = as_compiled(transfer, load_hardware(hardware), devices)
    assert (told.transfer.kind, told.overlaps) == (compiled, overlaps)

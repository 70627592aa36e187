"""partition on GSPMD's shardings: the program that it makes of the same function with Shardy's."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_programs import MESHES, PROGRAMS

import stablehlo_tools
from stablehlo_tools.artifacts.artifact import from_exported

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@contextmanager
def _gspmd() -> Generator[None]:
    """Lets jax write GSPMD's shardings, as it always did before it had Shardy."""
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.clear_caches()
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
        jax.clear_caches()


def _both(exported: Callable[[], Exported]) -> tuple[Exported, Exported]:
    """The artifacts of a function with GSPMD's shardings and with Shardy's."""
    with _gspmd():
        older = exported()
    assert b"mhlo.sharding" in older.mlir_module_serialized
    return older, exported()


def _text(exported: Exported, pipeline: str = "partition") -> str:
    """The program after passes, but for how meshes, groups and channels are written down."""
    text = str(from_exported(stablehlo_tools.transform(exported, pipeline)).module)
    for written, common in (
        (r"(?m)^  sdy\.mesh.*\n", ""),
        (r"@mesh(_\d+)?\b", "@mesh"),
        (r"replica_groups = (dense<[^>]*> : \w+<\w+>|#[\w.]+<.*?\]>)", "groups"),
        (r"manual_axes=\{[^}]*\}", "manual"),
        (r"handle = \d+, type = \d", "handle"),
    ):
        text = re.sub(written, common, text)
    return text


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=program.name, marks=[pytest.mark.soak] if number % 32 else [])
        for number, program in enumerate(PROGRAMS)
    ],
)
def test_the_program_is_that_of_shardys(number: int) -> None:
    older, newer = _both(PROGRAMS[number].exported)
    assert _text(older) == _text(newer)


def _shard_maps(x: Any, w: Any) -> Any:
    """Manual over all axes, over one, over one in another, in a loop, and with no argument; each
    differentiated."""
    mesh = MESHES["4x2"]()
    y = lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P("x", P.UNCONSTRAINED)))

    def inner(a: Any) -> Any:
        mapped = jax.shard_map(
            lambda b: b * lax.psum(b.sum(), "y"), in_specs=P(None, "y"), out_specs=P(None, "y")
        )
        return lax.ppermute(mapped(a), "x", [(0, 1), (1, 2), (2, 3), (3, 0)])

    def body(carry: Any, _: Any) -> Any:
        mapped = jax.shard_map(
            lambda a: a + lax.pmean(a, "y"), mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y")
        )
        return mapped(carry), None

    nested = jax.shard_map(
        inner, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    given = jax.shard_map(
        lambda: jnp.float32(1) + lax.axis_index("x")[None], mesh=mesh, in_specs=(), out_specs=P("x")
    )
    y, _ = lax.scan(body, nested(y), None, length=2)
    return (y * given().sum()).sum()


def _exported_shard_maps() -> Exported:
    mesh = MESHES["4x2"]()
    specs = (P("x", None), P(None, "y"))
    jitted = jax.jit(
        jax.value_and_grad(_shard_maps, (0, 1)),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
    )
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (4, 8))]
    return export.export(jitted)(*shapes)


def test_shard_maps_are_manual_computations() -> None:
    older, newer = _both(_exported_shard_maps)
    assert b"SPMDFullToShardShape" in older.mlir_module_serialized
    assert _text(older) == _text(newer)


def test_passes_in_front_of_partition_read_them_too() -> None:
    mesh = MESHES["4x2"]()

    def layers(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    def exported() -> Exported:
        specs = (P(None, "y", None), P("x", None, None))
        jitted = jax.jit(layers, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8, 16), (8, 16, 16))]
        return export.export(jitted)(*shapes)

    older, newer = _both(exported)
    pipeline = "expand-pipeline{axis=x microbatches=4}"
    assert _text(older, pipeline) == _text(newer, pipeline)


def test_an_export_is_called_as_before_and_keeps_the_names_of_its_mesh() -> None:
    older, newer = _both(_exported_shard_maps)
    partitioned = stablehlo_tools.transform(older, "partition")
    assert partitioned.in_shardings_jax(None) == newer.in_shardings_jax(None)
    assert b"mhlo.sharding" not in partitioned.mlir_module_serialized
    mesh = MESHES["4x2"]()
    arguments = [
        jax.device_put(np.cos(np.arange(aval.size, dtype=np.float32)).reshape(aval.shape), at)
        for aval, at in zip(newer.in_avals, newer.in_shardings_jax(mesh), strict=True)
    ]
    read = export.deserialize(bytearray(partitioned.serialize()))
    results = [jax.tree.leaves(jax.jit(each.call)(*arguments)) for each in (read, newer)]
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
        assert mine.sharding.is_equivalent_to(expected.sharding, mine.ndim)

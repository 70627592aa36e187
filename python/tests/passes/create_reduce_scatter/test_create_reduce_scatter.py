"""create-reduce-scatter: its plans, the values it computes, and programs that jax exports."""

import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.devices import mesh

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.ir.walk import functions_by_name, terminator
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.transforms.parts.create_reduce_scatter.chunked import (
    GatherPlan,
    Scatter,
    ScatterPlan,
    TakenChunks,
    plan_gather,
    plan_scatter,
)

ALL = ((0, 1, 2, 3),)
SHARDY = (
    "sdy-propagation-pipeline,sdy-flatten-call-graph,"
    "sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives,"
    "sdy-convert-global-to-local"
)


def test_group_is_put_in_the_order_of_the_chunks():
    plan = plan_scatter(ALL, [TakenChunks(0, 4, (2, 0, 3, 1))], 4)
    assert plan == ScatterPlan((Scatter(0, ((1, 3, 0, 2),)),), None)
    assert plan is not None
    assert plan.traffic() == Fraction(3, 4)


def test_devices_of_one_chunk_are_summed_over_last():
    plan = plan_scatter(ALL, [TakenChunks(1, 2, (0, 1, 0, 1))], 4)
    assert plan == ScatterPlan((Scatter(1, ((0, 1), (2, 3))),), ((0, 2), (1, 3)))
    assert plan is not None
    assert plan.traffic() == Fraction(1, 2) + Fraction(1, 2)


@pytest.mark.parametrize(
    ("rows", "columns", "far"),
    [
        ((0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 3, 0, 1, 2, 3), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ((0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 0, 1, 0, 1, 0, 1), ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_close_devices_come_first_and_far_ones_carry_less(
    rows: tuple[int, ...], columns: tuple[int, ...], far: tuple[tuple[int, ...], ...]
):
    cuts = [TakenChunks(0, max(rows) + 1, rows), TakenChunks(1, max(columns) + 1, columns)]
    plan = plan_scatter((tuple(range(8)),), cuts, 8)
    assert plan is not None
    assert [scatter.dimension for scatter in plan.scatters] == [1, 0]
    assert plan.scatters[1].groups == far
    assert plan.traffic() == Fraction(7, 8)


@pytest.mark.parametrize(
    ("groups", "chunks"),
    [
        (ALL, []),
        (ALL, [TakenChunks(0, 4, (0, 1, 2, 2))]),  # one taken twice, one never
        (ALL, [TakenChunks(0, 8, (0, 2, 4, 6))]),  # more chunks than devices
        (ALL, [TakenChunks(0, 2, (0, 1, 1, 1))]),
        (
            ALL,
            [TakenChunks(0, 2, (0, 1, 0, 1)), TakenChunks(1, 2, (0, 1, 0, 1))],
        ),  # two of four blocks
        (((0, 1), (2, 3)), [TakenChunks(0, 2, (0, 0, 1, 1))]),  # the same in each group
        (((0, 1, 2), (3,)), [TakenChunks(0, 1, (0, 0, 0, 0))]),  # of different sizes
        (((0, 1),), [TakenChunks(0, 2, (0, 1, 0, 1))]),  # two devices left out
    ],
)
def test_no_reduce_scatter(groups: tuple[tuple[int, ...], ...], chunks: list[TakenChunks]):
    assert plan_scatter(groups, chunks, 4) is None


def test_gathers():
    group = ((3, 1, 0, 2),)
    assert plan_gather(group, 0, [TakenChunks(0, 4, (2, 1, 3, 0))], 4) == GatherPlan()
    assert plan_gather(group, 0, [TakenChunks(0, 2, (1, 0, 1, 0))], 4) == GatherPlan(
        ((3, 1), (0, 2))
    )
    moved = plan_gather(group, 0, [TakenChunks(0, 4, (0, 1, 2, 3))], 4)
    assert moved == GatherPlan(pairs=((2, 3), (1, 1), (3, 0), (0, 2)))
    assert plan_gather(group, 1, [TakenChunks(0, 4, (2, 1, 3, 0))], 4) is None
    assert plan_gather(group, 0, [TakenChunks(0, 4, (0, 0, 0, 0))], 4) is None
    assert plan_gather(group, 0, [TakenChunks(0, 2, (0, 0, 1, 1))], 4) is None
    assert plan_gather(group, 0, [TakenChunks(0, 8, (0, 1, 2, 3))], 4) is None


@pytest.mark.parametrize(
    ("lines", "kind", "expected"),
    [
        ("%r = stablehlo.convert %p : (tensor<ui32>) -> tensor<i64>", "i64", [0, 1, 2, 3]),
        # Integers wrap around.
        (
            "%b = stablehlo.convert %p : (tensor<ui32>) -> tensor<i8>\n"
            "%k = stablehlo.constant dense<100> : tensor<i8>\n"
            "%r = stablehlo.multiply %b, %k : tensor<i8>",
            "i8",
            [0, 100, -56, 44],
        ),
        # Division and remainder go towards zero.
        (
            "%b = stablehlo.convert %p : (tensor<ui32>) -> tensor<i32>\n"
            "%k = stablehlo.constant dense<-3> : tensor<i32>\n"
            "%s = stablehlo.add %b, %k : tensor<i32>\n"
            "%two = stablehlo.constant dense<2> : tensor<i32>\n"
            "%q = stablehlo.divide %s, %two : tensor<i32>\n"
            "%m = stablehlo.remainder %s, %two : tensor<i32>\n"
            "%ten = stablehlo.constant dense<10> : tensor<i32>\n"
            "%t = stablehlo.multiply %q, %ten : tensor<i32>\n"
            "%r = stablehlo.add %t, %m : tensor<i32>",
            "i32",
            [-11, -10, -1, 0],
        ),
        # A table of bytes wraps around as bytes.
        (
            "%i = stablehlo.iota dim = 0 : tensor<4xi8>\n"
            "%k = stablehlo.constant dense<100> : tensor<4xi8>\n"
            "%m = stablehlo.multiply %i, %k : tensor<4xi8>\n"
            "%w = stablehlo.convert %m : (tensor<4xi8>) -> tensor<4xi32>\n"
            "%s = stablehlo.dynamic_slice %w, %p, sizes = [1] : "
            "(tensor<4xi32>, tensor<ui32>) -> tensor<1xi32>\n"
            "%r = stablehlo.reshape %s : (tensor<1xi32>) -> tensor<i32>",
            "i32",
            [0, 100, -56, 44],
        ),
        # What divides by zero is up to the compiler.
        ("%r = stablehlo.divide %p, %p : tensor<ui32>", "ui32", None),
        ("%r = stablehlo.shift_left %p, %p : tensor<ui32>", "ui32", [0, 2, 8, 24]),
        # A lookup is clamped.
        (
            "%t = stablehlo.constant dense<[5, 6, 7]> : tensor<3xi32>\n"
            "%s = stablehlo.dynamic_slice %t, %p, sizes = [1] : "
            "(tensor<3xi32>, tensor<ui32>) -> tensor<1xi32>\n"
            "%r = stablehlo.reshape %s : (tensor<1xi32>) -> tensor<i32>",
            "i32",
            [5, 6, 7, 7],
        ),
        (
            "%i = stablehlo.iota dim = 0 : tensor<8xi32>\n"
            "%v = stablehlo.reverse %i, dims = [0] : tensor<8xi32>\n"
            "%s = stablehlo.dynamic_slice %v, %p, sizes = [1] : "
            "(tensor<8xi32>, tensor<ui32>) -> tensor<1xi32>\n"
            "%low = stablehlo.constant dense<5> : tensor<i32>\n"
            "%high = stablehlo.constant dense<6> : tensor<i32>\n"
            "%x = stablehlo.reshape %s : (tensor<1xi32>) -> tensor<i32>\n"
            "%r = stablehlo.clamp %low, %x, %high : tensor<i32>",
            "i32",
            [6, 6, 5, 5],
        ),
        ("%r = stablehlo.add %p, %a : tensor<ui32>", "ui32", None),  # an argument of the program
    ],
)
def test_values_on_every_device(lines: str, kind: str, expected: list[int] | None):
    source = (
        "module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {\n"
        f"func.func @main(%a: tensor<ui32>) -> tensor<{kind}> {{\n"
        f"%p = stablehlo.partition_id : tensor<ui32>\n{lines}\n"
        f"return %r : tensor<{kind}>\n}}\n}}"
    )
    program = artifact.parse(source.encode())
    values = DeviceValues(program.module, ModuleFacts.from_module(program.module))
    main = functions_by_name(program.module)["main"]
    found = values.scalar(terminator(main.regions[0].blocks[0]).operands[0])
    assert (None if found is None else found.tolist()) == expected


def by_sum_and_slice(x: jax.Array) -> jax.Array:
    """What people write in the place of psum_scatter."""
    whole = lax.psum(x, "a")
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("a") * 4, 4, 0)


def by_index(x: jax.Array) -> jax.Array:
    """The same with an index, of a sum over two axes."""
    whole = lax.psum(x, ("b", "a")) * 2
    return whole.reshape(4, 4, -1)[lax.axis_index("a")]


def own_shard_back(x: jax.Array) -> jax.Array:
    """A gather of which the device takes what it had."""
    whole = lax.all_gather(x, "a", tiled=True)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("a") * 16, 16, 0)


def summed_in_a_scan(x: jax.Array) -> jax.Array:
    """A sum in each iteration, in a function of its own; the offset is from outside."""
    start = lax.axis_index("a") * 4

    @jax.checkpoint
    def part(carry: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(lax.psum(x + carry, "a"), start, 4, 0)

    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return carry + 1, part(carry)  # pyright: ignore[reportReturnType]

    return lax.scan(step, jnp.float32(0), None, length=3)[1].sum(0)  # pyright: ignore


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_sum_and_slice, ["reduce_scatter"]),
        (by_index, ["reduce_scatter", "all_reduce"]),
        (own_shard_back, []),
        (summed_in_a_scan, ["reduce_scatter"]),
    ],
)
def test_exported_shard_map(function: Any, expected: list[str]):
    devices = mesh(a=4, b=2)
    mapped = jax.shard_map(
        function, mesh=devices, in_specs=P(None, "b"), out_specs=P("a", "b"), check_vma=False
    )
    before, after = exported(jax.jit(mapped), devices)
    assert collectives(after) == expected
    x = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    given = jax.device_put(x, NamedSharding(devices, P(None, "b")))
    results = [np.asarray(program.to_exported().call(given)) for program in (before, after)]
    assert results[0].tobytes() == results[1].tobytes()


def test_exported_shard_map_over_one_axis_of_two():
    devices = mesh(a=4, b=2)
    mapped = jax.shard_map(
        by_sum_and_slice,
        mesh=devices,
        in_specs=P(),
        out_specs=P("a"),
        axis_names={"a"},
        check_vma=False,
    )
    _, after = exported(jax.jit(mapped), devices)
    assert collectives(after) == ["reduce_scatter"]
    # The device's position was computed in a manual computation of its own, which is gone too.
    assert "stablehlo.partition_id" not in artifact.to_text(after.module)
    x = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    given = jax.device_put(x, NamedSharding(devices, P(None, "b")))
    assert np.array_equal(np.asarray(after.to_exported().call(given)), 4 * x)


def test_a_reduce_scatter_has_the_places_of_the_sum_and_the_slice():
    devices = mesh(a=4, b=2)
    mapped = jax.shard_map(
        by_sum_and_slice,
        mesh=devices,
        in_specs=P(None, "b"),
        out_specs=P("a", "b"),
        check_vma=False,
    )
    _, after = exported(jax.jit(mapped), devices)
    text = artifact.to_text(after.module, locations=True)
    used = re.search(r"\(tensor<16x8xf32>\) -> tensor<4x8xf32> loc\((#\w+)\)", text)
    assert used is not None
    parts = re.search(rf"{used.group(1)} = loc\(fused\[(#\w+), (#\w+)\]\)", text)
    assert parts is not None
    assert f'{parts.group(1)} = loc("psum' in text
    assert f'{parts.group(2)} = loc("dynamic_slice' in text


def test_what_shardy_leaves_in_a_training_step():
    devices = mesh(data=4, model=2)

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return ((x @ up) @ down).sum()

    shapes = [(64, 32), (32, 128), (128, 32)]
    specs = [P("data", None), P("data", "model"), P("model", "data")]
    inputs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(devices, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    step = jax.jit(
        jax.grad(loss, argnums=(1, 2)),
        out_shardings=tuple(NamedSharding(devices, spec) for spec in specs[1:]),
    )
    before = artifact.parse(export.export(step)(*inputs).mlir_module().encode())
    transforming.run_pipeline(before, Pipeline.parse(SHARDY))
    assert "stablehlo.partition_id" in artifact.to_text(before.module)
    after = rewritten(before)
    assert collectives(after).count("reduce_scatter") == 2
    assert "all_to_all" not in collectives(after)
    assert "stablehlo.partition_id" not in artifact.to_text(after.module)
    rng = np.random.default_rng(0)
    local = [(16, 32), (8, 64), (64, 8)]
    arguments = [
        [rng.integers(-2, 3, shape).astype(np.float32) for _ in range(8)] for shape in local
    ]
    results: list[list[list[bytes]]] = []
    for program in (before, after):
        executable = bindings.compile_for_devices(
            bindings.write_bytecode(program.module), 1, 8, jax.devices(), partitioned=False
        )
        outputs = bindings.run_on_devices(executable, arguments, jax.devices())
        results.append([[np.asarray(part).tobytes() for part in parts] for parts in outputs])
    assert results[0] == results[1]


def exported(function: Any, devices: jax.sharding.Mesh) -> tuple[Artifact, Artifact]:
    """A function of one matrix as jax exports it, and after the pass."""
    sharding = NamedSharding(devices, P(None, "b"))
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=sharding)
    before = artifact.parse(bytes(export.export(function)(shape).serialize()))
    return before, rewritten(before)


def rewritten(program: Artifact) -> Artifact:
    result = program.copy()
    transforming.run_pipeline(result, Pipeline.parse("create-reduce-scatter"))
    return result


def collectives(program: Artifact) -> list[str]:
    """The kinds of the module's collectives, in order."""
    kinds = "all_reduce|all_gather|all_to_all|reduce_scatter|collective_permute"
    return re.findall(rf'"stablehlo\.({kinds})"', artifact.to_text(program.module))

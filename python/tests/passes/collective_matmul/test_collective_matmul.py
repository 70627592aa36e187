"""collective-matmul on exported programs: values in float64, what becomes a ring, what stays."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_comparison import assert_identical
from jax import export, lax
from jax.export import Exported
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kept_values import run
from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.transforms.parts.collective_matmul import ring_choice
from stablehlo_tools.transforms.parts.collective_matmul.ring_choice import RingTarget
from stablehlo_tools.transforms.parts.collective_matmul.rings import (
    BlockPart,
    Cube,
    DeviceRing,
    Direct,
    RingDirection,
    cycles,
)
from stablehlo_tools.verify.verification import Options, verify_artifacts

type Program = tuple[Callable[..., object], object, object, tuple[tuple[int, ...], ...]]

T = "t"


def gathered(x: jax.Array, dim: int = 0, axes: str | tuple[str, ...] = T) -> jax.Array:
    """An all_gather along a dimension."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def scattered(x: jax.Array, dim: int = 0, axes: str = T) -> jax.Array:
    """A reduce_scatter along a dimension."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return scattered(jax.nn.gelu(gathered(x) @ w) @ v)


def sequences(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    hidden = jnp.tanh(jnp.einsum("bsd,df->bsf", gathered(x, 1), w))
    return scattered(jnp.einsum("bsf,fd->bsd", hidden, v), 1)


def attention(
    x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array
) -> jax.Array:
    whole = gathered(x, 1)
    q, k, v = ((whole @ w).reshape(2, 16, 2, 3) for w in (wq, wk, wv))
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    out = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(2, 16, 6)
    return scattered(out @ wo, 1) + x


def gradients(x: jax.Array, w: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    whole, rows = gathered(x), gathered(dy)
    hidden = whole @ w
    back = (rows @ v.T) * jnp.cos(hidden)
    return scattered(back @ w.T), jax.nn.gelu(hidden).T @ rows, whole.T @ back


def normed(x: jax.Array, scale: jax.Array, w: jax.Array, rest: jax.Array) -> tuple[jax.Array, ...]:
    whole = gathered(x)
    whole = whole / jnp.sqrt(jnp.mean(whole * whole, -1, keepdims=True) + 1e-5) * scale
    return (whole + rest) @ w, gathered(x) * 3


def merged(x: jax.Array, w: jax.Array) -> jax.Array:
    return scattered((gathered(x, 1).reshape(32, 6) @ w).reshape(2, 16, 4), 1)


def layers(x: jax.Array, ws: jax.Array, vs: jax.Array) -> tuple[jax.Array, jax.Array]:
    def layer(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, v = weights
        return h + scattered(jnp.tanh(gathered(h) @ w) @ v), jnp.sum(h)

    return lax.scan(layer, x, (ws, vs))


def crossed(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows over one axis and columns over the other, each taken by products of the other's."""
    rows, columns = gathered(x, 0, "a"), gathered(w, 1, "b")
    first = jnp.tanh(x @ columns)
    second = scattered(rows @ v, 0, "a")
    return scattered(gathered(first, 0, "a") @ columns.T, 0, "a") + second @ v.T, first


def transposed(a: jax.Array, w: jax.Array) -> jax.Array:
    return scattered((a @ w).T.reshape(2, 8, 5), 1)


def exchanged(x: jax.Array, split: int, concat: int, axes: str = T) -> jax.Array:
    """An all_to_all from one dimension to another."""
    return lax.all_to_all(x, axes, split_axis=split, concat_axis=concat, tiled=True)


def experts(x: jax.Array, w: jax.Array, v: jax.Array, axes: str = T) -> jax.Array:
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", exchanged(x, 0, 1, axes), w))
    return exchanged(jnp.einsum("ecf,efd->ecd", hidden, v), 1, 0, axes)


def expert_gradients(
    x: jax.Array, w: jax.Array, v: jax.Array, dy: jax.Array
) -> tuple[jax.Array, ...]:
    y, back = jax.vjp(experts, x, w, v)
    return y, *back(dy)


def expert_layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    for _ in range(2):
        x = x + jnp.tanh(experts(x, w, v))
    return x


def tokens_kept(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens = exchanged(x, 0, 1)
    return jnp.einsum("ecd,edf->ecf", tokens, w), tokens


PROGRAMS: dict[str, Program] = {
    "experts": (
        experts,
        (P(None, T), P(T), P(T)),
        P(None, T),
        ((8, 16, 6), (8, 6, 10), (8, 10, 6)),
    ),
    "expert-gradients": (
        expert_gradients,
        (P(None, T), P(T), P(T), P(None, T)),
        (P(None, T), P(None, T), P(T), P(T)),
        ((8, 16, 6), (8, 6, 10), (8, 10, 6), (8, 16, 6)),
    ),
    "expert-layers": (
        expert_layers,
        (P(None, T), P(T), P(T)),
        P(None, T),
        ((8, 16, 6), (8, 6, 10), (8, 10, 6)),
    ),
    "tokens-kept": (tokens_kept, (P(None, T), P(T)), (P(T), P(T)), ((16, 16, 6), (16, 6, 10))),
    "exchanged-behind": (
        lambda a, w: exchanged(jnp.einsum("cd,df->cf", a, w), 0, 1),
        (P(T), P()),
        P(None, T),
        ((128, 6), (6, 10)),
    ),
    "same-dimension": (lambda x, w: exchanged(x, 0, 0) @ w, (P(T), P()), P(T), ((128, 6), (6, 10))),
    "mlp": (mlp, (P(T), P(None, T), P(T)), P(T), ((16, 6), (6, 24), (24, 6))),
    "sequences": (
        sequences,
        (P(None, T), P(None, T), P(T)),
        P(None, T),
        ((3, 16, 6), (6, 24), (24, 6)),
    ),
    "attention": (
        attention,
        (P(None, T), P(), P(), P(), P()),
        P(None, T),
        ((2, 16, 6), (6, 6), (6, 6), (6, 6), (6, 6)),
    ),
    "gradients": (
        gradients,
        (P(T), P(None, T), P(T), P(T)),
        (P(T), P(T), P(None, T)),
        ((16, 6), (6, 24), (24, 6), (16, 6)),
    ),
    "normed": (normed, (P(T), P(), P(), P()), (P(), P()), ((16, 6), (6,), (6, 4), (16, 6))),
    "merged": (merged, (P(None, T), P()), P(None, T), ((2, 16, 6), (6, 4))),
    "layers": (
        layers,
        (P(T), P(None, None, T), P(None, T)),
        (P(T), P()),
        ((16, 6), (3, 6, 24), (3, 24, 6)),
    ),
    "transposed": (transposed, (P(None, T), P(T)), P(None, T), ((5, 24), (24, 16))),
    "contracted": (lambda x, w: x @ gathered(w), (P(), P(T)), P(), ((5, 16), (16, 6))),
    "free": (lambda x, w: x @ gathered(w, 1), (P(), P(None, T)), P(), ((5, 7), (7, 16))),
    "batch": (
        lambda x, w: jnp.einsum("bij,bjk->bik", gathered(x), w),
        (P(T), P()),
        P(),
        ((16, 3, 4), (16, 4, 5)),
    ),
}
GROUPED: dict[str, tuple[Program, tuple[tuple[int, ...], tuple[str, ...]]]] = {
    "two": (PROGRAMS["mlp"], ((2,), (T,))),
    "three": ((mlp, (P(T), P(None, T), P(T)), P(T), ((9, 6), (6, 6), (6, 6))), ((3,), (T,))),
    "one-of-two-axes": (
        (
            lambda x, w, v: scattered(jnp.tanh(gathered(x, 0, "b") @ w) @ v, 0, "b"),
            (P(("b", "a")), P(None, "b"), P("b")),
            P(("b", "a")),
            ((16, 6), (6, 24), (24, 6)),
        ),
        ((2, 4), ("a", "b")),
    ),
    "crossed": (
        (crossed, (P("a"), P(None, "b"), P()), (P("a"), P("a")), ((8, 6), (6, 24), (6, 6))),
        ((2, 4), ("a", "b")),
    ),
    "experts-of-one-axis": (
        (
            lambda x, w, v: experts(x, w, v, "b"),
            (P("a", "b"), P("b"), P("b")),
            P("a", "b"),
            ((8, 16, 6), (4, 6, 10), (4, 10, 6)),
        ),
        ((2, 4), ("a", "b")),
    ),
    "experts-of-three": (
        (experts, (P(None, T), P(T), P(T)), P(None, T), ((3, 9, 6), (3, 6, 10), (3, 10, 6))),
        ((3,), (T,)),
    ),
    "both-axes": (
        (lambda x, w: gathered(x, 0, ("a", "b")) @ w, (P(("a", "b")), P()), P(), ((16, 6), (6, 4))),
        ((2, 4), ("a", "b")),
    ),
}


def exported(program: Program, axes: tuple[tuple[int, ...], tuple[str, ...]]) -> Exported:
    """A program over a mesh, in float64."""
    function, inputs, outputs, shapes = program
    sizes, names = axes
    with jax.enable_x64(True):
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
        step = jax.shard_map(
            function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes]
        return export.export(jax.jit(step))(*arguments)


def assert_same(before: Exported, after: Exported) -> None:
    """Values in float64 within a relative and absolute bound, on random arguments."""
    random = np.random.default_rng(0)
    arguments = [random.standard_normal(kind.shape) for kind in before.in_avals]
    with jax.enable_x64(True):
        for value, again in zip(run(before, arguments), run(after, arguments), strict=True):
            assert value.dtype == np.float64
            assert np.isfinite(value).all()
            np.testing.assert_allclose(again, value, rtol=1e-11, atol=1e-11)


def ringed(before: Exported, directions: str, hardware: str) -> Exported:
    """A program with all rings that there can be."""
    options = f"rings=all directions={directions} hardware={hardware}"
    return stablehlo_tools.transform(before, f"collective-matmul{{{options}}}")


def text(program: Exported) -> str:
    """Its StableHLO."""
    return str(artifact.from_exported(program, "program").module)


WAYS = (("one", "h100"), ("both", "tpu-v5e"), ("both", "h100"), ("one", "tpu-v5e"))


def of_two_one(name: str, way: tuple[str, ...], number: int) -> Any:
    """A case; of the first two ways each program runs by one, the next program by the other."""
    marks = () if WAYS.index(way) == number % 2 else pytest.mark.soak
    return pytest.param(name, *way, marks=marks)


@pytest.mark.parametrize(
    ("name", "directions", "hardware"),
    [of_two_one(name, way, number) for number, name in enumerate(PROGRAMS) for way in WAYS],
)
def test_values_are_kept(name: str, directions: str, hardware: str):
    before = exported(PROGRAMS[name], ((8,), (T,)))
    after = ringed(before, directions, hardware)
    assert "collective_permute" in text(after)
    assert "stablehlo.reduce_scatter" not in text(after)
    assert "stablehlo.all_to_all" not in text(after)
    assert_same(before, after)


@pytest.mark.parametrize("name", ["experts", "expert-layers", "same-dimension"])
def test_values_that_go_straight_to_their_device_are_kept_bitwise(name: str):
    before = exported(PROGRAMS[name], ((8,), (T,)))
    given, made = (artifact.from_exported(each) for each in (before, ringed(before, "one", "h100")))
    assert verify_artifacts(given, made, Options(trials=1)).same


@pytest.mark.parametrize("name", ["experts", "expert-gradients", "tokens-kept", "mlp"])
def test_values_are_kept_where_all_hops_change_one_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    """As on a slice of more chips than the tests have devices."""

    def on_a_large_slice(pairs: Sequence[Sequence[int]], *_: object) -> bool:
        return all((source ^ target).bit_count() <= 1 for source, target in pairs)

    monkeypatch.setattr(ring_choice, "permute_overlaps", on_a_large_slice)
    before = exported(PROGRAMS[name], ((8,), (T,)))
    after = ringed(before, "one", "tpu-v5e")
    assert "stablehlo.all_to_all" not in text(after)
    assert "collective_permute" in text(after)
    assert_same(before, after)


@pytest.mark.parametrize("directions", ["both", pytest.param("one", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", GROUPED)
def test_values_are_kept_over_any_groups(name: str, directions: str):
    before = exported(*GROUPED[name])
    after = ringed(before, directions, "tpu-v5e")
    assert "collective_permute" in text(after)
    assert_same(before, after)


def test_a_second_run_changes_nothing():
    once = ringed(exported(PROGRAMS["mlp"], ((8,), (T,))), "one", "h100")
    assert text(ringed(once, "one", "h100")) == text(once)


@pytest.mark.parametrize("groups", ["rows", "columns"])
def test_on_a_large_slice_hops_are_those_that_compute_can_run_beside(groups: str):
    numbers = [tuple(range(8 * group, 8 * group + 8)) for group in range(8)]
    if groups == "columns":
        numbers = list(zip(*numbers, strict=True))
    v5e, v6e = (RingTarget(load_hardware(name), False) for name in ("tpu-v5e", "tpu-v6e"))
    gray = v5e.cycle(tuple(numbers), 64)
    assert gray == (0, 1, 3, 2, 6, 7, 5, 4)
    assert v6e.cycle(tuple(numbers), 64) != gray
    odd = (tuple(range(0, 18, 3)), tuple(range(1, 19, 3)))  # no way round changes one bit alone
    assert not ring_choice.permute_overlaps(
        DeviceRing(odd, v5e.cycle(odd, 64), RingDirection.ONE).pairs(1),
        load_hardware("tpu-v5e"),
        64,
    )
    pairs = DeviceRing(tuple(numbers), gray, RingDirection.ONE).pairs(1)
    assert ring_choice.permute_overlaps(pairs, load_hardware("tpu-v5e"), 64)


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_goes_straight_gets_there(size: int, returns: bool):
    group = tuple(range(size))
    for ring in (
        Direct((group,), group, RingDirection.BOTH, returns),
        Direct((group,), group, RingDirection.ONE, returns),
        Cube((group,), group, RingDirection.ONE, returns),
    ):
        assert sorted(ring.summing, key=_key) == sorted(ring.arriving, key=_key)
        assert ring.arriving[-1 if returns else 0].offset == 0
        for device in group:
            places = [ring.places(size, part)[device] for part in ring.arriving]
            assert sorted(places) == list(group)
        for part in ring.arriving:
            at = {device: device for device in group}  # where is what each device sends
            for pairs in ring.straight(part) if part.offset else []:
                hop = {pair[0]: pair[1] for pair in pairs}
                at = {device: hop[place] for device, place in at.items()}
            assert at == {device: ring.places(size, part)[device] for device in group}
            assert ring.opposite(ring.opposite(part)) == part
            back = ring.places(size, ring.opposite(part))
            assert all(back[at[device]] == device for device in group)
    assert not Cube(((0, 1, 2),), (0, 1, 2), RingDirection.ONE).exists
    assert not Cube(((1, 2),), (0, 1), RingDirection.ONE).exists
    assert Cube(((0, 2, 4, 6),), (0, 1, 2, 3), RingDirection.ONE).exists


@pytest.mark.soak  # half a minute; the small programs above stand for the models
@pytest.mark.parametrize("name", ["decoder-tp-forward", "encoder-decoder-forward"])
def test_values_of_partitioned_models_are_kept(name: str):
    model = MODELS[name].build()
    assert not isinstance(model, str)
    partitioned = stablehlo_tools.transform(model, "partition,create-reduce-scatter")
    after = ringed(partitioned, "both", "tpu-v5e")
    assert text(after).count("collective_permute") > text(partitioned).count("collective_permute")
    given, made = artifact.from_exported(partitioned), artifact.from_exported(after)
    assert_identical(given, made)


def _large(function: Callable[..., object], *shapes: tuple[int, ...]) -> Exported:
    mesh = jax.make_mesh((8,), (T,), axis_types=(AxisType.Auto,))
    specs = (P(T, None), P(None, T), P(T, None))[: len(shapes)]
    step = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(T), check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return export.export(jax.jit(step), platforms=["tpu"])(*arguments)


def said(program: Exported, hardware: str) -> list[str]:
    """What the pass says that it did with each region."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stablehlo_tools.transform(program, f"collective-matmul{{hardware={hardware} explain}}")
    notes = [re.search(r"collective-matmul: (.*)", str(each.message)) for each in caught]
    return [note.group(1) for note in notes if note is not None]


@pytest.mark.parametrize(
    ("hardware", "way"), [("tpu-v5e", "both directions by halves"), ("h100", "both directions")]
)
def test_a_tensor_parallel_mlp_becomes_a_ring(hardware: str, way: str):
    program = _large(mlp, (8192, 8192), (8192, 28672), (28672, 8192))
    assert said(program, hardware) == [
        f"all_gather and reduce_scatter became a ring of 8, in {way}, beside 2 products"
    ]


def test_tokens_of_experts_become_a_ring_where_all_to_all_waits():
    """XLA:TPU runs all_to_alls on the compute stream."""
    mesh = jax.make_mesh((8,), (T,), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        experts, mesh=mesh, in_specs=(P(None, T), P(T), P(T)), out_specs=P(None, T), check_vma=False
    )
    shapes = ((8, 10240, 4096), (8, 4096, 1792), (8, 1792, 4096))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = export.export(jax.jit(step), platforms=["tpu"])(*arguments)
    assert said(program, "tpu-v5e") == [
        "all_to_all and all_to_all became a ring of 8, in both directions, beside 2 products"
    ]


def test_a_gather_that_an_order_hides_stays():
    """Of two layers' weights the second is gathered beside the first layer's products."""

    def two_layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        hidden = x @ w[:, :64]
        for _ in range(8):
            hidden = jnp.tanh(hidden @ hidden[:64].T @ hidden[:64])
        return hidden @ gathered(v)[:64]

    program = _large(two_layers, (65536, 8192), (8192, 512), (512, 4096))
    assert all("a ring would save no time" in each for each in said(program, "tpu-v5e"))


def test_small_products_become_no_ring():
    program = _large(mlp, (64, 64), (64, 128), (128, 64))
    assert said(program, "tpu-v5e") == [
        "all_gather and reduce_scatter beside 2 products: a ring would save no time"
    ]


@pytest.mark.parametrize("way", RingDirection)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
def test_every_block_comes_round_once(size: int, way: RingDirection):
    group = tuple(range(size))
    for cycle in cycles(size):
        assert sorted(cycle) == list(group)
        ring = DeviceRing((group,), cycle, way)
        assert sorted(ring.arriving, key=_key) == sorted(ring.summing, key=_key)
        blocks = {(part.half, part.offset % size) for part in ring.arriving}
        assert len(blocks) == len(ring.arriving) == size * ring.halves
        for device in group:
            places = [ring.places(size, part)[device] for part in ring.arriving]
            assert sorted(places) == list(range(size * ring.halves))
        summed = [part for _, parts in ring.sums for part in parts]
        assert len(summed) == (size - 1) * ring.halves


def _key(part: BlockPart) -> tuple[int, int]:
    return part.half, part.offset


@pytest.mark.parametrize(("devices", "shape"), [(4, (2, 2)), (8, (2, 4)), (16, (4, 4))])
def test_on_a_torus_neighbours_in_the_ring_are_neighbours(devices: int, shape: tuple[int, int]):
    compiler = RingTarget(load_hardware("tpu-v5e"), hold=False)
    cycle = compiler.cycle((tuple(range(devices)),), devices)
    places = [divmod(device, shape[1]) for device in cycle]
    for one, other in zip(places, (*places[1:], places[0]), strict=True):
        assert abs(one[0] - other[0]) + abs(one[1] - other[1]) == 1

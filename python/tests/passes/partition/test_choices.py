"""What `partition` chooses by cost is never dearer than what propagation gave."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from models.zoo import ZOO, programs
from soaking import first

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.transforms import partition
from stablehlo_tools.transforms.parts.partition.choosing import equal_nodes, written_choices
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import (
    Atoms,
    StrategyChoice,
)
from stablehlo_tools.transforms.parts.partition.choosing.division_moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import StrategyNode
from stablehlo_tools.transforms.parts.partition.choosing.equal_nodes import join_equal
from stablehlo_tools.transforms.parts.partition.choosing.proposals import Hiding, improve

P = PartitionSpec
ROWS, INNER = 512, 256
PLAIN = [model.name for model in programs(jit=True, layer_scan=False)]
FAR = 1.25  # how far the search, which moves one axis at a time, may be from the best


def mlp(x: Any, w: Any, v: Any) -> Any:
    return jnp.maximum(x @ w, 0) @ v


def scores(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.softmax((x @ w) @ v, axis=-1)


def search(
    program: export.Exported, monkeypatch: pytest.MonkeyPatch, look: Callable[[Moves, float], Any]
) -> Any:
    """What is seen of the problem of a program after the search, and of what it cost before, as
    compilers hide it; the problem is gone when the pass is through."""
    seen: list[Any] = []

    def noting(moves: Moves) -> None:
        before = Hiding(moves).cost()
        improve(moves)
        seen.append(look(moves, before))

    monkeypatch.setattr(partition, "improve", noting)
    partition.PartitionPass().run(artifact.from_exported(program).module, Diagnostics())
    (found,) = seen
    return found


def exported(function: Callable[..., Any], specs: tuple[PartitionSpec, ...]) -> export.Exported:
    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    shapes = ((ROWS, INNER), (INNER, 4 * INNER), (4 * INNER, INNER))
    arguments = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return export.export(jax.jit(function))(*arguments)


SPECS = [
    (P("a"), P("a"), P("a")),
    (P("a"), P(None, "b"), P("b")),
    (P("a", "b"), P("b", "a"), P("a", "b")),
    (P(("a", "b")), P("a", "b"), P("b", "a")),
]


@pytest.mark.parametrize("specs", first(1, SPECS), ids=str)
@pytest.mark.parametrize("function", first(1, [mlp, scores]))
def test_of_a_small_program_no_way_is_much_cheaper(
    function: Callable[..., Any], specs: tuple[PartitionSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    search(exported(function, specs), monkeypatch, compare_with_all)


def compare_with_all(moves: Moves, before: float) -> None:
    """Compares what was found with every way to divide the products, the other ops following."""
    hiding = Hiding(moves)
    found = hiding.cost()
    assert found <= before
    named = ((node, node.op) for node in moves.problem.nodes)
    products = [node for node, op in named if op is not None and "dot" in op.name]
    for choices in itertools.product(*map(ways, products)):
        for node, choice in zip(products, choices, strict=True):
            node.choice, node.pinned = choice, True
        improve(moves)
        assert hiding.cost() >= found / FAR


def ways(node: StrategyNode) -> list[StrategyChoice]:
    """All choices of a node by which each axis divides one factor, or none."""
    form = node.form
    atoms = [atom for each in form.atoms.movable for atom in each]
    found: dict[tuple[tuple[int, ...], ...], StrategyChoice] = {}
    for factors in itertools.product(range(-1, len(form.rule.sizes)), repeat=len(atoms)):
        strategy = tuple(
            tuple(a for a, factor in zip(atoms, factors, strict=True) if factor == f)
            for f in range(len(form.rule.sizes))
        )
        choice = form.choice(strategy)
        if choice is not None:
            found[strategy] = choice
    return list(found.values())


@pytest.mark.parametrize("name", first(1, ["mamba-forward", "decoder-2d-scan-step"]))
def test_the_search_costs_no_more_than_propagation_and_is_the_same_each_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ZOO[name].build()
    assert isinstance(program, export.Exported)

    def strategies(moves: Moves, before: float) -> list[Any]:
        assert Hiding(moves).cost() <= before
        return [node.choice.strategy for node in moves.problem.nodes]

    one, again = (search(program, monkeypatch, strategies) for _ in range(2))
    assert one == again


@pytest.mark.parametrize("name", first(3, PLAIN))
def test_what_is_planned_is_what_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, but for borders; what goes over two axes may go in two collectives."""
    program = ZOO[name].build()
    assert not isinstance(program, str)

    def planned(moves: Moves, _: float) -> float:
        links = moves.problem.links
        return sum(step.size for link in links for step in moves.steps(link)[0])

    expected = search(program, monkeypatch, planned)
    monkeypatch.undo()
    after = transform(artifact.from_exported(program), "partition,create-reduce-scatter")
    collectives = [c for c in find_collectives(after.module) if c.kind != "collective_permute"]
    sent = sum(max(c.bytes_in or 0, c.bytes_out or 0) for c in collectives)
    assert expected <= 1.05 * sent
    assert sent <= 1.3 * expected


def test_a_product_of_few_rows_takes_as_long_as_its_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8, 4096), np.float32, sharding=NamedSharding(mesh, P()))
    w = jax.ShapeDtypeStruct((4096, 4096), np.float32, sharding=NamedSharding(mesh, P(None, "a")))
    h100 = load_hardware("h100")

    def taken(moves: Moves, _: float) -> float:
        (time,) = (moves.compute(n, n.choice) for n in moves.problem.nodes if n.time)
        return time

    time = search(export.export(jax.jit(jnp.dot))(x, w), monkeypatch, taken)
    weights = 4096 * 4096 * 4 / 2
    assert weights < time * h100.memory_rate < 1.02 * weights
    assert 2 * 8 * 4096 * 4096 / 2 / h100.peak("f32") < time / 2


def decoder_layers(positions: int) -> export.Exported:
    """The gradient of layers of attention and a gated feed-forward, FSDP over 8 devices, with a
    sample for each; `positions` a sample."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    width, inner, heads, count = 4096, 14336, 32, 8

    @jax.checkpoint
    def layer(x: Any, w: dict[str, Any]) -> tuple[Any, None]:
        q, k, v = ((x @ w[n]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ w["o"]
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    def loss(w: dict[str, Any], table: Any, tokens: Any) -> Any:
        return jnp.square(jax.lax.scan(layer, table[tokens], w)[0]).mean()

    def sharded(*shape: int, axes: tuple[Any, ...], of: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, of, sharding=NamedSharding(mesh, P(*axes)))

    sizes = dict.fromkeys("qkvo", (width, width))
    sizes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    weights = {n: sharded(count, *each, axes=(None, "data")) for n, each in sizes.items()}
    table = sharded(32000, width, axes=("data",))
    tokens = sharded(8, positions, axes=("data",), of=np.int32)
    return export.export(jax.jit(jax.grad(loss)))(weights, table, tokens)


@pytest.mark.parametrize(("positions", "activations"), [(2048, False), (128, True)])
def test_weights_are_gathered_where_kernels_hide_that(positions: int, activations: bool) -> None:
    """And activations, which kernels wait for, only where they are much less."""
    after = transform(
        artifact.from_exported(decoder_layers(positions)),
        "partition{hardware=h100},create-reduce-scatter",
    )
    gathered = [
        tuple(c.op.results[0].type.shape)
        for c in find_collectives(after.module)
        if c.kind == "all_gather" and c.op.parent and c.op.parent.name == "stablehlo.while"
    ]
    assert gathered
    assert any(positions in shape[:2] for shape in gathered) == activations


def test_a_gather_along_two_dimensions_is_two_collectives() -> None:
    # Two heads do not divide over four chips: in each step of a decoder each more small collective
    # costs a latency, so that caches of heads in parts of sequences take longer.
    mesh = AbstractMesh((4,), ("x",), (AxisType.Auto,))

    def shaped(*shape: int, spec: PartitionSpec | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec or P()))

    def decode(wq: Any, wk: Any, wv: Any, wo: Any, keys: Any, values: Any, x: Any) -> Any:
        def step(carry: Any, t: Any) -> Any:
            keys, values, x = carry
            query = (x @ wq).reshape(8, 2, 16, 128)
            keys, values = (
                jax.lax.dynamic_update_slice(cache, (x @ w).reshape(8, 1, 2, 128), (0, t, 0, 0))
                for cache, w in ((keys, wk), (values, wv))
            )
            scores = jnp.einsum("bgqd,bsgd->bgqs", query, keys) / 11
            scores = jnp.where(jnp.arange(4096) <= t, scores, -1e9)
            weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)
            out = jnp.einsum("bgqs,bsgd->bgqd", weights, values).reshape(8, 4096)
            return (keys, values, jnp.tanh(out @ wo)), None

        return jax.lax.scan(step, (keys, values, x), jnp.arange(64, dtype=jnp.int32))[0]

    columns, cache = P(None, "x"), (8, 4096, 2, 128)
    weights = [shaped(4096, width, spec=columns) for width in (4096, 256, 256)]
    arguments = (
        *weights,
        shaped(4096, 4096, spec=P("x")),
        shaped(*cache),
        shaped(*cache),
        shaped(8, 4096),
    )
    exported = export.export(jax.jit(decode))(*arguments)
    after = transform(exported, "partition{hardware=h100}")
    assert len(find_collectives(artifact.from_exported(after).module)) <= 10


def test_equal_layers_decide_once_at_the_same_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(weights: Any, x: Any) -> Any:
        for wide, narrow in weights:
            x = x + jnp.tanh(x @ wide) @ narrow
        return jnp.mean(x**2)

    mesh = AbstractMesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2)

    def shaped(*shape: int, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))

    layer = (shaped(256, 1024, spec=P("a", "b")), shaped(1024, 256, spec=P("b", "a")))
    program = export.export(jax.jit(jax.grad(loss)))([layer] * 32, shaped(512, 256, spec=P("a")))

    def costs(moves: Moves, _: float) -> tuple[float, float]:
        joined = join_equal(moves.problem)
        if joined is None:
            return moves.cost(), Hiding(moves).cost()
        assert len(joined.problem.nodes) < len(moves.problem.nodes) / 3
        assert sum(node.times for node in joined.problem.nodes) == len(moves.problem.nodes)
        assert moves.of_joined(joined).cost() == pytest.approx(moves.cost())
        return moves.cost(), Hiding(moves).cost()

    each_alone = search(program, monkeypatch, costs)
    monkeypatch.setattr(equal_nodes, "_MOST", 100)
    assert search(program, monkeypatch, costs) == pytest.approx(each_alone, rel=1e-3)


def test_a_remedy_without_a_price_costs_nothing() -> None:
    link = Mock()
    link.value.location = ir.Location.unknown(ir.Context())
    told = written_choices._told(written_choices._Remedy(link, (), 0.0), Mock(spec=Atoms))
    assert told.endswith("removes it at no cost")

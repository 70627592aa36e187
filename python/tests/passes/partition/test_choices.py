"""What `partition` chooses by cost is never dearer than what propagation gave."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from models.zoo import ZOO
from soaking import first

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.transforms import partition
from stablehlo_tools.transforms.parts.partition import choosing
from stablehlo_tools.transforms.parts.partition.choosing.layouts import Choice
from stablehlo_tools.transforms.parts.partition.choosing.moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.problem import Node
from stablehlo_tools.transforms.parts.partition.choosing.proposals import improve

P = PartitionSpec
ROWS, INNER = 512, 256
FAR = 1.25  # how far the search, which moves one axis at a time, may be from the best


def mlp(x: Any, w: Any, v: Any) -> Any:
    return jnp.maximum(x @ w, 0) @ v


def scores(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.softmax((x @ w) @ v, axis=-1)


def search(
    program: export.Exported,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[Moves, float], Any],
) -> Any:
    """What is seen of the problem of a program after the search, and of what it cost before; the
    problem is gone when the pass is through."""
    seen: list[Any] = []

    def noting(moves: Moves) -> None:
        before = moves.cost()
        improve(moves)
        seen.append(look(moves, before))

    monkeypatch.setattr(choosing, "improve", noting)
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
    found = moves.cost()
    assert found <= before
    named = ((node, node.op) for node in moves.problem.nodes)
    products = [node for node, op in named if op is not None and "dot" in op.name]
    for choices in itertools.product(*map(ways, products)):
        for node, choice in zip(products, choices, strict=True):
            node.choice, node.pinned = choice, True
        improve(moves)
        assert moves.cost() >= found / FAR


def ways(node: Node) -> list[Choice]:
    """All choices of a node by which each axis divides one factor, or none."""
    form = node.form
    atoms = [atom for each in form.atoms.movable for atom in each]
    found: dict[tuple[tuple[int, ...], ...], Choice] = {}
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
        assert moves.cost() <= before
        return [node.choice.strategy for node in moves.problem.nodes]

    one, again = (search(program, monkeypatch, strategies) for _ in range(2))
    assert one == again

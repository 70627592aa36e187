"""break-permute-cycles: how pairs are cut, and bitwise the values of before on eight devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
import random_permutes
from hypothesis import given
from hypothesis import strategies as st
from jax import export, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from random_permutes import DEVICES, Program, permute, random_program
from soaking import first

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.permute_pairs import (
    Pair,
    cut_cycles,
    cycle_text,
    find_cycles,
    pairs_of,
)
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.verify.verification import verify_artifacts


def ring(*ids: int) -> list[Pair]:
    return list(zip(ids, (*ids[1:], ids[0]), strict=True))


def broken(program: Artifact, options: str = "") -> Artifact:
    result = program.copy()
    Pipeline.parse(f"break-permute-cycles{options}").run(result.module, Diagnostics(), None)
    return result


def pairs_after(program: Artifact) -> list[list[Pair]]:
    return [list(pairs_of(permute)) for permute in find_collectives(program.module)]


CYCLIC = {
    "two devices": ring(0, 1),
    "forward": ring(0, 1, 2, 3),
    "backward": ring(3, 2, 1, 0),
    "two of four": [*ring(0, 1, 2, 3), *ring(4, 5, 6, 7)],
    "one and one that is almost": [(0, 1), (1, 2), (2, 3), *ring(4, 5, 6, 7)],
    "interleaved": [*ring(0, 2, 4, 6), *ring(1, 3, 5, 7)],
    "eight": ring(*range(8)),
    "one to itself": [(0, 0)],
    "without the first": ring(*range(1, 8)),
    "beside a chain": [(0, 5), (5, 6), *ring(1, 2)],
}
ACYCLIC: dict[str, Sequence[Pair]] = {
    "nothing": [],
    "one pair": [(1, 2)],
    "shuffled chain": [(1, 2), (2, 3), (3, 0)],
    "two that are almost": [(0, 1), (1, 2), (3, 0), (4, 5), (5, 6), (7, 4)],
    "eight without one": [pair for pair in ring(*range(8)) if pair != (3, 4)],
}


@pytest.mark.parametrize("name", CYCLIC)
def test_cycles_are_found(name: str):
    assert find_cycles(CYCLIC[name])


@pytest.mark.parametrize("name", ACYCLIC)
def test_chains_are_no_cycles(name: str):
    assert not find_cycles(ACYCLIC[name])


def test_a_ring_is_cut_where_it_closes_whatever_the_order_of_its_pairs():
    for pairs in (ring(0, 1, 2, 3), ring(2, 3, 0, 1), ring(0, 1, 2, 3)[::-1]):
        assert cut_cycles(pairs).back == ((3, 0),)
    assert cut_cycles(ring(3, 2, 1, 0)).back == ((0, 3),)
    assert cut_cycles(ring(0, 1)).back == ((1, 0),)
    assert cycle_text(find_cycles(ring(2, 3, 0, 1))[0]) == "0>1>2>3>0"


@given(st.permutations(range(10)), st.permutations(range(10)), st.sets(st.integers(0, 9)))
def test_what_is_cut_has_no_cycle_and_loses_no_pair(
    targets: list[int], order: list[int], kept: set[int]
):
    pairs = [(source, targets[source]) for source in order if source in kept]
    cut = cut_cycles(pairs)
    assert sorted([*cut.forward, *cut.back, *((i, i) for i in cut.own)]) == sorted(pairs)
    assert not find_cycles(cut.forward)
    assert not find_cycles(cut.back)
    for cycle in cut.cycles:
        inside = [pair for pair in cut.back if pair[0] in cycle]
        assert len(inside) == (len(cycle) > 1)


def check(seed: int) -> None:
    program = random_program(seed)
    before = program.parsed()
    after = broken(before)
    with jax.enable_x64(True):
        values = program.values(seed)
        assert program.run(before, values) == program.run(after, values), program.lines
    for permute_ in find_collectives(after.module):
        has_elements = 0 not in permute_.op.results[0].type.shape
        assert not (has_elements and find_cycles(pairs_of(permute_)))
    assert artifact.to_text(broken(after).module) == artifact.to_text(after.module)


@pytest.mark.parametrize("seed", first(3, range(6)))
def test_random_permutes(seed: int):
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [*range(6, 16), *range(1000, 1400)])
def test_random_permutes_soak(seed: int):
    check(seed)


@pytest.mark.parametrize("element", random_permutes.TYPES)
def test_every_element_type(element: str):
    shape = (3, 2)
    kind = random_permutes.kind(shape, element)
    pairs = [*ring(0, 2, 4), *ring(1, 7), (5, 5), (3, 6)]
    program = Program([permute("%y0", "%x0", pairs, kind)], [(shape, element)])
    before = program.parsed()
    with jax.enable_x64(True):
        values = program.values(0)
        results = program.run(broken(before), values)
        assert results == program.run(before, values)
    source_of = {target: source for source, target in pairs}
    expected = [
        values[0][source_of[d]].tobytes() if d in source_of else bytes(len(results[0][0]))
        for d in range(DEVICES)
    ]
    assert results[0] == expected  # bitwise zeros where nothing is received


def test_both_of_two_rings_take_what_comes_back():
    """XLA's own pass selects by the last ring's target only, and gives the other's zeros."""
    pairs = [*ring(0, 2, 4, 6), *ring(1, 3, 5, 7)]
    program = Program(
        [permute("%y0", "%x0", pairs, "tensor<f32>", None)], [((), "f32")], "replicas"
    )
    after = broken(program.parsed())
    assert pairs_after(after)[0] == [(6, 0), (7, 1)]
    values: list[list[Any]] = [[np.float32(d + 1) for d in range(DEVICES)]]
    results = [np.frombuffer(part, np.float32)[0] for part in program.run(after, values)[0]]
    assert results == [7, 8, 1, 2, 3, 4, 5, 6]


def test_small_permutes_stay():
    tensors = [((4, 2), "ui64")]
    program = Program([permute("%y0", "%x0", ring(0, 1, 2, 3), "tensor<4x2xui64>")], tensors)
    parts = {
        limit: len(pairs_after(broken(program.parsed(), f"{{min-bytes={limit}}}")))
        for limit in (65, 64, 32)
    }
    assert parts == {65: 1, 64: 2, 32: 2}


def _exported(names: tuple[str, ...], shift: int) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    around = [(i, (i + shift) % 4) for i in range(4)]

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        moved = lax.ppermute(carry, "stage", around)
        return jax.checkpoint(lambda x: x * 2 + lax.axis_index("stage"))(moved), None

    spec = P("stage") if len(names) == 1 else P("stage", "data")
    mapped = jax.shard_map(
        lambda x: lax.scan(body, x, None, length=3)[0],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=set(names),
        check_vma=False,
    )
    sharding = jax.NamedSharding(mesh, P("stage", "data"))
    kind = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    return export.export(jax.jit(mapped))(kind)


QUICK = (("stage",), 1)


@pytest.mark.parametrize(
    ("names", "shift"),
    [
        pytest.param(names, shift, marks=() if (names, shift) == QUICK else pytest.mark.soak)
        for names in (("stage",), ("stage", "data"))
        for shift in (1, 2, 3)
    ],
)
def test_a_ring_in_a_scan_of_jax(names: tuple[str, ...], shift: int):
    before = _exported(names, shift)
    after = stablehlo_tools.transform(before, "break-permute-cycles")
    texts = artifact.from_exported(after), artifact.from_exported(before)
    assert len(find_collectives(texts[0].module)) == 2 * len(find_collectives(texts[1].module))
    assert verify_artifacts(texts[1], texts[0]).same

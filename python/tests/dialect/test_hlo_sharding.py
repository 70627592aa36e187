"""GSPMD's shardings read as XLA reads them, and the mesh of which their tiles are made."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

from stablehlo_tools.dialect.hlo_sharding import (
    HloSharding,
    TileMesh,
    mesh_of_tiles,
    parse_hlo_sharding,
)

_TEXTS = (
    "{devices=[4,2]<=[8]}",
    "{devices=[2,4]<=[4,2]T(1,0)}",
    "{devices=[2,2,2]0,4,1,5,2,6,3,7}",
    "{devices=[4,1,2]<=[8] last_tile_dim_replicate}",
    "{devices=[1,1,2,4]<=[4,2]T(1,0) last_tile_dims={manual, replicated}}",
    "{devices=[8,8]<=[2,4,8]T(1,0,2)}",
    "{devices=[2,4]<=[8] last_tile_dims={unreduced}}",
)


def _xla(text: str) -> Any:
    return _hlo.HloSharding.from_string(text)


@pytest.mark.parametrize("text", _TEXTS)
def test_tiles_are_those_that_xla_reads(text: str) -> None:
    (sharding,), xla = parse_hlo_sharding(text.encode()), _xla(text)
    assert list(sharding.tiles) == xla.tile_assignment_dimensions()
    assert list(sharding.devices) == xla.tile_assignment_devices()
    assert len(sharding.subgroups) == len(sharding.tiles) - (sharding.rank or 0)


@pytest.mark.parametrize("text", [*_TEXTS, "{replicated}", "{manual}", "{maximal device=3}"])
def test_serialized_shardings_are_those_of_the_text(text: str) -> None:
    data = _xla(text).to_proto().SerializeToString()
    if data:  # `{replicated}` is no bytes at all
        assert parse_hlo_sharding(data) == parse_hlo_sharding(text.encode())


def test_tuples_and_what_is_beside_the_tiles() -> None:
    several = parse_hlo_sharding(
        b'{{devices=[2,1]<=[2] metadata={op_name="f"}}, /*index=1*/{manual}, {unknown shard_as 3}}'
    )
    assert [each.kind for each in several] == ["tiled", "manual", "unknown"]
    assert several[2].group == (3, False)
    assert parse_hlo_sharding(b"{replicated shard_like 4}")[0].group == (4, True)
    assert parse_hlo_sharding(b"{}") == ()


@pytest.mark.parametrize(
    "text",
    [
        *("{devices=[4,2]<=[4]}", "{devices=[2]0,0}", "{devices=[4,2]<=[4,2]T(0,0)}"),
        *("{sharded}", "devices=[2]<=[2]", "{devices=[2]<=[2] last_tile_dims={maximal}}", "\x01"),
        *("", "{{}}", "{devices=[2]<=[2]", "{devices=[2]<=[2] last_tile_dims={manual,manual}}"),
    ],
)
def test_what_is_no_sharding_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"sharding|device|order|last_tile_dims"):
        parse_hlo_sharding(text.encode())


def _held(mesh: TileMesh, sharding: HloSharding, dim: int) -> np.ndarray:
    """For each device, which tile along a dimension it holds by the axes of a mesh."""
    count = math.prod(size for _, size in mesh.axes)
    ids = np.array(mesh.device_ids or range(count)).reshape([size for _, size in mesh.axes])
    places = dict(zip([n for n, _ in mesh.axes], np.indices(ids.shape), strict=True))
    tiles, sizes = np.zeros_like(ids), dict(mesh.axes)
    for axis in mesh.divided[sharding][dim]:
        tiles = tiles * sizes[axis] + places[axis]
    held = np.empty(count, dtype=np.int64)
    held[ids.ravel()] = tiles.ravel()
    return held


@st.composite
def _shardings(draw: st.DrawFn) -> tuple[list[int], list[HloSharding]]:
    """Shardings over one mesh: by groups of its axes, in any order, those left over replicated."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))
    count = math.prod(sizes)
    order = draw(st.one_of(st.just(list(range(count))), st.permutations(range(count))))
    ids = np.array(order).reshape(sizes)
    whole = tuple(range(len(sizes)))
    shardings = [HloSharding("tiled", tuple(sizes), tuple(order))]
    for axes in draw(st.lists(st.permutations(whole), max_size=4)):
        cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
        groups = [axes[a:b] for a, b in itertools.pairwise([0, *cuts, len(axes)])]
        tiles = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
        devices = ids.transpose(axes).reshape(*tiles[:2], -1)
        if draw(st.booleans()):  # as XLA sorts those that hold the same
            devices = np.sort(devices, axis=-1)
        listed = tuple(devices.ravel().tolist())
        shardings.append(HloSharding("tiled", tiles, listed, ("replicated",)))
    return sizes, shardings


@given(_shardings())
def test_one_mesh_divides_as_each_sharding_of_a_mesh(drawn: tuple[list[int], list[HloSharding]]):
    sizes, shardings = drawn
    mesh = mesh_of_tiles(shardings, math.prod(sizes))
    assert mesh is not None
    for sharding in shardings:
        for dim in range(len(sharding.tiles) - len(sharding.subgroups)):
            assert (_held(mesh, sharding, dim) == sharding.coordinates(dim)).all()


def _mesh(*texts: str, known: tuple[tuple[str, int], ...] = ()) -> TileMesh | None:
    shardings = [parse_hlo_sharding(text.encode())[0] for text in texts]
    return mesh_of_tiles(shardings, len(shardings[0].devices), known)


def test_tiles_of_no_mesh() -> None:
    assert _mesh("{devices=[3,2]<=[6]}", "{devices=[2,3]<=[6]}") is None
    assert _mesh("{devices=[4]0,1,2,3}", "{devices=[4]1,0,2,3}") is None


def test_a_known_mesh_keeps_its_names_where_its_axes_will_do() -> None:
    known = (("data", 4), ("one", 1), ("model", 2))
    mesh = _mesh("{devices=[2,4]<=[4,2]T(1,0)}", known=known)
    assert mesh is not None
    assert mesh.axes == known
    assert next(iter(mesh.divided.values())) == (("model",), ("data",))
    other = _mesh("{devices=[2,4]<=[8]}", known=known)
    assert other is not None
    assert other.axes == (("axis_0", 2), ("axis_1", 4))

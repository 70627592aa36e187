"""Replica groups against the definitions of the StableHLO specification."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablehlo_tools.analysis.replica_groups import (
    AxisRef,
    DeviceMesh,
    GroupMode,
    ProcessGrid,
    exchange_group_mode,
    mesh_axes_groups,
    permute_groups,
    process_groups,
    reduction_group_mode,
)

GRID = ProcessGrid(num_replicas=4, num_partitions=2)  # process = 2 * replica + partition


@pytest.mark.parametrize(
    ("mode", "groups", "expected"),
    [
        (GroupMode.CROSS_REPLICA, [[0, 1], [2, 3]], ((0, 2), (1, 3), (4, 6), (5, 7))),
        (GroupMode.CROSS_PARTITION, [[0, 1]], ((0, 1), (2, 3), (4, 5), (6, 7))),
        (GroupMode.CROSS_REPLICA_AND_PARTITION, [[0, 1], [2, 3]], ((0, 2, 1, 3), (4, 6, 5, 7))),
        (GroupMode.FLATTENED_IDS, [[0, 5], [7, 2]], ((0, 5), (7, 2))),
        (GroupMode.CROSS_REPLICA, [], ((0, 2, 4, 6), (1, 3, 5, 7))),
        (GroupMode.FLATTENED_IDS, [], (tuple(range(8)),)),
        (GroupMode.FLATTENED_IDS, [[0, 1, 2], [3, -1, -1]], ((0, 1, 2), (3,))),
    ],
)
def test_dense_groups(
    mode: GroupMode, groups: list[list[int]], expected: tuple[tuple[int, ...], ...]
):
    assert process_groups(groups, mode, GRID) == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [([[0, 1], [1, 2]], "overlap"), ([[0, 8]], "is not one of the"), ([[-2]], "is not one of the")],
)
def test_bad_groups_are_refused(groups: list[list[int]], message: str):
    with pytest.raises(ValueError, match=message):
        process_groups(groups, GroupMode.FLATTENED_IDS, GRID)


def test_group_modes_follow_the_specification():
    assert reduction_group_mode(0, False) is GroupMode.CROSS_REPLICA
    assert reduction_group_mode(1, False) is GroupMode.CROSS_REPLICA_AND_PARTITION
    assert reduction_group_mode(1, True) is GroupMode.FLATTENED_IDS
    with pytest.raises(ValueError, match="channel"):
        reduction_group_mode(0, True)
    assert exchange_group_mode(0) is GroupMode.CROSS_REPLICA
    assert exchange_group_mode(3) is GroupMode.CROSS_PARTITION


def test_permutes_run_on_every_replica_or_partition():
    pairs = [[0, 1]]
    across_partitions = permute_groups(pairs, GroupMode.CROSS_PARTITION, GRID)
    assert across_partitions == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert permute_groups(pairs, GroupMode.CROSS_REPLICA, GRID) == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match="is not one of the"):
        permute_groups([[0, 2]], GroupMode.CROSS_PARTITION, GRID)


def test_mesh_axes_in_their_order():
    mesh = DeviceMesh((("a", 4), ("b", 2)))
    assert mesh_axes_groups(mesh, [AxisRef("a")]) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh_axes_groups(mesh, [AxisRef("b"), AxisRef("a")]) == ((0, 2, 4, 6, 1, 3, 5, 7),)
    assert mesh_axes_groups(mesh, []) == tuple((i,) for i in range(8))


def test_mesh_device_ids_are_positions_renamed():
    mesh = DeviceMesh((("a", 2), ("b", 2)), (3, 1, 0, 2))
    assert mesh_axes_groups(mesh, [AxisRef("b")]) == ((3, 1), (0, 2))


def test_sub_axes_take_their_digits():
    mesh = DeviceMesh((("a", 8),))
    assert mesh_axes_groups(mesh, [AxisRef("a", 1, 2)]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh_axes_groups(mesh, [AxisRef("a", 2, 2)]) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh_axes_groups(mesh, [AxisRef("a", 4, 2)]) == ((0, 1), (2, 3), (4, 5), (6, 7))
    both = mesh_axes_groups(mesh, [AxisRef("a", 4, 2), AxisRef("a", 1, 2)])
    assert both == ((0, 4, 1, 5), (2, 6, 3, 7))


@pytest.mark.parametrize(
    "axes", [[AxisRef("z")], [AxisRef("a"), AxisRef("a")], [AxisRef("a", 3, 2)]]
)
def test_bad_axes_are_refused(axes: list[AxisRef]):
    with pytest.raises(ValueError, match=r"axis"):
        mesh_axes_groups(DeviceMesh((("a", 8),)), axes)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_mesh_groups_partition_the_devices(sizes: list[int], data: st.DataObject):
    """Against a brute-force definition: same group iff all other coordinates agree."""
    mesh = DeviceMesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    chosen = data.draw(st.permutations(range(len(sizes))))
    chosen = chosen[: data.draw(st.integers(0, len(sizes)))]
    groups = mesh_axes_groups(mesh, [AxisRef(f"a{i}") for i in chosen])
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    coordinates = list(itertools.product(*(range(size) for size in sizes)))
    for group in groups:
        members = [coordinates[device] for device in group]
        fixed = [i for i in range(len(sizes)) if i not in chosen]
        assert len({tuple(member[i] for i in fixed) for member in members}) == 1
        moving = [tuple(member[i] for i in chosen) for member in members]
        assert moving == sorted(moving)

"""Times of collectives worked out by hand, on networks of round figures without latency losses.

A toy node of four devices sends 100 bytes/ns over its switch and 10 over the network outside; a toy
torus has links of 10 bytes/ns in each direction. Hops take 1 ns inside and 5 outside.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablehlo_tools.cost.hardware import Hardware, Network, load_hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.switches import filled_evenly
from stablehlo_tools.cost.tori import slice_shape, torus_of
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.diagnostics import ToolError

BYTES = 48_000.0
SWITCH = Network("Inside", "switch", 100.0, 1.0, 1.0, 2.0, devices=4)
OUTSIDE = Network("Outside", "switch", 10.0, 1.0, 5.0, 20.0)
PLANE = Network("Link", "torus", 10.0, 1.0, 1.0, 3.0, devices=16, dimensions=2, wraps_from=4)
OPEN = replace(PLANE, wraps_from=8)

type Groups = tuple[tuple[int, ...], ...]


def hardware(*networks: Network) -> Hardware:
    return replace(load_hardware("h100"), networks=networks)


NODES = hardware(SWITCH, OUTSIDE)
TORUS = hardware(PLANE, OUTSIDE)
LINES = hardware(OPEN, OUTSIDE)


def time(kind: str, groups: Groups, device: Hardware, devices: int) -> TransferTime:
    return transfer_time(DeviceTransfer(kind, BYTES, groups), device, devices)


def bytes_ns(kind: str, groups: Groups, device: Hardware, devices: int) -> float:
    timed = time(kind, groups, device, devices)
    return timed.ns - timed.latency_ns


def axis(stride: int, count: int, members: int = 4) -> Groups:
    """Groups of `members` devices `stride` apart among `count`."""
    firsts = (d for d in range(count) if d // stride % members == 0)
    return tuple(tuple(first + stride * i for i in range(members)) for first in firsts)


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_broadcast")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 48_000 * 3 / 4 / 100),
        ("reduce_scatter", 48_000 * 3 / 4 / 100),
        ("all_reduce", 2 * 48_000 * 3 / 4 / 100),
        ("all_to_all", 48_000 * 3 / 4 / 100),
        ("ragged_all_to_all", 48_000 * 3 / 4 / 100),
        ("collective_broadcast", 48_000 / 100),
    ],
)
def test_inside_of_a_node(kind: str, expected: float):
    timed = time(kind, axis(1, 8), NODES, 8)
    assert timed.ns - timed.latency_ns == pytest.approx(expected)
    assert timed.links == ("Inside",)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Two members in each of two nodes: their two ports carry 20 bytes/ns, less than inside.
        ("all_gather", 48_000 * 3 / 4 / 20),
        ("reduce_scatter", 48_000 * 3 / 4 / 20),
        # Trees reduce inside first, so half of a ring's bytes leave, at nine tenths of the rate.
        ("all_reduce", 2 * 48_000 / 2 / 20 / 0.9),
        # Half of each member's bytes go to the other node, through its own port.
        ("all_to_all", 48_000 / 2 / 10),
        ("collective_broadcast", 48_000 / 20),
    ],
)
def test_across_nodes_members_of_a_node_add_up_their_ports(kind: str, expected: float):
    timed = time(kind, ((0, 1, 4, 5), (2, 3, 6, 7)), NODES, 8)
    assert timed.ns - timed.latency_ns == pytest.approx(expected)
    assert timed.links == ("Outside", "Inside")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 48_000 / 2 / 10),
        ("reduce_scatter", 48_000 / 2 / 10),
        ("all_reduce", 48_000 / 10),
        ("all_to_all", 48_000 / 2 / 10),
        ("collective_broadcast", 48_000 / 10),
    ],
)
def test_strided_groups_of_one_member_per_node_have_a_port_each(kind: str, expected: float):
    timed = time(kind, axis(4, 8, members=2), NODES, 8)
    assert timed.ns - timed.latency_ns == pytest.approx(expected)
    assert timed.links == ("Outside",)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 48_000 * 3 / 4 / 20),  # both directions of a ring
        ("reduce_scatter", 48_000 * 3 / 4 / 20),
        ("all_reduce", 2 * 48_000 * 3 / 4 / 20),
        ("all_to_all", 48_000 / 20),  # 4²/4 messages of a quarter cross the middle
        ("collective_broadcast", 48_000 / 20),
    ],
)
@pytest.mark.parametrize(("stride", "link"), [(1, "Link y"), (4, "Link x")])
def test_on_a_ring_of_a_torus(kind: str, expected: float, stride: int, link: str):
    timed = time(kind, axis(stride, 16), TORUS, 16)
    assert timed.ns - timed.latency_ns == pytest.approx(expected)
    assert (timed.algorithm, timed.links) == ("bidirectional ring", (link,))


@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_that_does_not_wrap_takes_twice_a_ring(kind: str):
    line = time(kind, axis(1, 16), LINES, 16)
    assert bytes_ns(kind, axis(1, 16), LINES, 16) == pytest.approx(
        2 * bytes_ns(kind, axis(1, 16), TORUS, 16)
    )
    assert line.algorithm == "line"


def test_two_axes_at_once_carry_twice_as_much():
    timed = time("all_gather", (tuple(range(16)),), TORUS, 16)
    assert timed.ns - timed.latency_ns == pytest.approx(48_000 * 15 / 16 / 40)
    assert timed.links == ("Link x", "Link y")


def test_an_all_to_all_over_two_axes_is_bound_by_one():
    assert bytes_ns("all_to_all", (tuple(range(16)),), TORUS, 16) == pytest.approx(48_000 / 20)


def test_members_a_stride_apart_share_links_with_the_groups_between():
    alone = bytes_ns("all_gather", ((0, 2),), TORUS, 16)
    both = bytes_ns("all_gather", ((0, 2), (1, 3)), TORUS, 16)
    assert alone == pytest.approx(48_000 / 2 / 20)
    assert both == pytest.approx(2 * alone)


def test_groups_on_other_rows_of_a_torus_share_nothing():
    assert bytes_ns("all_gather", ((0, 2), (4, 6)), TORUS, 16) == pytest.approx(48_000 / 2 / 20)


def test_a_part_of_a_ring_is_a_line():
    assert time("all_gather", ((0, 1), (2, 3)), TORUS, 16).algorithm == "line"
    assert bytes_ns("all_gather", ((0, 1), (2, 3)), TORUS, 16) == pytest.approx(48_000 / 2 / 10)


def test_a_ring_closes_over_its_end():
    """0 and 3 are neighbours on a ring of four."""
    assert time("all_gather", ((0, 3),), TORUS, 16).latency_ns == 3 + 1


def test_groups_of_any_form_are_routed():
    timed = time("all_gather", ((0, 5, 10),), LINES, 16)  # a diagonal of the plane
    assert (timed.algorithm, timed.links) == ("routed ring", ("Link x", "Link y"))
    # A third from each of two members, half each way round; 5 → 0 and 10 → 0 end on one link.
    assert timed.ns - timed.latency_ns == pytest.approx(2 * 48_000 * 2 / 3 / 2 / 10)


@pytest.mark.parametrize("kind", ["collective_permute", "send", "recv"])
def test_a_permute_is_bound_by_its_port(kind: str):
    pairs = ((0, 1), (1, 0), (2, 3))
    assert bytes_ns(kind, pairs, NODES, 8) == pytest.approx(48_000 / 100)
    assert time(kind, pairs, NODES, 8).links == ("Inside",)
    across = ((0, 1), (3, 4))
    assert bytes_ns(kind, across, NODES, 8) == pytest.approx(48_000 / 10)
    assert time(kind, across, NODES, 8).links == ("Outside", "Inside")


def test_sends_of_one_device_follow_each_other():
    assert bytes_ns("send", ((0, 1), (0, 2)), NODES, 8) == pytest.approx(2 * 48_000 / 100)


def test_a_permute_on_a_torus_is_bound_by_its_busiest_link():
    neighbours = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert bytes_ns("collective_permute", neighbours, TORUS, 16) == pytest.approx(48_000 / 10)
    # Without the wrap 3 → 0 goes back over the same links, in their other direction.
    assert bytes_ns("collective_permute", neighbours, LINES, 16) == pytest.approx(48_000 / 10)
    assert time("collective_permute", neighbours, LINES, 16).latency_ns == 3 + 3
    # 0 → 2 and 1 → 3 share the link from 1 to 2.
    assert bytes_ns("collective_permute", ((0, 2), (1, 3)), LINES, 16) == pytest.approx(
        2 * 48_000 / 10
    )


def test_a_permute_half_round_a_ring_goes_both_ways():
    assert bytes_ns("collective_permute", ((0, 2),), TORUS, 16) == pytest.approx(48_000 / 2 / 10)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 48_000 * 15 / 16 / 40),  # inside; outside 16 ports carry half in 150 ns
        ("all_reduce", 2 * 48_000 * 15 / 16 / 40),
        ("all_to_all", 48_000 / 2 / 10),  # outside; inside, where half stays, it takes as long
    ],
)
def test_slices_of_a_torus_are_joined_by_the_network_outside(kind: str, expected: float):
    timed = time(kind, (tuple(range(32)),), TORUS, 32)
    assert timed.ns - timed.latency_ns == pytest.approx(expected)
    assert timed.algorithm.startswith("hierarchical: bidirectional ring, ")
    assert timed.links == ("Outside", "Link x", "Link y")


def test_an_all_to_all_of_two_slices_leaves_half_inside_of_each():
    fast = hardware(PLANE, replace(OUTSIDE, bandwidth=1e6))
    inside = bytes_ns("all_to_all", (tuple(range(16)),), fast, 32)
    assert bytes_ns("all_to_all", (tuple(range(32)),), fast, 32) == pytest.approx(inside / 2)


def test_a_permute_between_slices_leaves_the_torus():
    timed = time("collective_permute", ((15, 16),), TORUS, 32)
    assert (timed.links, timed.ns) == (("Outside",), 20 + 5 + 48_000 / 10)


def test_latency_is_a_start_and_hops():
    assert time("all_gather", axis(1, 8), NODES, 8).latency_ns == 2 + 3 * 1
    assert time("all_reduce", axis(1, 8), NODES, 8).latency_ns == 2 + 2 * 3 * 1
    # Two domains of four: three hops inside of each, one between.
    assert time("all_gather", (), NODES, 8).latency_ns == 20 + 6 * 1 + 1 * 5
    # A tree: chains of three hops inside, one level outside, up and down.
    assert time("all_reduce", (), NODES, 8).latency_ns == 20 + 2 * (3 * 1 + 1 * 5)
    # A ring of four in both directions: two hops.
    assert time("all_gather", axis(1, 16), TORUS, 16).latency_ns == 3 + 2 * 1
    assert time("all_gather", axis(1, 16), LINES, 16).latency_ns == 3 + 3 * 1


def test_trees_pay_for_many_nodes_and_rings_for_large_messages():
    one_per_node = (tuple(range(0, 64, 4)),)
    small = transfer_time(DeviceTransfer("all_reduce", 1.0, one_per_node), NODES, 64)
    large = transfer_time(DeviceTransfer("all_reduce", 1e9, one_per_node), NODES, 64)
    assert (small.algorithm, large.algorithm) == ("tree", "ring")


def test_a_reducing_switch_speeds_up_whole_domains_most():
    reducing = hardware(replace(SWITCH, in_network_reduction=1.2), OUTSIDE)
    whole = time("all_reduce", axis(1, 8), reducing, 8)
    assert whole.algorithm == "in-network"
    assert whole.ns - whole.latency_ns == pytest.approx(2 * 48_000 * 3 / 4 / 120)
    # Of two members each would send as much as in a ring.
    assert time("all_reduce", ((0, 1), (2, 3)), reducing, 8).algorithm == "ring"
    assert time("all_gather", axis(1, 8), reducing, 8).algorithm == "ring"


def test_links_between_every_two_devices_add_up():
    mesh = hardware(replace(SWITCH, pair_bandwidth=30.0), OUTSIDE)
    assert bytes_ns("collective_permute", ((0, 1),), mesh, 8) == pytest.approx(48_000 / 30)
    assert bytes_ns("all_gather", ((0, 1),), mesh, 8) == pytest.approx(48_000 / 2 / 30)
    assert bytes_ns("all_gather", axis(1, 8), mesh, 8) == pytest.approx(48_000 * 3 / 4 / 90)


@pytest.mark.parametrize("kind", [*KINDS, "collective_permute"])
def test_groups_of_one_cost_nothing(kind: str):
    groups = ((0,), (1,)) if kind in KINDS else ((0, 0), (1, 1))
    assert time(kind, groups, NODES, 2) == TransferTime(0.0, 0.0, "none", ())


def test_no_groups_are_one_of_all_devices():
    assert time("all_gather", (), NODES, 8) == time("all_gather", (tuple(range(8)),), NODES, 8)
    assert time("collective_permute", (), NODES, 8).ns == 0
    assert time("send", (), NODES, 4) == time("send", ((0, 1), (1, 2), (2, 3), (3, 0)), NODES, 4)


def test_the_slowest_of_unlike_groups_decides():
    mixed = time("all_gather", ((0, 1, 2, 3), (4, 8)), NODES, 12)
    assert mixed.ns == time("all_gather", ((4, 8),), NODES, 12).ns
    assert mixed.links == ("Outside", "Inside")


def test_groups_on_unlike_axes_use_the_links_of_both():
    rows_and_column = ((0, 1, 2, 3), (4, 8), (12, 13))
    assert time("all_gather", rows_and_column, TORUS, 16).links == ("Link x", "Link y")


def test_the_spelling_of_hlo_is_known():
    assert time("all-gather", (), NODES, 8) == time("all_gather", (), NODES, 8)
    assert time("collective-permute", (), NODES, 8).ns == 0


@given(
    kind=st.sampled_from(KINDS),
    members=st.permutations(range(32)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    networks=st.sampled_from([NODES, TORUS, LINES]),
)
def test_any_groups_have_a_time_whatever_their_order(
    kind: str, members: list[int], sizes: list[int], networks: Hardware
):
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    cut = [members[first : first + size] for first, size in zip(firsts, sizes, strict=True)]
    groups = tuple(tuple(group) for group in cut if group)
    turned = tuple(tuple(reversed(group)) for group in reversed(groups))
    timed = time(kind, groups, networks, 32)
    other = time(kind, turned, networks, 32)
    assert timed.ns == pytest.approx(other.ns)
    assert timed.links == other.links
    more = transfer_time(DeviceTransfer(kind, 2 * BYTES, groups), networks, 32)
    assert 0 <= timed.latency_ns <= timed.ns <= more.ns <= 2 * timed.ns


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [
        ("all_grather", ((0, 1),), "unknown collective 'all_grather'; known: all_gather"),
        ("all_gather", ((0, 9),), "all_gather among 8 devices names device 9, which is not"),
    ],
)
def test_what_is_no_collective_of_the_program_is_refused(kind: str, groups: Groups, message: str):
    with pytest.raises(ToolError, match=message):
        time(kind, groups, NODES, 8)


def test_devices_that_nothing_joins_are_refused():
    expected = "connects devices 0 and 7; 'Inside', the outermost, connects 4"
    with pytest.raises(ToolError, match=expected):
        time("all_gather", ((0, 7),), hardware(SWITCH), 8)


@pytest.mark.parametrize(
    ("chips", "shape"),
    [
        (1, (1, 1)),
        (2, (1, 2)),
        (4, (2, 2)),
        (8, (2, 4)),
        (16, (4, 4)),
        (32, (4, 8)),
        (64, (8, 8)),
        (128, (8, 16)),
        (256, (16, 16)),
        (6, (2, 3)),
        (7, (1, 7)),
    ],
)
def test_slices_of_a_plane(chips: int, shape: tuple[int, int]):
    assert slice_shape(chips, 2, 16) == shape


@pytest.mark.parametrize(
    ("chips", "shape"),
    [
        (4, (1, 2, 2)),
        (8, (2, 2, 2)),
        (16, (2, 2, 4)),
        (32, (2, 4, 4)),
        (64, (4, 4, 4)),
        (128, (4, 4, 8)),
        (192, (4, 4, 12)),  # not 4 x 6 x 8: whole cubes
        (512, (8, 8, 8)),
        (6144, (16, 16, 24)),
    ],
)
def test_slices_of_cubes(chips: int, shape: tuple[int, int, int]):
    assert slice_shape(chips, 3, 4) == shape


def test_axes_wrap_as_clouds_sell_them():
    v5e, v5p = (load_hardware(name).networks[0] for name in ("tpu-v5e", "tpu-v5p"))
    assert torus_of(v5e, 128).wraps == (False, True)  # 8 x 16
    assert torus_of(v5e, 64).wraps == (False, False)
    assert torus_of(v5p, 64).wraps == (True, True, True)
    assert torus_of(v5p, 32).wraps == (False, False, False)  # 2 x 4 x 4 is no whole cube


def test_domains_that_a_program_does_not_fill_are_divided_evenly():
    gb200 = load_hardware("gb200")
    share = DeviceTransfer("all_gather", 2**28, tuple((i, i + 1) for i in range(0, 128, 2)))
    assert transfer_time(share, gb200, 128).links == ("NVLink",)
    halves = DeviceTransfer("all_gather", 2**28, (tuple(range(64)), tuple(range(64, 128))))
    assert transfer_time(halves, gb200, 128).links == ("NVLink",)
    assert "InfiniBand" in transfer_time(halves, gb200, 144).links  # two full racks: 72 is the cut
    devices = [network.devices for network in filled_evenly(gb200.networks, 100)]
    assert devices == [50, None]

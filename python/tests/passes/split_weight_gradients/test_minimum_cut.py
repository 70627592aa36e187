"""The cheapest set of nodes between starts and ends, against every set there is."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablehlo_tools.analysis.layer_loops.cheapest_cut import cheapest_cut

type Edges = Collection[tuple[int, int]]


def separates(cut: Collection[int], edges: Edges, starts: Collection[int], ends: Collection[int]):
    """Whether no path leads from a start to an end but through a node of the cut."""
    reached = {node for node in starts if node not in cut}
    while following := {h for t, h in edges if t in reached and h not in cut} - reached:
        reached |= following
    return not reached & set(ends)


def all_cuts(prices: list[int | None], edges: Edges, starts: set[int], ends: set[int]):
    """Every set of nodes with a price that separates, with what it costs."""
    nodes = [node for node, price in enumerate(prices) if price is not None]
    sets = chain.from_iterable(combinations(nodes, size) for size in range(len(nodes) + 1))
    return {
        cut: sum(prices[node] or 0 for node in cut)
        for cut in sets
        if separates(cut, edges, starts, ends)
    }


NODES = st.integers(0, 6)


@given(
    st.lists(st.one_of(st.integers(0, 6), st.none()), min_size=7, max_size=7),
    st.sets(st.tuples(NODES, NODES), max_size=14),
    st.sets(NODES, min_size=1, max_size=3),
    st.sets(NODES, min_size=1, max_size=3),
)
def test_no_set_that_separates_is_cheaper(
    prices: list[int | None], edges: set[tuple[int, int]], starts: set[int], ends: set[int]
):
    cuts = all_cuts(prices, edges, starts, ends)
    cut = cheapest_cut(prices, edges, starts, ends)
    if cut is None:
        assert not cuts
        return
    assert tuple(cut) in cuts  # it separates, and is in order
    assert cuts[tuple(cut)] == min(cuts.values())


def test_of_equal_cuts_the_one_nearest_to_the_ends_is_taken():
    assert cheapest_cut([3, 3, 3], [(0, 1), (1, 2)], [0], [2]) == [2]
    assert cheapest_cut([2, 2, 4, 2], [(0, 2), (1, 2), (2, 3)], [0, 1], [2, 3]) == [2]


@pytest.mark.parametrize(
    ("prices", "cut"),
    [([5, 4, 5], [1]), ([3, 4, 5], [0]), ([5, None, 6], [0]), ([None, 9, None], [1])],
)
def test_the_cheapest_node_of_a_path_is_cut_where_it_may_be(
    prices: list[int | None], cut: list[int]
):
    assert cheapest_cut(prices, [(0, 1), (1, 2)], [0], [2]) == cut


def test_two_narrow_branches_are_cut_where_one_wide_node_costs_more():
    diamond = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert cheapest_cut([9, 4, 4, 9], diamond, [0], [3]) == [1, 2]
    assert cheapest_cut([9, 5, 5, 9], diamond, [0], [3]) == [3]


def test_room_that_a_first_path_took_is_given_back():
    """The first path goes through 0 and 2; that 0 alone is cheapest shows once it is undone."""
    assert cheapest_cut([1, 1, 1, 2], [(0, 2), (0, 3)], [0, 1], [2, 3]) == [0]


def test_what_is_a_start_and_an_end_is_cut_itself():
    assert cheapest_cut([7], [], [0], [0]) == [0]
    assert cheapest_cut([None], [], [0], [0]) is None


def test_a_path_of_nodes_without_a_price_cannot_be_cut():
    assert cheapest_cut([None, None, 1], [(0, 1), (1, 2)], [0], [1]) is None


def test_nothing_is_cut_where_no_path_leads_there():
    assert cheapest_cut([1, 1], [(1, 0)], [0], [1]) == []
    assert cheapest_cut([1, 1], [(0, 1)], [], [1]) == []
    assert cheapest_cut([None, None], [], [0], [1]) == []


def test_sizes_of_stacks_of_any_model_have_a_cut():
    """Prices are bytes: those of a hundred layers' activations are far from where room ends."""
    terabytes = 1 << 50
    assert cheapest_cut([terabytes, terabytes + 1], [(0, 1)], [0], [1]) == [0]

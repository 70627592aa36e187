"""Finds minimum cuts of directed graphs."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow


def source_side(graph: csr_array, source: int, sink: int) -> frozenset[int]:
    """Returns the source's side of the minimum cut nearest to the source.

    It is the set of nodes that a maximum flow leaves reachable. Capacities and the whole flow are
    32-bit integers.
    """
    left = csr_array(graph - maximum_flow(graph, source, sink).flow)
    left.data = np.maximum(left.data, 0)  # also backward edges, where the flow is negative
    left.eliminate_zeros()
    return frozenset(breadth_first_order(left, source, return_predecessors=False).tolist())

"""Minimum cuts of directed graphs."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow


def source_side(graph: csr_array, source: int, sink: int) -> frozenset[int]:
    """The source's side of the minimum cut that is nearest to it: the nodes that a maximum flow
    leaves reachable. Capacities are integers of 32 bits, and so is the whole flow."""
    left = csr_array(graph - maximum_flow(graph, source, sink).flow)
    left.data = np.maximum(left.data, 0)  # backward edges too: a flow is negative there
    left.eliminate_zeros()
    return frozenset(breadth_first_order(left, source, return_predecessors=False).tolist())

"""Which ops on the batch can run on all of it before any microbatch does.

How many tokens count is needed by the first microbatch already, since its loss is divided by it.
Ops like that read the batch and no weights, and multiply no matrices.
"""

from __future__ import annotations

from stablehlo_tools.analysis.dimension_propagation.graph import Body, Graph, Node, inputs_of
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import COLLECTIVES
from stablehlo_tools.ir.values import is_float

OPAQUE = frozenset({"stablehlo.custom_call", MANUAL_COMPUTATION})


def known_beforehand(graph: Graph, seeds: Seeds, rank: int) -> set[Node]:
    """The ops of the block that hang on nothing but the batch, integers, and floats of at most
    `rank` dimensions; without contractions."""
    late = {
        number
        for number in graph.root.arguments
        if number not in seeds
        and is_float(graph.values[number].type)
        and len(graph.shape(number) or ()) >= rank
    }
    found: set[Node] = set()
    for node in graph.root.nodes:
        if late.isdisjoint(inputs_of(node)) and not is_heavy(node):
            found.add(node)
        else:
            late.update(node.results)
    return found


def is_heavy(node: Node) -> bool:
    """Whether an op is a contraction, one that nobody knows, or has such a one in it."""
    if node.name in CONTRACTIONS or node.name in OPAQUE:
        return True
    return any(is_heavy(inner) for body in node.bodies for inner in body.nodes)


def communicates(node: Node) -> bool:
    """Whether an op is a collective, or has one in it."""
    inner = (each for body in node.bodies for each in body.nodes)
    return node.name in COLLECTIVES or any(map(communicates, inner))


def numbers_in(body: Body) -> set[int]:
    """The values of a block and of the blocks in it."""
    found = set(body.arguments)
    for node in body.nodes:
        found.update(node.results)
        for inner in node.bodies:
            found |= numbers_in(inner)
    return found

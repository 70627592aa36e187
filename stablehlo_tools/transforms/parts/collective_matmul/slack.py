"""Whether an order can hide a collective, so that it needs no ring.

A gather that follows from no product (of a weight) can be issued as early as is wished, and a
scatter that no product follows (of a weight's gradient) waited for as late. If there are products
that neither make what it sends nor need what it gives, and take as long, a scheduler hides it
behind those; in a ring it would be waited for block by block.
"""

from __future__ import annotations

from functools import cached_property

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.analysis.dataflow import Node, dependences, dependents, solve
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.op_work import op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import Work, WorkKind, kernel_ns
from stablehlo_tools.cost.transfers import Transfer
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, WHILE
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.transforms.parts.collective_matmul.regions import Region

_PRODUCTS = frozenset({DOT_GENERAL, CONVOLUTION})


class Slack:
    """What else there is to do in a block, while one of its collectives is on its way."""

    def __init__(self, graph: Graph, hardware: Hardware, devices: int) -> None:
        self._graph = graph
        self._hardware = hardware
        self._devices = devices

    def needs_ring(self, region: Region) -> bool:
        """Whether one of a region's collectives cannot be hidden by an order."""
        groups = region.groups
        return any(
            not self._is_hidden(node, node.results[0], groups, before=True)
            for node in region.gathers
        ) or any(
            not self._is_hidden(node, node.operands[0], groups, before=False)
            for node in (*region.scatters, *region.exchanges)
        )

    def _is_hidden(self, node: Node, whole: int, groups: ProcessGroups, *, before: bool) -> bool:
        """Whether it is free at one end, and has as much beside it as it takes."""
        above = self._following(node.operands, backward=True)
        below = self._following(node.results, backward=False)
        if above if before else below:
            return False
        beside = self._ns.keys() - above - below
        size = tensor_bytes(ir.ShapedType(self._graph.values[whole].type)) or 0
        kind = node.name.removeprefix("stablehlo.")
        sent = transfer_time(Transfer(kind, size, groups), self._hardware, self._devices)
        return sum(self._ns[each] for each in beside) >= sent.ns

    def _following(self, numbers: tuple[int, ...], *, backward: bool) -> set[Node]:
        """The products that values are made of, or that follow from them; in a loop also those of
        other iterations."""
        graph, reached = self._graph, dict.fromkeys(numbers, True)
        while True:
            transfer = dependences if backward else dependents
            reached = solve(graph, reached, transfer, backward=backward)
            around = {
                other: True
                for argument, returned in self._carried
                for one, other in [(argument, returned) if backward else (returned, argument)]
                if one in reached and other not in reached
            }
            if not around:
                break
            reached |= around
        return {
            node
            for node in self._ns
            if any(number in reached for number in (node.results if backward else node.inputs))
        }

    @cached_property
    def _carried(self) -> list[tuple[int, int]]:
        """What a loop's body is given, and gives to the next iteration in its place."""
        root = self._graph.root
        if root.block.owner.name != WHILE or len(root.arguments) != len(root.returned):
            return []
        return list(zip(root.arguments, root.returned, strict=True))

    @cached_property
    def _ns(self) -> dict[Node, float]:
        """The products of the block, loops and branches that have any among them, and their ns."""
        return {
            node: sum(map(self._product_ns, products))
            for node in self._graph.root.nodes
            if (products := ops_named(node.op, _PRODUCTS))
        }

    def _product_ns(self, op: ir.Operation) -> float:
        product = op_work(op, short_name(op)).matmul
        if product is None:
            return 0.0
        dtype = str(element_of(op.operands[0]))
        return kernel_ns(Work(WorkKind.MATMUL, matmuls=(product,), dtype=dtype), self._hardware)

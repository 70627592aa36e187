"""Finds products that can run block by block beside the collectives before and after them.

    %g = all_gather %x                       // of rows
    %h = dot_general %g, %w1
    %a = tanh %h
    %p = dot_general %a, %w2
    %y = reduce_scatter %p                   // of rows

A region is the set of ops that work on each block of a gather's rows, or a scatter's, by itself:
here all five ops. It begins at gathers over the same groups. It continues as long as the relation
of an op's dimensions lets it run on one block. It ends at the first products on each path, or at
reduce_scatters over these groups. Other users of its values get the assembled blocks. Without a
gather, it goes back from a reduce_scatter to the products that this sums.

For the tokens of experts, an all_to_all also begins a region if its result consists of the blocks
of all devices. It ends one if it returns each block to its device. Their blocks are sent directly
from device to device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, Tilings
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integer
from stablehlo_tools.dialect.names import (
    ALL_TO_ALL,
    BARRIER,
    DOT_GENERAL,
    MANUAL_COMPUTATION,
    RESHAPE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import COLLECTIVES, ELEMENTWISE, full_names
from stablehlo_tools.ir.views import Combining

_PASSED = ELEMENTWISE | full_names("broadcast_in_dim reshape transpose")
_NOT_FOLLOWED = COLLECTIVES | {BARRIER, MANUAL_COMPUTATION}


class BlockOrder:
    """The order of the ops in a block, which changes as regions are written."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes: list[Node | None] = list(nodes)  # None for erased ones
        self._place = {node: place for place, node in enumerate(self._nodes)}

    def sort_nodes(self, nodes: Collection[Node]) -> list[Node]:
        """Returns nodes in their order."""
        return sorted(nodes, key=self._place.__getitem__)

    def without(self, nodes: Collection[Node]) -> None:
        """Removes nodes whose ops are erased."""
        for node in nodes:
            self._nodes[self._place.pop(node)] = None

    def make_room(self, nodes: Sequence[Node]) -> None:
        """Moves all dependents of `nodes` after the last of them, where the region is written.

        `nodes` must be in order, and none of them may depend on a moved op.
        """
        first, last = self._place[nodes[0]], self._place[nodes[-1]]
        inside = set(nodes)
        follows = {number for node in nodes for number in node.results}
        stays: list[Node] = []
        moved: list[Node] = []
        for node in filter(None, self._nodes[first : last + 1]):
            if node in inside or follows.isdisjoint(node.inputs):
                stays.append(node)
            else:
                follows.update(node.results)
                moved.append(node)
        behind = nodes[-1].op
        for node in moved:
            node.op.move_after(behind)
            behind = node.op
        written = stays + moved
        self._nodes[first : last + 1] = [*written, *[None] * (last + 1 - first - len(written))]
        self._place.update((node, place) for place, node in enumerate(written, first))


@dataclass(eq=False)
class RingRegion:
    """Ops that run block by block over the rings of some groups.

    `gathers` and `scatters`: the collectives at its ends, with the tiling of their values.
    `gathers` includes all_to_alls at its beginning; `exchanges` are those at its end. `steps`: the
    ops between, in program order, with the dimensions that blocks split. `like`: a collective of
    the region, whose mode and channel the written ones get.
    """

    graph: Graph
    order: BlockOrder
    groups: ProcessGroups
    like: Collective
    gathers: dict[Node, DimTiling] = field(default_factory=dict[Node, DimTiling])
    scatters: dict[Node, DimTiling] = field(default_factory=dict[Node, DimTiling])
    exchanges: dict[Node, DimTiling] = field(default_factory=dict[Node, DimTiling])
    steps: dict[Node, OpTiling] = field(default_factory=dict[Node, OpTiling])

    @property
    def size(self) -> int:
        """The number of blocks."""
        return len(self.groups[0])

    @property
    def products(self) -> list[Node]:
        """The products, in order."""
        return [node for node in self.steps if node.name == DOT_GENERAL]

    @property
    def nodes(self) -> list[Node]:
        """All nodes, in program order."""
        return self.order.sort_nodes({*self.gathers, *self.steps, *self.scatters, *self.exchanges})

    @property
    def has_exchanges(self) -> bool:
        """True if blocks are sent directly from device to device at one of its ends."""
        return bool(self.exchanges) or any(node.name == ALL_TO_ALL for node in self.gathers)

    @property
    def goes_straight(self) -> bool:
        """True if all blocks are sent directly from device to device."""
        return not self.scatters and all(node.name == ALL_TO_ALL for node in self.gathers)

    def end(self, node: Node, tiling: DimTiling) -> None:
        """Adds a collective at the region's end."""
        ends = self.exchanges if node.name == ALL_TO_ALL else self.scatters
        ends[node] = tiling

    def summed_products(self) -> set[Node]:
        """Returns the products right before the scatters, and the ops between the two."""
        found: set[Node] = set()
        pending = [number for node in self.scatters for number in node.operands]
        while pending:
            node = self.graph.maker.get(pending.pop())
            if node in self.steps and node not in found:
                found.add(node)
                pending += () if node.name == DOT_GENERAL else node.operands
        return found

    def can_halve(self) -> bool:
        """Returns True if all ops also run on halves of blocks."""
        if self.has_exchanges:
            return False
        ends = (*self.gathers.items(), *self.scatters.items())
        parts = 2 * self.size
        shapes = [
            (self.graph.shape(n.results[0] if n in self.gathers else n.operands[0]), t)
            for n, t in ends
        ]
        return all(shape is not None and t.fits(shape, parts) for shape, t in shapes) and all(
            self.graph.tiling(node, step.operands, parts) == step
            for node, step in self.steps.items()
        )

    def used_outside(self) -> list[tuple[int, DimTiling]]:
        """Returns the values in blocks that other ops, or the block's terminator, read."""
        graph, inside = self.graph, set(self.nodes)
        made = [(node.results[0], tiling) for node, tiling in self.gathers.items()]
        for node, step in self.steps.items():
            pairs = zip(node.results, step.results, strict=True)
            made += [(number, tiling) for number, tiling in pairs if tiling is not None]
        return [
            (number, tiling)
            for number, tiling in made
            if number in graph.root.returned
            or any(user not in inside for user in graph.users.get(number, ()))
        ]

    def signature(self) -> tuple[object, ...]:
        """Returns a key that is equal for regions that compute the same, for example in other
        layers."""
        return (
            self.groups,
            tuple(
                (n.name, *(str(v.type) for v in (*n.op.operands, *n.op.results)))
                for n in self.nodes
            ),
        )


def find_regions(
    block: ir.Block, collectives: Mapping[ir.Value, tuple[Collective, ProcessGroups]]
) -> list[RingRegion]:
    """Returns the regions of one block; each op is in at most one, and each can be written at one
    place.

    `collectives`: those of the module that may be decomposed, by their results.
    """
    graph = Graph.from_block(block, opened=())
    order = BlockOrder(graph.root.nodes)
    known: dict[Node, tuple[Collective, ProcessGroups]] = {}
    for node in graph.root.nodes:
        found = collectives.get(node.op.results[0]) if node.results else None
        if found is not None:
            known[node] = found
    candidates: list[RingRegion] = []
    for groups in dict.fromkeys(groups for _, groups in known.values()):
        ends = {node: c for node, (c, theirs) in known.items() if theirs == groups}
        candidates += _Finder(graph, order, groups, ends).regions()
    # all_to_alls of tokens take precedence: a schedule cannot hide them, but it can hide a gather
    # of weights beside the same products.
    candidates.sort(key=lambda region: not region.has_exchanges)
    regions: list[RingRegion] = []
    taken: set[Node] = set()
    for region in candidates:
        nodes = region.nodes
        if taken.isdisjoint(nodes):
            taken.update(nodes)
            regions.append(region)
    regions.sort(key=lambda region: region.nodes[0].index)
    # Regions in a cycle of dependences cannot each be written at one place.
    while len(placed := in_order(regions)) < len(regions):
        regions.remove([region for region in regions if region not in placed][-1])
    return regions


def in_order(regions: Sequence[RingRegion]) -> list[RingRegion]:
    """Sorts regions of one block so that each follows those that it depends on.

    A region is written at its last op. Regions in a cycle of dependences are left out.
    """
    follows = _follows(regions)
    done, listed, left = 0, list[RingRegion](), dict(enumerate(regions))
    while True:
        number = next((number for number in left if not follows[number] & ~done), None)
        if number is None:
            return listed
        listed.append(left.pop(number))
        done |= 1 << number


def _follows(regions: Sequence[RingRegion]) -> list[int]:
    """Returns for each region the regions that it depends on, as bits, if each is written at one
    place."""
    owner = {node: number for number, region in enumerate(regions) for node in region.nodes}
    follows = [0] * len(regions)
    is_new = bool(regions)
    # A dependence found late may lead on to a region that was visited before.
    while is_new:
        is_new = False
        graph, reached = regions[0].graph, dict[int, int]()
        for node in graph.root.nodes:
            number, bits = owner.get(node), 0
            for value in node.inputs:
                maker = graph.maker.get(value)
                given = reached.get(value, 0)
                if number is not None and maker is not None and owner.get(maker) == number:
                    given &= ~(1 << number)
                bits |= given
            if number is not None:
                is_new = is_new or bool(bits & ~follows[number])
                follows[number] |= bits
                bits = follows[number] | 1 << number
            if bits:
                reached.update(dict.fromkeys(node.results, bits))
    return follows


class _Finder:
    """Finds the regions over the rings of one set of groups."""

    def __init__(
        self,
        graph: Graph,
        order: BlockOrder,
        groups: ProcessGroups,
        ends: Mapping[Node, Collective],
    ) -> None:
        self._graph = graph
        self._order = order
        self._groups = groups
        self._parts = len(groups[0])
        self._ends = ends
        self._tilings: dict[int, DimTiling] = {}
        self._steps: dict[Node, OpTiling] = {}
        self._scatters: dict[Node, DimTiling] = {}  # and all_to_alls at the end
        # Sets of gathers, as bits: those whose blocks a value consists of (`_in_blocks`), and those
        # that it depends on in another way (`_behind`).
        self._in_blocks: dict[int, int] = {}
        self._behind: dict[int, int] = {}
        self._before: list[int] = []  # for each gather, the gathers that it depends on

    def regions(self) -> list[RingRegion]:
        """Returns the regions that have a product."""
        for node in self._graph.root.nodes:
            self._follow(node)
        kept = self._kept()
        found = [region for region in self._components(kept) if region.products]
        taken = {node for region in found for node in region.steps}
        for node, collective in self._ends.items():
            tiling = _scatter_tiling(collective)
            if tiling is None or any(node in region.nodes for region in found):
                continue
            region = RingRegion(self._graph, self._order, self._groups, collective)
            region.end(node, tiling)
            if self._go_back(node.operands[0], tiling, region, taken) and region.products:
                region.steps = dict(sorted(region.steps.items(), key=lambda item: item[0].index))
                taken |= region.steps.keys()
                found.append(region)
        return found

    def _follow(self, node: Node) -> None:
        """Continues a region through an op, if it runs on blocks.

        The op must not depend on the same gathers outside of the region.
        """
        collective = self._ends.get(node)
        if collective is not None and collective.kind == "all_gather":
            self._start(node, "all_gather_dim")
            return
        tilings = self._operand_tilings(node)
        blocks = behind = 0
        for number, tiling in zip(node.operands, tilings, strict=True):
            blocks |= self._in_blocks.get(number, 0) if tiling is not None else 0
        for number in node.inputs:
            behind |= self._behind.get(number, 0) | self._in_blocks.get(number, 0) & ~blocks
        if not blocks and collective is not None and node.name == ALL_TO_ALL:
            self._start(node, "concat_dimension")
            return
        if not blocks | behind:
            return
        step = None
        if blocks & behind:
            pass  # it would depend on the region from outside
        elif collective is not None and tilings[0] is not None:
            if _scatter_tiling(collective) == tilings[0]:
                self._scatters[node] = tilings[0]
        elif any(tilings):
            step = self._step(node, tilings)
        if step is None or step.combine is not None:
            self._behind.update(dict.fromkeys(node.results, blocks | behind))
        if step is None:
            return
        self._steps[node] = step
        for number, tiling in zip(node.results, step.results, strict=True):
            if tiling is not None:
                self._tilings[number] = tiling
                self._in_blocks[number] = blocks
                self._behind[number] = behind

    def _operand_tilings(self, node: Node) -> Tilings:
        """Returns the tilings of the operands that an op can read in blocks.

        If one gather depends on another (in a backward pass, on the forward's), only the later
        one's.
        """
        tilings = [self._tilings.get(number) for number in node.operands]
        of = [self._in_blocks.get(number, 0) for number in node.operands]
        gathers, later = reduce(or_, of, 0), 0
        while gathers:
            last = gathers.bit_length() - 1
            later |= self._before[last]
            gathers ^= 1 << last
        return tuple(
            None if bits & later else tiling for tiling, bits in zip(tilings, of, strict=True)
        )

    def _start(self, node: Node, along: str) -> None:
        tiling = DimTiling(integer(node.op, along))
        shape = self._graph.shape(node.results[0])
        if shape is not None and tiling.fits(shape, self._parts):
            self._tilings[node.results[0]] = tiling
            (operand,) = node.operands
            self._in_blocks[node.results[0]] = 1 << len(self._before)
            self._before.append(self._in_blocks.get(operand, 0) | self._behind.get(operand, 0))

    def _step(self, node: Node, tilings: Tilings) -> OpTiling | None:
        """Returns the tiling of an op that runs on blocks; None if it does not."""
        if node.name in _NOT_FOLLOWED or any(n in self._tilings for n in node.captures):
            return None
        step = self._graph.tiling(node, tilings, self._parts)
        if step is None:
            return None
        # All results must be in blocks, unless the op is a product that is summed over them.
        if step.combine is not None:
            return step if node.name == DOT_GENERAL else None
        return None if step.chained or None in step.results else step

    def _kept(self) -> set[Node]:
        """Returns the ops on the way to the first product, or to a scatter after one."""
        to_scatter, to_product = set(self._scatters), set[Node]()
        behind_product: set[int] = set()  # values in blocks that depend on a product
        for node in self._steps:
            taken = self._blocks_of(node)
            if node.name == DOT_GENERAL and behind_product.isdisjoint(taken):
                to_product.add(node)
            if node.name == DOT_GENERAL or not behind_product.isdisjoint(taken):
                behind_product.update(node.results)
        for node in (*self._scatters, *reversed(self._steps)):
            for number in self._blocks_of(node):
                maker = self._graph.maker[number]
                if maker not in self._steps:
                    continue
                if node in to_scatter:
                    to_scatter.add(maker)
                if node in to_product:
                    to_product.add(maker)
        return to_product | to_scatter

    def _blocks_of(self, node: Node) -> list[int]:
        """Returns the operands that an op reads in blocks."""
        if node in self._scatters:
            return [node.operands[0]]
        step = self._steps.get(node)
        if step is None:
            return []
        pairs = zip(node.operands, self._operand_tilings(node), step.operands, strict=True)
        return [number for number, given, taken in pairs if given is not None and taken is not None]

    def _components(self, kept: set[Node]) -> Iterator[RingRegion]:
        """Yields each connected set of kept ops as a region."""
        group_of: dict[Node, list[Node]] = {}
        gathers = [n for n in self._ends if n.results[0] in self._tilings]
        for node in self._graph.root.nodes:
            if node not in kept and node not in gathers:
                continue
            own = group_of.setdefault(node, [node])
            for number in self._blocks_of(node):
                maker = self._graph.maker[number]
                other = group_of.get(maker, own)
                if other is not own:
                    other += own
                    group_of.update(dict.fromkeys(own, other))
                    own = other
        for group in {id(group): group for group in group_of.values()}.values():
            ends = [node for node in group if node in self._ends]
            if not ends:
                continue
            region = RingRegion(self._graph, self._order, self._groups, self._ends[ends[0]])
            for node in sorted(group, key=lambda node: node.index):
                if node in gathers:
                    region.gathers[node] = self._tilings[node.results[0]]
                elif node in self._scatters:
                    region.end(node, self._scatters[node])
                else:
                    region.steps[node] = self._steps[node]
            yield region

    def _go_back(
        self, number: int, tiling: DimTiling, region: RingRegion, taken: set[Node]
    ) -> bool:
        """Adds the ops that compute a value to a region, back to products.

        Returns True if there is a product whose blocks lead to the value.
        """
        node = self._graph.maker.get(number)
        if node is None or node in taken or node in region.steps:
            return node in region.steps if node is not None else False
        inside = {*region.steps, *region.scatters, *region.exchanges}
        users = self._graph.users.get(number, ())
        if number in self._graph.root.returned or any(user not in inside for user in users):
            return False
        step = self._backwards(node, tiling)
        if step is None:
            return False
        if node.name == DOT_GENERAL:
            region.steps[node] = step
            return True
        if node.name not in _PASSED or len(node.results) != 1:
            return False
        region.steps[node] = step
        pairs = zip(node.operands, step.operands, strict=True)
        reached = [self._go_back(n, t, region, taken) for n, t in pairs if t is not None]
        if not any(reached):
            del region.steps[node]
        return any(reached)

    def _backwards(self, node: Node, tiling: DimTiling) -> OpTiling | None:
        """Returns the tiling of an op whose result is in blocks; None if there is none."""
        relation = self._graph.relation(node)
        shape = self._graph.shape(node.results[0])
        if relation is None or shape is None or not tiling.fits(shape, self._parts):
            return None
        if node.name == RESHAPE:
            candidates = [
                (0, DimTiling(dim, outer))
                for dim in range(len(relation.operands[0]))
                for outer in dict.fromkeys((1, tiling.outer, *shape))
            ]
        else:
            candidates = [
                (link.operand.tensor, DimTiling(link.operand.dim, tiling.outer))
                for link in relation.of_result(0, tiling.dim)
            ]
        for position, given in candidates:
            tilings = tuple(
                given if place == position else None for place in range(len(node.operands))
            )
            step = self._graph.tiling(node, tilings, self._parts)
            if step is not None and step.combine is None and step.results == (tiling,):
                return step
        return None


def _scatter_tiling(collective: Collective) -> DimTiling | None:
    """Returns the tiling of the operand of a reduce_scatter that adds, or of an all_to_all.

    None for other collectives.
    """
    if collective.kind == "all_to_all":
        return DimTiling(integer(collective.op, "split_dimension"))
    if collective.kind != "reduce_scatter":
        return None
    if reducer_kind(Combining(collective.op).combiner) != "add":
        return None
    return DimTiling(integer(collective.op, "scatter_dimension"))

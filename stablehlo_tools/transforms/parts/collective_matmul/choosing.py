"""Which regions become rings, and in which directions: those that are predicted to save time.

Each choice is written on a copy of the program and timed by the cost model, all collectives where a
scheduler would issue them: what a ring saves is then what no order hides. Regions that do the same
at another place are decided together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import prod

from stablehlo_tools.analysis.collectives import (
    Channels,
    Collective,
    ModuleFacts,
    find_collectives,
    tensor_bytes,
)
from stablehlo_tools.analysis.dataflow import Node, dependences, dependents, solve
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.op_work import op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.as_compiled import permute_overlaps
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import Work, WorkKind, kernel_ns
from stablehlo_tools.cost.transfers import Transfer, ways
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, WHILE
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.values import has_uses, maker_of
from stablehlo_tools.ir.walk import ops_around, ops_named
from stablehlo_tools.transforms.parts.collective_matmul.regions import (
    Region,
    find_regions,
    in_order,
)
from stablehlo_tools.transforms.parts.collective_matmul.rings import (
    BACKWARDS,
    FORWARDS,
    Cube,
    Direct,
    Ring,
    Way,
    cycles,
)
from stablehlo_tools.transforms.parts.collective_matmul.writing import Held, RegionWriter
from stablehlo_tools.transforms.parts.create_reduce_scatter.rewriting import GroupForms
from stablehlo_tools.transforms.parts.pipeline_collectives.choosing import predict

_PRODUCTS = frozenset({DOT_GENERAL, CONVOLUTION})
_ENDS = frozenset({"all_gather", "all_to_all", "reduce_scatter"})
_BLOCK = 2.0**20  # bytes, to compare hops by
_TOGETHER = 2.0  # times that bytes put together are written more than the model knows
_GAIN = 0.03  # of the program's time: the model is no nearer to what compilers make of blocks
_ROUNDS = 2  # a region can save time once another one leaves it blocks

Ways = Mapping[int, Way]  # of regions by their numbers


@dataclass(frozen=True)
class Survey:
    """All regions of a module, in the order of the text; the same of a copy of the module."""

    forms: GroupForms
    blocks: list[ir.Block]
    regions: list[Region]

    @classmethod
    def of(cls, module: ir.Module) -> Survey:
        """Reads the module. Raises a located ToolError for groups that it does not have."""
        collectives = find_collectives(module)
        forms = GroupForms(ModuleFacts.of(module, collectives))
        known = {
            collective.op.results[0]: (collective, groups)
            for collective in collectives
            if (groups := _rings(collective, forms)) is not None
        }
        blocks = list(dict.fromkeys(maker_of(value).block for value in known))
        regions = [region for block in blocks for region in find_regions(block, known)]
        return cls(forms, blocks, regions)

    def kinds(self) -> list[list[int]]:
        """The numbers of the regions, those together that do the same."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, region in enumerate(self.regions):
            alike.setdefault(region.signature(), []).append(number)
        return list(alike.values())


def write(module: ir.Module, chosen: Ways, compiler: Compiler) -> float:
    """Rewrites the regions of these numbers; the bytes that are put together of blocks, each time
    that it is done."""
    survey = Survey.of(module)
    channels, held = Channels(module), Held()
    ways_of = {survey.regions[number]: way for number, way in chosen.items()}
    by_block: dict[Graph, list[Region]] = {}
    for number in chosen:
        region = survey.regions[number]
        by_block.setdefault(region.graph, []).append(region)
    with ir.Location.unknown(module.context):
        for region in (each for regions in by_block.values() for each in in_order(regions)):
            ring = compiler.ring(region, ways_of[region], survey.forms.facts.grid.size)
            RegionWriter(region, ring, survey.forms, channels, held, hold=compiler.hold).run()
        together = 0.0
        for value in filter(has_uses, held.blocks):
            runs = prod(constant_trips(loop) or 1 for loop in ops_around(maker_of(value), WHILE))
            together += float(runs * (tensor_bytes(ir.ShapedType(value.type)) or 0))
        for block in survey.blocks:
            erase_unused(block)
    return together


@dataclass(frozen=True)
class Compiler:
    """What rings are written for: `hold` keeps a compiler to the order that is written."""

    hardware: Hardware
    hold: bool

    def ns(self, module: ir.Module, together: float = 0.0) -> float:
        """What a program is predicted to take that puts so many bytes together: into zeros, which
        are written first, and both as kernels of their own more often than the model knows."""
        at_once = None if self.hardware.is_torus else 1
        known = predict(module, self.hardware, None, at_once=at_once)
        return known.ns + _TOGETHER * together / self.hardware.memory_rate

    def ring(self, region: Region, way: Way, devices: int) -> Ring:
        """The ring that the blocks of a region go round."""
        if not region.goes_straight:
            return Ring(region.groups, self.cycle(region.groups, devices), way)
        order, returns = tuple(range(region.size)), bool(region.gathers and region.exchanges)
        direct = Direct(region.groups, order, way, returns)
        cube = Cube(region.groups, order, way, returns)
        return direct if self._overlaps(direct, devices) or not cube.exists else cube

    def hides(self, region: Region, devices: int) -> bool:
        """Whether compute can run beside what the blocks of a region go by."""
        return self._overlaps(self.ring(region, Way.ONE, devices), devices)

    def cycle(self, groups: ProcessGroups, devices: int) -> tuple[int, ...]:
        """The way round the devices of a group with the quickest hops, of those that compute can
        run beside, if there are any."""

        def price(cycle: tuple[int, ...]) -> tuple[bool, float]:
            ring = Ring(groups, cycle, Way.BOTH)
            return not self._overlaps(ring, devices), self._hop_ns(ring, devices)

        return min(cycles(len(groups[0])), key=price)

    def _overlaps(self, ring: Ring, devices: int) -> bool:
        """Whether compute can run beside all hops."""
        return all(permute_overlaps(pairs, self.hardware, devices) for pairs in ring.sends)

    def _hop_ns(self, ring: Ring, devices: int) -> float:
        """A hop in each direction: side by side, where they take different ways of links."""
        there, back = (
            transfer_time(
                Transfer("collective_permute", _BLOCK, ring.pairs(direction)),
                self.hardware,
                devices,
            )
            for direction in (FORWARDS, BACKWARDS)
        )
        taken = {way for link in there.links for way in ways(link)}
        is_shared = any(way in taken for link in back.links for way in ways(link))
        return there.ns + back.ns if is_shared else max(there.ns, back.ns)

    def ways_round(self, region: Region, asked: Callable[[Way], bool]) -> list[Way]:
        """How blocks may go round, those that are worth a trial; the best first where the model
        sees no difference.

        Of two devices the one is on either side. Where one collective is in flight at a time, as on
        XLA:GPU, sums go in both directions, so that one travels while the other gets its term (0.79
        ms, and 0.89 in one), and what is only gathered goes in one (0.79, and 0.87). On a torus a
        region with both ends goes by halves: XLA:TPU does not schedule two phases well (6.9 ms, and
        6.0 by halves). All for products of 8192 x 8192 x 28672 on eight devices. What goes straight
        to its device has no way round: both directions are those of the nearest first.
        """
        if region.size == 2:
            return [Way.ONE]
        if region.has_exchanges:
            return [way for way in (Way.BOTH, Way.ONE) if asked(way)][:1]
        if not self.hardware.is_torus:
            possible = [Way.BOTH, Way.ONE] if region.scatters else [Way.ONE, Way.BOTH]
            return [way for way in possible if asked(way)][:1]
        both = Way.HALVES if region.gathers and region.scatters else Way.BOTH
        if both is Way.HALVES and not region.can_halve():
            return [Way.ONE]
        return [way for way in (both, Way.ONE) if asked(way)]


def best(
    module: ir.Module, compiler: Compiler, asked: Callable[[Way], bool], *, at_any_price: bool
) -> dict[int, Way]:
    """The choice that is predicted to be fastest, kind after kind; `at_any_price`: of those in
    which all are rings. A region that saves nothing is asked once more after the others."""
    survey = Survey.of(module)
    chosen: dict[int, Way] = {}
    now = compiler.ns(module)
    left = survey.kinds()
    if not at_any_price:
        devices = survey.forms.facts.grid.size
        slacks = {
            region.graph: Slack(region.graph, compiler.hardware, devices)
            for region in survey.regions
        }
        middles = [survey.regions[numbers[len(numbers) // 2]] for numbers in left]
        needed = [
            slacks[middle.graph].needs_ring(middle) and compiler.hides(middle, devices)
            for middle in middles
        ]
        left = list(compress(left, needed))
    for _ in range(_ROUNDS):
        before = dict(chosen)
        for numbers in [each for each in left if each[0] not in chosen]:
            trials: list[tuple[float, int, Way]] = []
            tried = compiler.ways_round(survey.regions[numbers[0]], asked)
            for place, way in enumerate(tried):
                draft = copy_module(module)
                taken = {**chosen, **dict.fromkeys(numbers, way)}
                together = write(draft, taken, compiler)
                trials.append((compiler.ns(draft, together), place, way))
            least, _, way = min(trials)
            if at_any_price or now - least > _GAIN * now:
                chosen.update(dict.fromkeys(numbers, way))
                now = least
        if chosen == before:
            break
    return dict(sorted(chosen.items()))


class Slack:
    """The other work of a block while one of its collectives is on its way.

    If an order can hide the collective behind that, it needs no ring.

    A gather that follows from no product (of a weight) can be issued as early as is wished, and a
    scatter that no product follows (of a weight's gradient) waited for as late. If there are
    products that neither make what it sends nor need what it gives, and take as long, a scheduler
    hides it behind those; in a ring it would be waited for block by block.
    """

    def __init__(self, graph: Graph, hardware: Hardware, devices: int) -> None:
        self._graph = graph
        self._hardware = hardware
        self._devices = devices

    def needs_ring(self, region: Region) -> bool:
        """Returns True if no order can hide one of a region's collectives."""
        groups = region.groups
        return any(
            not self._is_hidden(node, node.results[0], groups, before=True)
            for node in region.gathers
        ) or any(
            not self._is_hidden(node, node.operands[0], groups, before=False)
            for node in (*region.scatters, *region.exchanges)
        )

    def _is_hidden(self, node: Node, whole: int, groups: ProcessGroups, *, before: bool) -> bool:
        """Returns True if it is free at one end, and has as much beside it as it takes."""
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
        root, carried = graph.root, list[tuple[int, int]]()
        if root.block.owner.name == WHILE and len(root.arguments) == len(root.returned):
            # What a loop's body is given, and gives to the next iteration in its place.
            carried = list(zip(root.arguments, root.returned, strict=True))
        while True:
            transfer = dependences if backward else dependents
            reached = solve(graph, reached, transfer, backward=backward)
            around = {
                other: True
                for argument, returned in carried
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
    def _ns(self) -> dict[Node, float]:
        """The products of the block, loops and branches that have any among them, and their ns."""
        found: dict[Node, float] = {}
        for node in self._graph.root.nodes:
            for op in ops_named(node.op, _PRODUCTS):
                product = op_work(op, short_name(op)).matmul
                ns = 0.0
                if product is not None:
                    dtype = str(element_of(op.operands[0]))
                    work = Work(WorkKind.MATMUL, matmuls=(product,), dtype=dtype)
                    ns = kernel_ns(work, self._hardware)
                found[node] = found.get(node, 0.0) + ns
        return found


def _rings(collective: Collective, forms: GroupForms) -> ProcessGroups | None:
    """The groups of a collective that can be rings."""
    op = collective.op
    if collective.kind not in _ENDS or collective.is_async or len(op.operands) != 1:
        return None
    grid = forms.facts.grid
    element = ir.ShapedType(op.results[0].type).element_type
    if min(grid.num_replicas, grid.num_partitions) > 1:
        return None
    if not isinstance(element, ir.FloatType | ir.IntegerType):
        return None
    groups = forms.groups(collective)
    if not groups or len({len(group) for group in groups}) != 1 or len(groups[0]) < 2:
        return None
    pairs = Ring(groups, tuple(range(len(groups[0]))), Way.ONE).pairs(FORWARDS)
    return groups if forms.express_pairs(pairs, collective) else None

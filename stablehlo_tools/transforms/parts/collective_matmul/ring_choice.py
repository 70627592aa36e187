"""Chooses the regions that become rings, and their directions, by predicted time.

Each choice is written on a copy of the program and timed by the cost model. All other collectives
are timed as a scheduler would issue them, so a ring saves only what no order hides. Equal regions
at different places are decided together.
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
from stablehlo_tools.analysis.loops import expected_trips
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.op_work import op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.emitted_collectives import permute_overlaps
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import KernelWork, WorkKind, kernel_ns
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, ways
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, WHILE
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.values import has_uses, maker_of
from stablehlo_tools.ir.walk import ops_around, ops_named
from stablehlo_tools.transforms.parts.collective_matmul.block_writing import Held, RegionWriter
from stablehlo_tools.transforms.parts.collective_matmul.regions import (
    RingRegion,
    find_regions,
    in_order,
)
from stablehlo_tools.transforms.parts.collective_matmul.rings import (
    BACKWARDS,
    FORWARDS,
    Cube,
    DeviceRing,
    Direct,
    RingDirection,
    cycles,
)
from stablehlo_tools.transforms.parts.create_reduce_scatter.smaller_collectives import GroupForms
from stablehlo_tools.transforms.parts.pipeline_collectives.shift_choice import predict

_PRODUCTS = frozenset({DOT_GENERAL, CONVOLUTION})
_ENDS = frozenset({"all_gather", "all_to_all", "reduce_scatter"})
_BLOCK = 2.0**20  # bytes of a hop, to compare cycles by
_TOGETHER = 2.0  # additional writes of concatenated blocks that the model does not predict
_GAIN = 0.03  # of the program's time: the model's error for compiled blocks
_ROUNDS = 2  # a region can save time after another one provides its operands as blocks

Ways = Mapping[int, RingDirection]  # by number of the region


@dataclass(frozen=True)
class Survey:
    """All regions of a module, in program order; the order is the same for copies of the module."""

    forms: GroupForms
    blocks: list[ir.Block]
    regions: list[RingRegion]

    @classmethod
    def from_module(cls, module: ir.Module) -> Survey:
        """Analyzes the module. Raises a located ToolError for groups that it does not have."""
        collectives = find_collectives(module)
        forms = GroupForms(ModuleFacts.from_module(module, collectives))
        known = {
            collective.op.results[0]: (collective, groups)
            for collective in collectives
            if (groups := _rings(collective, forms)) is not None
        }
        blocks = list(dict.fromkeys(maker_of(value).block for value in known))
        regions = [region for block in blocks for region in find_regions(block, known)]
        return cls(forms, blocks, regions)

    def kinds(self) -> list[list[int]]:
        """Returns the numbers of the regions, grouped by signature."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, region in enumerate(self.regions):
            alike.setdefault(region.signature(), []).append(number)
        return list(alike.values())


def write(module: ir.Module, chosen: Ways, compiler: RingTarget) -> float:
    """Rewrites the chosen regions, by number.

    Returns the bytes that are assembled from blocks in a run, counting each loop iteration.
    """
    survey = Survey.from_module(module)
    channels, held = Channels(module), Held()
    ways_of = {survey.regions[number]: way for number, way in chosen.items()}
    by_block: dict[Graph, list[RingRegion]] = {}
    for number in chosen:
        region = survey.regions[number]
        by_block.setdefault(region.graph, []).append(region)
    with ir.Location.unknown(module.context):
        for region in (each for regions in by_block.values() for each in in_order(regions)):
            ring = compiler.choose_ring(region, ways_of[region], survey.forms.facts.grid.size)
            RegionWriter(region, ring, survey.forms, channels, held, hold=compiler.hold).run()
        together = 0.0
        for value in filter(has_uses, held.blocks):
            runs = prod(expected_trips(loop, 1) for loop in ops_around(maker_of(value), WHILE))
            together += float(runs * (tensor_bytes(ir.ShapedType(value.type)) or 0))
        for block in survey.blocks:
            erase_unused(block)
    return together


@dataclass(frozen=True)
class RingTarget:
    """The compiler that rings are written for; `hold`: barriers keep it to the written order."""

    hardware: Hardware
    hold: bool

    def ns(self, module: ir.Module, together: float = 0.0) -> float:
        """Returns the predicted ns of a program that assembles `together` bytes from blocks.

        Blocks are written into zeros, which are written first. Compilers use separate kernels for
        both more often than the model predicts.
        """
        at_once = None if self.hardware.is_torus else 1
        known = predict(module, self.hardware, None, at_once=at_once)
        return known.ns + _TOGETHER * together / self.hardware.memory_rate

    def choose_ring(self, region: RingRegion, way: RingDirection, devices: int) -> DeviceRing:
        """Returns the ring that the blocks of a region travel in."""
        if not region.goes_straight:
            return DeviceRing(region.groups, self.cycle(region.groups, devices), way)
        order, returns = tuple(range(region.size)), bool(region.gathers and region.exchanges)
        direct = Direct(region.groups, order, way, returns)
        cube = Cube(region.groups, order, way, returns)
        return direct if self._overlaps(direct, devices) or not cube.exists else cube

    def hides(self, region: RingRegion, devices: int) -> bool:
        """Returns True if compute can run beside all hops of a region's blocks."""
        return self._overlaps(self.choose_ring(region, RingDirection.ONE, devices), devices)

    def cycle(self, groups: ProcessGroups, devices: int) -> tuple[int, ...]:
        """Returns the cycle through the devices of a group with the quickest hops.

        Prefers cycles whose hops compute can run beside.
        """

        def price(cycle: tuple[int, ...]) -> tuple[bool, float]:
            ring = DeviceRing(groups, cycle, RingDirection.BOTH)
            return not self._overlaps(ring, devices), self._hop_ns(ring, devices)

        return min(cycles(len(groups[0])), key=price)

    def _overlaps(self, ring: DeviceRing, devices: int) -> bool:
        """Returns True if compute can run beside all hops."""
        return all(permute_overlaps(pairs, self.hardware, devices) for pairs in ring.sends)

    def _hop_ns(self, ring: DeviceRing, devices: int) -> float:
        """Returns the ns of one hop in each direction, which overlap if they share no link."""
        there, back = (
            transfer_time(
                DeviceTransfer("collective_permute", _BLOCK, ring.pairs(direction)),
                self.hardware,
                devices,
            )
            for direction in (FORWARDS, BACKWARDS)
        )
        taken = {way for link in there.links for way in ways(link)}
        is_shared = any(way in taken for link in back.links for way in ways(link))
        return there.ns + back.ns if is_shared else max(there.ns, back.ns)

    def ways_round(
        self, region: RingRegion, asked: Callable[[RingDirection], bool]
    ) -> list[RingDirection]:
        """Returns the ways worth a trial; the first is best if the model sees no difference.

        With two devices, both directions are the same. On XLA:GPU one collective is in flight at a
        time. There, sums travel in both directions, so that one travels while the other gets its
        term (0.79 ms, one direction 0.89 ms). Blocks that are only gathered travel in one (0.79 ms,
        both directions 0.87 ms). On a torus a region with both ends uses halves, because XLA:TPU
        does not schedule two phases well (6.9 ms, by halves 6.0 ms). All for products of 8192 x
        8192 x 28672 on eight devices. Blocks that are sent directly to their device do not travel
        round: both directions mean nearest first.
        """
        if region.size == 2:
            return [RingDirection.ONE]
        if region.has_exchanges:
            return [way for way in (RingDirection.BOTH, RingDirection.ONE) if asked(way)][:1]
        if not self.hardware.is_torus:
            possible = (
                [RingDirection.BOTH, RingDirection.ONE]
                if region.scatters
                else [RingDirection.ONE, RingDirection.BOTH]
            )
            return [way for way in possible if asked(way)][:1]
        both = RingDirection.HALVES if region.gathers and region.scatters else RingDirection.BOTH
        if both is RingDirection.HALVES and not region.can_halve():
            return [RingDirection.ONE]
        return [way for way in (both, RingDirection.ONE) if asked(way)]


def best(
    module: ir.Module,
    compiler: RingTarget,
    asked: Callable[[RingDirection], bool],
    *,
    at_any_price: bool,
) -> dict[int, RingDirection]:
    """Returns the choice with the shortest predicted time, decided kind by kind.

    `asked` tells which ways are allowed. With `at_any_price` all regions become rings. A region
    that saves no time is tried once more after the others.
    """
    survey = Survey.from_module(module)
    chosen: dict[int, RingDirection] = {}
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
            trials: list[tuple[float, int, RingDirection]] = []
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
    """The other work of a block that an order can hide a collective behind, without a ring.

    A gather that depends on no product (of a weight) can be issued as early as wished. A scatter
    that no product depends on (of a weight's gradient) can be awaited as late as wished. If enough
    products neither compute its operand nor read its result, a scheduler hides it behind those. A
    ring would have to wait for it block by block.
    """

    def __init__(self, graph: Graph, hardware: Hardware, devices: int) -> None:
        self._graph = graph
        self._hardware = hardware
        self._devices = devices

    def needs_ring(self, region: RingRegion) -> bool:
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
        """Returns True if no product is at one end, and independent products take as long as the
        collective.

        `whole`: the number of the value that it gathers or scatters. `before`: True for the end
        before it.
        """
        above = self._following(node.operands, backward=True)
        below = self._following(node.results, backward=False)
        if above if before else below:
            return False
        beside = self._ns.keys() - above - below
        size = tensor_bytes(ir.ShapedType(self._graph.values[whole].type)) or 0
        kind = node.name.removeprefix("stablehlo.")
        sent = transfer_time(DeviceTransfer(kind, size, groups), self._hardware, self._devices)
        return sum(self._ns[each] for each in beside) >= sent.ns

    def _following(self, numbers: tuple[int, ...], *, backward: bool) -> set[Node]:
        """Returns the products that values depend on (`backward`), or that depend on them.

        In a loop, also those of other iterations.
        """
        graph, reached = self._graph, dict.fromkeys(numbers, True)
        root, carried = graph.root, list[tuple[int, int]]()
        if root.block.owner.name == WHILE and len(root.arguments) == len(root.returned):
            # Each carry's argument and yielded value, to follow dependences between iterations.
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
        """The ns of the block's products, by node; loops and branches count with their products."""
        found: dict[Node, float] = {}
        for node in self._graph.root.nodes:
            for op in ops_named(node.op, _PRODUCTS):
                product = op_work(op, short_name(op)).matmul
                ns = 0.0
                if product is not None:
                    dtype = str(element_of(op.operands[0]))
                    work = KernelWork(WorkKind.MATMUL, matmuls=(product,), dtype=dtype)
                    ns = kernel_ns(work, self._hardware)
                found[node] = found.get(node, 0.0) + ns
        return found


def _rings(collective: Collective, forms: GroupForms) -> ProcessGroups | None:
    """Returns the groups of a collective that can be rings; None if they cannot."""
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
    pairs = DeviceRing(groups, tuple(range(len(groups[0]))), RingDirection.ONE).pairs(FORWARDS)
    return groups if forms.express_pairs(pairs, collective) else None

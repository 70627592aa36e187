"""Finds the values of a block that carry the batch, from the arguments that carry it.

Ops are followed in the order of the text, loops until nothing changes. A value is tiled
(`DimTiling`), combined from the parts' results (`OpTiling.combine`), or whole. A whole value does
not depend on the batch, or an op needed the whole batch to compute it. A value that depends on
several samples is marked as mixed, with the op that mixed them. If it meets tiled values again, the
batch is not independent. Counts that depend only on integers, such as the number of tokens that are
not padding, are not mixed: they are known before the work starts.

A manual computation (`jax.shard_map`) is followed through its body, the program of one device. A
device has an equal share of every part if the parts are strided over the batch:

    samples 0 … 15, 2 parts     part 0 is 0 2 4 … 14, DimTiling(0, outer=8)
    device 0 of 2, samples 0 … 7    part 0 is 0 2 4 6, DimTiling(0, outer=4)

`TilingOrigins` goes backwards, from tiled values to the values that they are computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.dataflow import (
    Body,
    Dataflow,
    Node,
    carries,
    dependents,
    handed_on,
    solve,
    sources_of,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import (
    DimTiling,
    OpTiling,
    Tilings,
    plain_shape,
    relation_of,
    reshape_tiling,
    tiling_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.factors import OpDimensions
from stablehlo_tools.dialect.microbatch_marks import Mark, mark_of
from stablehlo_tools.dialect.names import (
    BARRIER,
    MANUAL_COMPUTATION,
    RESHAPE,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE, LAYOUT
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.ir.views import ManualComputation

_UPDATING = ELEMENTWISE | LAYOUT | {BARRIER, SHARDING_CONSTRAINT}


class Graph(Dataflow):
    """A block with values that have dimensions, and ops that relate them."""

    @cached_property
    def data(self) -> set[int]:
        """The values that depend on a float argument."""
        floats = [n for n in self.root.arguments if is_float(self.values[n].type)]
        return set(solve(self, dict.fromkeys(floats, True), dependents))

    @cached_property
    def weights(self) -> set[int]:
        """The float arguments in `updates`, and those of the type of another result, which may be
        their gradient."""
        known = set[int]().union(*self.updates.values())
        types = {self.values[n].type for n in self.root.returned if n not in known}
        floats = (n for n in self.root.arguments if is_float(self.values[n].type))
        return {n for n in floats if n in self.updates or self.values[n].type in types}

    @cached_property
    def updates(self) -> dict[int, list[int]]:
        """The float arguments that are returned updated, element by element, as a training step
        returns weights and optimizer state; each with these results."""
        numbers = [n for n in self.root.returned if is_float(self.values[n].type)]
        wanted = {number: frozenset({number}) for number in numbers}

        def to_sources(
            node: Node, results: Mapping[int, frozenset[int]]
        ) -> Iterator[tuple[int, frozenset[int]]]:
            if node.name == WHILE and node.bodies:
                for carry in carries(node):
                    # Its start counts if an iteration updates it element by element, too.
                    for inner, outer in (
                        (carry.returned, carry.result),
                        (carry.operand, carry.argument),
                    ):
                        if outer in results:
                            yield inner, results[outer]
            elif node.bodies:
                for number, sources in sources_of(node):
                    yield from ((n, results[number]) for n in sources if number in results)
            elif node.name in _UPDATING:
                found = frozenset[int]().union(*(results.get(n, ()) for n in node.results))
                yield from ((number, found) for number in node.operands)

        found = solve(self, wanted, to_sources, frozenset.union, backward=True)
        updates = {
            number: [n for n in found[number] if self.values[n].type == self.values[number].type]
            for number in self.root.arguments
            if number in found and is_float(self.values[number].type)
        }
        return {number: results for number, results in updates.items() if results}

    @cached_property
    def _relations(self) -> dict[Node, OpDimensions | None]:
        return {}

    @cached_property
    def _bodies(self) -> dict[Node, ManualBody]:
        return {}

    @cached_property
    def _tilings(self) -> dict[tuple[Node, Tilings, int, bool], OpTiling | None]:
        return {}

    def shape(self, number: int) -> tuple[int, ...] | None:
        """Returns the shape of a value; None if it is not a static tensor."""
        return plain_shape(self.values[number])

    def relation(self, node: Node) -> OpDimensions | None:
        """Returns the relation of an op's dimensions; None if the batch is not followed there."""
        if node not in self._relations:
            self._relations[node] = relation_of(node.op)
        return self._relations[node]

    def tiling(
        self, node: Node, tilings: Tilings, parts: int, *, regroups: bool = False
    ) -> OpTiling | None:
        """Returns how an op runs on operands, some of them tiled; see `tiling_of`."""
        asked = node, tilings, parts, regroups
        if asked not in self._tilings:
            self._tilings[asked] = (
                self.body(node).follow_each(tilings, parts, regroups=regroups)
                if node.name == MANUAL_COMPUTATION
                else tiling_of(node.op, self.relation(node), tilings, parts, regroups=regroups)
            )
        return self._tilings[asked]

    def body(self, node: Node) -> ManualBody:
        """Returns the body of a manual computation."""
        if node not in self._bodies:
            self._bodies[node] = ManualBody(node, self.inside(ManualComputation(node.op).body))
        return self._bodies[node]

    def inside(self, block: ir.Block) -> Graph:
        """Returns the graph of the body of a manual computation."""
        return Graph.from_block(block)

    def walk(self, parts: int, *, regroups: bool = False) -> Propagation:
        """Returns a walk that has not begun."""
        return Propagation(self, parts, regroups=regroups)


@dataclass(frozen=True)
class MixingOp:
    """A place where the batch is not independent.

    `mixed` mixes samples, and `used` reads its result together with samples.
    """

    mixed: Node
    used: Node


@dataclass(frozen=True)
class BatchDims:
    """The result of a propagation. Values and nodes that are not listed are whole.

    `tilings` are those of tiled values, by number. `op_tilings` says how nodes run on parts.
    Control flow has none, but its results and its blocks' arguments have tilings. `meetings` are in
    the order of the text; without one, the batch is independent.
    """

    graph: Graph
    parts: int
    tilings: Mapping[int, DimTiling]
    op_tilings: Mapping[Node, OpTiling]
    meetings: tuple[MixingOp, ...]
    regroups: bool = False

    def tiling_of(self, value: ir.Value) -> DimTiling | None:
        """Returns the tiling of a value; None if it is whole."""
        return self.tilings.get(self.graph.numbers[value])

    def inside(self, node: Node) -> BatchDims:
        """Returns the batch in the body of a manual computation."""
        step = self.op_tilings.get(node)
        tilings = (None,) * len(node.operands) if step is None else step.operands
        return self.graph.body(node).follow(tilings, self.parts, regroups=self.regroups).dims


def propagate(
    graph: Graph,
    seeds: Mapping[int, DimTiling],
    parts: int,
    *,
    to_the_end: bool = True,
    regroups: bool = False,
) -> BatchDims:
    """Follows the batch from tiled values, which are arguments of the block.

    Stops at the first meeting unless `to_the_end`. With `regroups`, the batch is also followed
    through slices, pads and concatenations along it.
    """
    return graph.walk(parts, regroups=regroups).run(seeds, to_the_end=to_the_end)


class Propagation:
    """One walk through a graph; subclasses override how it passes ops and loops."""

    def __init__(self, graph: Graph, parts: int, *, regroups: bool = False) -> None:
        self.graph = graph
        self.parts = parts
        self.regroups = regroups
        self.tilings: dict[int, DimTiling] = {}
        self.mixed: dict[int, Node] = {}
        self.op_tilings: dict[Node, OpTiling] = {}
        self.meetings: dict[Node, Node] = {}
        self.concerned: set[int] = set()  # values with a tiling, or mixed

    def run(self, seeds: Mapping[int, DimTiling], *, to_the_end: bool = True) -> BatchDims:
        """Follows the values that are tiled from the start."""
        self.tilings.update(seeds)
        self.concerned.update(seeds)
        for node in self.graph.root.nodes:
            self.visit(node)
            if self.meetings and not to_the_end:
                break
        met = sorted(self.meetings.items(), key=lambda item: item[0].index)
        meetings = tuple(MixingOp(mixed, used) for used, mixed in met)
        return BatchDims(
            self.graph, self.parts, self.tilings, self.op_tilings, meetings, self.regroups
        )

    def visit(self, node: Node) -> None:
        """Follows tiled values through one op."""
        self.meetings.pop(node, None)
        self.op_tilings.pop(node, None)
        if node.name == WHILE:
            self._loop(node)
        elif node.bodies:
            self._branches(node)
        else:
            self._op(node)

    def _body(self, body: Body) -> None:
        for node in body.nodes:
            self.visit(node)

    def _op(self, node: Node) -> None:
        mark = mark_of(node.op)
        if mark is not None:
            # Each microbatch computes it for itself, so it is not mixed.
            tiling = self.tilings.get(node.operands[0])
            rows = DimTiling(0) if mark is Mark.EACH else None
            if tiling is not None or rows is not None:
                self.op_tilings[node] = OpTiling((tiling,), (rows,))
            self._set(node, (rows,), None)
            return
        if self.concerned.isdisjoint(node.inputs):
            if not self.concerned.isdisjoint(node.results):
                self._set(node, [None] * len(node.results), None)
            return
        tilings = tuple(map(self.tilings.get, node.operands))
        captured = any(number in self.tilings for number in node.captures)
        if not captured and not any(tilings):
            self._set(node, [None] * len(node.results), self._mixer(node.inputs))
            return
        if node.name == MANUAL_COMPUTATION and not captured:
            self._manual(node, tilings)
            return
        op_tiling = None
        if not captured:
            op_tiling = self.graph.tiling(node, tilings, self.parts, regroups=self.regroups)
        if op_tiling is None:
            self._set(node, [None] * len(node.results), self._mixing(node))
            return
        self.op_tilings[node] = op_tiling
        if node.name == BARRIER:
            for operand, result, tiling in zip(
                node.operands, node.results, op_tiling.results, strict=True
            ):
                self._put(result, tiling, self.mixed.get(operand))
            return
        mixer = self._mixer(node.inputs)
        if mixer is not None and not op_tiling.chained:
            self.meetings[node] = mixer
        combines = op_tiling.chained or op_tiling.combine is not None
        self._set(node, op_tiling.results, self._mixing(node) if combines else None)

    def _manual(self, node: Node, tilings: Tilings) -> None:
        mixed = tuple(map(self.mixed.get, node.operands))
        inside = self.graph.body(node).follow(tilings, self.parts, mixed, regroups=self.regroups)
        if inside.tiling is None:
            self._set(node, [None] * len(node.results), self._mixing(node))
            return
        self.op_tilings[node] = inside.tiling
        if inside.dims.meetings:
            self.meetings[node] = inside.dims.meetings[0].mixed
        for result, tiling, mixer in zip(
            node.results, inside.tiling.results, inside.mixed, strict=True
        ):
            self._put(result, tiling, mixer)

    def _loop(self, node: Node) -> None:
        condition, body = node.bodies
        carried: list[DimTiling | None] = [self.tilings.get(n) for n in node.operands]
        first = [self.mixed.get(n) for n in node.operands]
        mixed, kept_whole = first, set[int]()
        while True:
            for inner in (condition, body):
                for place, number in enumerate(inner.arguments):
                    self._put(number, carried[place], mixed[place])
                self._body(inner)
            after = [self.tilings.get(n) for n in body.returned]
            pairs = list(zip(carried, after, strict=True))
            for place, (before, now) in enumerate(pairs):
                if before is not None and now is not None and before != now:
                    kept_whole.add(place)  # the next iteration has another tiling
            agreed = [
                None if place in kept_whole else before or now
                for place, (before, now) in enumerate(pairs)
            ]
            ends = self.mixed.get(condition.returned[0])
            spread = [
                m or self.mixed.get(n) or ends or (node if place in kept_whole else None)
                for place, (m, n) in enumerate(zip(mixed, body.returned, strict=True))
            ]
            if agreed == carried and spread == mixed:
                break
            mixed = spread if agreed == carried else first  # other tilings may avoid the mix
            carried = agreed
        for place, result in enumerate(node.results):
            self._put(result, carried[place], mixed[place])
        self._check(node, zip(carried, mixed, strict=True))

    def _branches(self, node: Node) -> None:
        chooser = self.mixed.get(node.operands[0])
        for body in node.bodies:
            self._body(body)
        results: list[tuple[DimTiling | None, Node | None]] = []
        for place, result in enumerate(node.results):
            numbers = [body.returned[place] for body in node.bodies]
            returned = {self.tilings[n] for n in numbers if n in self.tilings}
            tiling = next(iter(returned)) if len(returned) == 1 else None
            joined = node if returned and tiling is None else None
            mixer = joined or chooser or self._mixer(numbers)
            self._put(result, tiling, mixer)
            results.append((tiling, mixer))
        self._check(node, results)

    def _check(self, node: Node, carried: Iterable[tuple[DimTiling | None, Node | None]]) -> None:
        """Notes a meeting if control flow carries a mixed value in parts."""
        met = next((mixer for tiling, mixer in carried if tiling and mixer), None)
        if met is not None:
            self.meetings[node] = met

    def _mixing(self, node: Node) -> Node | None:
        """Returns the op that mixed the whole result of an op on parts, or an operand of it."""
        earlier = self._mixer(node.inputs)
        data = any(n in self.graph.data for n in node.inputs if n in self.tilings)
        return earlier or (node if data else None)

    def _mixer(self, numbers: Iterable[int]) -> Node | None:
        mixers = map(self.mixed.get, numbers)
        return next((mixer for mixer in mixers if mixer is not None), None)

    def _set(self, node: Node, tilings: Iterable[DimTiling | None], mixer: Node | None) -> None:
        for result, tiling in zip(node.results, tilings, strict=True):
            self._put(result, tiling, mixer)

    def _put(self, number: int, tiling: DimTiling | None, mixer: Node | None) -> None:
        if tiling is None:
            self.tilings.pop(number, None)
        else:
            self.tilings[number] = tiling
        if mixer is None:
            self.mixed.pop(number, None)
        else:
            self.mixed[number] = mixer
        if tiling is None and mixer is None:
            self.concerned.discard(number)
        else:
            self.concerned.add(number)


TiledValue = tuple[int, DimTiling]


@dataclass(frozen=True)
class InsideTiling:
    """A manual computation on parts.

    `tiling` has the tilings of its operands and results; None if devices have unequal shares of the
    parts. `dims` is the batch in its body. `mixed` is the op that mixed samples, for each result.
    """

    tiling: OpTiling | None
    dims: BatchDims
    mixed: tuple[Node | None, ...]


class ManualBody:
    """The body of a manual computation, through which the batch is followed.

    A dimension that the manual axes divide is shorter in the body. So the devices that divide it
    are the ratio of the two sizes.
    """

    def __init__(self, node: Node, graph: Graph) -> None:
        self.graph = graph
        returned = (self.graph.values[number] for number in self.graph.root.returned)
        self._operands = [
            *zip(node.op.operands, ManualComputation(node.op).body.arguments, strict=True)
        ]
        self._results = [*zip(node.op.results, returned, strict=True)]
        self._followed: dict[tuple[object, ...], InsideTiling] = {}

    def follow(
        self,
        tilings: Tilings,
        parts: int,
        mixed: tuple[Node | None, ...] = (),
        *,
        regroups: bool = False,
    ) -> InsideTiling:
        """Returns how the computation runs on operands, some of them tiled. Operands that the body
        needs in parts are tiled, too. `mixed` are the ops that mixed samples, for each operand."""
        asked = tilings, parts, mixed, regroups
        if asked not in self._followed:
            self._followed[asked] = self._follow(tilings, parts, mixed, regroups=regroups)
        return self._followed[asked]

    def follow_each(self, tilings: Tilings, parts: int, *, regroups: bool) -> OpTiling | None:
        """Returns how the computation runs on operands, some of them tiled; None if an op in it
        reads several parts, or a piece of a whole value."""
        inside = self.follow(tilings, parts, regroups=regroups)
        steps, tiled = inside.dims.op_tilings, inside.dims.tilings
        combines = any(step.combine or step.chained for step in steps.values())
        loses = any(
            node not in steps and not node.bodies and not tiled.keys().isdisjoint(node.inputs)
            for node in self.graph.nodes
        )
        mixes = combines or loses or any(inside.mixed) or bool(inside.dims.meetings)
        return None if mixes or missing_pieces(inside.dims) else inside.tiling

    def enter(self, place: int, tiling: DimTiling | None) -> DimTiling | None:
        """Returns the tiling of an operand on one device; None if a device has other shares of the
        parts."""
        return _on_one_device(*self._operands[place], tiling)

    def _follow(
        self, tilings: Tilings, parts: int, mixed: tuple[Node | None, ...], *, regroups: bool
    ) -> InsideTiling:
        arguments, returned = self.graph.root.arguments, self.graph.root.returned
        seeds: dict[int, DimTiling] = {}
        unknown = [place for place, tiling in enumerate(tilings) if tiling is not None]
        # A device may hold other shares of the parts than the tiling asks for.
        for place in tuple(unknown):
            inner = self.enter(place, tilings[place])
            if inner is not None:
                seeds[arguments[place]] = inner
                unknown.remove(place)
        while True:
            # A whole operand that tiled ones meet in the body is cut outside of it.
            walk = self.graph.walk(parts, regroups=regroups)
            for place, mixer in enumerate(mixed):
                if mixer is not None:
                    walk.mixed[arguments[place]] = mixer
                    walk.concerned.add(arguments[place])
            dims = walk.run(seeds)
            origins = TilingOrigins(self.graph, parts).find_origins(missing_pieces(dims))
            more = {n: tiling for n, tiling in origins.items() if n in {*arguments} - seeds.keys()}
            if not more or unknown:
                break
            seeds |= more
        if unknown:
            return InsideTiling(None, dims, tuple(None for _ in returned))
        # The tilings outside follow from those on one device.
        operands = tuple(
            _on_all_devices(value, argument, seeds.get(number))
            for number, (value, argument) in zip(arguments, self._operands, strict=True)
        )
        results = tuple(
            _on_all_devices(value, inner, dims.tilings.get(number))
            for number, (value, inner) in zip(returned, self._results, strict=True)
        )
        return InsideTiling(OpTiling(operands, results), dims, tuple(map(walk.mixed.get, returned)))

    def find_origins(
        self, place: int, tiling: DimTiling, parts: int, *, regroups: bool
    ) -> list[tuple[int, DimTiling]] | None:
        """Returns the operands, by place, that a result in this tiling is computed from, with
        their tilings; None if it is computed from none."""
        inner = _on_one_device(*self._results[place], tiling)
        if inner is None:
            return None
        wanted = [(self.graph.root.returned[place], inner)]
        origins = TilingOrigins(self.graph, parts, regroups=regroups).find_origins(wanted)
        found = [
            (at, _on_all_devices(*self._operands[at], origins[number]))
            for at, number in enumerate(self.graph.root.arguments)
            if number in origins
        ]
        return [(at, each) for at, each in found if each is not None] or None


def _devices_along(value: ir.Value, inner: ir.Value, dim: int) -> int:
    """Returns the number of devices that divide a dimension of a value, given its part on one."""
    whole, part = plain_shape(value), plain_shape(inner)
    return whole[dim] // part[dim] if whole and part and part[dim] else 1


def _on_one_device(value: ir.Value, inner: ir.Value, tiling: DimTiling | None) -> DimTiling | None:
    if tiling is None:
        return None
    outer, rest = divmod(tiling.outer, _devices_along(value, inner, tiling.dim))
    return DimTiling(tiling.dim, outer) if outer and not rest else None


def _on_all_devices(value: ir.Value, inner: ir.Value, tiling: DimTiling | None) -> DimTiling | None:
    if tiling is None:
        return None
    return DimTiling(tiling.dim, tiling.outer * _devices_along(value, inner, tiling.dim))


def missing_pieces(dims: BatchDims) -> list[TiledValue]:
    """Returns the whole values that ops need pieces of, with the tilings of the pieces."""
    return [
        (operand, tiling)
        for node, op_tiling in dims.op_tilings.items()
        for operand, tiling in zip(node.operands, op_tiling.operands, strict=True)
        if tiling is not None and operand not in dims.tilings
    ]


class TilingOrigins:
    """Finds the values that tiled values are computed from, op by op backwards."""

    def __init__(self, graph: Graph, parts: int, *, regroups: bool = False) -> None:
        self._graph = graph
        self._parts = parts
        self._regroups = regroups
        self._carriers = {
            number: (node, place)
            for node in graph.nodes
            if node.name == WHILE
            for place, carry in enumerate(carries(node))
            for number in (carry.argument, carry.result)
        }

    def find_origins(self, wanted: Iterable[TiledValue]) -> dict[int, DimTiling]:
        """Returns the first values, with their tilings, that the wanted ones are computed from.

        These are arguments, or results of ops without tiled operands.
        """
        origins: dict[int, DimTiling] = {}
        pending, seen = list(wanted), set[int]()
        while pending:
            number, tiling = pending.pop()
            shape = self._graph.shape(number)
            if number in seen or shape is None or not tiling.fits(shape, self._parts):
                continue
            seen.add(number)
            before = self._before(number, tiling)
            if before is None:
                origins[number] = tiling
            else:
                pending += before
        return origins

    def _before(self, number: int, tiling: DimTiling) -> list[TiledValue] | None:
        """Returns the tiled values that a value is computed from; None if it is an origin."""
        if number in self._carriers:
            return self._around(*self._carriers[number], tiling)
        node = self._graph.maker.get(number)
        if node is None:
            return None
        if node.bodies:
            return [(returned, tiling) for returned in dict(handed_on(node))[number]]
        place = node.results.index(number)
        if node.name == MANUAL_COMPUTATION:
            found = self._graph.body(node).find_origins(
                place, tiling, self._parts, regroups=self._regroups
            )
            return found and [(node.operands[at], each) for at, each in found]
        for position in range(len(node.operands)):
            for given in self._candidates(node, position, place, tiling):
                tilings = tuple(
                    given if other == position else None for other in range(len(node.operands))
                )
                op_tiling = self._graph.tiling(node, tilings, self._parts, regroups=self._regroups)
                if op_tiling is not None and op_tiling.results[place] == tiling:
                    taken = zip(node.operands, op_tiling.operands, strict=True)
                    return [(operand, each) for operand, each in taken if each is not None]
        return None

    def _around(self, node: Node, place: int, tiling: DimTiling) -> list[TiledValue]:
        """Returns the values that a carry of a loop comes from."""
        return [(node.operands[place], tiling), (node.bodies[1].returned[place], tiling)]

    def _candidates(
        self, node: Node, position: int, place: int, tiling: DimTiling
    ) -> list[DimTiling]:
        """Returns the tilings of an operand that may give a result this tiling."""
        relation = self._graph.relation(node)
        if relation is None:
            return []
        shape, result = relation.operands[position], relation.results[place]
        if node.name == RESHAPE:
            back = reshape_tiling(tiling, result, shape, self._parts)
            return [] if back is None else [back]
        dims = [
            link.operand.dim
            for link in relation.of_result(place, tiling.dim)
            if link.operand.tensor == position
        ]
        outers = [tiling.outer]
        if tiling.dim < min(len(shape), len(result)):  # an operand of another size holds all parts
            outer, rest = divmod(shape[tiling.dim] * tiling.outer, result[tiling.dim] or 1)
            outers += [outer] if outer and not rest else []
        return [DimTiling(dim, outer) for outer in dict.fromkeys((*outers, 1)) for dim in dims]

"""Decides which ops of a training step run on each microbatch, and which before or after all.

The first microbatch already needs the number of tokens of the batch, since its loss is divided by
that number. Ops of this kind read the batch and no weights, and contain no contractions.

An op that is linear in a sum may run on each term or on the total. On the total it runs once. In
the loop, fewer bytes may be accumulated: if it adds gradients of one weight, or slices a term. The
same holds for terms that the program has in a narrow type and converts to a wide one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import tensor_bytes
from stablehlo_tools.analysis.dataflow import Node, inputs_of, needed_nodes, numbers_in
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds, SeedTrial, seeds_text
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.analysis.partial_sums import PartialSums, source_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, ToolError, note
from stablehlo_tools.dialect.kernels.table import describe_unknown
from stablehlo_tools.dialect.microbatch_marks import mark_of
from stablehlo_tools.dialect.names import (
    BARRIER,
    CUSTOM_CALL,
    MANUAL_COMPUTATION,
    SHARDING_CONSTRAINT,
    WHILE,
)
from stablehlo_tools.dialect.traits import COLLECTIVES
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.ir.views import ManualComputation
from stablehlo_tools.ir.walk import ops_named
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import wide

_HEAVY = CONTRACTIONS | {CUSTOM_CALL}


def known_beforehand(graph: Graph, seeds: Seeds, rank: int) -> set[Node]:
    """Returns the ops of the block, without contractions, that depend only on the batch, integers,
    and floats of fewer than `rank` dimensions."""
    late = {
        number
        for number in graph.root.arguments
        if number not in seeds
        and is_float(graph.values[number].type)
        and len(graph.shape(number) or ()) >= rank
    }
    early: set[Node] = set()
    for node in graph.root.nodes:
        if late.isdisjoint(inputs_of(node)) and not is_heavy(node):
            early.add(node)
        else:
            late.update(node.results)
    return early


def is_heavy(node: Node) -> bool:
    """Returns True if an op is a contraction or opaque, or contains such an op."""
    return bool(ops_named(node.op, _HEAVY))


def communicates(node: Node) -> bool:
    """Returns True if an op is a collective, or contains one."""
    return bool(ops_named(node.op, COLLECTIVES))


_MOST_TOGETHER = 64  # linear ops that are tried in the loop at once


def accumulated_bytes(value: ir.Value) -> int:
    """Returns the size in bytes of an accumulator of a value, in at least float32."""
    type_ = ir.RankedTensorType.get(
        shape_of(value), wide(element_of(value)), loc=ir.Location.unknown(value.context)
    )
    return tensor_bytes(type_) or 0


class Boundary:
    """Chooses which of the linear ops run in the loop."""

    def __init__(
        self, graph: Graph, inside: Set[Node], linear: Sequence[Node], terms: Mapping[int, str]
    ) -> None:
        self._graph = graph
        self._terms = terms
        self._chosen = set(inside)
        self._linear = {number: node for node in linear for number in node.results}
        self._made = dict(self._linear)
        self._made.update({number: node for node in inside for number in node.results})
        self._users: dict[int, list[Node | None]] = defaultdict(list)
        for node in graph.root.nodes:
            for number in sorted(inputs_of(node)):
                self._users[number].append(node)
        for number in graph.root.returned:
            self._users[number].append(None)
        for node in linear:
            self._add_if_cheaper(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._chosen

    def _add_if_cheaper(self, node: Node) -> None:
        """Adds an op to the loop, with the linear ops that it depends on, if that is cheaper."""
        together = self._with_sources(node)
        if together is None:
            return
        numbers = {n for each in together for n in (*inputs_of(each), *each.results)}
        before = self._cost(numbers)
        self._chosen |= together
        if self._cost(numbers) >= before:
            self._chosen -= together

    def _with_sources(self, node: Node) -> set[Node] | None:
        together, pending = set[Node](), [node]
        while pending:
            each = pending.pop()
            if each in together or each in self._chosen:
                continue
            if each.name in COLLECTIVES or each.bodies or len(together) == _MOST_TOGETHER:
                return None
            together.add(each)
            pending += [self._linear[n] for n in inputs_of(each) if n in self._linear]
        return together

    def _cost(self, numbers: Iterable[int]) -> tuple[int, int, int]:
        """Returns the bytes of accumulators, the number of them for values of a narrower type, and
        the number whose values only sharding constraints use. These are compared in this order."""
        size, narrow, free = 0, 0, 0
        for number in numbers:
            if number not in self._terms or self._made.get(number) not in self._chosen:
                continue
            outside = [user for user in self._users[number] if user not in self._chosen]
            if not outside:
                continue
            value = self._graph.values[number]
            size += accumulated_bytes(value)
            narrow += wide(element_of(value)) != element_of(value)
            free += all(user is not None and user.name == SHARDING_CONSTRAINT for user in outside)
        return size, narrow, free


def _least_share(computation: Node, trial: SeedTrial) -> int:
    """Returns the fewest samples that a device has in a manual computation; 0 if none is known."""
    arguments = ManualComputation(computation.op).body.arguments
    shares = [
        shape_of(argument)[tiling.dim]
        for number, argument in zip(computation.operands, arguments, strict=True)
        if (tiling := trial.dims.tilings.get(number)) is not None
    ]
    return min(shares, default=0)


def mixing_refusal(terms: PartialSums, waits: Node, used: Node, trial: SeedTrial) -> ToolError:
    """Returns the refusal that names the op that needs all samples, and one on samples that depends
    on it."""
    source = source_of(terms, waits) or waits
    batch = seeds_text(trial)
    if source.name == CUSTOM_CALL:
        return ToolError(
            f"accumulate-gradients: a kernel reads samples of the batch ({batch}) and cannot run "
            f"on one microbatch (P4): {describe_unknown(source.op)}",
            source.op.location,
            (note(f"{used.name} works on samples and depends on it", used.op.location),),
        )
    share = _least_share(source, trial) if source.name == MANUAL_COMPUTATION else 0
    if share % trial.dims.parts:
        return ToolError(
            f"accumulate-gradients: {trial.dims.parts} microbatches do not divide the {share} "
            f"samples of a device in this shard_map (P3): take a divisor of {share}, or a larger "
            "batch",
            source.op.location,
        )
    return ToolError(
        f"accumulate-gradients: {source.name} needs all samples of the batch ({batch}), and its "
        "result meets samples again, so no microbatch can pass this op before all have reached it "
        "(P4): compute statistics of each sample separately, let per-microbatch=true compute them "
        "for each microbatch, or name another batch with `arguments` and `dimension`",
        source.op.location,
        (note(f"{used.name} works on samples and depends on it", used.op.location),),
    )


_WEIGHTS_RANK = 2  # vectors and scalars may be needed to know the weight of each sample


@dataclass(frozen=True)
class MicrobatchDivision:
    """The ops of a block that run on each microbatch.

    `inside` are the ops of the loop's body, in order; some of them also stay before it, on the
    whole batch. `gone` are all ops that are no longer needed outside. The rest of the block uses
    three kinds of results. `sums` are given with the reduction of their terms, `samples` are in
    parts, and `same` is equal for every microbatch. `whole` are all values in the loop that are
    equal for every microbatch.
    """

    trial: SeedTrial
    inside: tuple[Node, ...]
    gone: tuple[Node, ...]
    sums: tuple[tuple[int, str], ...]
    samples: tuple[int, ...]
    same: tuple[int, ...]
    whole: frozenset[int]

    @property
    def dims(self) -> BatchDims:
        """The batch dimension of each value."""
        return self.trial.dims


def divide(trial: SeedTrial) -> MicrobatchDivision:
    """Returns the division of the block through which a trial has propagated a batch.

    Raises ToolError if an op works on samples that depend on the whole batch.
    """
    try:
        return _BlockReading(trial, 1).division()
    except ToolError:
        # Vectors may be weights too: they count as known beforehand only if scalars do not suffice.
        vectors_too = _BlockReading(trial, _WEIGHTS_RANK)
        if vectors_too.refusal is not None:
            raise
        return vectors_too.division()


@dataclass
class _BlockReading:
    """One walk over the ops of the block.

    `late` are values that only exist after the loop, with the ops that they wait for. `kept` are
    whole values that the loop computes for every microbatch, all equal. `again` are ops that are
    known beforehand and can also run on each microbatch.
    """

    trial: SeedTrial
    rank: int
    inside: list[Node] = field(default_factory=list[Node])
    linear: list[Node] = field(default_factory=list[Node])
    late: dict[int, Node] = field(default_factory=dict[int, Node])
    kept: set[int] = field(default_factory=set[int])
    again: set[Node] = field(default_factory=set[Node])
    refusal: ToolError | None = None

    def __post_init__(self) -> None:
        self.dims = self.trial.dims
        self.terms = PartialSums(self.dims)
        self.known = known_beforehand(self.dims.graph, self.trial.seeds, self.rank)
        for node in self.dims.graph.root.nodes:
            self.terms.visit([node])
            if node in self.known:
                # Values that are known beforehand are neither terms nor blocked.
                in_parts = all(number in self.dims.tilings for number in node.results)
                runs = in_parts and self._works_on_samples(node) and self._waits(node, ()) is None
                if runs and not communicates(node):
                    self.again.add(node)
                for number in node.results:
                    self.terms.terms.pop(number, None)
                    self.terms.blocked.pop(number, None)
            else:
                self._place(node)

    def division(self) -> MicrobatchDivision:
        """Returns the division. Raises ToolError."""
        if self.refusal is not None:
            raise self.refusal
        graph = self.dims.graph
        chosen = Boundary(graph, set(self.inside), self.linear, self.terms.terms)
        gone = [node for node in graph.root.nodes if node in chosen]
        # The values of the loop that the rest of the block uses, in order.
        rest = (inputs_of(node) for node in graph.root.nodes if node not in chosen)
        used = set(graph.root.returned).union(*rest)
        wanted = [number for node in gone for number in node.results if number in used]
        run = [node for node in graph.root.nodes if node in chosen or node in self.again]
        terms, layouts = self.terms.terms, self.dims.tilings
        return MicrobatchDivision(
            self.trial,
            needed_nodes(run, wanted),
            tuple(gone),
            tuple((n, terms[n]) for n in wanted if n in terms),
            tuple(n for n in wanted if n in layouts),
            tuple(n for n in wanted if n not in terms and n not in layouts),
            frozenset(self.kept),
        )

    def _works_on_samples(self, node: Node) -> bool:
        return any(number in self.dims.tilings for number in inputs_of(node))

    def _place(self, node: Node) -> None:
        used = inputs_of(node)
        waits = self._waits(node, used)
        on_samples = self._works_on_samples(node)
        if waits is not None:
            self.late.update(dict.fromkeys(node.results, waits))
            if on_samples and is_heavy(node) and self.refusal is None:
                self.refusal = mixing_refusal(self.terms, waits, node, self.trial)
        elif on_samples or not self.kept.isdisjoint(used) or mark_of(node.op) is not None:
            self.inside.append(node)
            # A mark reads the term of a microbatch, so the ops that make the term run there, too.
            sources = set(used) if mark_of(node.op) is not None else set[int]()
            for source in reversed(self.linear.copy()):
                if not sources.isdisjoint(source.results):
                    self.linear.remove(source)
                    self.inside.append(source)
                    sources |= inputs_of(source)
            whole = [n for n in node.results if n not in self.dims.tilings]
            self.kept.update(n for n in whole if n not in self.terms.terms)
        elif any(number in self.terms.terms for number in used):
            self.linear.append(node)

    def _waits(self, node: Node, used: Iterable[int]) -> Node | None:
        """Returns the op that keeps a node from running on a microbatch; None if there is none."""
        for number in sorted(used):
            if number in self.late:
                return self.late[number]
        made = [*node.results]
        for body in node.bodies:
            made += sorted(numbers_in(body))
        stops = (self.terms.blocked[n] for n in made if n in self.terms.blocked)
        return next(stops, None) or self._find_tiling_loss(node)

    def _find_tiling_loss(self, node: Node) -> Node | None:
        """Returns control flow, the node or one in it, that passes on parts as whole values; None
        if there is none."""
        layouts = self.dims.tilings
        for body in node.bodies:
            for place, number in enumerate(body.returned[: len(node.results)]):
                given = [number]
                if node.name == WHILE:  # the condition returns no carry
                    own = [number] if body is node.bodies[1] else []
                    given = [node.operands[place], *own]
                if layouts.get(node.results[place]) is None and any(n in layouts for n in given):
                    return node
            for inner in body.nodes:
                changed = self._find_tiling_loss(inner)
                if changed is not None:
                    return changed
        return None


def free_whole_values(division: MicrobatchDivision) -> bool:
    """Lets uses of values that are the same for every microbatch bypass the barriers of a division.
    Ops that depend only on those can then stay before the loop. Returns True if there were any; the
    division is then invalid.

    Rematerialisation puts weights and samples into one barrier.
    """
    values, freed = division.dims.graph.values, False
    for node in division.gone:
        if node.name != BARRIER:
            continue
        for operand, result in zip(node.operands, node.results, strict=True):
            if result in division.whole:
                values[result].replace_all_uses_with(values[operand])
                freed = True
    return freed


def division_note(division: MicrobatchDivision) -> Diagnostic:
    """Returns a note on the arguments that carry the batch, the ops in the loop, and its
    results."""
    graph = division.dims.graph
    size = sum(accumulated_bytes(graph.values[n]) for n, _ in division.sums)
    return note(
        f"accumulate-gradients: the batch is {seeds_text(division.trial)}; {len(division.inside)} "
        f"of {len(graph.root.nodes)} ops run on each of {division.dims.parts} microbatches; "
        f"{len(division.sums)} sums, {size} bytes, are accumulated, and {len(division.samples)} "
        "values of samples are collected",
        division.inside[0].op.location,
    )

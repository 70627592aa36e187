"""Which ops of a training step run on each microbatch, and which before or behind all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dimension_propagation.graph import (
    WHILE,
    Body,
    Node,
    inputs_of,
    needed,
)
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.seeds import Trial
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.transforms.parts.accumulate_gradients.beforehand import (
    communicates,
    is_heavy,
    known_beforehand,
    numbers_in,
)
from stablehlo_tools.transforms.parts.accumulate_gradients.boundary import Boundary
from stablehlo_tools.transforms.parts.accumulate_gradients.refusals import mixing_refusal

_WEIGHTS_RANK = 2  # vectors and scalars may be needed to know the weight of each sample


@dataclass(frozen=True)
class Division:
    """What of a block runs on each microbatch.

    `inside` are the ops of the loop's body, in order; some of them stay in front of it, too, on the
    whole batch. `gone` are all that have no place outside any more. What the rest of the block
    takes of the loop: `sums`, with the reduction that joins their terms, `samples`, values in
    parts, and `same`, values that are the same for every microbatch. `whole` are all values of the
    latter kind that the loop makes.
    """

    trial: Trial
    inside: tuple[Node, ...]
    gone: tuple[Node, ...]
    sums: tuple[tuple[int, str], ...]
    samples: tuple[int, ...]
    same: tuple[int, ...]
    whole: frozenset[int]

    @property
    def dims(self) -> BatchDims:
        """How the batch lies in the values."""
        return self.trial.dims


def divide(trial: Trial) -> Division:
    """Divides the block that a batch was followed through.

    Raises ToolError where an op works on samples that hang on the whole batch.
    """
    try:
        return _Reading(trial, 1).division()
    except ToolError:
        vectors_too = _Reading(trial, _WEIGHTS_RANK)
        if vectors_too.refusal is not None:
            raise
        return vectors_too.division()


@dataclass
class _Reading:
    """One walk over the ops of the block.

    `late` are values that are there behind the loop, and the ops that made them wait; `kept` whole
    values that the loop makes alike for every microbatch; `again` ops that are known beforehand and
    can run on each microbatch as well.
    """

    trial: Trial
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
                self._foresee(node)
            else:
                self._place(node)

    def division(self) -> Division:
        """The outcome. Raises ToolError."""
        if self.refusal is not None:
            raise self.refusal
        graph = self.dims.graph
        chosen = Boundary(graph, set(self.inside), self.linear, self.terms.terms)
        gone = [node for node in graph.root.nodes if node in chosen]
        wanted = self._wanted(gone)
        run = [node for node in graph.root.nodes if node in chosen or node in self.again]
        terms, layouts = self.terms.terms, self.dims.tilings
        return Division(
            self.trial,
            needed(run, wanted),
            tuple(gone),
            tuple((n, terms[n]) for n in wanted if n in terms),
            tuple(n for n in wanted if n in layouts),
            tuple(n for n in wanted if n not in terms and n not in layouts),
            frozenset(self.kept),
        )

    def _wanted(self, gone: list[Node]) -> list[int]:
        """The values of the loop that the rest of the block uses, in order."""
        graph, loop = self.dims.graph, set(gone)
        used = set(graph.root.returned)
        for node in graph.root.nodes:
            if node not in loop:
                used |= inputs_of(node)
        return [number for node in gone for number in node.results if number in used]

    def _foresee(self, node: Node) -> None:
        """What is known beforehand is neither a term nor blocked."""
        in_parts = all(number in self.dims.tilings for number in node.results)
        runs = in_parts and self._works_on_samples(node) and self._waits(node, ()) is None
        if runs and not communicates(node):
            self.again.add(node)
        for number in node.results:
            self.terms.terms.pop(number, None)
            self.terms.blocked.pop(number, None)

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
        elif on_samples or not self.kept.isdisjoint(used):
            self.inside.append(node)
            whole = [n for n in node.results if n not in self.dims.tilings]
            self.kept.update(n for n in whole if n not in self.terms.terms)
        elif any(number in self.terms.terms for number in used):
            self.linear.append(node)

    def _waits(self, node: Node, used: Iterable[int]) -> Node | None:
        """The op because of which a node cannot run on a microbatch."""
        for number in sorted(used):
            if number in self.late:
                return self.late[number]
        made = [*node.results]
        for body in node.bodies:
            made += sorted(numbers_in(body))
        stops = (self.terms.blocked[n] for n in made if n in self.terms.blocked)
        return next(stops, None) or self._changed(node)

    def _changed(self, node: Node) -> Node | None:
        """Control flow, the node or one in it, that hands parts on as whole values."""
        layouts = self.dims.tilings
        for body in node.bodies:
            for place, number in enumerate(body.returned[: len(node.results)]):
                given = [number]
                if node.name == WHILE:
                    given = [node.operands[place], *self._returned(node, body, place)]
                if layouts.get(node.results[place]) is None and any(n in layouts for n in given):
                    return node
            for inner in body.nodes:
                found = self._changed(inner)
                if found is not None:
                    return found
        return None

    def _returned(self, node: Node, body: Body, place: int) -> tuple[int, ...]:
        return (body.returned[place],) if body is node.bodies[1] else ()

"""Finding the arguments that carry the batch, where nobody says which do.

Every dimension of an argument that can be cut is tried: integers first, since tokens and labels are
samples and weights are not. The one wins that puts the most work in parts. Arguments that the parts
then need pieces of are samples too: they are added where that puts more work in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from stablehlo_tools.analysis.dimension_propagation.graph import WHILE, Body, Graph, Node
from stablehlo_tools.analysis.dimension_propagation.layout import Layout
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, propagate
from stablehlo_tools.analysis.dimension_propagation.rules import COLLECTIVES, CONTRACTIONS
from stablehlo_tools.ir.values import is_float

Seeds = dict[int, Layout]
Sources = dict[int, tuple[int, ...]]
_MOST_TRIALS = 256
_MOST_EXTENDED = 8
_MOST_FOLLOWED = 32  # arguments whose outermost dimension is followed past what mixes it


@dataclass(frozen=True)
class Trial:
    """The batch followed from some seeds, and how much work then lies in parts."""

    seeds: Seeds
    dims: BatchDims
    collectives: int
    work: int

    @property
    def independent(self) -> bool:
        """Whether no value in parts depends on several samples."""
        return not self.dims.meetings


def try_seeds(
    graph: Graph, seeds: Seeds, parts: int, *, to_the_end: bool = True, regroups: bool = False
) -> Trial:
    """Follows the batch from seeds; if asked, only as far as it is independent, and through what
    joins and parts batches."""
    dims = propagate(graph, seeds, parts, to_the_end=to_the_end, regroups=regroups)
    collectives = sum(node.name in COLLECTIVES for node in dims.steps)
    return Trial(seeds, dims, collectives, work_of(graph, dims.steps))


def work_of(graph: Graph, nodes: Iterable[Node]) -> int:
    """How much work ops are, to compare it with that of others: elements that they give, of dots
    and convolutions multiplications."""
    work = 0
    for node in nodes:
        elements = sum(_elements(graph, number) for number in node.results)
        is_contraction = node.name in CONTRACTIONS
        work += _multiplications(graph, node.operands, elements) if is_contraction else elements
    return work


def find_seeds(graph: Graph, parts: int) -> Trial | None:
    """The independent trial with most work, or nearly, that puts a collective in parts.

    Where another has at least twice its work, that one: the batch is then not independent, or no
    collective carries it. None where no argument has a dimension that can be cut.
    """
    arguments = graph.root.arguments
    integers = [n for n in arguments if not is_float(graph.values[n].type)]
    floats = [n for n in arguments if is_float(graph.values[n].type)]
    seen: list[Trial] = []
    for group in (integers, floats):
        whole = set(group[-_MOST_FOLLOWED:])  # the batch comes behind the weights
        tried = [
            try_seeds(graph, seeds, parts, to_the_end=_is_likely(seeds, whole))
            for seeds in candidates(graph, group, parts)
        ]
        first = sorted((t for t in tried if t.independent), key=_least)[:_MOST_EXTENDED]
        longer = [*map(extended, first)]
        seen += [*longer, *tried]
        useful = [trial for trial in longer if trial.collectives]
        best = _outermost(useful)
        if best is not None and 2 * best.work > max(map(_work, seen)):
            return _together(best, useful)
    return max(seen, key=_work, default=None)


def _outermost(trials: Sequence[Trial]) -> Trial | None:
    """The most work; but of trials that have at least half of that, one of an outer dimension."""
    most = max(map(_work, trials), default=0)
    near = [trial for trial in trials if 2 * trial.work >= most]
    return min(near, key=lambda t: (min(s.dim for s in t.seeds.values()), -t.work), default=None)


def _together(best: Trial, others: Sequence[Trial]) -> Trial:
    """The best trial, and about as much work that can lie in parts beside it: another tower."""
    for other in others:
        if best.seeds.keys() & other.seeds.keys() or 2 * other.work < best.work:
            continue
        seeds = {**best.seeds, **other.seeds}
        both = try_seeds(best.dims.graph, seeds, best.dims.parts, to_the_end=False)
        kept = best.dims.steps.keys() <= both.dims.steps.keys()
        if kept and both.independent and both.collectives > best.collectives:
            best = both
    return best


def _least(trial: Trial) -> int:
    return -trial.work


def _work(trial: Trial) -> int:
    return trial.work


def _is_likely(seeds: Seeds, arguments: set[int]) -> bool:
    return all(number in arguments and layout.dim == 0 for number, layout in seeds.items())


def candidates(graph: Graph, arguments: Iterable[int], parts: int) -> list[Seeds]:
    """The dimensions that can be cut, outer ones first."""
    found = [
        (dim, number)
        for number in arguments
        for dim in range(len(graph.shape(number) or ()))
        if Layout(dim).fits(graph.shape(number) or (), parts)
    ]
    return [{number: Layout(dim)} for dim, number in sorted(found, key=_outer)[:_MOST_TRIALS]]


def _outer(candidate: tuple[int, int]) -> int:
    return candidate[0]


def extended(trial: Trial) -> Trial:
    """The trial with further arguments that carry the batch, as many samples as those it has."""
    graph, parts = trial.dims.graph, trial.dims.parts
    samples = {(graph.shape(n) or ())[layout.dim] for n, layout in trial.seeds.items()}
    sources = sources_of(graph)
    pending = needed_arguments(trial, sources)
    tried = set(trial.seeds)
    while pending:
        following = pending.pop(0)
        if following in tried:
            continue
        tried.add(following)
        shape = graph.shape(following) or ()
        for seeds in candidates(graph, [following], parts):
            if shape[seeds[following].dim] not in samples:
                continue
            together = {**trial.seeds, **seeds}
            other = try_seeds(graph, together, parts, to_the_end=False)
            kept = trial.dims.steps.keys() <= other.dims.steps.keys()
            if kept and other.independent and other.work > trial.work:
                trial, pending = other, needed_arguments(other, sources)
                break
    return trial


def needed_arguments(trial: Trial, sources: Sources) -> list[int]:
    """The arguments from which whole values are computed that the parts take pieces of."""
    graph, layouts = trial.dims.graph, trial.dims.layouts
    pending = [
        operand
        for node, step in trial.dims.steps.items()
        for operand, layout in zip(node.operands, step.operands, strict=True)
        if layout is not None and operand not in layouts
    ]
    seen = set(pending)
    while pending:
        for source in sources.get(pending.pop(), ()):
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return [number for number in graph.root.arguments if number in seen]


def sources_of(graph: Graph) -> Sources:
    """The values that each value is computed from."""
    return _sources(graph.root, {})


def _sources(body: Body, found: Sources) -> Sources:
    for node in body.nodes:
        for inner in node.bodies:
            _sources(inner, found)
        if node.name == WHILE:
            carried = node.bodies[1]
            for place, operand in enumerate(node.operands):
                source = (operand, carried.returned[place])
                found[carried.arguments[place]] = found[node.results[place]] = source
            continue
        for place, result in enumerate(node.results):
            chosen = tuple(inner.returned[place] for inner in node.bodies)
            found[result] = (*node.inputs, *chosen)
    return found


def _elements(graph: Graph, number: int) -> int:
    return prod(graph.shape(number) or ())


def _multiplications(graph: Graph, operands: tuple[int, ...], results: int) -> int:
    """Of a dot or a convolution: about the geometric mean of what it reads and writes, cubed."""
    read = prod(max(_elements(graph, number), 1) for number in operands)
    return int((read * max(results, 1)) ** 0.5)

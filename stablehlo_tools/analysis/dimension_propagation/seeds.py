"""Finds the arguments that carry the batch, if the user does not name them.

Every dimension of an argument that can be divided is tried, integers first, because tokens and
labels are samples and weights are not. The dimension that tiles the most work is chosen. Arguments
that the parts then need pieces of are also samples: they are added if that tiles more work.

The batch is found by how a program works on its parts. If the number of parts does not divide it,
something else is taken for the batch, such as a weight, and the refusal is misleading. A smaller
number of parts finds the batch itself: `why_undivided` reports that, in the sizes of all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter

from stablehlo_tools.analysis.dataflow import Node, dependences, solve
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    BatchDims,
    Graph,
    TilingOrigins,
    missing_pieces,
    propagate,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS, DimTiling
from stablehlo_tools.analysis.entry import argument_name, counted_name, outside_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import COLLECTIVES
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import is_float

Seeds = dict[int, DimTiling]
_MOST_TRIALS = 256
_MOST_EXTENDED = 8
_MOST_FOLLOWED = 32  # arguments whose outermost dimension is followed past the op that mixes it


@dataclass(frozen=True)
class SeedTrial:
    """The batch followed from some seeds, and the work that is tiled then."""

    seeds: Seeds
    dims: BatchDims
    collectives: int
    work: int
    to_the_end: bool  # else only up to the first meeting

    @property
    def independent(self) -> bool:
        """True if no value in parts depends on several samples."""
        return not self.dims.meetings


def try_seeds(
    graph: Graph, seeds: Seeds, parts: int, *, to_the_end: bool = True, regroups: bool = False
) -> SeedTrial:
    """Follows the batch from seeds.

    Stops at the first meeting unless `to_the_end`. With `regroups`, the batch is also followed
    through slices, pads and concatenations along it.
    """
    dims = propagate(graph, seeds, parts, to_the_end=to_the_end, regroups=regroups)
    collectives = sum(node.name in COLLECTIVES for node in dims.op_tilings)
    return SeedTrial(seeds, dims, collectives, work_on_parts(dims), to_the_end)


def work_on_parts(dims: BatchDims) -> int:
    """Returns the work of the ops on parts, those in manual computations included."""
    inside = [dims.inside(node) for node in dims.op_tilings if node.name == MANUAL_COMPUTATION]
    return work_of(dims.graph, dims.op_tilings) + sum(map(work_on_parts, inside))


def seeds_text(trial: SeedTrial) -> str:
    """The dimensions that are cut, of arguments as the caller of the program knows them."""
    values = trial.dims.graph.values
    return ", ".join(
        f"dimension {layout.dim} of {argument_name(values[number])}"
        for number, layout in sorted(trial.seeds.items())
    )


def work_of(graph: Graph, nodes: Iterable[Node]) -> int:
    """Returns the work of ops, comparable only with that of other ops.

    The unit is a result element, for dots and convolutions a multiplication.
    """
    work = 0
    for node in nodes:
        elements = sum(_elements(graph, number) for number in node.results)
        if node.name in CONTRACTIONS:  # sqrt(operands * result) is the number of multiplications
            read = prod(max(_elements(graph, number), 1) for number in node.operands)
            elements = int((read * max(elements, 1)) ** 0.5)
        work += elements
    return work


def find_seeds(graph: Graph, parts: int) -> SeedTrial | None:
    """Returns the independent trial with nearly the most work that tiles a collective.

    If another trial has at least twice its work, that one is returned: then the batch is not
    independent, or no collective carries it. None if no argument has a dimension that can be
    divided.
    """
    seen: list[SeedTrial] = []
    for tried in map(list, search(graph, parts)):
        first = sorted((t for t in tried if t.independent), key=lambda t: -t.work)[:_MOST_EXTENDED]
        longer = [*map(extend_trial, first)]
        seen += [*longer, *tried]
        useful = [trial for trial in longer if trial.collectives]
        best = outermost(useful)
        if best is not None and 2 * best.work > max(trial.work for trial in seen):
            return _together(best, useful)
    return max(seen, key=lambda trial: trial.work, default=None)


def outermost(trials: Sequence[SeedTrial]) -> SeedTrial | None:
    """Returns, of the trials with at least half of the most work, one of an outermost dimension."""
    most = max((trial.work for trial in trials), default=0)
    near = [trial for trial in trials if 2 * trial.work >= most]
    return min(near, key=lambda t: (min(s.dim for s in t.seeds.values()), -t.work), default=None)


def _together(best: SeedTrial, others: Sequence[SeedTrial]) -> SeedTrial:
    """Returns the best trial, joined with others of similar work that fit: another tower."""
    for other in others:
        if best.seeds.keys() & other.seeds.keys() or 2 * other.work < best.work:
            continue
        seeds = {**best.seeds, **other.seeds}
        both = try_seeds(best.dims.graph, seeds, best.dims.parts, to_the_end=False)
        kept = best.dims.op_tilings.keys() <= both.dims.op_tilings.keys()
        if kept and both.independent and both.collectives > best.collectives:
            best = both
    return best


def search(
    graph: Graph,
    parts: int,
    ways: Callable[[Graph, Seeds, int], Iterable[Seeds]] = lambda graph, seeds, parts: [seeds],
    *,
    to_the_end: bool = False,
    regroups: bool = False,
) -> Iterator[Iterator[SeedTrial]]:
    """Tries every dimension that can be divided: of integers, which may be tokens, then of floats.

    `ways` returns the ways to divide a dimension. Unless `to_the_end`, only likely ones are
    followed to the end: the outermost of the last arguments, because the batch comes after the
    weights.
    """

    def tries(arguments: Sequence[int]) -> Iterator[SeedTrial]:
        last = set(arguments[-_MOST_FOLLOWED:])
        for seeds in candidates(graph, arguments, parts):
            for cut in ways(graph, seeds, parts):
                end = to_the_end or all(n in last and not t.dim for n, t in cut.items())
                yield try_seeds(graph, cut, parts, to_the_end=end, regroups=regroups)

    arguments = graph.root.arguments
    integers = [n for n in arguments if not is_float(graph.values[n].type)]
    floats = [n for n in arguments if is_float(graph.values[n].type)]
    return map(tries, (integers, floats))


def candidates(graph: Graph, arguments: Iterable[int], parts: int) -> list[Seeds]:
    """Returns the dimensions that can be divided, outer ones first.

    If there are too many, those of weights come last, and then those of the first arguments.
    """
    divisible = [
        (dim, number)
        for number in arguments
        for dim in range(len(graph.shape(number) or ()))
        if DimTiling(dim).fits(graph.shape(number) or (), parts)
    ]
    if len(divisible) > _MOST_TRIALS:
        weights = graph.weights
        divisible.sort(key=lambda each: (each[1] in weights, each[0], -each[1]))
        divisible = sorted(divisible[:_MOST_TRIALS], key=itemgetter(1, 0))
    return [{number: DimTiling(dim)} for dim, number in sorted(divisible, key=itemgetter(0))]


def stride_samples(graph: Graph, seeds: Seeds, parts: int) -> Seeds:
    """Returns the same dimensions, with sample k of every `parts` in microbatch k.

    However a batch is divided over devices, each device then has a share of every microbatch.
    """
    shapes = {number: graph.shape(number) or () for number in seeds}
    return {
        number: DimTiling(layout.dim, shapes[number][layout.dim] // parts)
        for number, layout in seeds.items()
    }


def group_samples(graph: Graph, seeds: Seeds, parts: int) -> list[Seeds]:
    """Returns the same dimensions, with groups of consecutive samples in each microbatch, small
    groups first. A group may be what competes for the capacity of an expert."""
    ((number, layout), *others) = seeds.items()
    share = (graph.shape(number) or ())[layout.dim] // parts
    return [
        {number: DimTiling(layout.dim, share // size)}
        for size in range(2, share + 1)
        if share % size == 0 and not others
    ]


def extend_trial(trial: SeedTrial) -> SeedTrial:
    """Returns the trial with further arguments that carry as many samples as its own."""
    graph, parts = trial.dims.graph, trial.dims.parts
    samples = {(graph.shape(n) or ())[tiling.dim] for n, tiling in trial.seeds.items()}
    pending = needed_arguments(trial)
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
            kept = trial.dims.op_tilings.keys() <= other.dims.op_tilings.keys()
            if kept and other.independent and other.work > trial.work:
                trial, pending = other, needed_arguments(other)
                break
    return trial


def needed_arguments(trial: SeedTrial) -> list[int]:
    """Returns the arguments that whole values depend on, if parts need pieces of those values."""
    graph, whole = trial.dims.graph, [number for number, _ in missing_pieces(trial.dims)]
    sources = solve(graph, dict.fromkeys(whole, True), dependences, backward=True)
    return [number for number in graph.root.arguments if number in sources]


def with_needed(trial: SeedTrial) -> SeedTrial:
    """Returns the trial with all arguments tiled that its parts need pieces of, such as labels.

    Returns the given trial if the batch is not independent then.
    """
    graph, parts = trial.dims.graph, trial.dims.parts
    arguments, longer = set(graph.root.arguments), trial
    while True:
        needed = TilingOrigins(graph, parts).find_origins(missing_pieces(longer.dims))
        new = {n: tiling for n, tiling in needed.items() if n in arguments - longer.seeds.keys()}
        if not new:
            return longer
        longer = try_seeds(graph, {**longer.seeds, **new}, parts, to_the_end=False)
        if (
            not longer.independent
            or not longer.dims.op_tilings.keys() >= trial.dims.op_tilings.keys()
        ):
            return trial


def _elements(graph: Graph, number: int) -> int:
    return prod(graph.shape(number) or ())


# The number of devices that an argument of the block, by its place, is divided over in a dimension.
Spread = Callable[[int, int], int]
_TRIED = (2, 3, 5, 7)  # parts; a batch of a larger prime is rare
_MOST_NAMED = 3
_MOST_NUMBERS = 6


def fewer_parts(graph: Graph, parts: int) -> Iterator[int]:
    """Yields numbers of parts that divide outermost dimensions that `parts` does not."""
    shapes = [graph.shape(number) or () for number in graph.root.arguments]
    sizes = {shape[0] for shape in shapes if shape and shape[0] % parts}
    for fewer in _TRIED:
        if fewer != parts and any(size and size % fewer == 0 for size in sizes):
            yield fewer


def has_integers(graph: Graph, seeds: Seeds) -> bool:
    """Returns True if one of them is of integers, as samples are: tokens and labels."""
    return any(not is_float(graph.values[number].type) for number in seeds)


@dataclass(frozen=True)
class Undivided:
    """Why a batch cannot be divided into parts; the option as given, and one that would work."""

    why: str
    instead: tuple[str, str] | None

    def refusal(
        self, name: str, rule: str, location: ir.Location, notes: tuple[Diagnostic, ...] = ()
    ) -> ToolError:
        """Returns the error of a pass."""
        said = f"{name}: {self.why} ({rule})"
        return ToolError(said, location, notes, instead=self.instead)


def why_undivided(
    graph: Graph, seeds: Seeds, parts: int, what: str, spread: Spread | None = None
) -> Undivided | None:
    """Says why `parts` do not divide the batch of `seeds`, and what would; None if they do.

    `what` names the parts, for example `microbatches`. With `spread`, the share of each device must
    be divisible. Sizes are given for all devices.
    """
    sizes: dict[int, int] = {}  # on each device, if devices divide it
    for number, tiling in seeds.items():
        whole = (graph.shape(number) or ())[tiling.dim]
        devices = 1 if spread is None else spread(graph.root.arguments.index(number), tiling.dim)
        sizes[number] = whole // devices if whole % devices == 0 else whole
    size = next((sizes[number] for number in sorted(sizes) if sizes[number] % parts), None)
    if size is None:
        return None
    alike = [number for number in sorted(sizes) if sizes[number] == size]
    first, dim = alike[0], seeds[alike[0]].dim
    rows = shape_of(outside_of(graph.values[first]))[dim]
    devices = rows // size if size else 1
    names = [argument_name(graph.values[number]) for number in alike[:_MOST_NAMED]]
    names += [f"{len(alike) - len(names)} more"] if len(alike) > len(names) else []
    named = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    shared = f", {size} on each of {devices} devices" if devices > 1 else ""
    along = "rows" if not dim else f"elements in dimension {dim}"
    has = "has" if len(alike) == 1 else "have"
    dividing = [n for n in range(2, size + 1) if size % n == 0]
    listed = " or ".join(map(str, dividing[:_MOST_NUMBERS]))
    others = f"take {listed} {what}, or " if dividing else "take "
    near = max((n for n in dividing if n <= parts), default=next(iter(dividing), 0))
    return Undivided(
        f"{parts} {what} do not divide the batch: {named} {has} {rows} {along}"
        f"{shared}; {others}a batch of a multiple of {parts * devices}",
        (f"{what}={parts}", f"{what}={near}") if near else None,
    )


def no_dimension(graph: Graph, number: int, dimension: int) -> str:
    """Says that an argument has no such dimension; empty if it has it, of a static size."""
    shape = graph.shape(number)
    if shape is not None and 0 <= dimension < len(shape):
        return ""
    has = "" if shape is None else f": it has {len(shape)}, from 0 on"
    return (
        f"{counted_name(graph.values[number])}, {graph.values[number].type}, has no dimension "
        f"{dimension} of a static size{has}"
    )


def sizes_undivided(graph: Graph, parts: int) -> list[str]:
    """Describes the arguments that could be the batch if `parts` divided their outermost sizes.

    The last arguments come first: integers, then floats of at least two dimensions.
    """
    integers, floats = list[str](), list[str]()
    for number in reversed(graph.root.arguments):
        shape = graph.shape(number) or ()
        of_floats = is_float(graph.values[number].type)
        if not shape or shape[0] % parts == 0 or (of_floats and len(shape) < 2):
            continue
        rows = "1 row" if shape[0] == 1 else f"{shape[0]} rows"
        name = argument_name(graph.values[number])
        said = f"{name} has {rows}, which {parts} do not divide"
        (floats if of_floats else integers).append(said)
    return [*integers, *floats][:_MOST_NAMED]

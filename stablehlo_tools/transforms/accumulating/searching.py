"""Finds the arguments that carry the batch of a training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablehlo_tools.analysis.batch_dims.graph import Graph
from stablehlo_tools.analysis.batch_dims.layout import Layout
from stablehlo_tools.analysis.batch_dims.rules import CONTRACTIONS
from stablehlo_tools.analysis.batch_dims.seeds import (
    Seeds,
    Sources,
    Trial,
    candidates,
    needed_arguments,
    sources_of,
    try_seeds,
    work_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.transforms.accumulating.division import Division, divide
from stablehlo_tools.transforms.expanding.microbatches import strided

_MOST_DIVIDED = 32
_MOST_TOLD = 3
_LEAST_SHARE = 16  # of the contractions one in so many is in the loop; others are an optimizer's
_MOST_FOLLOWED = 32  # arguments whose outermost dimension is followed past what mixes it


def find_division(graph: Graph, parts: int, location: ir.Location) -> Division:
    """The division by the dimension of arguments that is the batch: one that puts most work, or
    half of it, into the loop, an outer one before inner ones.

    Integers are tried first, since tokens and labels are samples and weights are not. Raises a
    located ToolError where there is none: the reason of the likeliest.
    """
    arguments = graph.root.arguments
    integers = [n for n in arguments if not is_float(graph.values[n].type)]
    floats = [n for n in arguments if is_float(graph.values[n].type)]
    search = _Search(graph, parts)
    search.over(integers)
    if not search.is_enough:
        search.over(floats)
    best = search.best
    if best is not None:
        return best
    raise _told(search.refusal, graph, parts, location)


def given_division(
    graph: Graph, places: Sequence[int], dimension: int, parts: int, location: ir.Location
) -> Division:
    """The division by a dimension of arguments of the block. Raises a located ToolError where they
    have no such dimension, or cannot be cut by it."""
    seeds: Seeds = {}
    for place in places:
        number = graph.root.arguments[place]
        shape = graph.shape(number)
        if shape is None or not 0 <= dimension < len(shape):
            raise ToolError(
                f"accumulate-gradients: argument {place}, {graph.values[number].type}, has no "
                f"dimension {dimension} of a static size (P3)",
                location,
            )
        if not Layout(dimension).fits(shape, parts):
            raise ToolError(
                f"accumulate-gradients: dimension {dimension} of argument {place} has "
                f"{shape[dimension]} elements, which {parts} microbatches do not divide (P3)",
                location,
            )
        seeds[number] = Layout(dimension)
    found = divide(try_seeds(graph, strided(graph, seeds, parts), parts))
    if not found.inside:
        raise ToolError(
            "accumulate-gradients: nothing but what is known beforehand hangs on the arguments "
            f"{', '.join(map(str, places))} (P3)",
            location,
        )
    return found


class _Search:
    """Divisions that were found, and why others were not."""

    def __init__(self, graph: Graph, parts: int) -> None:
        self._graph = graph
        self._parts = parts
        self._sources: Sources = sources_of(graph)
        self._found: list[Division] = []
        self._refused: list[tuple[Trial, ToolError]] = []
        self._all_work = work_of(graph, [n for n in graph.nodes if n.name in CONTRACTIONS])

    def over(self, arguments: Sequence[int]) -> None:
        """Tries every dimension of some arguments."""
        trials: list[Trial] = []
        last = set(arguments[-_MOST_FOLLOWED:])  # the batch comes behind the weights
        for seeds in candidates(self._graph, arguments, self._parts):
            likely = all(n in last and layout.dim == 0 for n, layout in seeds.items())
            trial = self._try(seeds, to_the_end=likely)
            if trial.work and (likely or trial.independent):
                trials.append(trial)
        for trial in sorted(trials, key=_unlikeliness)[:_MOST_DIVIDED]:
            self._divide(trial)

    @property
    def is_enough(self) -> bool:
        """Whether a division puts at least half of the contractions into the loop."""
        return self._all_work > 0 and any(
            2 * _contractions(each) >= self._all_work for each in self._found
        )

    @property
    def best(self) -> Division | None:
        """The division to take; None where one that is refused is more than twice as likely."""
        most = max((each.trial.work for each in self._found), default=0)
        least = min((_unlikeliness(each.trial) for each in self._found), default=0.0)
        if any(_unlikeliness(trial) < 2 * least for trial, _ in self._refused):
            return None
        near = [each for each in self._found if 2 * each.trial.work >= most]
        return min(near, key=_outermost, default=None)

    @property
    def refusal(self) -> ToolError | None:
        """Why the likeliest trial came to nothing."""
        if not self._refused:
            return None
        return min(self._refused, key=lambda refused: _unlikeliness(refused[0]))[1]

    def _try(self, seeds: Seeds, *, to_the_end: bool = True) -> Trial:
        cut = strided(self._graph, seeds, self._parts)
        return try_seeds(self._graph, cut, self._parts, to_the_end=to_the_end)

    def _divide(self, trial: Trial) -> None:
        try:
            found = self._extended(divide(trial))
        except ToolError as error:
            self._refused.append((trial, error))
            return
        if found.inside and _LEAST_SHARE * _contractions(found) >= self._all_work:
            self._found.append(found)

    def _extended(self, found: Division) -> Division:
        """The division with further arguments that carry the batch, as many samples as those it
        has. Raises ToolError where an argument that parts are taken of shows that the batch is
        not independent: what was cut are features."""
        graph = self._graph
        sizes = {(graph.shape(n) or ())[seed.dim] for n, seed in found.trial.seeds.items()}
        pending = needed_arguments(found.trial, self._sources)
        tried = set(found.trial.seeds)
        while pending:
            following = pending.pop(0)
            if following in tried:
                continue
            tried.add(following)
            longer = self._with(found, following, sizes)
            if longer is not None:
                found = longer
                pending = needed_arguments(found.trial, self._sources)
        return found

    def _with(self, found: Division, number: int, sizes: Iterable[int]) -> Division | None:
        shape, refusal = self._graph.shape(number) or (), None
        for seeds in candidates(self._graph, [number], self._parts):
            if shape[seeds[number].dim] not in sizes:
                continue
            trial = self._try({**found.trial.seeds, **seeds})
            kept = found.dims.steps.keys() <= trial.dims.steps.keys()
            if not kept or trial.work < found.trial.work:
                continue
            try:
                return divide(trial)
            except ToolError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return None


def _unlikeliness(trial: Trial) -> float:
    """More work is likelier, but less so the more often the outcome of a sum is used with samples
    again: that is how features behave."""
    return -trial.work / (1 + len(trial.dims.meetings))


def _contractions(division: Division) -> int:
    steps = division.dims.steps
    return work_of(division.dims.graph, [node for node in steps if node.name in CONTRACTIONS])


def _outermost(division: Division) -> tuple[int, int]:
    return min(seed.dim for seed in division.trial.seeds.values()), -division.trial.work


def _told(refusal: ToolError | None, graph: Graph, parts: int, location: ir.Location) -> ToolError:
    """Why nothing was found, and which arguments could be the batch, but for their sizes."""
    texts: list[str] = []
    for place, number in enumerate(graph.root.arguments):
        shape = graph.shape(number) or ()
        if shape and shape[0] % parts:
            texts.append(f"argument {place} has {shape[0]} rows, which {parts} do not divide")
    notes = tuple(note(text, location) for text in texts[-_MOST_TOLD:])
    if refusal is not None:
        return ToolError(
            refusal.diagnostic.message,
            refusal.diagnostic.place,
            (*refusal.diagnostic.notes, *notes),
        )
    return ToolError(
        f"accumulate-gradients: no argument has a dimension that {parts} microbatches divide and "
        "that work hangs on which needs to know the weights (P3)",
        location,
        notes,
    )

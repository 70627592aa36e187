"""Finds the arguments that carry the batch of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from stablehlo_tools.analysis.dataflow import inputs_of, needed_nodes, walk_nodes
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    Graph,
    TilingOrigins,
    missing_pieces,
)
from stablehlo_tools.analysis.dimension_propagation.seeds import (
    Seeds,
    SeedTrial,
    Spread,
    fewer_parts,
    group_samples,
    has_integers,
    no_dimension,
    outermost,
    search,
    sizes_undivided,
    stride_samples,
    try_seeds,
    why_undivided,
    work_of,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS, DimTiling
from stablehlo_tools.analysis.entry import counted_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, ToolError, note
from stablehlo_tools.transforms.parts.accumulate_gradients.microbatch_division import (
    MicrobatchDivision,
    divide,
)

_MOST_DIVIDED = 32
_LEAST_SHARE = 16  # the loop has at least 1 / 16 of the contractions; the rest are an optimizer's


def find_division(
    graph: Graph, parts: int, location: ir.Location, spread: Spread | None = None
) -> MicrobatchDivision:
    """Returns the division by the dimension of arguments that is the batch. It is one that puts
    most of the work, or half of it, into the loop; outer dimensions are preferred.

    Integers are tried first, since tokens and labels are samples and weights are not. Raises a
    located ToolError if none is found: the batch is of another size, or the reason of the
    likeliest trial. With `spread`, microbatches have to divide each device's part of the batch.
    """
    search = _DivisionSearch.through(graph, parts)
    best = search.best
    if best is None and search.refused is not None:
        best = _DivisionSearch.through(graph, parts, group_samples).best
    if best is None:
        raise _divisibility_error(search, spread, location) or _told(search, location)
    said = why_undivided(graph, best.trial.seeds, parts, "microbatches", spread)
    if said is not None:
        raise said.refusal("accumulate-gradients", "P3", location)
    return best


def given_division(
    graph: Graph, places: Sequence[int], dimension: int, parts: int, location: ir.Location
) -> MicrobatchDivision:
    """Returns the division by a dimension of arguments of the block. Raises a located ToolError if
    they have no such dimension, or cannot be divided along it."""
    seeds: Seeds = {}
    names: list[str] = []
    for place in places:
        number = graph.root.arguments[place]
        missing = no_dimension(graph, number, dimension)
        if missing:
            raise ToolError(f"accumulate-gradients: {missing} (P3)", location)
        shape, named = graph.shape(number) or (), counted_name(graph.values[number])
        names.append(named)
        if not DimTiling(dimension).fits(shape, parts):
            raise ToolError(
                f"accumulate-gradients: dimension {dimension} of {named} has "
                f"{shape[dimension]} elements, which {parts} microbatches do not divide (P3)",
                location,
            )
        seeds[number] = DimTiling(dimension)
    division = divide(try_seeds(graph, stride_samples(graph, seeds, parts), parts, regroups=True))
    if not division.inside:
        raise ToolError(
            "accumulate-gradients: no op that can run on a microbatch depends on "
            f"{', '.join(names)} (P3)",
            location,
        )
    return division


class Refused(NamedTuple):
    """A candidate for the batch, and the reason why it cannot be divided. `are_weights` is True if
    the program returns some of the arguments updated, or a gradient of them."""

    seeds: Seeds
    why: ToolError
    are_weights: bool


class _DivisionSearch:
    """The divisions that were found, and the trials that were refused."""

    def __init__(self, graph: Graph, parts: int) -> None:
        self.graph = graph
        self.parts = parts
        self._origins = TilingOrigins(graph, parts, regroups=True)
        self._found: list[MicrobatchDivision] = []
        self._refused: list[tuple[SeedTrial, ToolError]] = []
        self._all_work = work_of(graph, [n for n in graph.nodes if n.name in CONTRACTIONS])

    @staticmethod
    def through(
        graph: Graph,
        parts: int,
        ways: Callable[[Graph, Seeds, int], list[Seeds]] = lambda *cut: [stride_samples(*cut)],
    ) -> _DivisionSearch:
        """Returns a search over integers first, then over floats if those are not enough."""
        found = _DivisionSearch(graph, parts)
        for trials in search(graph, parts, ways, regroups=True):
            likely = [t for t in trials if t.work and (t.to_the_end or t.independent)]
            for trial in sorted(likely, key=_unlikeliness)[:_MOST_DIVIDED]:
                found.divide(trial)
            if found.is_enough:
                break
        return found

    @property
    def is_enough(self) -> bool:
        """True if a division puts at least half of the contractions into the loop."""
        return self._all_work > 0 and any(
            2 * _contractions(each) >= self._all_work for each in self._found
        )

    @property
    def best(self) -> MicrobatchDivision | None:
        """The division to use; None if a refused trial is more than twice as likely as all."""
        least = min((_unlikeliness(each.trial) for each in self._found), default=0.0)
        if any(_unlikeliness(trial) < 2 * least for trial, _ in self._refused):
            return None
        best = outermost([each.trial for each in self._found])
        return next((each for each in self._found if each.trial is best), None)

    @property
    def refused(self) -> Refused | None:
        """The likeliest trial that was refused. One of arguments that are probably weights is only
        chosen if all others are, too."""
        if not self._refused:
            return None

        def rank(refused: tuple[SeedTrial, ToolError]) -> tuple[bool, float]:
            return self._are_weights(refused[0]), _unlikeliness(refused[0])

        trial, why = min(self._refused, key=rank)
        return Refused(trial.seeds, why, self._are_weights(trial))

    def _are_weights(self, trial: SeedTrial) -> bool:
        return not self.graph.weights.isdisjoint(trial.seeds)

    def divide(self, trial: SeedTrial) -> None:
        """Adds the division by a trial, or the reason why there is none."""
        try:
            division = self._add_arguments(divide(trial))
        except ToolError as error:
            self._refused.append((trial, error))
            return
        if not division.sums and not trial.seeds.keys().isdisjoint(self.graph.updates):
            return  # a weight's columns: a batch has sums, the gradients
        work = _contractions(division)
        is_most = _LEAST_SHARE * work >= self._all_work and work >= _on_all_samples(division)
        if division.inside and is_most:
            self._found.append(division)

    def _add_arguments(self, division: MicrobatchDivision) -> MicrobatchDivision:
        """Returns the division with more arguments that carry the batch: those from which ops need
        parts.

        Raises ToolError if one of them shows that the batch is not independent: the cut was along
        features.
        """
        tried = set(division.trial.seeds)
        while True:
            origins = self._origins.find_origins(missing_pieces(division.dims))
            following = [n for n in self.graph.root.arguments if n in origins and n not in tried]
            if not following:
                return division
            # All at once: a statistic of two of them then runs before the loop (PPO's advantages).
            with suppress(ToolError):
                longer = self._with_arguments(division, {n: origins[n] for n in following})
                if longer is not None:
                    division = longer
                    tried.update(following)
                    continue
            tried.add(following[0])
            division = (
                self._with_arguments(division, {following[0]: origins[following[0]]}) or division
            )

    def _with_arguments(
        self, division: MicrobatchDivision, more: Seeds
    ) -> MicrobatchDivision | None:
        """Returns the division with more arguments; None if they carry no batch, because the trial
        then loses divided ops or work."""
        trial = try_seeds(self.graph, {**division.trial.seeds, **more}, self.parts, regroups=True)
        kept = division.dims.op_tilings.keys() <= trial.dims.op_tilings.keys()
        return divide(trial) if kept and trial.work >= division.trial.work else None


def _unlikeliness(trial: SeedTrial) -> float:
    """Returns a key that is lower for likelier trials. More work is likelier, but less so if
    results of sums meet samples again often, as those over features do."""
    return -trial.work / (1 + len(trial.dims.meetings))


def _contractions(division: MicrobatchDivision) -> int:
    steps = division.dims.op_tilings
    return work_of(division.dims.graph, [node for node in steps if node.name in CONTRACTIONS])


def _on_all_samples(division: MicrobatchDivision) -> int:
    """Returns the work of contractions that the loop contains or needs, but that do not run on
    microbatches. If features are cut instead of samples, this exceeds the work of those that do."""
    graph, steps = division.dims.graph, division.dims.op_tilings
    gone = set(division.gone)
    ahead = needed_nodes(
        [node for node in graph.root.nodes if node not in gone],
        {number for node in division.inside for number in inputs_of(node)},
    )
    run = walk_nodes([*ahead, *division.inside])
    return work_of(graph, [n for n in run if n.name in CONTRACTIONS and n not in steps])


def _divisibility_error(
    search: _DivisionSearch, spread: Spread | None, location: ir.Location
) -> ToolError | None:
    """Returns the refusal of a batch that fewer microbatches divide, but so many do not; None if
    such a batch is not found.

    If other batches are refused for another reason, only integers count: floats may be features.
    """
    graph, parts = search.graph, search.parts
    is_refused = search.refused is not None and not search.refused.are_weights
    for fewer in fewer_parts(graph, parts):
        other = _DivisionSearch.through(graph, fewer)
        best, refused = other.best, other.refused
        notes: tuple[Diagnostic, ...] = ()
        if best is not None:
            seeds = best.trial.seeds
        elif refused is not None and not refused.are_weights:
            seeds, why = refused.seeds, refused.why.diagnostic
            notes = (note(f"{fewer} microbatches are refused, too: {why.message}", why.place),)
        else:
            continue
        said = why_undivided(graph, seeds, parts, "microbatches", spread)
        if said is not None and (not is_refused or has_integers(graph, seeds)):
            return said.refusal("accumulate-gradients", "P3", location, notes)
    return None


def _told(search: _DivisionSearch, location: ir.Location) -> ToolError:
    """Returns the reason why nothing was found. The refusal of a weight is only added as a note."""
    refused = search.refused
    if refused is not None and not refused.are_weights:
        return refused.why
    notes = [note(said, location) for said in sizes_undivided(search.graph, search.parts)]
    if refused is not None:
        why = refused.why.diagnostic
        notes.append(note(f"the likeliest candidate is a weight: {why.message}", why.place))
    return ToolError(
        f"accumulate-gradients: no argument has a dimension that {search.parts} microbatches "
        "divide and that feeds most of the contractions with weights (P3): name the batch with "
        "`arguments` and `dimension`",
        location,
        tuple(notes),
    )

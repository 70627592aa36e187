"""The setting of a schedule: ranks, microbatches, and a model with the costs of its slices.

Costs are read from a JSON object. Each figure is a number, or a list with one for every slice:

    {"forward": [1, 1, 2, 1], "input_gradient": 1, "weight_gradient": 1, "communication": 0.1}

The keys are the fields of `Costs`; the three phases are required. The slices are equal parts of the
model in order. Without any list, there are as many slices as ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.atomic import STDIN
from stablehlo_tools.files.json_text import read_json
from stablehlo_tools.schedules.table import Placement, Table

PerStage = float | Sequence[float]
_MOST = 1e100  # sums of so large figures are still finite
KEPT = 0.5  # default share of an activation kept for W; 0.37 to 0.43 in arXiv 2401.10241
_NEEDED = ("forward", "input_gradient", "weight_gradient")
_PER_SLICE = (*_NEEDED, "backward", "activation", "kept", "weights")
_SCALARS = ("communication", "overlapped", "message")
_ROUNDING = 1e-9  # share of the limit
_MOST_FORWARDS = 4_000_000  # with their backwards, these fit in some gigabytes of memory


@dataclass(frozen=True)
class ScheduleSetting:
    """Ranks, microbatches, chunks per rank, and the costs of the model's equal slices.

    `slices` has the figures of any number of equal slices of the model, in order, each for one
    microbatch; usually there is one per rank. A schedule of more stages divides them, one of fewer
    joins them. `limit` is the most bytes of weights and activations that a rank may hold. If
    `chunks` is None, the schedule chooses the stages per rank. `sequence_slices` is the number of
    slices of a microbatch's sequence, for schedules that slice sequences; else None.
    """

    ranks: int
    microbatches: int
    slices: Costs
    chunks: int | None = None
    limit: float | None = None
    sequence_slices: int | None = None

    def __post_init__(self) -> None:
        """Raises ToolError for counts below 1, tables of enormous size, and a limit below 0."""
        check_counts(self.ranks, self.microbatches, self.chunks, self.sequence_slices)
        if self.limit is not None and not self.limit >= 0:
            raise ToolError(f"the memory limit is {self.limit}: give 0 or more")

    def costs(self, stages: int) -> Costs:
        """Returns the costs of `stages` equal stages. Raises as `reslice_figures` does."""
        return _cut_costs(self.slices, stages)

    def costs_of(self, table: Table) -> Costs:
        """Returns the costs of a table's phases: per slice if the table slices sequences."""
        return per_slice(self.costs(table.stages), table.sequence_slices)

    def can_be_cut(self, chunks: int) -> bool:
        """Returns True if the slices give costs for so many chunks per rank."""
        try:
            self.costs(self.ranks * chunks)
        except ToolError:
            return False
        return True

    def room(self, placement: Placement) -> list[float]:
        """The bytes that the limit leaves each rank for activations; negative without any."""
        limit = float("inf") if self.limit is None else self.limit
        weights = self.costs(placement.stages).weights
        return [limit - sum(weights[stage] for stage in own) for own in placement.held]

    def fits(self, held: float) -> bool:
        """Returns True if a rank may hold so many bytes, with a tolerance for rounding."""
        return self.limit is None or held <= self.limit * (1 + _ROUNDING)


@dataclass(frozen=True)
class Costs:
    """Times and bytes of every stage for one microbatch; times in any one unit.

    forward, input_gradient, weight_gradient, backward: times of the phases F, I, W and B.
    communication: time from the end of a stage to the start of the next on another rank.
    overlapped: time of an overlapped pair, as a fraction of the sum of its two parts.
    activation: bytes held from the forward to the end of the (input) gradient.
    kept: bytes still held from there to the end of the weight gradient, if that is split off.
    weights: bytes of a stage's parameters, their gradients and the optimizer's state.
    message: bytes of one transfer between two stages.
    offloaded: bytes of an activation that its copy to the host frees on the device.
    copy: time of that copy, and of the one back; a rank makes one in each direction at a time,
        overlapped with its compute.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    backward: tuple[float, ...]
    communication: float = 0.0
    overlapped: float = 1.0
    activation: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    message: float = 0.0
    offloaded: tuple[float, ...] = ()
    copy: tuple[float, ...] = ()

    def with_phases(self, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Costs:
        """The costs with other times of phases, made of those of each kind."""
        return replace(self, **{key: change(getattr(self, key)) for key in (*_NEEDED, "backward")})

    @property
    def stages(self) -> int:
        """The number of stages that these costs are of."""
        return len(self.forward)

    @property
    def microbatch(self) -> tuple[float, ...]:
        """The time of every phase of a microbatch, by stage."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))


def costs(
    stages: int,
    forward: PerStage = 1.0,
    input_gradient: PerStage = 1.0,
    weight_gradient: PerStage = 1.0,
    backward: PerStage | None = None,
    communication: float = 0.0,
    overlapped: float = 1.0,
    activation: PerStage = 1.0,
    kept: PerStage | None = None,
    weights: PerStage = 0.0,
    message: float = 0.0,
) -> Costs:
    """Returns the costs of `stages` stages; each figure is one number or a sequence by stage.

    `backward` defaults to the sum of the two gradients, `kept` to half of the activation. A copy to
    the host moves a whole activation in no time; offload.py sets other values. Raises ToolError for
    a negative or enormous figure, a sequence of another length, or `kept` above `activation`.
    """
    phases = {
        "forward": _each("forward", forward, stages),
        "input_gradient": _each("input_gradient", input_gradient, stages),
        "weight_gradient": _each("weight_gradient", weight_gradient, stages),
    }
    both = zip(phases["input_gradient"], phases["weight_gradient"], strict=True)
    held = _each("activation", activation, stages)
    left = tuple(KEPT * size for size in held) if kept is None else _each("kept", kept, stages)
    for size, part in zip(held, left, strict=True):
        if part > size:
            raise ToolError(f"kept: {part:g} of an activation of {size:g}; it must be a part of it")
    return Costs(
        **phases,
        backward=tuple(map(sum, both)) if backward is None else _each("backward", backward, stages),
        communication=_figure("communication", communication),
        overlapped=_figure("overlapped", overlapped),
        activation=held,
        kept=left,
        weights=_each("weights", weights, stages),
        message=_figure("message", message),
        offloaded=held,
        copy=(0.0,) * stages,
    )


def unit_costs(stages: int) -> Costs:
    """Returns F = I = W = 1, B = 2, no communication, 1 byte per activation, half kept for W."""
    return costs(stages)


def reslice_figures(figures: Sequence[float], stages: int) -> tuple[float, ...]:
    """The figures of a model's equal slices, for another number of slices of the same model.

    Each figure is divided evenly among several stages, or several neighbours are summed into one.
    Raises ToolError if neither number divides the other.
    """
    given = len(figures)
    if given and stages % given == 0:
        each = stages // given
        return tuple(figure / each for figure in figures for _ in range(each))
    if stages and given % stages == 0:
        each = given // stages
        return tuple(sum(figures[i : i + each]) for i in range(0, given, each))
    raise ToolError(
        f"{given} figures do not fit {stages} stages: give one for all, or a number of them that "
        f"divides {stages} or is a multiple of {stages}"
    )


@cache
def _cut_costs(slices: Costs, stages: int) -> Costs:
    """The costs of a model's slices, for another number of slices."""
    keys = (*_PER_SLICE, "offloaded", "copy")
    return replace(slices, **{key: reslice_figures(getattr(slices, key), stages) for key in keys})


def per_slice(costs: Costs, slices: int) -> Costs:
    """Returns the costs of one of `slices` equal slices of a microbatch's sequence.

    Latency and weights are those of the whole stage. The keys and values that later slices read are
    part of a slice's activation. The slice's own gradient reads them last and frees them.
    """
    if slices == 1:
        return costs

    def cut(figures: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(figure / slices for figure in figures)

    held = {key: cut(getattr(costs, key)) for key in ("activation", "kept", "offloaded", "copy")}
    return replace(costs.with_phases(cut), message=costs.message / slices, **held)


def _each(what: str, value: PerStage, stages: int) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        return (_figure(what, value),) * stages
    if len(value) != stages:
        raise ToolError(f"{what}: {len(value)} figures for {stages} stages")
    return tuple(_figure(what, figure) for figure in value)


def _figure(what: str, value: float) -> float:
    if not 0 <= value <= _MOST:
        raise ToolError(f"{what}: {value:g} is out of range; give 0 to {_MOST:g}")
    return abs(float(value))  # -0.0 is 0


def read_costs(path: str, ranks: int, slices: int) -> Costs:
    """Reads the costs in a file; `slices` is the number of slices if it has no lists.

    Raises ToolError, with the file's name, if it is not in this form.
    """
    with naming("<stdin>" if path == STDIN else path):
        return to_costs(read_json(path), ranks, slices)


def to_costs(content: Any, ranks: int, slices: int) -> Costs:
    """The costs in parsed JSON; numbers without a list are of one rank's share of the model.

    Raises ToolError naming the key.
    """
    if not isinstance(content, dict):
        raise ToolError(f"costs must be an object with at least the keys {', '.join(_NEEDED)}")
    given = cast("dict[str, Any]", content)
    known = (*_PER_SLICE, *_SCALARS)
    strange = next((key for key in given if key not in known), None)
    if strange is not None:
        raise ToolError(f"unknown key {strange!r}; costs have {', '.join(known)}")
    missing = [key for key in _NEEDED if key not in given]
    if missing:
        raise ToolError(f"the costs have no {' and no '.join(missing)}")
    figures: dict[str, float | list[float]] = {}
    for key, value in given.items():
        if isinstance(value, list) and key in _PER_SLICE:
            each = enumerate(cast("list[Any]", value))
            figures[key] = [_read_figure(f"{key}[{at}]", figure) for at, figure in each]
        else:
            figures[key] = _read_figure(key, value)
    lengths = {key: len(value) for key, value in figures.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ToolError(
            f"the lists have different lengths: {said}; give one figure a slice in each"
        )
    slices = next(iter(lengths.values()), slices)
    if not slices:
        raise ToolError("the lists are empty; give one figure a slice")
    if not lengths:
        shares = {key: cast("float", figures[key]) for key in _PER_SLICE if key in figures}
        # Numbers without a list are of one rank: the model has `ranks` such shares.
        figures |= {key: figure * ranks / slices for key, figure in shares.items()}
    return costs(slices, **cast("dict[str, Any]", figures))


def _read_figure(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{where}: {value!r} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ToolError(f"{where}: the number is too large") from None


def check_counts(
    ranks: int, microbatches: int, chunks: int | None, sequence_slices: int | None = None
) -> None:
    """Raises ToolError for counts below 1, and for tables of enormous size."""
    counts = {
        "ranks": ranks,
        "microbatches": microbatches,
        "chunks a rank": chunks,
        "slices of a microbatch": sequence_slices,
    }
    for what, count in counts.items():
        if count is not None and count < 1:
            raise ToolError(f"{what}: {count}; give 1 or more")
    forwards = ranks * microbatches * (chunks or 1) * (sequence_slices or 1)
    if forwards > _MOST_FORWARDS:
        cut = "" if sequence_slices is None else " x slices"
        raise ToolError(
            f"ranks x microbatches x chunks{cut} are {forwards:,}; a table has at most "
            f"{_MOST_FORWARDS:,} forwards"
        )

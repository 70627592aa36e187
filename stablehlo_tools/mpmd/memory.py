"""What a rank holds at each of its calls and messages, by liveness over its program, in bytes.

A value lives from the call or the message that makes it to the last one that takes it; barriers
make nothing. Arguments and what is returned live to the end. What a microbatch leaves for later,
received tensors and those not yet sent included, is `held`, which the schedule bounds.

The bound follows from the schedule and what the manifest has of its stages: a stage holds its
activation from F to B or I, and what is kept of it from I to W; a message is held from its receive
to the phase that it is for, and from the phase that makes it to its send. What goes from a stage to
another one on the same rank is held from the one to the other. Without messages and what goes
between stages, the most of it is at most what `simulate` has for the rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.entry import ENTRY
from stablehlo_tools.analysis.tasks.graph import module_task_graph
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.memory_bounds import action_of, bounds, made_by
from stablehlo_tools.mpmd.proof.labels import Labels
from stablehlo_tools.mpmd.proof.sums import InSums
from stablehlo_tools.mpmd.reading import RETURN, Call, Event, Origin, Reading
from stablehlo_tools.overlap.memory import memory_profile

_ANY_HARDWARE = "h100"  # bytes are the same on each


@dataclass(frozen=True)
class Moment:
    """What is held of microbatches behind an event of a rank, and what its schedule holds then."""

    event: int
    held: float
    bound: float


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank, in bytes.

    `peak` is all that is alive at once, the temporaries of functions included, while event
    `peak_at` runs; `arguments` are those of `main`. `weights` are what the manifest counts of the
    rank's stages: parameters and sums of gradients. `fixed` is the most that is alive of what
    belongs to no microbatch, `temporary` the most that a function takes while it runs.
    """

    rank: int
    peak: float
    peak_at: int
    arguments: float
    weights: float
    fixed: float
    temporary: float
    moments: tuple[Moment, ...]

    @property
    def held(self) -> float:
        """The most that is held of microbatches."""
        return max((moment.held for moment in self.moments), default=0.0)

    @property
    def bound(self) -> float:
        """The most that the schedule holds of microbatches."""
        return max((moment.bound for moment in self.moments), default=0.0)

    @property
    def limit(self) -> float:
        """What the peak cannot exceed while no more is held than by the schedule."""
        return self.fixed + self.bound + self.temporary


def rank_memory(reading: Reading, labels: Labels, sums: InSums, manifest: Manifest) -> RankMemory:
    """The memory of a rank whose program runs its row of the manifest's table, and has these sums.

    Raises a located ToolError for a tensor of unknown size, and for an op whose memory is unknown.
    """
    lives = _lives(reading)
    sizes = {origin: _bytes(reading, origin) for origin in lives}
    arguments = sum(bytes_of(argument) for argument in reading.block.arguments)
    of_microbatch = _of_microbatches(reading, labels, sums, lives)
    temporary = Temporaries(reading.module)
    peak, peak_at = arguments, -1
    fixed, longest = arguments, 0.0
    held: list[float] = []
    alive = arguments
    now = 0.0
    starts, ends = _by_event(lives)
    for event in reading.events:
        during = alive
        if isinstance(event, Call):
            own = temporary.of(event.function)
            during, longest = during + own, max(longest, own)
        made = starts[event.index]
        alive += sum(sizes[origin] for origin in made)
        now += sum(sizes[origin] for origin in made if origin in of_microbatch)
        fixed = max(fixed, alive - now)
        if max(during, alive) > peak:
            peak, peak_at = max(during, alive), event.index
        gone = ends[event.index]
        alive -= sum(sizes[origin] for origin in gone)
        now -= sum(sizes[origin] for origin in gone if origin in of_microbatch)
        held.append(now)
    allowed = bounds(reading, labels, manifest.stages, sizes)
    moments = tuple(map(Moment, range(len(held)), held, allowed))
    weights = sum(manifest.stages[stage].weights for stage in manifest.ranks[reading.rank].stages)
    return RankMemory(reading.rank, peak, peak_at, arguments, weights, fixed, longest, moments)


def _lives(reading: Reading) -> dict[Origin, tuple[int, int]]:
    """The events that make each value of calls and messages, and that take it last."""
    end = len(reading.events)
    lives: dict[Origin, tuple[int, int]] = {}
    for event in reading.events:
        for origin in made_by(event):
            uses = reading.uses.get(origin, [])
            last = max((end if use.event == RETURN else use.event for use in uses), default=-1)
            lives[origin] = (event.index, max(last, event.index))
    return lives


def _bytes(reading: Reading, origin: Origin) -> float:
    return bytes_of(reading.events[origin.event].op.results[origin.number])


def _by_event(
    lives: dict[Origin, tuple[int, int]],
) -> tuple[defaultdict[int, list[Origin]], defaultdict[int, list[Origin]]]:
    starts: defaultdict[int, list[Origin]] = defaultdict(list)
    ends: defaultdict[int, list[Origin]] = defaultdict(list)
    for origin, (first, last) in lives.items():
        starts[first].append(origin)
        ends[last].append(origin)
    return starts, ends


def _of_microbatches(
    reading: Reading, labels: Labels, sums: InSums, lives: dict[Origin, tuple[int, int]]
) -> set[Origin]:
    """The values that are of one microbatch: taken by actions of it alone.

    Not sums, which go on to other microbatches and behind the schedule.
    """
    found: set[Origin] = set()
    for origin in lives:
        event = reading.events[origin.event]
        maker = action_of(reading, labels, event)
        if maker is None or _is_sum(event, origin, sums):
            continue
        users = [
            None if use.event == RETURN else action_of(reading, labels, reading.events[use.event])
            for use in reading.uses.get(origin, [])
        ]
        if all(user is not None and user.microbatch == maker.microbatch for user in users):
            found.add(origin)
    return found


def _is_sum(event: Event, origin: Origin, sums: InSums) -> bool:
    return isinstance(event, Call) and (event.function, origin.number) in sums.results


class Temporaries:
    """The most that the functions of a module take while they run, beside their arguments.

    Their results are in it. Each function is read once.
    """

    def __init__(self, module: ir.Module) -> None:
        self._context = module.context
        copy = bindings.parse_module(bindings.write_bytecode(module), module.context)
        functions_by_name(copy)[ENTRY].erase()
        self._code = bindings.write_bytecode(copy)
        self._known: dict[str, float] = {}

    def of(self, function: str) -> float:
        """Bytes of a function. Raises a located ToolError where they are not known."""
        if function not in self._known:
            copy = bindings.parse_module(self._code, self._context)
            entry = functions_by_name(copy)[function]
            with copy.context:
                entry.attributes["sym_name"] = ir.StringAttr.get(ENTRY)
                entry.attributes["sym_visibility"] = ir.StringAttr.get("public")
            clock = Clock(load_hardware(_ANY_HARDWARE), ModuleFacts.of(copy).grid.size)
            graph = module_task_graph(copy, clock, function)
            self._known[function] = memory_profile(graph, in_loop=True).peak_bytes
        return self._known[function]

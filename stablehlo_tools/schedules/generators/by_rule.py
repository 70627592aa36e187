"""Schedules written by a rule, independent of costs: on one loop, or in two opposite directions.

On the loop placement: GPipe, 1F1B, interleaved, breadth-first, circular and ZB-H. Interleaved 1F1B
exists for any number of microbatches. They run in groups: every rank runs its first chunk for a
whole group, then its second, and so on. With a group of fewer than p, ranks would wait for its
microbatches to pass around the loop. So the m microbatches form m // p groups of nearly equal
sizes, each of p to 2p - 1.

Zero-bubble schedules (arXiv 2401.10241) split the backward. Input gradients keep the pipeline
busy. Each rank delays its weight gradients by the time by which its first input gradient precedes
that of rank 0, and runs them at the end, where 1F1B idles.

DualPipe (DeepSeek-V3, arXiv 2412.19437; github.com/deepseek-ai/DualPipe) runs two pipelines through
the same ranks in opposite directions, and overlaps a forward and a backward in every step of the
steady state. DualPipeV folds it at the middle: rank r runs the stages of ranks r and 2p - 1 - r. In
both, a rank has a near stage, which its microbatches reach first, and a far one. So one list of
phases serves both.

Schedules of sequence slices are 1F1B in units of a part of a microbatch's tokens. Under causal
attention a slice reads keys and values of earlier slices, which are on the rank of the stage. So
the forwards of a microbatch run from its first slice to its last, and its gradients in reverse. A
rank runs so many slices ahead that the last forward of a microbatch, not its first, precedes its
backwards. The slices are assumed to have equal times. Seq1F1B (Sun et al., arXiv 2406.03488) cuts
them so that they do. SlimPipe (Li et al., arXiv 2504.14519) cuts equal lengths and lets ranks
exchange parts of their attention; that happens within a phase and does not affect the order.

Schedules of waves: a microbatch runs along its route without a pause, and back the same way.

All phases are assumed to last one slot. A microbatch that starts in slot t runs stage s forward in
slot t + s and, with S stages, backward in slot t + 2S - 1 - s. On the routes below, microbatches of
a group that start two slots apart never meet on a rank. Neither do groups that start 2S slots
apart: the forwards of a group fill the slots between the backwards of the previous one. Each rank
runs its phases in the order of their slots; the simulator applies the real times.

Chimera (Li and Hoefler, arXiv 2107.06925; github.com/Shigangli/Chimera) sends half of the
microbatches down the ranks and half up, in groups of p / 2 a direction. Longer batches follow by
its "direct concatenation"; its forward doubling and backward halving recompute, or halve
microbatches, and are not written here.

Hanayo (Liu et al., arXiv 2308.15762) goes down and up the ranks once a wave, with one copy of the
parameters, in groups of p. For one wave this is Chimera of 2p ranks, folded at the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.setting import Costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionPair,
    Placement,
    Step,
    Table,
    backward,
    bidirectional,
    forward,
    input_gradient,
    loop,
    table_of,
    v_shape,
    weight_gradient,
)
from stablehlo_tools.schedules.table_simulator import simulate

_APART = 2  # slots between two microbatches of a group

Visit = tuple[int, int]  # a stage and a microbatch


def gpipe(ranks: int, microbatches: int) -> Table:
    """GPipe (arXiv 1811.06965): bubble (p - 1)(F + B), all activations of the batch are live."""
    return replace(looped_bfs(ranks, microbatches, 1), name="gpipe")


def gpipe_but_1f1b_for_the_last(ranks: int, microbatches: int) -> Table:
    """GPipe, except that the last rank runs each backward right after its forward.

    It has the times of GPipe; the last rank holds one activation.
    """
    last = [step(ranks - 1, i) for i in range(microbatches) for step in (forward, backward)]
    table = gpipe(ranks, microbatches)
    rows = [*table.rows[:-1], last]
    return table_of("gpipe-1f1b-last", table.placement, microbatches, rows)


def one_f_one_b(ranks: int, microbatches: int) -> Table:
    """1F1B (arXiv 2006.09503): bubble (p - 1)(F + B), at most p - r activations on rank r."""
    ahead = [ranks - rank for rank in range(ranks)]
    return _in_turns("1f1b", ranks, microbatches, 1, ahead)


def eager_one_f_one_b(ranks: int, microbatches: int) -> Table:
    """1F1B with forwards so far ahead that one hop in each direction overlaps with compute.

    Rank r holds at most 2(p - r) - 1 activations. The backward wave reaches it 2(p - r) - 1 steps
    after its own first step, so no rank waits for a transfer in between.
    """
    ahead = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return _in_turns("eager-1f1b", ranks, microbatches, 1, ahead)


def _in_turns(name: str, ranks: int, microbatches: int, chunks: int, ahead: Sequence[int]) -> Table:
    """Returns the table of ranks that alternate, rank r being `ahead[r]` forwards ahead."""
    rows = [
        alternate(*visits(ranks, microbatches, chunks, rank), ahead[rank]) for rank in range(ranks)
    ]
    return table_of(name, loop(ranks, chunks), microbatches, rows)


def alternate(
    forwards: Sequence[Visit],
    backwards: Sequence[Visit],
    ahead: int,
    gradient: Callable[[int, int], Action] = backward,
) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards left over.

    At most `ahead` activations are alive.
    """
    ups, downs = [forward(*each) for each in forwards], [gradient(*each) for each in backwards]
    first = min(ahead, len(ups))
    turns = chain.from_iterable(zip(downs, ups[first:], strict=False))
    return [*ups[:first], *turns, *downs[len(ups) - first :]]


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Table:
    """Interleaved 1F1B: bubble (p - 1)(F + B) of a chunk, the least for m >= p microbatches.

    Generalizes Megatron-LM's schedule (arXiv 2104.04473), which requires p to divide m. Rank r
    holds at most (v - 1)g + 2(p - 1 - r) + 1 activations, where g is the largest group; g = p if p
    divides m.
    """
    largest = max(groups(ranks, microbatches))
    ahead = [(chunks - 1) * largest + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    return _in_turns("interleaved-1f1b", ranks, microbatches, chunks, ahead)


def groups(ranks: int, microbatches: int) -> list[int]:
    """Returns the sizes of the groups, nearly equal; each is at least p if m is."""
    count = max(1, microbatches // ranks)
    each, rest = divmod(microbatches, count)
    return [each + 1] * rest + [each] * (count - rest)


def visits(
    ranks: int, microbatches: int, chunks: int, rank: int, group: int | None = None
) -> tuple[list[Visit], list[Visit]]:
    """The forwards and the backwards of a rank in order, each a stage and a microbatch.

    `group` is the least number of microbatches in a group, p by default: fewer keep fewer
    activations alive, and leave ranks waiting.
    """
    forwards: list[Visit] = []
    backwards: list[Visit] = []
    stages = range(rank, ranks * chunks, ranks)
    first = 0
    for size in groups(ranks if group is None else group, microbatches):
        members = range(first, first + size)
        forwards += [(stage, i) for stage in stages for i in members]
        backwards += [(stage, i) for stage in reversed(stages) for i in members]
        first += size
    return forwards, backwards


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Table:
    """Breadth-first looped pipeline (arXiv 2211.05953): bubble (p - 1)(F + B) of a chunk.

    Each stage runs all microbatches consecutively, so weights are gathered only once. All
    activations of the batch are live at the same time.
    """
    batch = range(microbatches)
    rows = [
        [forward(stage, i) for stage in stages for i in batch]
        + [backward(stage, i) for stage in reversed(stages) for i in batch]
        for stages in (range(rank, ranks * chunks, ranks) for rank in range(ranks))
    ]
    return table_of("looped-bfs", loop(ranks, chunks), microbatches, rows)


def circular(ranks: int, microbatches: int, chunks: int, training: bool = True) -> Table:
    """The circular pipeline of one SPMD loop: groups circulate, one hop per iteration.

    The bubble of the forward is (S - 1)/(mv + S - 1) with S = p. The backward is the reversed loop,
    as differentiation makes it, so all activations of the batch are live at the same time. The
    table holds only the work; the loop sends on every iteration, even without work.
    """
    rows = []
    for rank in range(ranks):
        order, _ = visits(ranks, microbatches, chunks, rank)
        back = reversed(order) if training else ()
        rows.append([*(forward(*visit) for visit in order), *(backward(*visit) for visit in back)])
    name = "circular" if training else "circular-forward"
    return table_of(name, loop(ranks, chunks), microbatches, rows, training)


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """ZB-H1: bubble (p - 1)(F + I - W) of a chunk by END; with one chunk, p activations per rank.

    With v chunks it is the interleaved zero bubble of PyTorch: (v - 1)g + p activations, where g is
    the largest group; g = p if p divides m.
    """
    return _put_off("zb-h1", ranks, microbatches, chunks, 1)


def zb_h2(ranks: int, microbatches: int) -> Table:
    """ZB-H2: bubble (p - 1)(F + I - 2W) by SPAN; 2p - 1 activations on every rank."""
    return _put_off("zb-h2", ranks, microbatches, 1, 2)


def _put_off(name: str, ranks: int, microbatches: int, chunks: int, distance: int) -> Table:
    """Returns a ZB-H table.

    For each rank closer to the first, `distance` more forwards run ahead and `distance` fewer
    weight gradients are delayed.
    """
    largest = max(groups(ranks, microbatches))
    rows = [
        _row(
            *visits(ranks, microbatches, chunks, rank),
            ahead=(chunks - 1) * largest + distance * (ranks - 1 - rank),
            put_off=distance * rank,
        )
        for rank in range(ranks)
    ]
    return table_of(name, loop(ranks, chunks), microbatches, rows)


def _row(forwards: list[Visit], backwards: list[Visit], ahead: int, put_off: int) -> list[Action]:
    """Returns a row: `ahead` forwards, then F and I alternating, with W `put_off` rounds later."""
    row = [forward(*visit) for visit in forwards[:ahead]]
    for turn, visit in enumerate(backwards):
        if ahead + turn < len(forwards):
            row.append(forward(*forwards[ahead + turn]))
        row.append(input_gradient(*visit))
        if turn >= put_off:
            row.append(weight_gradient(*backwards[turn - put_off]))
    left = backwards[max(0, len(backwards) - put_off) :]
    return row + [weight_gradient(*visit) for visit in left]


def dualpipe(ranks: int, microbatches: int, overlapped: bool = True) -> Table:
    """DualPipe: even microbatches run down the ranks and odd ones up.

    Each rank holds the parameters of two stages and at most p + 1 activations. It idles at most
    (p/2 - 1)(F&B + B - 3W), if F = I >= W and F&B >= F + W on all stages. F&B is the time of an
    overlapped pair, B that of a full backward. Without `overlapped` every pair is a forward and
    then a backward. Raises ToolError unless the ranks are even, and the microbatches are even and
    at least twice as many.
    """
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        given, taken = (
            f"microbatches={microbatches}",
            f"microbatches={max(microbatches + 1, 2 * ranks) // 2 * 2}",
        )
        if ranks % 2:
            given, taken = f"ranks={ranks}", f"ranks={ranks + 1}"
        raise ToolError(
            f"dualpipe: {ranks} ranks and {microbatches} microbatches; it needs an even number of "
            "ranks, and an even number of microbatches that is at least twice the ranks",
            instead=(given, taken),
        )
    half = ranks // 2
    rows: list[list[Step]] = []
    for rank in range(ranks):
        near = min(rank, ranks - 1 - rank)
        routes = (0, 1) if rank < half else (1, 0)
        chunks = [_Chunk(near, routes[0], 2), _Chunk(ranks - 1 - near, routes[1], 2)]
        rows.append(_rank_row(half, near, microbatches // 2, chunks, overlapped))
    return table_of("dualpipe", bidirectional(ranks), microbatches, rows)


def dualpipe_v(ranks: int, microbatches: int, overlapped: bool = True) -> Table:
    """Rank r holds stages r and 2p - 1 - r, and at most 2p + 1 activations of theirs.

    Of the makespan it idles (p - 1)(F&B + B - 3W) at most, of a stage's times and under the
    conditions of `dualpipe`. Raises ToolError for fewer than two microbatches a rank.
    """
    if microbatches < 2 * ranks:
        raise ToolError(
            f"dualpipe-v: {ranks} ranks and {microbatches} microbatches; it needs at least twice "
            f"as many microbatches as ranks, here {2 * ranks}"
        )
    rows = [
        _rank_row(
            ranks,
            rank,
            microbatches,
            [_Chunk(rank, 0, 1), _Chunk(2 * ranks - 1 - rank, 0, 1)],
            overlapped,
        )
        for rank in range(ranks)
    ]
    return table_of("dualpipe-v", v_shape(ranks, 2), microbatches, rows)


def fastest(
    write: Callable[[int, int, bool], Table], ranks: int, microbatches: int, costs: Costs
) -> Table:
    """Returns the table of `write` with the lower makespan, with or without overlapped pairs.

    `write` is `dualpipe` or `dualpipe_v`. A pair sends its forward's activation only after its
    backward has finished too. So if overlapping saves little time, pairs delay the first and the
    last waves, and separate phases are faster. On a tie the pairs are kept.
    """
    tables = [write(ranks, microbatches, overlapped) for overlapped in (True, False)]
    return min(tables, key=lambda table: simulate(table, costs).makespan)


def _phases(half: int, near: int, microbatches: int) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the eight phases of a rank that is `near` ranks from its end of `half` such ranks.

    `microbatches` are those of each stage. The far stage's forwards arrive from the middle rank,
    `half - 1 - near` ranks away; until then the rank runs near ones.

    A phase is a number of repetitions and the moves to repeat. A move is a forward F, a full
    backward B or an input gradient I of the near (n) or the far (f) stage, or W, the oldest
    remaining weight gradient. F&B is an overlapped pair.
    """
    away = half - 1 - near
    steady = microbatches - 2 * half + near + 1
    # On the middle rank the first far backward depends on the forward right before it.
    opening = ("nF", "fB") if away == 0 else ("nF&fB",)
    closing = [move for _ in range(near + 1) for move in ("fB", "nB")]
    split = near + 1  # the later half of the last backwards leave their weight gradients open
    closing[split:] = [move.replace("B", "I") for move in closing[split:]]
    return [
        (2 * away, ("nF",)),
        (near + 1, ("nF", "fF")),
        (away, ("fI", "W", "fF")),
        (1, (*opening, "fF&nB")),
        (steady - 1, ("nF&fB", "fF&nB")),
        (away, ("fB", "fF&nB")),
        (1, tuple(closing)),
        (away, ("W", "nI")),
        (near + 1, ("W",)),
    ]


class _Chunk:
    """A stage of a rank, whose microbatches run forward and backward in their order."""

    def __init__(self, stage: int, first: int, step: int) -> None:
        self.stage = stage
        self.forwards = count(first, step)
        self.backwards = count(first, step)


def _rank_row(
    half: int, near: int, microbatches: int, chunks: Sequence[_Chunk], overlapped: bool
) -> list[Step]:
    row: list[Step] = []
    still: deque[tuple[int, int]] = deque()  # stage and microbatch of the pending weight gradients
    of = dict(zip("nf", chunks, strict=True))
    for times, moves in _phases(half, near, microbatches):
        for move in moves * times:
            steps = [_step(part, of, still) for part in move.split("&")]
            row += [ActionPair(*steps)] if overlapped and len(steps) > 1 else steps
    return row


def _step(move: str, of: dict[str, _Chunk], still: deque[tuple[int, int]]) -> Action:
    if move == "W":
        return weight_gradient(*still.popleft())
    chunk, what = of[move[0]], move[1]
    if what == "F":
        return forward(chunk.stage, next(chunk.forwards))
    microbatch = next(chunk.backwards)
    if what == "B":
        return backward(chunk.stage, microbatch)
    still.append((chunk.stage, microbatch))
    return input_gradient(chunk.stage, microbatch)


def seq1f1b(ranks: int, microbatches: int, slices: int) -> Table:
    """Bubble (p - 1)(F + B) of a slice; rank r holds at most k + p - 1 - r slices, k a microbatch.

    Its warm-up of p - r - 2 + k slices is as in Sea AI Lab's zero-bubble-pipeline-parallelism
    (zerobubble/scheduler/seq1f1b.py). With one slice it is 1F1B.
    """
    return _sliced_table("seq1f1b", ranks, microbatches, slices, 1, 1)


def slimpipe(ranks: int, microbatches: int, slices: int, chunks: int = 1) -> Table:
    """SlimPipe: bubble (p - 1)(F + B) of a slice on a chunk.

    Rank r holds at most vk + 2(p - 1 - r) slices of its v chunks; a microbatch is vk of them. The
    two more for every hop to the last rank let transfers in both directions overlap with compute.
    Raises ToolError for several chunks and fewer slices than ranks, because it would deadlock.
    """
    if chunks > 1 and slices < ranks:
        raise ToolError(
            f"slimpipe: {chunks} chunks a rank, {slices} slices and {ranks} ranks; with more than "
            "one chunk it needs at least as many slices as ranks"
        )
    return _sliced_table("slimpipe", ranks, microbatches, slices, chunks, 2)


def _sliced_table(
    name: str, ranks: int, microbatches: int, slices: int, chunks: int, each_hop: int
) -> Table:
    """Returns a table of slices; each rank is `each_hop` slices ahead of the next one."""
    rows = []
    for rank in range(ranks):
        forwards: list[Visit] = []
        backwards: list[Visit] = []
        for first in range(0, microbatches * slices, slices):
            stages = range(rank, ranks * chunks, ranks)
            own = [(stage, first + part) for stage in stages for part in range(slices)]
            forwards += own
            backwards += reversed(own)
        rows.append(alternate(forwards, backwards, chunks * slices + each_hop * (ranks - 1 - rank)))
    return table_of(name, loop(ranks, chunks), microbatches * slices, rows, sequence_slices=slices)


def chimera(ranks: int, microbatches: int) -> Table:
    """Chimera: even microbatches run down the ranks and odd ones up.

    Each rank holds the parameters of two stages and p / 2 + 1 to p activations. If a backward lasts
    as long as a forward and p divides m, the bubble is p - 2 phases, (p - 2)/(2m + p - 2) of the
    time. Raises ToolError for an odd number of ranks, because the two directions would collide.
    """
    if ranks % 2:
        raise ToolError(
            f"chimera: {ranks} ranks; it needs an even number of ranks",
            instead=(f"ranks={ranks}", f"ranks={ranks + 1}"),
        )
    return _waves("chimera", bidirectional(ranks), microbatches, ranks // 2)


def hanayo(ranks: int, microbatches: int, chunks: int) -> Table:
    """Hanayo: down the ranks and up again once for every two chunks, V / 2 waves.

    A rank holds at most pV activations: those of p microbatches for its chunks. If a backward lasts
    as long as a forward and p divides m, the bubble is 2(p - 1) phases of one chunk, or
    (p - 1)/(mV + p - 1) of the time. Raises ToolError for an odd number of chunks.
    """
    if chunks % 2:
        raise ToolError(
            f"hanayo: {chunks} chunk{'s' * (chunks != 1)} a rank; it needs an even number of "
            "chunks, two a wave",
            instead=(f"chunks={chunks}", f"chunks={chunks + 1}"),
        )
    return _waves("hanayo", v_shape(ranks, chunks), microbatches, ranks)


def _waves(name: str, placement: Placement, microbatches: int, group: int) -> Table:
    """Returns a table of waves; `group` microbatches of a route start two slots apart."""
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(placement.ranks)]
    for microbatch in range(microbatches):
        before, place = divmod(microbatch // len(placement.routes), group)
        start = 2 * placement.stages * before + _APART * place
        for stage in range(placement.stages):
            row = slots[placement.rank_of(stage, microbatch)]
            row.append((start + stage, forward(stage, microbatch)))
            row.append((start + 2 * placement.stages - 1 - stage, backward(stage, microbatch)))
    rows = [[action for _, action in sorted(row, key=lambda each: each[0])] for row in slots]
    return table_of(name, placement, microbatches, rows)

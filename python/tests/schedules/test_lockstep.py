"""Schedules in lock step, played with symbols for values: every value reaches its cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.explicit_tables import align_columns
from stablehlo_tools.schedules.generators.by_rule import (
    groups,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from stablehlo_tools.schedules.lockstep import (
    Direction,
    Lockstep,
    StackTurns,
    TickCell,
    backward_lockstep,
    forward_lockstep,
    training_lockstep,
    turns_of,
)
from stablehlo_tools.schedules.table import Action, ActionKind

RANKS = range(1, 7)
CHUNKS = range(1, 5)
MICROBATCHES = range(1, 10)
PLACES = list(product(RANKS, CHUNKS))
SHAPES = [(ranks, m, chunks) for (ranks, chunks), m in product(PLACES, MICROBATCHES)]

Value = tuple[str | int, ...]
Work = tuple[int, int, int]  # rank, chunk, microbatch


class _Player:
    """Runs a schedule on slots; a value is its microbatch and the stages it has been through.

    Knows of a schedule what an SPMD program does: read, compute, write, send round the ring.
    """

    def __init__(self, schedule: Lockstep) -> None:
        self._schedule = schedule
        self._last = schedule.ranks * schedule.chunks - 1
        self._received = {
            back: [[_junk("empty")] * each.slots for _ in range(schedule.ranks)]
            for back, each in _directions(schedule)
        }
        self._kept = [[_junk("empty")] * schedule.kept_slots for _ in range(schedule.ranks)]
        self._done: dict[tuple[bool, int, int], Value] = {}

    def play(self) -> None:
        schedule = self._schedule
        for tick in range(schedule.ticks):
            for back, direction in _directions(schedule):
                sent = [self._run(back, rank, cell) for rank, cell in _row(direction, tick)]
                self._deliver(back, sent, direction.deliveries[tick])
        stages = range(self._last + 1)
        count = schedule.microbatches * len(stages) * len(schedule.directions)
        assert len(self._done) == count
        for back, _ in _directions(schedule):
            order = [*reversed(stages)] if back else [*stages]
            for microbatch in range(schedule.microbatches):
                result = self._done[back, order[-1], microbatch]
                assert result == (_origin(back), microbatch, *order)

    def _run(self, back: bool, rank: int, cell: TickCell | None) -> Value:
        if cell is None:
            return _junk("idle")
        stage = cell.chunk * self._schedule.ranks + rank
        assert (back, stage, cell.microbatch) not in self._done
        value = self._input(back, rank, stage, cell)
        passed = range(self._last, stage, -1) if back else range(stage)
        assert value == (_origin(back), cell.microbatch, *passed)
        self._keep(back, rank, stage, cell)
        self._done[back, stage, cell.microbatch] = (*value, stage)
        return (*value, stage)

    def _input(self, back: bool, rank: int, stage: int, cell: TickCell) -> Value:
        first = stage == (self._last if back else 0)
        assert (cell.source == -1) == first
        if not first:
            assert cell.source >= 0
            return self._received[back][rank][cell.source]
        if back and self._schedule.forward is not None:
            assert (False, stage, cell.microbatch) in self._done, "the loss needs the forward"
        return (_origin(back), cell.microbatch)

    def _keep(self, back: bool, rank: int, stage: int, cell: TickCell) -> None:
        if len(self._schedule.directions) == 1:
            assert cell.kept == -1
            return
        assert 0 <= cell.kept < self._schedule.kept_slots
        content = ("kept", stage, cell.microbatch)
        if back:
            assert self._kept[rank][cell.kept] == content
        else:
            self._kept[rank][cell.kept] = content

    def _deliver(self, back: bool, sent: list[Value], slots: tuple[int, ...]) -> None:
        away = 1 if back else -1
        for rank, slot in enumerate(slots):
            assert slot >= 0
            self._received[back][rank][slot] = sent[(rank + away) % len(sent)]


def _directions(schedule: Lockstep) -> Iterator[tuple[bool, Direction]]:
    """The directions that there are; True for backwards, which a tick runs last."""
    for back, direction in ((False, schedule.forward), (True, schedule.backward)):
        if direction is not None:
            yield back, direction


def _row(direction: Direction, tick: int) -> Iterator[tuple[int, TickCell | None]]:
    return enumerate(direction.cells[tick])


def _origin(back: bool) -> str:
    return "gradient" if back else "sample"


def _junk(why: str) -> Value:
    return ("junk", why)


def _times(direction: Direction) -> dict[Work, int]:
    return {
        (rank, cell.chunk, cell.microbatch): tick
        for tick, cells in enumerate(direction.cells)
        for rank, cell in enumerate(cells)
        if cell is not None
    }


def _fewest_receive_slots(schedule: Lockstep, back: bool, direction: Direction) -> int:
    """The most data that lie at a rank at once, counting what arrives, used or not."""
    lying = [[0] * schedule.ticks for _ in range(schedule.ranks)]
    useful = [[0] * schedule.ticks for _ in range(schedule.ranks)]
    times = _times(direction)
    for (rank, chunk, microbatch), read in times.items():
        stage = chunk * schedule.ranks + rank + (1 if back else -1)
        before = (stage % schedule.ranks, stage // schedule.ranks, microbatch)
        if before not in times:
            continue
        useful[rank][times[before]] = 1
        for tick in range(times[before], read):
            lying[rank][tick] += 1
    cells = product(range(schedule.ranks), range(schedule.ticks))
    return max(lying[rank][tick] + 1 - useful[rank][tick] for rank, tick in cells)


def _fewest_kept_slots(forward: Direction, backward: Direction) -> int:
    alive = [[0] * len(forward.cells) for _ in forward.cells[0]]
    read = _times(backward)
    for work, written in _times(forward).items():
        for tick in range(written, read[work] + 1):
            alive[work[0]][tick] += 1
    return max(map(max, alive))


def _all_kinds(ranks: int, microbatches: int, chunks: int) -> list[Lockstep]:
    return [
        forward_lockstep(ranks, microbatches, chunks),
        backward_lockstep(ranks, microbatches, chunks),
        training_lockstep(ranks, microbatches, chunks, together=False),
        training_lockstep(ranks, microbatches, chunks, together=True),
    ]


@pytest.mark.parametrize(("ranks", "chunks"), PLACES)
def test_every_value_reaches_its_cell(ranks: int, chunks: int):
    for microbatches in MICROBATCHES:
        for schedule in _all_kinds(ranks, microbatches, chunks):
            _Player(schedule).play()


@pytest.mark.parametrize(("ranks", "chunks"), PLACES)
def test_slots_are_as_few_as_overlap(ranks: int, chunks: int):
    for microbatches in MICROBATCHES:
        for schedule in _all_kinds(ranks, microbatches, chunks):
            for back, direction in _directions(schedule):
                assert direction.slots == _fewest_receive_slots(schedule, back, direction)
            if schedule.forward is not None and schedule.backward is not None:
                fewest = _fewest_kept_slots(schedule.forward, schedule.backward)
                assert schedule.kept_slots == fewest


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("ranks", "each", "stacks"), [(2, 1, 2), (3, 2, 2), (4, 1, 3)])
def test_stacks_keep_no_more_than_their_own_overlap(
    ranks: int, each: int, stacks: int, together: bool
):
    for microbatches in MICROBATCHES:
        schedule = training_lockstep(ranks, microbatches, each * stacks, together)
        turns = turns_of(schedule, stacks)
        cells = sum(len(_times(direction)) for turn in turns for direction in turn[:2])
        assert cells == 2 * ranks * each * stacks * microbatches
        for turn in turns:
            assert set(_times(turn.forward)) == set(_times(turn.backward))
            assert turn.kept_slots == _fewest_kept_slots(turn.forward, turn.backward)
            _check_kept(turn)


def _check_kept(turn: StackTurns) -> None:
    """That every backward finds what its forward left."""
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    for ahead, back in zip(turn.forward.cells, turn.backward.cells, strict=True):
        for rank, cell in enumerate(ahead):
            if cell is not None:
                assert 0 <= cell.kept < turn.kept_slots
                kept[rank, cell.kept] = (cell.chunk, cell.microbatch)
        for rank, cell in enumerate(back):
            if cell is not None:
                assert kept[rank, cell.kept] == (cell.chunk, cell.microbatch)


@pytest.mark.parametrize("kind", range(4))
def test_a_wrong_slot_is_noticed(kind: int):
    schedule = _all_kinds(3, 7, 2)[kind]
    for _, direction in _directions(schedule):
        for tick, rank in product(range(schedule.ticks), range(3)):
            cell = direction.cells[tick][rank]
            if cell is None or cell.source < 0:
                continue
            wrong = cell._replace(source=(cell.source + 1) % max(2, direction.slots))
            cells = [list(column) for column in direction.cells]
            cells[tick][rank] = wrong
            slots = max(2, direction.slots)
            changed = replace(direction, cells=tuple(map(tuple, cells)), slots=slots)
            where = "forward" if direction is schedule.forward else "backward"
            with pytest.raises(AssertionError):
                _Player(replace(schedule, **{where: changed})).play()


def test_a_kept_slot_too_few_is_noticed():
    schedule = training_lockstep(3, 7, 1, together=True)
    assert schedule.forward is not None
    assert schedule.backward is not None
    forward, backward = (
        replace(
            each,
            cells=tuple(
                tuple(cell and cell._replace(kept=cell.kept % 4) for cell in column)
                for column in each.cells
            ),
        )
        for each in (schedule.forward, schedule.backward)
    )
    assert schedule.kept_slots == 5
    with pytest.raises(AssertionError):
        _Player(replace(schedule, forward=forward, backward=backward)).play()


def test_one_direction_takes_the_least_ticks():
    for ranks, microbatches, chunks in SHAPES:
        least = max(
            microbatches * chunks + ranks - 1,  # all work of a rank, and the way to the last
            ranks * chunks + microbatches - 1,  # all microbatches enter, and the last goes through
        )
        assert forward_lockstep(ranks, microbatches, chunks).ticks == least
        assert backward_lockstep(ranks, microbatches, chunks).ticks == least


def test_one_receive_slot_where_groups_fill_the_ring():
    for ranks, microbatches, chunks in SHAPES:
        if microbatches % ranks and microbatches > ranks and chunks > 1:
            continue
        for schedule in _all_kinds(ranks, microbatches, chunks)[:2]:
            assert [each.slots for each in schedule.directions] == [1]


def test_backward_is_the_mirror_image():
    for ranks, microbatches, chunks in SHAPES:
        forward = forward_lockstep(ranks, microbatches, chunks).forward
        backward = backward_lockstep(ranks, microbatches, chunks).backward
        assert forward is not None
        assert backward is not None
        mirrored = [
            tuple(cell and cell._replace(chunk=chunks - 1 - cell.chunk) for cell in column[::-1])
            for column in forward.cells
        ]
        assert mirrored == [*backward.cells]
        assert [column[::-1] for column in forward.deliveries] == [*backward.deliveries]


def test_in_turn_is_the_generators_table_in_columns():
    for ranks, microbatches, chunks in SHAPES:
        schedule = training_lockstep(ranks, microbatches, chunks, together=False)
        table = align_columns(
            one_f_one_b(ranks, microbatches)
            if chunks == 1
            else interleaved_one_f_one_b(ranks, microbatches, chunks)
        )
        expected = {
            (step.kind, step.stage, step.microbatch): tick
            for row in table.rows
            for tick, step in enumerate(row)
            if isinstance(step, Action)
        }
        found = {
            (
                ActionKind.BACKWARD if back else ActionKind.FORWARD,
                chunk * ranks + rank,
                microbatch,
            ): tick
            for back, direction in _directions(schedule)
            for (rank, chunk, microbatch), tick in _times(direction).items()
        }
        assert found == expected


def test_one_chunk_in_turn_keeps_what_1f1b_keeps():
    for ranks, microbatches in product(RANKS, MICROBATCHES):
        schedule = training_lockstep(ranks, microbatches, 1, together=False)
        assert schedule.kept_slots == min(ranks, microbatches)
        assert schedule.ticks == 2 * (microbatches + ranks - 1)
        assert all(schedule.busy(rank) == 2 * microbatches for rank in range(ranks))


def test_chunks_in_turn_keep_what_interleaved_1f1b_keeps():
    for ranks, microbatches, chunks in SHAPES:
        if chunks == 1:
            continue
        schedule = training_lockstep(ranks, microbatches, chunks, together=False)
        ahead = (chunks - 1) * max(groups(ranks, microbatches)) + 2 * (ranks - 1) + 1
        assert schedule.kept_slots == min(ahead, microbatches * chunks)


def test_together_takes_the_least_ticks_and_slots_where_groups_fill_the_ring():
    for ranks, microbatches, chunks in SHAPES:
        schedule = training_lockstep(ranks, microbatches, chunks, together=True)
        rest = microbatches % ranks
        whole = chunks == 1 or not rest or microbatches < ranks
        alone = backward_lockstep(ranks, microbatches, chunks).ticks
        least = ranks * chunks - 1 + alone  # the first backward waits for the first to go through
        size = max(groups(ranks, microbatches))
        more = 0 if whole else (chunks - 1) * min(ranks - rest, size - ranks)
        assert schedule.ticks == least + more
        if whole:
            kept = min(microbatches * chunks, (chunks + 1) * ranks - 1)
            assert schedule.kept_slots == kept
            assert [each.slots for each in schedule.directions] == [1, 1]


def test_one_chunk_together_by_its_figures():
    for ranks, microbatches in product(RANKS, MICROBATCHES):
        schedule = training_lockstep(ranks, microbatches, 1, together=True)
        assert schedule.ticks == microbatches + 2 * ranks - 2
        assert schedule.kept_slots == min(microbatches, 2 * ranks - 1)


def test_a_backward_of_the_last_stage_shares_the_tick_of_its_forward():
    schedule = training_lockstep(2, 3, 1, together=True)
    assert schedule.forward is not None
    assert schedule.backward is not None
    assert schedule.forward.cells[1][1] == TickCell(0, 0, 0, 0)
    assert schedule.backward.cells[1][1] == TickCell(0, 0, -1, 0)
    assert schedule.busy(0) == 5
    assert schedule.busy(1) == 3


@pytest.mark.parametrize(
    ("counts", "what"), [((0, 1, 1), "ranks"), ((1, 0, 1), "microbatches"), ((1, 1, 0), "chunks")]
)
def test_counts_below_one_are_refused(counts: tuple[int, int, int], what: str):
    ranks, microbatches, chunks = counts
    message = f"a pipeline needs a positive number of {what}, not 0"
    for build in (forward_lockstep, backward_lockstep):
        with pytest.raises(ToolError, match=message):
            build(ranks, microbatches, chunks)
    for together in (False, True):
        with pytest.raises(ToolError, match=message):
            training_lockstep(ranks, microbatches, chunks, together)


@pytest.mark.soak
def test_a_large_pipeline_plays():
    for schedule in _all_kinds(64, 1023, 4):
        _Player(schedule).play()

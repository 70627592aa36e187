"""Every change of one action of a table, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from stablehlo_tools.schedules.table import Action, ActionKind, ActionPair, Row, Step, Table


class Mutation(NamedTuple):
    """What was done to a table, and the rows that are other than they were, by rank."""

    what: str
    rows: dict[int, Row]


def mutated(table: Table, mutation: Mutation) -> Table:
    """The table after a mutation."""
    rows = (mutation.rows.get(rank, row) for rank, row in enumerate(table.rows))
    return replace(table, rows=tuple(rows))


def mutations(table: Table) -> Iterator[Mutation]:
    """Every change of one action."""
    for rank, row in enumerate(table.rows):
        for at in range(len(row)):
            where = f"rank {rank}, step {at}"
            for what, changed in _of_row(row, at):
                yield Mutation(f"{where}: {what}", {rank: changed})
            for what, other, changed in _to_others(table, rank, at):
                moved = {rank: _without(row, at), other: changed}
                yield Mutation(f"{where}: moved to {what}", moved)
                yield Mutation(f"{where}: copied to {what}", {other: changed})


def reorderings(table: Table) -> Iterator[Mutation]:
    """Of these, the changes that leave each rank what it had."""
    for rank, row in enumerate(table.rows):
        for at in range(len(row)):
            for what, changed in _reordered(row, at):
                yield Mutation(f"rank {rank}, step {at}: {what}", {rank: changed})


def _of_row(row: Row, at: int) -> Iterator[tuple[str, Row]]:
    step = row[at]
    yield from _reordered(row, at)
    yield "deleted", _without(row, at)
    yield "made idle", _replaced(row, at, [None])
    for to in range(len(row) + 1):
        yield f"duplicated at {to}", (*row[:to], step, *row[to:])
    for changed in _changed(step):
        written = ",".join(map(str, changed))
        yield f"became {written}", _replaced(row, at, changed)


def _reordered(row: Row, at: int) -> Iterator[tuple[str, Row]]:
    step = row[at]
    rest = _without(row, at)
    for to in range(len(row)):
        if to != at:
            yield f"moved to {to}", (*rest[:to], step, *rest[to:])
        if to > at:
            swapped = _replaced(row, at, [row[to]])
            yield f"swapped with {to}", _replaced(swapped, to, [step])
    following = row[at + 1 : at + 2]
    if isinstance(step, Action) and following and isinstance(following[0], Action):
        for pair in (ActionPair(step, following[0]), ActionPair(following[0], step)):
            yield f"merged into {pair}", (*row[:at], pair, *row[at + 2 :])


def _changed(step: Step | None) -> Iterator[Sequence[Step | None]]:
    """A step of another kind, stage or microbatch; a pair taken apart too."""
    if isinstance(step, Action):
        yield from ([action] for action in _neighbours(step))
    elif step is not None:
        yield [step.forward, step.backward]
        yield [step.backward, step.forward]
        yield [ActionPair(step.backward, step.forward)]
        yield from ([step._replace(forward=one)] for one in _neighbours(step.forward))
        yield from ([step._replace(backward=one)] for one in _neighbours(step.backward))


def _neighbours(action: Action) -> Iterator[Action]:
    for kind in ActionKind:
        if kind is not action.kind and kind.is_copy == action.kind.is_copy:
            yield action._replace(kind=kind)
    for by in (-1, 1):
        yield action._replace(stage=action.stage + by)
        yield action._replace(microbatch=action.microbatch + by)


def _to_others(table: Table, rank: int, at: int) -> Iterator[tuple[str, int, Row]]:
    step = table.rows[rank][at]
    for other, row in enumerate(table.rows):
        for to in range(len(row) + 1) if other != rank else ():
            yield f"rank {other}, {to}", other, (*row[:to], step, *row[to:])


def _without(row: Row, at: int) -> Row:
    return (*row[:at], *row[at + 1 :])


def _replaced(row: Row, at: int, steps: Sequence[Step | None]) -> Row:
    return (*row[:at], *steps, *row[at + 1 :])

"""The validator accepts exactly what trying every interleaving accepts, mutation by mutation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from schedule_mutations import Mutation, mutated, mutations, reorderings
from schedule_oracle import accepts
from schedule_random import PLACEMENTS, random_table, random_transfers
from schedule_settings import SLICES
from schedule_tables import least_buffers, written

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import entries
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.named import NamedSchedule
from stablehlo_tools.schedules.setting import ScheduleSetting, unit_costs
from stablehlo_tools.schedules.table import ActionPair, Table, bidirectional, loop, v_shape
from stablehlo_tools.schedules.validator import violations

SIZES = ((1, 2), (2, 2), (2, 3), (2, 4), (3, 3))  # ranks and microbatches
MOST_STEPS = 48  # more would be too many states to try
BUFFERS = (0, 1, 2)

BY_HAND = {
    "v": written(
        v_shape(2), 2, "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
    ),
    "split": written(
        loop(2), 3, "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2", "1F0 1I0 1F1 1W0 1I1 1F2 1B2 1W1"
    ),
    "pairs": written(
        loop(2),
        3,
        "0F0 0F1 - (0F2;0B0)OVERLAP_F_B 0B1 0B2",
        "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2",
    ),
    "v-pairs-split": written(
        v_shape(2),
        2,
        "0F0 0F1 3F0 (3F1;3B0)OVERLAP_F_B 3I1 0B0 3W1 0I1 0W1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2I1 1I1 2W1 1W1",
    ),
    "slices": written(
        loop(2),
        4,
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "1F0 1F1 1I1 1F2 1I0 1W1 1W0 1F3 1B3 1B2",
        slices=2,
    ),
    "copies": written(
        loop(2),
        3,
        "0F0 0OFFLOAD0 0F1 0RELOAD0 0F2 0B0 0B1 0B2",
        "1F0 1B0 1F1 1OFFLOAD1 1F2 1RELOAD1 1I1 1W1 1B2",
    ),
    "forward-only": written(loop(2, 2), 2, "0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1", training=False),
}


@cache
def forms(table: Table) -> tuple[Table, ...]:
    """A table as it is, and with its sends and receives early and late."""
    return table, with_communication(table), with_communication(table, late=True)


def size(table: Table) -> int:
    """The steps of a table."""
    return sum(map(len, table.rows))


def built(entry: NamedSchedule) -> Iterator[Table]:
    """What a schedule of the catalogue writes for the small sizes that it exists at."""
    for ranks, microbatches in SIZES:
        try:
            slices = SLICES[entry.name]
            yield entry.build(
                ScheduleSetting(ranks, microbatches, unit_costs(ranks), sequence_slices=slices)
            )
        except ToolError:
            continue


def sampled(table: Table, most: int) -> list[Mutation]:
    """Mutations of a table, half of them changes of order only, for these are hardest to judge."""
    chance = random.Random(0)
    kinds = (list(reorderings(table)), list(mutations(table)))
    return [one for kind in kinds for one in chance.sample(kind, min(most // 2, len(kind)))]


def disagreements(form: Table, changes: list[Mutation], verdicts: Counter[bool]) -> list[str]:
    """The mutations that the validator and the oracle judge differently."""
    found: list[str] = []
    for change in changes:
        table = mutated(form, change)
        for buffers in BUFFERS if form.communicates else (0,):
            accepted = accepts(table, buffers)
            verdicts[accepted] += 1
            if accepted != (not violations(table, buffers=buffers)):
                found.append(f"{form.name}, {buffers} buffers: {change.what}")
    return found


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_mutations_of_the_catalogue(entry: NamedSchedule) -> None:
    verdicts: Counter[bool] = Counter()
    small = [form for table in built(entry) for form in forms(table) if size(form) <= MOST_STEPS]
    assert small, f"{entry.name} is not tested at any size"
    for form in small:
        assert accepts(form)
        assert violations(form) == []
        assert disagreements(form, sampled(form, 10), verdicts) == []
    assert verdicts[False]


@pytest.mark.parametrize("name", BY_HAND)
def test_mutations_of_tables_by_hand(name: str) -> None:
    verdicts: Counter[bool] = Counter()
    for form in forms(BY_HAND[name]):
        assert accepts(form)
        assert violations(form) == []
        assert disagreements(form, sampled(form, 40), verdicts) == []
    assert verdicts[True]
    assert verdicts[False]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_mutations_of_random_tables(placement: str) -> None:
    verdicts: Counter[bool] = Counter()
    for seed in range(2):
        table = random_table(seed, PLACEMENTS[placement], microbatches=2)
        for form in forms(table):
            assert accepts(form)
            assert violations(form) == []
            assert disagreements(form, sampled(form, 10), verdicts) == []
    assert verdicts[True]
    assert verdicts[False]


def test_random_tables_cover_pairs_and_both_backwards() -> None:
    tables = [random_table(seed, PLACEMENTS["loop"], 3) for seed in range(20)]
    text = " ".join(str(step) for table in tables for row in table.rows for step in row)
    assert all(mark in text for mark in ("OVERLAP", "B0", "I0", "W0", "None"))
    assert any(
        isinstance(step, ActionPair) for table in tables for row in table.rows for step in row
    )


def test_transfers_at_random_places() -> None:
    fewest: Counter[int | None] = Counter()
    settings = [(placement, 2, True, 5) for placement in PLACEMENTS.values()]
    settings += [(bidirectional(2), 6, False, 15), (loop(2, 2), 3, False, 12)]
    for placement, microbatches, training, tables in settings:
        for seed in range(tables):
            table = random_transfers(seed, random_table(seed, placement, microbatches, training))
            enough = [k for k in range(4) if accepts(table, k)]
            assert [k for k in range(4) if not violations(table, buffers=k)] == enough, table
            assert least_buffers(table) == (enough[0] if enough else None), table
            fewest[enough[0] if enough else None] += 1
    assert all(fewest[k] for k in (0, 1, 2, None)), fewest


@pytest.mark.soak
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_mutation_of_the_catalogue(entry: NamedSchedule) -> None:
    verdicts: Counter[bool] = Counter()
    for table in built(entry):
        for form in forms(table):
            if size(form) <= MOST_STEPS:
                assert disagreements(form, list(mutations(form)), verdicts) == []
    assert verdicts[False]


@pytest.mark.soak
@pytest.mark.parametrize("name", BY_HAND)
def test_every_mutation_of_tables_by_hand(name: str) -> None:
    for form in forms(BY_HAND[name]):
        assert disagreements(form, list(mutations(form)), Counter()) == []


@pytest.mark.soak
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_random_tables(placement: str) -> None:
    for seed in range(2, 40):
        table = random_table(seed, PLACEMENTS[placement], microbatches=1 + seed % 3)
        for form in forms(table):
            if size(form) <= MOST_STEPS:
                assert disagreements(form, sampled(form, 200), Counter()) == []

"""Plans of border exchanges: each device gets what it asks for, and no more is sent."""

from __future__ import annotations

import random

import pytest

from stablehlo_tools.transforms.parts.partition.halo import (
    FILLING,
    DimensionParts,
    HaloPiece,
    HaloPlan,
    plan,
)


def _received(
    sources: tuple[DimensionParts, ...], made: HaloPlan
) -> list[list[tuple[int, int] | str | None]]:
    """What each device has at each place: the source and element, or the filling."""
    held = [
        [[(k, start + i) for i in range(parts.length)] for start in parts.starts]
        for k, parts in enumerate(sources)
    ]
    supplies = list(held)
    for message in made.messages:
        assert len({s for s, _ in message.pairs}) == len({t for _, t in message.pairs})
        arrived: list[list[tuple[int, int]]] = [[] for _ in made.runs]
        for (sender, receiver), offset in zip(message.pairs, message.offsets, strict=True):
            assert sender != receiver
            assert 0 <= offset <= offset + message.size <= sources[message.source].length
            assert not arrived[receiver]
            arrived[receiver] = held[message.source][sender][offset : offset + message.size]
        supplies.append(arrived)
    found: list[list[tuple[int, int] | str | None]] = []
    for device, runs in enumerate(made.runs):
        places: list[tuple[int, int] | str | None] = [None] * made.target.length
        for run in runs:
            for place in range(run.low, run.high):
                if run.supply == FILLING:
                    places[place] = "filling"
                else:
                    places[place] = supplies[run.supply][device][place + run.offset]
        found.append(places)
    return found


@pytest.mark.parametrize("seed", range(200))
def test_every_device_gets_what_it_asks_for(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.choice([2, 3, 4, 8])
    sources: list[DimensionParts] = []
    pieces: list[HaloPiece] = []
    place = 0
    for number in range(rng.randint(1, 3)):
        source = DimensionParts.blocks(rng.randint(1, 40), parts)
        source = rng.choice(
            [source, source.reverse_parts(), source.dilate_parts(rng.randint(1, 3))]
        )
        start = rng.randrange(source.size)
        size = rng.randint(1, source.size - start)
        place += rng.randint(0, 3)
        pieces.append(HaloPiece(number, start, place, size))
        sources.append(source)
        place += size
    size = place + rng.randint(0, 3)
    length = rng.randint(1, 12)
    target = DimensionParts.steps(size, length, parts, rng.randint(1, length), rng.randint(-2, 2))
    target = rng.choice([target, DimensionParts.blocks(size, parts)])
    fills = rng.random() < 0.5
    found = _received(tuple(sources), plan(tuple(sources), tuple(pieces), target, fills))
    for device, start in enumerate(target.starts):
        for offset in range(target.length):
            at = start + offset
            if not 0 <= at < target.size:
                continue
            piece = next((p for p in pieces if p.place <= at < p.place + p.size), None)
            if piece is not None:
                wanted = piece.source, piece.start + at - piece.place
                assert found[device][offset] == wanted
            elif fills:
                assert found[device][offset] == "filling"


@pytest.mark.parametrize(
    ("pieces", "target", "sizes"),
    [
        pytest.param([HaloPiece(0, 3, 0, 29)], DimensionParts.blocks(29, 4), [3], id="shift"),
        pytest.param(
            [HaloPiece(0, 3, 0, 29), HaloPiece(0, 0, 29, 3)],
            DimensionParts.blocks(32, 4),
            [3],
            id="roll",
        ),
        pytest.param(
            [HaloPiece(0, 0, 1, 32)], DimensionParts.steps(34, 10, 4, 8), [1, 1], id="3-window"
        ),
        pytest.param(
            [HaloPiece(0, 0, 0, 32)], DimensionParts.steps(31, 9, 4, 8), [1], id="3-window-stride-2"
        ),
        pytest.param([HaloPiece(0, 0, 0, 31)], DimensionParts.blocks(31, 4), [], id="one-less"),
        pytest.param(
            [HaloPiece(0, 8, 0, 8)], DimensionParts.blocks(8, 4), [2, 2, 2], id="one-of-four"
        ),
        pytest.param([HaloPiece(0, 20, 0, 12)], DimensionParts.blocks(12, 4), [3, 2, 1], id="hops"),
    ],
)
def test_only_the_border_is_sent(
    pieces: list[HaloPiece], target: DimensionParts, sizes: list[int]
) -> None:
    made = plan((DimensionParts.blocks(32, 4),), tuple(pieces), target, True)
    assert [message.size for message in made.messages] == sizes

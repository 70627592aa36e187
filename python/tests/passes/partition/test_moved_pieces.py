"""Which pieces of a divided dimension move at once."""

import pytest

from stablehlo_tools.transforms.parts.partition.local_ops import rounds


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_every_device_gets_its_piece_and_none_sends_two_at_once(parts: int, pieces: int):
    piece, part = 5, 5 * pieces
    for number in range(pieces):
        start = number * parts * piece
        found = rounds(parts, part, piece, start)
        moved = [pair for turn in found for pair in zip(turn.pairs, turn.places, strict=True)]
        assert sorted(target for (_, target), _ in moved) == list(range(parts))
        for (source, target), place in moved:
            assert source * part + place == start + target * piece
            assert place + piece <= part
        for turn in found:
            assert len({source for source, _ in turn.pairs}) == len(turn.pairs)
        assert len(found) <= pieces + 1

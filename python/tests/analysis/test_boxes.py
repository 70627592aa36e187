import random

import pytest

from stablehlo_tools.analysis.elements.boxes import Box, boxes_outside, canonical


def _covered(size: int) -> list[Box]:
    boxes: list[Box] = []
    for _ in range(random.randint(1, 4)):
        start = random.randrange(size)
        stop = random.randint(start + 1, size)
        boxes.append((canonical(range(start, stop, random.choice([1, 1, 2, 3]))),))
    return boxes


@pytest.mark.parametrize("seed", range(200))
def test_few_boxes_outside_are_all_that_is_outside(seed: int):
    random.seed(seed)
    size = random.randint(1, 12)
    covered = _covered(size)
    outside = [set(box[0]) for box in boxes_outside((size,), covered)]
    left = set(range(size)) - {place for box in covered for place in box[0]}
    assert set().union(*outside) <= left
    assert sum(map(len, outside)) == len(set().union(*outside))
    assert len(outside) == 4 or set().union(*outside) == left
    assert [len(places) for places in outside] == sorted(map(len, outside), reverse=True)


def test_the_size_of_a_dimension_costs_nothing():
    row = (range(7, 8), range(8))
    outside = boxes_outside((10**15, 8), [row])
    assert outside == [(range(8, 10**15), range(8)), (range(7), range(8))]


def test_single_places_evenly_apart_are_one_box():
    covered = [(range(1, 2),), (range(3, 4),)]
    assert boxes_outside((5,), covered) == [(range(0, 5, 2),)]

"""The text of `inspect`: totals, advice and costly collectives, in the width of a terminal."""

from __future__ import annotations

import re

import pytest
from report_documents import MIB, US, Clock

from stablehlo_tools.report.cost_text import to_text
from stablehlo_tools.report.document import Document

EXPOSED = (3, 9, 1, 7, 5, 8, 2)  # microseconds of each collective


@pytest.fixture
def document() -> Document:
    clock = Clock()
    for time in EXPOSED:
        number = clock.collective("all_gather", "weights", "NVLink", MIB)
        clock.send(number, time * US)
        clock.wait(number)
    return Document("step", "1", (clock.program("step"),))


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"(?m)^ +(\d+)  all_gather", text)]


def test_the_five_with_most_exposed_time_are_listed(document: Document):
    text = to_text(document)
    assert numbers(text) == [1, 5, 3, 4, 0]
    assert "2 other collectives, 3.00 us exposed; --all also lists loops, kernels and" in text


def test_all_are_listed_in_the_order_of_the_program(document: Document):
    text = to_text(document, whole=True)
    assert numbers(text) == list(range(len(EXPOSED)))
    assert "--all" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_lines_fit_the_width_and_keep_the_times(document: Document, width: int):
    lines = to_text(document, width=width).splitlines()
    assert max(map(len, lines)) <= width
    (heading,) = [line for line in lines if line.lstrip().startswith("#  kind")]
    assert [word for word in heading.split() if word in ("bytes", "times", "time", "exposed")] == [
        "bytes",
        "times",
        "time",
        "exposed",
    ]
    assert ("groups" in heading) == (width == 120)

"""What a link gives where its ops were written for one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.transforms.parts.expand_pipeline.training import Link
from stablehlo_tools.transforms.parts.one_part import OnePartWriter

Values = dict[int, ir.Value]  # of one microbatch, by number


class LinkResults(NamedTuple):
    """What a link gives on one microbatch: what it hands on, by number; terms of its sums; and what
    the program needs of all samples."""

    made: Values
    terms: list[ir.Value]
    finals: list[ir.Value]


def results_of_link(
    link: Link, dims: BatchDims, made: Sequence[int], writing: OnePartWriter, build: Builder
) -> LinkResults:
    """What a link gives that was written."""

    def part(number: int) -> ir.Value:
        return writing.get(number, dims.tilings.get(number), build)

    return LinkResults(
        {number: part(number) for number in made},
        [writing.get(number, None, build) for number in link.sums],
        [part(number) for number in link.finals],
    )

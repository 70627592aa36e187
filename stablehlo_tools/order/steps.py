"""The steps of a cycle of waits, and the orders of the programs that they ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.order.program import Block
from stablehlo_tools.order.simulation import Choice, Simulator


@dataclass(frozen=True)
class Step:
    """At one device, or one program, the first meeting comes before the second."""

    device: int
    program: int
    first: int
    second: int
    tops: tuple[int, int]


def constrained(block: Block, steps: Sequence[tuple[int, int]]) -> list[int] | None:
    """An order of the block's nodes with the steps' pairs in order; None where there is none."""
    count = len(block.nodes)
    needed = list(block.before)
    for first, second in steps:
        needed[second] |= 1 << first
    order: list[int] = []
    done = 0
    while len(order) < count:
        free = (i for i in range(count) if not done >> i & 1 and needed[i] & ~done == 0)
        chosen = next(free, None)
        if chosen is None:
            return None
        order.append(chosen)
        done |= 1 << chosen
    return order


def choice_for(simulator: Simulator, cycle: Sequence[Step]) -> Choice | None:
    """The orders that a cycle asks for, program by program; None if they cannot be had."""
    wanted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in cycle:
        if step.tops[0] != step.tops[1]:
            wanted[step.program].append(step.tops)
    choice: dict[tuple[int, Block], Sequence[int]] = {}
    for program, steps in wanted.items():
        block = simulator.programs[program].block
        order = constrained(block, steps)
        if order is None:
            return None
        choice[program, block] = order
    return choice

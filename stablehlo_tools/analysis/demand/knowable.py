"""Which values can be known before the run at all, found once for the whole program.

A loop's carry can be known if it can be before the loop and, that given, after each iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stablehlo_tools.analysis.demand.program import ENTER, LEAVE, Code, Step
from stablehlo_tools.analysis.demand.slots import BARRIER
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES


@dataclass(frozen=True)
class Marking:
    """Marks in `can` what can be known; what is marked at first stays.

    `plain` says so of the result of an op with one; `partly`, whether a branch's result may be
    known when not all regions' are; `same[n]` is the value that n, a shard, is handed on from.
    """

    can: list[bool]
    plain: Callable[[Step], bool]
    partly: bool
    walked: set[int]
    same: dict[int, int]

    def mark(self, code: Code) -> None:
        """Marks the values of a block whose arguments are marked."""
        can = self.can
        for step in code.steps:
            if step.name == WHILE:
                self._loop(step)
            elif step.name in BRANCHES:
                self._branches(step)
            elif step.name == BARRIER:
                for operand, result in zip(step.operands, step.results, strict=True):
                    can[result] = can[operand]
            elif step.name == ENTER:
                for result in step.results:
                    if result in self.same:
                        can[result] = can[result] or can[self.same[result]]
            elif step.name != LEAVE and len(step.results) == 1 and not can[step.results[0]]:
                can[step.results[0]] = self.plain(step)

    def listed(self, code: Code) -> list[Step]:
        """The steps of a block that are to be evaluated in each iteration."""
        return [step for step in code.steps if self._is_listed(step)]

    def _is_listed(self, step: Step) -> bool:
        inside = [n for region in step.regions for n in _all_results(region)]
        return any(self.can[number] for number in (*step.results, *inside))

    def _branches(self, step: Step) -> None:
        for region in step.regions:
            self.mark(region)
        enough = any if self.partly else all
        for position, result in enumerate(step.results):
            self.can[result] = enough(self.can[r.ends[position]] for r in step.regions)

    def _loop(self, loop: Step) -> None:
        condition, body = loop.regions
        can = self.can
        hopes = [can[operand] for operand in loop.operands]
        if loop.number not in self.walked:
            rows = zip(hopes, body.ends, body.arguments, strict=True)
            hopes = [hope and end == argument for hope, end, argument in rows]
        while True:
            # A constant of the body is marked from the start; what depends on a carry starts anew.
            for block in (condition, body):
                for argument, hope in zip(block.arguments, hopes, strict=True):
                    can[argument] = hope
                self._clear(block)
                self.mark(block)
            after = [hope and can[end] for hope, end in zip(hopes, body.ends, strict=True)]
            if after == hopes:
                break
            hopes = after
        for result, hope in zip(loop.results, hopes, strict=True):
            can[result] = hope

    def _clear(self, code: Code) -> None:
        for step in code.steps:
            if step.operands and step.name not in (ENTER, LEAVE):
                for result in step.results:
                    self.can[result] = False
            for region in step.regions:
                self._clear(region)


def _all_results(code: Code) -> list[int]:
    found = list(code.ends)
    for step in code.steps:
        found += step.results
        for region in step.regions:
            found += _all_results(region)
    return found

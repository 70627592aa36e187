"""Compiles every rank of a set ahead of time for XLA:GPU, and reads the transfers back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.transfers import BOTH_ENDS, with_both_ends
from stablehlo_tools.targets.compilation import compile_artifact

_TRANSFERS = ("send", "recv")


@dataclass(frozen=True)
class RankCompilation:
    """The result of XLA:GPU for a rank; `refusal` is the error, "" if it compiled.

    `transfers` counts the sends and recvs in the compiled schedule, `expected` those in the
    program. `in_order` is True if both have the same order. `temporaries` is in bytes per device,
    without arguments and outputs.
    """

    rank: int
    refusal: str = ""
    transfers: int = 0
    expected: int = 0
    in_order: bool = False
    temporaries: int = 0
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """True if it compiled with every transfer in order."""
        return not self.refusal and self.in_order

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def compile_ranks(ranks: RankSet, timeout: float) -> list[RankCompilation]:
    """Compiles each rank in the form `both-ends`; `timeout` is in seconds, for one rank.

    Raises ToolError for a set that is in neither this form nor `pairs`.
    """
    written = ranks if ranks.manifest.form == BOTH_ENDS else with_both_ends(ranks)
    compiled: list[RankCompilation] = []
    for rank, program in enumerate(written.programs):
        try:
            made = compile_artifact(program, "gpu", timeout)
        except ToolError as error:
            compiled.append(RankCompilation(rank, refusal=error.diagnostic.message))
            continue
        transfers = {op.id for op in made.tagged if op.kind in _TRANSFERS}
        issued = [
            number
            for event in made.schedule.events
            if event.issues
            for number in event.ids
            if number in transfers
        ]
        expected = [number for number in made.program_ids if number in transfers]
        one = RankCompilation(
            rank,
            transfers=len(issued),
            expected=len(expected),
            in_order=issued == expected,
            temporaries=made.memory.temp_bytes,
            seconds=made.seconds,
        )
        compiled.append(one)
    return compiled

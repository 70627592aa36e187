"""Finds out if two artifacts compute the same values, in exact arithmetic modulo a prime.

Sums of residues have the same bits in any order, so there is no tolerance. Two different
polynomials of degree d agree on a random input with a probability of d / p at most, in each
element.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify.comparison import OutputComparison
from stablehlo_tools.verify.exact.programs import PARTIAL, FieldPlan
from stablehlo_tools.verify.job import SIDES, Side, ask_child, comparison_of

CHILD = "stablehlo_tools.verify.exact.process"
# Compiling takes most of the time, and integers have the same bits at every level.
_FLAGS = ("--xla_backend_optimization_level=0",)


@dataclass(frozen=True)
class FieldAnswer:
    """Describes how the outputs compare for the last input, of so many `inputs`; the rest is of all
    of them.

    `zero` are the outputs that BEFORE leaves all zero. The fields that belong to a side are
    explained at `verify.verification.Exactness`.
    """

    outputs: tuple[OutputComparison, ...]
    inputs: int
    zero: tuple[int, ...]
    branches: Mapping[Side, int]
    not_entered: Mapping[Side, tuple[str, ...]]
    one_sided: Mapping[Side, tuple[int, ...]]
    wrongly_partitioned: Mapping[Side, tuple[int, ...]]

    @staticmethod
    def of(fields: Mapping[str, Any]) -> FieldAnswer:
        """The answer that a child gave."""
        return FieldAnswer(
            tuple(comparison_of(output) for output in fields["outputs"]),
            fields["inputs"],
            tuple(fields["zero"]),
            fields["branches"],
            {side: tuple(texts) for side, texts in fields["not_entered"].items()},
            {side: tuple(numbers) for side, numbers in fields["one_sided"].items()},
            {side: tuple(wrong) for side, wrong in fields["wrongly_partitioned"].items()},
        )


def run_in_field(
    names: Mapping[Side, str],
    plan: FieldPlan,
    fixed: Mapping[int, float],
    seed: int,
    trials: int,
    timeout: float,
    child: str = CHILD,
) -> FieldAnswer:
    """Has a module, `child`, run the programs of a plan on the same residues and compare what they
    leave; `names` are those of the files.

    Raises ToolError for a program that cannot be compiled, or that hangs.
    """
    request = {
        **plan.to_json(),
        "fixed": {str(index): value for index, value in fixed.items()},
        "seed": seed,
        "trials": trials,
    }
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
        directory = Path(path)
        for name, code in plan.code.items():
            (directory / name).write_bytes(code)

        def ask(*, together: bool) -> dict[str, Any]:
            fields = {**request, "together": together}
            return ask_child(child, directory, fields, plan.devices, names, timeout, _FLAGS)

        try:
            answer = ask(together=True)
        except ToolError as error:
            if not error.by_chance and len(plan.runs) == len(SIDES):
                raise
            # XLA's partitioner may have ended the process; without it there is an answer.
            try:
                answer = ask(together=False)
            except ToolError:
                partial = directory / PARTIAL
                if not partial.exists():
                    raise
                answer = json.loads(partial.read_text(encoding="utf-8"))
    return FieldAnswer.of(answer)

"""What is proven of a candidate before it is written: values, order, memory.

Values are compared with the export's by running both on random inputs on virtual CPU devices, bit
for bit or, where a pass adds floats in another order, within what the program's own types resolve.
The order of collectives is that of `check-order`. Memory is the compiler's count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import Job, Options
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, size
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.order.report import finding_text
from stablehlo_tools.order.simulation import UndecidedError
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.verify.comparison import BITWISE, Rule
from stablehlo_tools.verify.twin import verify_twins
from stablehlo_tools.verify.verification import Options as VerifyOptions
from stablehlo_tools.verify.verification import Verification, verify_artifacts

State = Literal["proven", "refuted", "not proven"]
# |before - after| <= t + t * |before|, by the least precise float that the program computes in:
# sums of some thousands of terms in another order differ by so much.
_TOLERANCES = (("f8E", 0.25), ("f6E", 0.25), ("f4E", 0.25), ("bf16", 5e-2), ("f16", 1e-2))
_F32_TOLERANCE, _F64_TOLERANCE = 1e-4, 1e-9
_TRIALS = 2
_SECONDS = 180.0
# XLA:CPU on some cores takes so many times what a matmul takes a device: 30 GFLOP/s to 500 TFLOP/s.
_SLOWER = 1.6e4
_COPIES = 3  # of a program's bytes that a comparison holds at a time
_SHARE = 0.5  # of the machine's memory
_TWIN_BYTES = 4 << 30  # that a twin may take


@dataclass(frozen=True)
class Finding:
    """One thing that was to be proven, and what came out."""

    state: State
    text: str


@dataclass(frozen=True)
class Proof:
    """Everything; a candidate is taken unless something is refuted."""

    values: Finding
    order: Finding
    memory: Finding

    @property
    def holds(self) -> bool:
        """Whether nothing was refuted."""
        return all(f.state != "refuted" for f in (self.values, self.order, self.memory))

    def lines(self) -> list[str]:
        """One for each."""
        named = {"values": self.values, "order": self.order, "memory": self.memory}
        return [f"{name}: {each.state}: {each.text}" for name, each in named.items()]

    def summary(self) -> str:
        """What was refuted; else everything."""
        refuted = [line for line in self.lines() if ": refuted: " in line]
        return "; ".join(refuted or self.lines())

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Proof:
        """What `to_json` gave."""
        return Proof(*(Finding(**fields[name]) for name in ("values", "order", "memory")))

    @staticmethod
    def of_nothing(memory: Finding) -> Proof:
        """Of the export, left as it is."""
        same = Finding("proven", "the program is the export, unchanged")
        return Proof(same, same, memory)


def prove(
    before: Artifact, after: Artifact, figures: tuple[Figures, Figures], limit: float
) -> Proof:
    """Proves a candidate against the export. `limit`: bytes of a device."""
    return Proof(
        values=_values(before, after, *figures),
        order=_order(before, after),
        memory=memory_finding(figures[1], limit),
    )


def memory_finding(figures: Figures, limit: float) -> Finding:
    """Whether the program fits a device."""
    text = (
        f"{size(figures.compiler_bytes)} as the compiler counts, {size(figures.peak_bytes)} alive "
        f"at most in its schedule, of {size(limit)}"
    )
    return Finding("proven" if figures.needed_bytes <= limit else "not proven", text)


def tolerance_of(module: ir.Module) -> float:
    """What the least precise floats of a program resolve, relative and absolute."""
    types: set[str] = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        types.update(
            str(result.type.element_type)
            for result in op.results
            if isinstance(result.type, ir.ShapedType)
        )
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for prefix, tolerance in _TOLERANCES:
        if any(each.startswith(prefix) for each in types):
            return tolerance
    return _F32_TOLERANCE if types & {"f32", "complex<f32>"} else _F64_TOLERANCE


def _values(before: Artifact, after: Artifact, export: Figures, candidate: Figures) -> Finding:
    """Of the programs themselves where they can be run here; else of their twin."""
    too_large = _too_large(export, candidate)
    if too_large:
        # A twin computes in f64 where a tolerance is given, so that small mistakes show.
        how = f"; as a twin at reduced sizes, for {too_large}"
        return _compared(before, after, _of_twins, [_tolerant(before)], how)
    return _compared(before, after, _of_programs, [BITWISE, _tolerant(before)], "")


def _tolerant(before: Artifact) -> Rule:
    tolerance = tolerance_of(before.module)
    return Rule(tolerance, tolerance)


type Comparison = Callable[[Artifact, Artifact, VerifyOptions], tuple[Verification, str]]


def _of_programs(
    before: Artifact, after: Artifact, options: VerifyOptions
) -> tuple[Verification, str]:
    return verify_artifacts(before, after, options), ""


def _of_twins(
    before: Artifact, after: Artifact, options: VerifyOptions
) -> tuple[Verification, str]:
    answer = verify_twins(before, after, options, _TWIN_BYTES)
    factors = answer.twin.factors.items()
    sizes = ", ".join(f"{full} -> {'/'.join(map(str, small))}" for full, small in factors)
    unshown = "; ".join(answer.twin.notes)
    return answer.verification, f" ({sizes}); not shown: {unshown or 'nothing'}"


def _compared(
    before: Artifact, after: Artifact, compare: Comparison, rules: Sequence[Rule], how: str
) -> Finding:
    """The finding under the last of the rules, or under the first that holds."""
    verification = None
    for rule in rules:
        options = VerifyOptions(rule=rule, trials=_TRIALS, timeout=_SECONDS)
        try:
            verification, more = compare(before, after, options)
        except ToolError as error:
            return Finding("not proven", f"{error.diagnostic.message}{how}")
        if verification.same:
            agreed = _agreed(verification)
            return Finding(agreed.state, f"{agreed.text}{how}{more}")
    assert verification is not None, "there is a rule"
    worst = max(verification.outputs, key=lambda output: output.differing)
    return Finding(
        "refuted",
        f"output {worst.index} differs in {worst.differing} of {worst.elements} elements, "
        f"{rules[-1]}; the largest difference is {worst.max_abs_difference}{how}",
    )


def _agreed(verification: Verification) -> Finding:
    compared = len(verification.compared)
    if not compared:
        return Finding("not proven", "all outputs were NaN, infinite or mere rounding")
    of = "" if compared == len(verification.outputs) else f" of {len(verification.outputs)}"
    return Finding(
        "proven",
        f"{compared}{of} outputs are the same as the export's, {verification.rule}, on "
        f"{verification.trials} sets of random inputs and {verification.devices} virtual devices",
    )


def _too_large(export: Figures, candidate: Figures) -> str:
    """Why the programs cannot be run on this machine; "" where they can."""
    needed = _COPIES * export.devices * max(export.compiler_bytes, candidate.compiler_bytes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > _SHARE * memory:
        return f"running it on {export.devices} virtual devices takes about {size(needed)}"
    seconds = _SLOWER * export.devices * min(export.work_ns, candidate.work_ns) / 1e9
    if seconds > _SECONDS:
        return f"running it on a CPU takes about {seconds / 60:,.0f} minutes"
    return ""


def _order(before: Artifact, after: Artifact) -> Finding:
    try:
        [issued] = Job((after,), Options()).read()
        decided = decide([issued.program])
    except UndecidedError:
        return Finding("not proven", "loops would have to be stepped through for too long")
    except ToolError as error:
        return Finding("not proven", error.diagnostic.message)
    if decided.finding is None:
        return Finding("proven", "no run of it can deadlock")
    said = finding_text([issued.program], decided.finding).splitlines()[0]
    return Finding("not proven" if _had_a_finding(before) else "refuted", said)


def _had_a_finding(before: Artifact) -> bool:
    """Whether the export cannot be shown to end either."""
    try:
        [issued] = Job((before,), Options()).read()
        return decide([issued.program]).finding is not None
    except (ToolError, UndecidedError):
        return False

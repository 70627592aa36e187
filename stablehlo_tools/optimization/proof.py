"""Proves a candidate before it is written: values, order, memory.

Values are compared with the export's in exact arithmetic, by running both on virtual CPU devices.
Only if an op has no form in exact arithmetic, they are compared in floats, within the resolution of
the program's types. The order of collectives is checked as by `check-order`. Memory is the
compiler's count.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, size
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.order.simulation import LoopMismatchError
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.order.verdict_report import finding_text
from stablehlo_tools.verify.comparison import Rule
from stablehlo_tools.verify.exact.constants import UnmappedError
from stablehlo_tools.verify.twin import verify_twins
from stablehlo_tools.verify.verification import Options as VerifyOptions
from stablehlo_tools.verify.verification import Verification, verify_artifacts

# compared: in floats, within a tolerance.
State = Literal["proven", "proven at reduced sizes", "compared", "refuted", "not proven"]
# |before - after| <= t + t * |before|, by the least precise float of the program: sums of some
# thousands of terms in another order differ by about t.
_TOLERANCES = (("f8E", 0.25), ("f6E", 0.25), ("f4E", 0.25), ("bf16", 5e-2), ("f16", 1e-2))
_F32_TOLERANCE, _F64_TOLERANCE = 1e-4, 1e-9
_FLOAT_TRIALS = 2
_SECONDS = 180.0
# XLA:CPU on some cores runs a matmul slower than a device by 500 TFLOP/s / 30 GFLOP/s.
_SLOWER = 1.6e4
_COPIES = 3  # copies of a program's bytes that a comparison holds at a time
_SHARE = 0.5  # share of the machine's memory that a comparison may use
_TWIN_BYTES = 4 << 30  # limit for a twin


@dataclass(frozen=True)
class ProofItem:
    """The result of one check, with its explanation."""

    state: State
    text: str


@dataclass(frozen=True)
class CandidateProof:
    """All results for a candidate, which is accepted unless one of them is refuted."""

    values: ProofItem
    order: ProofItem
    memory: ProofItem

    @property
    def holds(self) -> bool:
        """True if no result is refuted."""
        return all(f.state != "refuted" for f in (self.values, self.order, self.memory))

    def lines(self) -> list[str]:
        """Returns one line for each result."""
        named = {"values": self.values, "order": self.order, "memory": self.memory}
        return [f"{name}: {each.state}: {each.text}" for name, each in named.items()]

    def summary(self) -> str:
        """Returns the refuted results in one line; all of them if none is refuted."""
        refuted = [line for line in self.lines() if ": refuted: " in line]
        return "; ".join(refuted or self.lines())

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> CandidateProof:
        """Returns the proof from the data of `to_json`."""
        return CandidateProof(
            *(ProofItem(**fields[name]) for name in ("values", "order", "memory"))
        )


def prove(
    before: Artifact, after: Artifact, figures: tuple[Figures, Figures], limit: float
) -> CandidateProof:
    """Proves a candidate against the export. `limit`: bytes of a device."""
    return CandidateProof(
        values=_values(before, after, *figures),
        order=_order(before, after),
        memory=memory_finding(figures[1], limit),
    )


def memory_finding(figures: Figures, limit: float) -> ProofItem:
    """Returns `proven` if the program fits in `limit` bytes, else `not proven`."""
    text = (
        f"{size(figures.compiler_bytes)} by the compiler's count, {size(figures.peak_bytes)} live "
        f"at most in its schedule, of {size(limit)}"
    )
    return ProofItem("proven" if figures.needed_bytes <= limit else "not proven", text)


def tolerance_of(module: ir.Module) -> float:
    """Returns the tolerance, relative and absolute, of a program's least precise floats."""
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


def _values(before: Artifact, after: Artifact, export: Figures, candidate: Figures) -> ProofItem:
    """Compares the programs if this machine can run them; else twins at reduced sizes."""
    too_large = _too_large(export, candidate)
    options = VerifyOptions(arithmetic="exact", timeout=_SECONDS, partitioned=False)
    try:
        try:
            return _compare_programs(before, after, options, too_large)
        except UnmappedError as error:
            tolerance = tolerance_of(before.module)
            rule = Rule(tolerance, tolerance)
            floats = replace(options, arithmetic="floats", rule=rule, trials=_FLOAT_TRIALS)
            finding = _compare_programs(before, after, floats, too_large)
            unmapped = f"{error.diagnostic.message} has no form in exact arithmetic"
            return replace(finding, text=f"{finding.text}; {unmapped}")
    except ToolError as error:
        how = f"; as a twin at reduced sizes, because {too_large}" if too_large else ""
        return ProofItem("not proven", f"{error.diagnostic.message}{how}")


def _compare_programs(
    before: Artifact, after: Artifact, options: VerifyOptions, too_large: str
) -> ProofItem:
    if not too_large:
        return _finding(verify_artifacts(before, after, options), "proven", "")
    answer = verify_twins(before, after, options, _TWIN_BYTES)
    factors = answer.twin.factors.items()
    sizes = ", ".join(f"{full} -> {'/'.join(map(str, small))}" for full, small in factors)
    how = f"; as a twin at reduced sizes ({sizes}), because {too_large}"
    how += "".join(f"; {line}" for line in answer.limits())
    finding = _finding(
        answer.verification, "proven" if answer.twin.is_uniform else "proven at reduced sizes", how
    )
    return finding if answer.same else replace(finding, state="refuted")


def _finding(verification: Verification, proven: State, how: str) -> ProofItem:
    outputs = verification.outputs
    if not verification.same:
        worst = max(outputs, key=lambda output: output.differing)
        differing = f"output {worst.index} differs in {worst.differing} of {worst.elements}"
        return ProofItem("refuted", f"{differing} elements, {_arithmetic(verification)}{how}")
    compared = len(verification.compared)
    if not compared:
        return ProofItem("not proven", f"all outputs were zero, NaN or infinite{how}")
    of = "" if compared == len(outputs) else f" of {len(outputs)}"
    text = (
        f"{compared}{of} outputs are the same as the export's, {_arithmetic(verification)}, on "
        f"{verification.trials} sets of random inputs and {verification.devices} virtual devices"
    )
    return ProofItem(proven if verification.exact is not None else "compared", f"{text}{how}")


def _arithmetic(verification: Verification) -> str:
    return "in exact arithmetic" if verification.exact is not None else str(verification.rule)


def _too_large(export: Figures, candidate: Figures) -> str:
    """Returns the reason why this machine cannot run the programs; "" if it can."""
    needed = _COPIES * export.devices * max(export.compiler_bytes, candidate.compiler_bytes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > _SHARE * memory:
        return f"running it on {export.devices} virtual devices needs about {size(needed)}"
    seconds = _SLOWER * export.devices * min(export.work_ns, candidate.work_ns) / 1e9
    if seconds > _SECONDS:
        return f"running it on a CPU needs about {seconds / 60:,.0f} minutes"
    return ""


def _order(before: Artifact, after: Artifact) -> ProofItem:
    try:
        [issued] = ProgramJob((after,), JobOptions()).read()
        decided = decide([issued.program])
    except LoopMismatchError:
        return ProofItem("not proven", "following its loops needs too many steps")
    except ToolError as error:
        return ProofItem("not proven", error.diagnostic.message)
    if decided.finding is None:
        return ProofItem("proven", "no run of it can deadlock")
    said = finding_text([issued.program], decided.finding).splitlines()[0]
    try:
        [export] = ProgramJob((before,), JobOptions()).read()
        ends = decide([export.program]).finding is None
    except (ToolError, LoopMismatchError):
        ends = True
    return ProofItem("refuted" if ends else "not proven", said)

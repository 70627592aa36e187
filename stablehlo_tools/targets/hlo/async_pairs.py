"""What an HLO instruction starts and finishes: async wrappers, and fusions that hold collectives.

XLA:TPU splits a collective over fusions of one `chain_id`: one that starts it (the collective goes
to AsyncCollectiveStart), any number that compute while it runs, and one that finishes it
(AsyncCollectiveDone). A collective in a fusion without either mark is synchronous. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.targets.hlo.aliases import through_views
from stablehlo_tools.targets.hlo.collectives import ISSUED
from stablehlo_tools.targets.hlo.module import Computation, HloInstruction, HloModule
from stablehlo_tools.targets.hlo.work import fused
from stablehlo_tools.targets.scheduled_hlo import Phase


@dataclass(frozen=True)
class Fused:
    """A collective inside of a fusion and what the fusion does with it.

    `early` says that the fusion needs the result of a collective that it finishes, or does not make
    the operand of one that it starts: then this comes before what the fusion computes.
    """

    collective: HloInstruction
    computation: Computation
    phase: Phase
    chain: str
    early: bool


def fused_collectives(fusion: HloInstruction, module: HloModule) -> list[Fused]:
    """The collectives that a fusion starts, finishes or runs; not those that only go on."""
    inside = list(fused(fusion, module))
    marks: dict[str, tuple[Phase, HloInstruction]] = {}
    for inner, _ in inside:
        if inner.target in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
            phase = Phase.START if inner.target.endswith("Start") else Phase.DONE
            marks.update(dict.fromkeys(inner.operands, (phase, inner)))
    found: list[Fused] = []
    for inner, computation in inside:
        if inner.opcode not in ISSUED:
            continue
        if inner.name not in marks and inner.chain is not None:
            continue
        phase, mark = marks.get(inner.name, (Phase.SYNC, inner))
        readers = [u for u in computation.users.get(mark.name, []) if u.opcode != "tuple"]
        operand = through_views(computation.by_name[inner.operands[0]], computation)
        early = bool(readers) if phase is Phase.DONE else operand.opcode == "parameter"
        found.append(Fused(inner, computation, phase, f"{inner.opcode} {inner.chain}", early))
    return found


def wrapped_collectives(
    name: str, module: HloModule, caller: HloInstruction
) -> Iterator[tuple[HloInstruction, Computation]]:
    """The collectives that an async computation issues, however it wraps them."""
    computation = module.computation(name, caller)
    for inner in computation.instructions:
        if inner.opcode.removesuffix("-start") in ISSUED:
            yield inner, computation
        elif inner.opcode in ("fusion", "call") or inner.opcode.endswith("-start"):
            for called in inner.calls:
                yield from wrapped_collectives(called, module, inner)


def communicates(name: str, module: HloModule, caller: HloInstruction) -> bool:
    """Whether a computation issues a collective, itself or in what it calls."""
    computation = module.computation(name, caller)
    return any(
        inner.opcode.removesuffix("-start") in ISSUED
        or any(communicates(called, module, inner) for called in inner.calls)
        for inner in computation.instructions
    )

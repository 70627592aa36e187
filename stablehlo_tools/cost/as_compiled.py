"""What XLA makes of a collective before it schedules it, by the machine that it compiles for.

Read back from the modules that jax 0.12's compilers made of programs of one collective, v5e slices
of 8 to 256 chips. XLA:TPU runs all_reduce, reduce_scatter and all_to_all on the compute stream. It
gathers over 64 chips or more, where the result has at most 16 MiB, by an all_reduce of what each
chip has put into zeros: twice the bytes, and on the compute stream. XLA:GPU leaves collectives what
they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.transfers import Transfer

ON_COMPUTE_STREAM = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})  # of XLA:TPU
_SUMMED_FROM = 64  # members of a group
_SUMMED_TO = 16 * 2.0**20  # bytes


@dataclass(frozen=True, slots=True)
class Compiled:
    """What runs, and whether compute can run beside it."""

    transfer: Transfer
    overlaps: bool


def as_compiled(transfer: Transfer, hardware: Hardware, devices: int) -> Compiled:
    """What becomes of a collective in a program on `devices` devices."""
    if not hardware.is_torus:
        return Compiled(transfer, overlaps=True)
    if transfer.kind == "all_gather" and is_summed(transfer, devices):
        transfer = replace(transfer, kind="all_reduce")
    return Compiled(transfer, overlaps=transfer.kind not in ON_COMPUTE_STREAM)


def is_summed(gather: Transfer, devices: int) -> bool:
    """Whether XLA:TPU gathers by a sum."""
    members = max((len(group) for group in gather.groups), default=devices)
    return members >= _SUMMED_FROM and gather.bytes <= _SUMMED_TO

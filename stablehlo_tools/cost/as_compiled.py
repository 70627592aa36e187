"""What XLA makes of a collective before it schedules it, by the machine that it compiles for.

Read back from the modules that jax 0.12's compilers made of programs of one collective, v5e slices
of 8 to 256 chips. XLA:TPU runs all_reduce, reduce_scatter and all_to_all on the compute stream. It
gathers over 64 chips or more, where the result has at most 16 MiB, by an all_reduce of what each
chip has put into zeros: twice the bytes, and on the compute stream. XLA:GPU leaves collectives what
they are.

Permutes run beside compute on v5p and v6e, and on v5e in slices of up to 16 chips. In larger ones
of v5e, whose routing is limited, only those do that send from each chip to one whose number differs
in one bit: neighbours that are swapped, halves of an axis, a ring in the order of a Gray code. A
ring along an axis, neighbour to neighbour, is synchronous. (Read back from libtpu 0.0.51 for 130
permutes on 8 to 256 chips of v5e, v5p and v6e; openxla does not say so.)
"""

from __future__ import annotations

from collections.abc import Sequence
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
    overlaps = transfer.kind not in ON_COMPUTE_STREAM
    if transfer.kind == "collective_permute":
        overlaps = permute_overlaps(transfer.groups, hardware, devices)
    return Compiled(transfer, overlaps)


def permute_overlaps(pairs: Sequence[tuple[int, ...]], hardware: Hardware, devices: int) -> bool:
    """Whether compute can run beside a permute of these pairs in a program on so many devices."""
    most = hardware.networks[0].any_permute_to
    if most is None or devices <= most:
        return True
    flipped = (source ^ target for source, target in pairs)
    return all(not bits & (bits - 1) for bits in flipped)


def is_summed(gather: Transfer, devices: int) -> bool:
    """Whether XLA:TPU gathers by a sum."""
    members = max((len(group) for group in gather.groups), default=devices)
    return members >= _SUMMED_FROM and gather.bytes <= _SUMMED_TO

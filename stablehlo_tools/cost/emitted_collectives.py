"""The collective that XLA emits for a collective of the program, per target machine.

Source: modules that jax 0.12's compilers emitted for programs of one collective, on v5e slices of 8
to 256 chips. XLA:TPU runs all_reduce, reduce_scatter and all_to_all on the compute stream. It
rewrites an all_gather over 64 chips or more, with a result of at most 16 MiB, to an all_reduce:
each chip writes its operand into zeros. That sends twice the bytes, on the compute stream. XLA:GPU
keeps the kind of every collective.

Permutes overlap with compute on v5p and v6e, and on v5e in slices of up to 16 chips. Larger slices
of v5e have limited routing. There a permute overlaps only if each source and target differ in one
bit of their numbers: swapped neighbours, halves of an axis, a ring in the order of a Gray code. A
ring along an axis, neighbour to neighbour, is synchronous. (Source: 130 permutes compiled by libtpu
0.0.51 for 8 to 256 chips of v5e, v5p and v6e; openxla does not document it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer

ON_COMPUTE_STREAM = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})  # of XLA:TPU
_SUMMED_FROM = 64  # members of a group
_SUMMED_TO = 16 * 2.0**20  # bytes


@dataclass(frozen=True, slots=True)
class CompiledWork:
    """The collective that XLA emits, and whether it can overlap with compute."""

    transfer: DeviceTransfer
    overlaps: bool


def as_compiled(transfer: DeviceTransfer, hardware: Hardware, devices: int) -> CompiledWork:
    """Returns the collective that XLA emits for `transfer` in a program on `devices` devices."""
    if not hardware.is_torus:
        return CompiledWork(transfer, overlaps=True)
    if transfer.kind == "all_gather" and is_summed(transfer, devices):
        transfer = replace(transfer, kind="all_reduce")
    overlaps = transfer.kind not in ON_COMPUTE_STREAM
    if transfer.kind == "collective_permute":
        overlaps = permute_overlaps(transfer.groups, hardware, devices)
    return CompiledWork(transfer, overlaps)


def permute_overlaps(pairs: Sequence[tuple[int, ...]], hardware: Hardware, devices: int) -> bool:
    """Returns True if a permute of these (source, target) pairs can overlap with compute.

    `devices` is the number of devices of the program.
    """
    most = hardware.networks[0].any_permute_to
    if most is None or devices <= most:
        return True
    flipped = (source ^ target for source, target in pairs)
    return all(not bits & (bits - 1) for bits in flipped)


def is_summed(gather: DeviceTransfer, devices: int) -> bool:
    """Returns True if XLA:TPU rewrites this all_gather to an all_reduce."""
    members = max((len(group) for group in gather.groups), default=devices)
    return members >= _SUMMED_FROM and gather.bytes <= _SUMMED_TO

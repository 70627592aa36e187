"""One cost model for a program: kernels and collectives on one of its devices, what was measured
before what is modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stablehlo_tools.cost.collectives import TransferTime, transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import kernel_ns
from stablehlo_tools.cost.work import Transfer, Work


class Measured(Protocol):
    """Times that were measured, by the names of an op."""

    def ns(self, names: Sequence[str]) -> float | None:
        """The time of the first of these names that is known."""
        ...


@dataclass(frozen=True)
class Clock:
    """Times work on one of `devices` devices."""

    hardware: Hardware
    devices: int
    measured: Measured | None = None

    def kernel(self, work: Work, names: Sequence[str]) -> float:
        """Nanoseconds of a kernel that is known by these names."""
        known = self.measured.ns(names) if self.measured is not None else None
        return kernel_ns(work, self.hardware) if known is None else known

    def collective(self, transfer: Transfer, names: Sequence[str]) -> TransferTime:
        """The time of a collective that is known by these names. Raises ToolError."""
        modelled = transfer_time(transfer, self.hardware, self.devices)
        known = self.measured.ns(names) if self.measured is not None else None
        if known is None:
            return modelled
        return replace(modelled, ns=known, latency_ns=min(known, modelled.latency_ns))

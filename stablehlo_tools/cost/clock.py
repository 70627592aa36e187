"""Times the kernels and collectives of a program; measured times override the cost model.

A measured profile is JSON; `traces` makes one from what jax.profiler.trace writes:

    {"schema": "stablehlo-tools/measured/1",
     "source": "8 x H100, 2026-01-31",
     "ops": {"fusion.12": 81250.0, "all-reduce.3": 410900.0}}

`ops` maps names of the program to nanoseconds on one device. A name is that of an HLO instruction,
an op_name or a source line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from stablehlo_tools.cost.contention import Contention, contention
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import KernelWork, kernel_ns, kernel_time
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer, TransferTime
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.json_text import read_json

SCHEMA = "stablehlo-tools/measured/1"


@dataclass(frozen=True)
class MeasuredProfile:
    """Nanoseconds by op; `used` and `missed` record the names that were looked up."""

    path: Path
    source: str
    ops: Mapping[str, float]
    used: set[str] = field(default_factory=set[str], compare=False)
    missed: set[str] = field(default_factory=set[str], compare=False)

    @classmethod
    def load(cls, path: Path | str) -> MeasuredProfile:
        """Reads a profile. Raises ToolError, naming the file, if it has another format."""
        path = Path(path)
        with naming(str(path)):
            content = read_json(path)
            if not isinstance(content, dict):
                raise ToolError(
                    f"not a measured profile: expected an object with 'schema': {SCHEMA!r}"
                )
            document = cast("dict[str, object]", content)
            if document.get("schema") != SCHEMA:
                raise ToolError(f"'schema' is {document.get('schema')!r}, but must be {SCHEMA!r}")
            keys = ("schema", "source", "ops")
            if strange := [key for key in document if key not in keys]:
                raise ToolError(
                    f"unknown field {strange[0]!r}; a profile has 'schema', 'source' and 'ops'"
                )
            source = document.get("source")
            if not isinstance(source, str) or not source.strip():
                raise ToolError("'source' must say where these times were measured")
            return cls(path, source, _ops(document.get("ops")))

    def ns(self, names: Sequence[str]) -> float | None:
        """Returns the time of the first of `names` that the profile has, else None."""
        for name in names:
            if name in self.ops:
                self.used.add(name)
                return self.ops[name]
        self.missed.update(names[:1])
        return None

    def check_used(self) -> None:
        """Raises ToolError if no lookup found a time in the profile."""
        if self.used:
            return
        key = next(iter(self.ops))
        asked = f", such as {min(self.missed)!r}" if self.missed else ""
        error = ToolError(
            f"none of its {len(self.ops)} ops, such as {key!r}, is in this program{asked}; the "
            "profile must come from the same compiled program"
        )
        error.input_name = str(self.path)
        raise error


def measured_document(source: str, ops: Mapping[str, float]) -> dict[str, object]:
    """Returns the JSON document of a profile, as `MeasuredProfile.load` reads it."""
    return {"schema": SCHEMA, "source": source, "ops": dict(sorted(ops.items()))}


def _ops(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise ToolError('\'ops\' must name at least one op: {"ops": {"fusion.1": 1250.0}}')
    ops: dict[str, float] = {}
    for name, ns in cast("dict[str, object]", value).items():
        if isinstance(ns, bool) or not isinstance(ns, int | float) or not 0 <= ns < math.inf:
            raise ToolError(
                f"the time of op {name!r} is {ns!r}, but must be a number of nanoseconds, 0 or more"
            )
        ops[name] = float(ns)
    return ops


class Measured(Protocol):
    """A source of measured times, by the names of an op."""

    def ns(self, names: Sequence[str]) -> float | None:
        """Returns the time of the first of these names that is known, else None."""
        ...


@dataclass(frozen=True)
class Clock:
    """Times work on one of `devices` devices."""

    hardware: Hardware
    devices: int
    measured: Measured | None = None

    def kernel(self, work: KernelWork, names: Sequence[str]) -> float:
        """Returns a kernel's ns: the measured time of the first known name, else the model's."""
        known = self.measured.ns(names) if self.measured is not None else None
        return kernel_ns(work, self.hardware) if known is None else known

    def shares(self, work: KernelWork) -> tuple[float, float]:
        """Returns the shares of a kernel's time that its operations and its memory would need."""
        return kernel_time(work, self.hardware).shares

    def contention(self, transfer: DeviceTransfer, time: TransferTime) -> Contention:
        """Returns the shares of compute units and memory bandwidth that a collective uses."""
        return contention(transfer, time, self.hardware)

    def collective(self, transfer: DeviceTransfer, names: Sequence[str]) -> TransferTime:
        """Returns a collective's time: measured under the first known name, else the model's.

        Raises ToolError if the model rejects the collective; see `transfer_time`.
        """
        modelled = transfer_time(transfer, self.hardware, self.devices)
        known = self.measured.ns(names) if self.measured is not None else None
        if known is None:
            return modelled
        # A measurement is one number. The model says which part of it a bucket pays only once.
        return replace(modelled, ns=known, latency_ns=min(known, modelled.latency_ns))

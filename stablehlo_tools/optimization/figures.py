"""What a candidate costs as the target's compiler schedules it. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NEVER = float("inf")  # ns: of a program that the compiler refuses for lack of memory


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in nanoseconds of one run, sizes in bytes on each device.

    All times are NEVER where the compiler refuses the program for lack of memory; then the sizes
    are what it says that it needs.

    `contended_ns`: of a run in which collectives take compute units and memory bandwidth of the
    kernels beside them: what is decided by. `work_ns`: of `compute_ns`, what is not the
    launch of kernels. `floor_ns`: no order of the same kernels and collectives is faster.
    `peak_bytes`: the most alive at any time in the schedule, as `inspect --target` counts it.
    `compiler_bytes`: what the compiler says it sets aside, arguments and results included.
    `collectives`: how many the schedule issues. `same_order`: whether it issues those of the
    program in the program's order.
    """

    total_ns: float
    contended_ns: float
    exposed_ns: float
    compute_ns: float
    work_ns: float
    floor_ns: float
    peak_bytes: float
    compiler_bytes: int
    collectives: int
    same_order: bool
    devices: int
    compiled_by: str  # "XLA:GPU of jax-cuda13-pjrt 0.12.0.1 for 8 H100 (1x1x8)"
    stand_in: str  # in words, where another chip was compiled for, or the program is for another
    schedule: str  # the digest of the scheduled HLO in the store

    @property
    def needed_bytes(self) -> float:
        """What a device has to have: the larger of the two counts."""
        return max(self.peak_bytes, self.compiler_bytes)

    @property
    def runs(self) -> bool:
        """Whether the compiler made a program of it."""
        return self.total_ns < NEVER

    def ratio_to(self, other: Figures) -> float | None:
        """Of its time to another's; None where one of them does not run."""
        return self.total_ns / other.total_ns if self.runs and other.runs else None

    @property
    def times(self) -> tuple[float, ...]:
        """What two schedules hardly have in common that are not alike."""
        return (self.total_ns, self.exposed_ns, self.compute_ns, self.peak_bytes)

    def shown(self) -> dict[str, Any]:
        """The fields of `to_json` that tell one candidate from another."""
        fields = self.to_json()
        return {name: fields[name] for name in ("total_ns", "exposed_ns", "peak_bytes")}

    def to_json(self) -> dict[str, Any]:
        """The fields; None for what never ends."""
        return {name: None if value == NEVER else value for name, value in asdict(self).items()}

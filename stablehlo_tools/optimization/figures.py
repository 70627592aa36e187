"""The cost of a candidate as scheduled by the target's compiler. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NEVER = float("inf")  # ns: of a program that the compiler refuses for lack of memory


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in nanoseconds of one run, sizes in bytes on each device.

    All times are NEVER if the compiler refuses the program for lack of memory; then the sizes are
    the bytes that it reports as needed.

    `contended_ns`: time if collectives use compute units and memory bandwidth of concurrent
    kernels; candidates are ranked by it. `work_ns`: `compute_ns` without the launches of kernels.
    `floor_ns`: no order of the same kernels and collectives is faster.
    `peak_bytes`: the most bytes live at any time in the schedule, as `inspect --target` counts.
    `compiler_bytes`: the bytes that the compiler reserves, including arguments and results.
    `collectives`: how many the schedule issues. `same_order`: True if it issues those of the
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
    stand_in: str  # a remark if the chip compiled for is not the machine's or the program's own
    schedule: str  # the digest of the scheduled HLO in the store

    @property
    def needed_bytes(self) -> float:
        """The memory that a device must have: the larger of the two counts."""
        return max(self.peak_bytes, self.compiler_bytes)

    @property
    def runs(self) -> bool:
        """True if the compiler accepted the program."""
        return self.total_ns < NEVER

    def ratio_to(self, other: Figures) -> float | None:
        """Returns its time divided by that of `other`; None if one of them does not run."""
        return self.total_ns / other.total_ns if self.runs and other.runs else None

    @property
    def times(self) -> tuple[float, ...]:
        """Figures that are equal only for schedules that are practically the same."""
        return (self.total_ns, self.exposed_ns, self.compute_ns, self.peak_bytes)

    def shown(self) -> dict[str, Any]:
        """Returns the fields of `to_json` that distinguish candidates."""
        fields = self.to_json()
        return {name: fields[name] for name in ("total_ns", "exposed_ns", "peak_bytes")}

    def to_json(self) -> dict[str, Any]:
        """Returns the fields; None for times of NEVER."""
        return {name: None if value == NEVER else value for name, value in asdict(self).items()}

"""What a user asks of the pass."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.cost.hardware import Hardware


@dataclass(frozen=True)
class Options:
    """The options of the pass; `limit` in bytes, None if none is given."""

    direction: str
    distance: int
    hardware: Hardware
    limit: float | None
    hold: bool

    @property
    def most_bytes(self) -> float:
        """What a program may need."""
        return self.hardware.memory_bytes if self.limit is None else self.limit

    @property
    def holds(self) -> bool:
        """Whether fences are written: XLA:TPU keeps to none."""
        return self.hold and not self.hardware.is_torus

    def allows(self, direction: str) -> bool:
        """Whether collectives may move in a direction."""
        return self.direction in (direction, "auto")

"""The request for a plan: the cluster, and the given parts; with meshes and divisions as text."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal

from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import Dims
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import GIB, ToolError
from stablehlo_tools.optimization.road import Circumstances
from stablehlo_tools.targets.chips import target_of

PASSES = "partition,create-reduce-scatter"
BUDGET = 300.0  # seconds, by default

MeshShape = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PlanRequest:
    """The cluster, and the parts of the plan that are given.

    `profile`: the name or the file of the hardware, as passes are told it (default: its name).
    `memory`: bytes of a device (default: those of the hardware). `axes`: the only mesh to consider.
    `keep`: the division of arguments by path, over these axes; `stated`: by number. `target`: whose
    compiler decides within `budget` seconds (default: the hardware's). Without compiler or budget,
    the model decides. `pipeline`: if auto, stages of layers over parts of the devices are
    candidates, too; if always, nothing else is. `passes` are run on the divided step.
    `executor`: whose workers compile.
    """

    hardware: Hardware
    devices: int
    profile: str = ""
    memory: float | None = None
    axes: MeshShape = ()
    keep: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    stated: Mapping[int, Dims] = field(default_factory=dict[int, Dims])
    target: str = ""
    budget: float = 0.0
    pipeline: Literal["never", "auto", "always"] = "never"
    passes: str = PASSES
    executor: Executor | None = None

    @property
    def limit(self) -> float:
        """The memory limit in bytes of a device."""
        return self.memory or self.hardware.memory_bytes

    @property
    def compiler(self) -> str:
        """The target whose compiler decides; "" if the model decides."""
        own = target_of(self.hardware)
        return (self.target or (own.value if own else "")) if self.budget > 0 else ""

    @property
    def machine(self) -> Circumstances:
        """The machine as passes are told it."""
        memory = None if self.memory is None else self.memory / GIB
        return Circumstances(self.profile or self.hardware.name, memory)


def parse_specs(texts: Sequence[str], axes: MeshShape) -> dict[str, Dims]:
    """Parses texts such as `state['w']=P(None, 'model')`. Raises ToolError."""
    found: dict[str, Dims] = {}
    names = [name for name, _ in axes]
    for text in texts:
        path, _, spec = text.rpartition("=P")
        try:
            entries = ast.literal_eval(f"({spec[1:-1]},)" if spec[1:-1] else "()")
            parts = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
        except (ValueError, SyntaxError, TypeError):
            raise ToolError(f"--keep {text}: not PATH=P(…), as in batch=P('data')") from None
        unknown = [axis for part in parts for axis in part if axis not in names]
        if not path or unknown:
            why = f"no axis is called {unknown[0]!r}" if unknown else "not PATH=P(…)"
            raise ToolError(f"--keep {text}: {why}; axes: {', '.join(names) or 'none'}")
        found[path] = tuple(tuple(AxisRef(axis) for axis in part) for part in parts)
    return found


def spec_text(dims: Dims) -> str:
    """Returns a division as jax writes it: `P(None, ('data', 'model'))`."""

    def entry(axes: Sequence[AxisRef]) -> str:
        names = [repr(axis.name) for axis in axes]
        return "None" if not names else names[0] if len(names) == 1 else f"({', '.join(names)})"

    entries = [entry(axes) for axes in dims]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def mesh_text(mesh: MeshShape) -> str:
    """Returns a mesh as text: `data 8 x model 8`."""
    return " x ".join(f"{name} {count}" for name, count in mesh)

"""The programs of the ranks of pipeline parallelism: their description, proof, and execution.

    job = stablehlo_tools.mpmd.load("set")

The names below load jax on first use, not on import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablehlo_tools.mpmd.runtime.job import Job, Results, State, load
    from stablehlo_tools.mpmd.runtime.signature import Need

_HOMES = {"Job": "job", "Need": "signature", "Results": "job", "State": "job", "load": "job"}

__all__ = ["Job", "Need", "Results", "State", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.runtime.{_HOMES[name]}"), name)

"""Programs with jax's explicit asynchronous collectives, written as jax 0.12 writes them."""

from __future__ import annotations

import json
from typing import Any

KINDS = {
    "all-gather": ("tensor<2x4xf32>", "tensor<4x4xf32>"),
    "all-reduce": ("tensor<2x4xf32>", "tensor<2x4xf32>"),
    "all-to-all": ("tensor<2x4xf32>", "tensor<4x2xf32>"),
    "collective-permute": ("tensor<2x4xf32>", "tensor<2x4xf32>"),
    "reduce-scatter": ("tensor<2x4xf32>", "tensor<1x4xf32>"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "all-gather": {"all_gather_dimension": 0, "use_global_device_ids": True},
    "all-reduce": {"use_global_device_ids": True},
    "all-to-all": {"split_dimension": 1, "concat_dimension": 0, "split_count": 2},
    "collective-permute": {"permutation": [[0, 1], [1, 0]]},
    "reduce-scatter": {"scatter_dimension": 0, "tiled": True, "use_global_device_ids": True},
}
REDUCING = ("all-reduce", "reduce-scatter")


def config(kind: str, **changed: Any) -> str:
    """The configuration of a kind among two devices; None takes an entry out."""
    groups = {} if kind == "collective-permute" else {"replica_groups": [[0, 1]]}
    entries = {**CONFIGS[kind], **groups, "channel_id": 1, **changed}
    return json.dumps({name: value for name, value in entries.items() if value is not None})


def start(kind: str, result: str, operand: str, text: str | None = None) -> str:
    """The line of a start."""
    quoted = (config(kind) if text is None else text).replace('"', "\\22")
    called = "called_computations = [@sum], " if kind in REDUCING else ""
    given, made = KINDS[kind]
    return (
        f'{result} = stablehlo.custom_call @"{kind}-start"({operand}) {{{called}'
        f'mhlo.frontend_attributes = {{async_collective_config = "{quoted}"}}}} '
        f": ({given}) -> {made}"
    )


def done(kind: str, result: str, operand: str) -> str:
    """The line of a done."""
    made = KINDS[kind][1]
    return f'{result} = stablehlo.custom_call @"{kind}-done"({operand}) : ({made}) -> {made}'


def module(body: str, results: str, types: str, arguments: str = "") -> str:
    """What each of two devices runs on %x and %y, and on more."""
    return f"""module attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func private @sum(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {{
    %s = stablehlo.add %a, %b : tensor<f32>
    return %s : tensor<f32>
  }}
  func.func @main(%x: tensor<2x4xf32>, %y: tensor<2x4xf32>{arguments}) -> ({types}) {{
{body}
    return {results} : {types}
  }}
}}
"""


def pairs(*kinds: str, apart: bool = True) -> str:
    """A program that starts collectives of some kinds in a row, all before the dones if `apart`."""
    starts = [start(kind, f"%f{i}", "%x" if i % 2 else "%y") for i, kind in enumerate(kinds)]
    dones = [done(kind, f"%d{i}", f"%f{i}") for i, kind in enumerate(kinds)]
    lines = [*starts, *dones] if apart else [e for p in zip(starts, dones, strict=True) for e in p]
    results = ", ".join(f"%d{i}" for i in range(len(kinds)))
    return module("\n".join(lines), results, ", ".join(KINDS[kind][1] for kind in kinds))

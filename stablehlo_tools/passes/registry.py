"""Lists the passes by name, which are imported only when used, and the named pipelines.

Reading these tables is cheap, so that `--help` lists the passes without loading MLIR. A named
pipeline is a flat list of passes, with the reason for the position of each step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stablehlo_tools.diagnostics import ToolError, nearest

if TYPE_CHECKING:
    from stablehlo_tools.passes.base import Pass


# A summary of each pass in one line. The name of a pass is that of its module and of its class:
# `thread-tokens` is `ThreadTokensPass` in `transforms/thread_tokens.py`.
PASSES = {
    "constrain-batch": (
        "sharding constraints keep the batch divided if the program does not say so"
    ),
    "partition": (
        "a plain sharded jit export becomes explicit collectives, by Shardy's partitioner"
    ),
    "create-reduce-scatter": (
        "all_reduces and all_gathers become smaller if each device uses only a part of the result"
    ),
    "fold-pipeline": (
        "a hand-written pipeline becomes the plain loop over layers that it computes"
    ),
    "roll-layers": "layers that are written out one after another become a loop",
    "expand-pipeline": (
        "a loop over layers becomes a pipeline over a mesh axis: GPipe, interleaved or 1F1B"
    ),
    "offload": (
        "residuals move to the host's memory until the backward reads them, if needed to fit"
    ),
    "rematerialize": (
        "the backward recomputes residuals that are not worth their memory, until the program fits"
    ),
    "shard-optimizer": (
        "the state and the update of an optimizer are divided over a mesh axis (ZeRO-1)"
    ),
    "split-layers": (
        "loops over layers become loops over ranges of them, and values stacked by layer are split"
    ),
    "accumulate-gradients": (
        "a training step on a whole batch becomes a loop over microbatches with accumulators"
    ),
    "split-weight-gradients": (
        "a backward loop over layers becomes two: the cotangents first, gradients of weights later"
    ),
    "collective-matmul": (
        "gathers before products, and scatters after them, become rings that overlap the products"
    ),
    "hierarchical-collectives": (
        "collectives over many devices become several over fewer if that is faster"
    ),
    "assign-communication-domains": (
        "collectives over NVLink and over InfiniBand in flight together on XLA:GPU"
    ),
    "split-batch": (
        "the batch of each device in parts, so that one's compute can hide another's collectives"
    ),
    "pipeline-collectives": (
        "collectives of a loop run one iteration early or late, or once after the loop"
    ),
    "reassociate-collectives": "sums of all_reduces or reduce_scatters become one of a sum",
    "bucket-collectives": (
        "collectives of one kind become one if that saves more latency than overlap"
    ),
    "hold-collectives": (
        "sums of a loop stay in their iteration and separate, though XLA:GPU would join them"
    ),
    "break-permute-cycles": (
        "ring permutes become acyclic ones and a select, so that no device can wait for itself"
    ),
    "schedule-overlap": (
        "compute and collectives in an order that overlaps them, held by barriers"
    ),
    "decompose-collective-permute": (
        "collective_permutes become send and recv, in an order that cannot deadlock"
    ),
    "import-pseudo-tokens": (
        "turn the float pseudo-tokens of PyTorch/XLA into one !stablehlo.token chain"
    ),
    "thread-tokens": "one !stablehlo.token chain through every collective, in program order",
    "strip-tokens": "remove the token chain that thread-tokens put in",
}


@dataclass(frozen=True)
class NamedStep:
    """One step of a named pipeline, and the reason for its position.

    `takes` are the options of the pipeline that replace the options of this step.
    """

    text: str
    reason: str
    takes: tuple[str, ...] = ()


_PARTITION = NamedStep("partition", "the passes below rewrite collectives that they can see")
_SMALLER = NamedStep("create-reduce-scatter", "transfers that are removed need not be hidden")
_ORDER = NamedStep(
    "schedule-overlap",
    "last, because all other passes would undo the order",
    ("hardware", "memory-limit"),
)

NAMED: dict[str, tuple[NamedStep, ...]] = {
    "order-collectives": (
        NamedStep("symbol-dce", "removes unused functions, so that they are not threaded"),
        NamedStep("thread-tokens", "last: token barriers stop every later merge and move"),
    ),
    # Times after and before, as XLA:GPU schedules them on 8 H100: MaxText's 7B step 293.3 of 300.6
    # ms; a step of flax over two stages 348 of 398 ms, 406 with schedule=1f1b and 338 with gpipe.
    # A mixture of experts on 64: 74 of 83 ms.
    "fsdp": (_PARTITION, _SMALLER, _ORDER),
    # Without an order: almost all compute next to a sum of activations waits for it. XLA:GPU's
    # order is as good (Tunix's Qwen3: 90.5 ms either way) or better (flax's scan: 277 and 283
    # ms, of 287 as exported).
    "tensor-parallel": (_PARTITION, _SMALLER),
    "moe": (_PARTITION, _SMALLER, _ORDER),
    "pipeline": (
        NamedStep(
            "expand-pipeline{schedule=eager-1f1b}",
            "first: it cuts the loop over layers, which partitioning divides",
            ("axis", "microbatches", "repeats", "schedule"),
        ),
        _PARTITION,
        _SMALLER,
        _ORDER,
    ),
}
KNOWN_NAMES = (*PASSES, *NAMED, "cse", "canonicalize", "symbol-dce")  # the last are C++ passes


def find_pass(name: str) -> type[Pass] | None:
    """Returns the class of a Python pass, or None if no Python pass has the name."""
    if name not in PASSES:
        return None
    module = importlib.import_module(f"stablehlo_tools.transforms.{name.replace('-', '_')}")
    return getattr(module, "".join(map(str.capitalize, name.split("-"))) + "Pass")


def unknown_pass(name: str) -> ToolError:
    """Returns the error for a name that neither this registry nor MLIR has."""
    near = nearest(name, KNOWN_NAMES)
    hint = f"did you mean {near!r}?" if near else f"passes here: {', '.join(PASSES)}"
    return ToolError(
        f"unknown pass {name!r}: neither in this toolkit nor registered in MLIR; {hint}",
        hint="stablehlo-tools opt --list-passes",
        instead=(name, near) if near else None,
    )

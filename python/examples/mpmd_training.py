"""One export of a training step, two schedules: a program for each rank, proven and run.

    python mpmd_training.py [--keep DIR]

Exports the step of a small decoder, which accumulates gradients over microbatches in a
`lax.scan`. `expand-mpmd` cuts it into a program for each rank of a pipeline, once under 1F1B and
once under a zero-bubble schedule; `check-mpmd` proves the sets and compares them with the export in
exact arithmetic; `run-mpmd` runs them in floats, as real processes connected by gloo, and compiles
every rank for XLA:GPU. Exit code 0 when all is proven, the same, and in order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an export needs no accelerator

import jax
import jax.numpy as jnp
from jax import export, lax

RANKS, MICROBATCHES, LAYERS = 2, 4, 8
BATCH, LENGTH, VOCABULARY = 8, 8, 32
WIDTH, INNER = 16, 32
RATE = 0.1
SCHEDULES = ("1f1b", "zb-v")


def loss(weights: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next token."""

    def layer(hidden: jax.Array, w: Any) -> tuple[jax.Array, None]:
        hidden = hidden + attention(normed(hidden), w)
        return hidden + jax.nn.relu(normed(hidden) @ w["up"]) @ w["down"], None

    hidden, _ = lax.scan(layer, weights["embedding"][tokens[:, :-1]], weights["layers"])
    logits = jax.nn.log_softmax(normed(hidden) @ weights["head"])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def attention(hidden: jax.Array, w: Any) -> jax.Array:
    """Causal attention of one head."""
    q, k, v = hidden @ w["query"], hidden @ w["key"], hidden @ w["value"]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e30)) @ v @ w["out"]


def normed(hidden: jax.Array) -> jax.Array:
    """RMSNorm without a scale."""
    return hidden * lax.rsqrt(jnp.mean(hidden * hidden, -1, keepdims=True) + 1e-5)


def summed(weights: Any, tokens: jax.Array, microbatches: int) -> tuple[jax.Array, Any]:
    """The loss and its gradients, added up over so many microbatches."""

    def add(sums: Any, microbatch: jax.Array) -> tuple[Any, None]:
        found = jax.value_and_grad(loss)(weights, microbatch)
        return jax.tree.map(jnp.add, sums, found), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
    return lax.scan(add, start, tokens.reshape(microbatches, -1, *tokens.shape[1:]))[0]


def step(weights: Any, momentum: Any, tokens: jax.Array) -> Any:
    """New weights and momentum, and the loss."""
    total, gradients = summed(weights, tokens, MICROBATCHES)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g / MICROBATCHES, momentum, gradients)
    weights = jax.tree.map(lambda w, m: w - RATE * m, weights, momentum)
    return weights, momentum, total / MICROBATCHES


def exported() -> export.Exported:
    """The step for one device, as any JAX program is exported."""

    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layers = {
        **{name: array(LAYERS, WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
        "up": array(LAYERS, WIDTH, INNER),
        "down": array(LAYERS, INNER, WIDTH),
    }
    weights = {
        "embedding": array(VOCABULARY, WIDTH),
        "layers": layers,
        "head": array(WIDTH, VOCABULARY),
    }
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return export.export(jax.jit(step))(weights, weights, tokens)


def main() -> int:
    """Runs the example; 1 where a set is not proven or not the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the files there")
    arguments = parser.parse_args()
    if arguments.keep is None:
        with tempfile.TemporaryDirectory() as directory:
            return tell(Path(directory))
    arguments.keep.mkdir(parents=True, exist_ok=True)
    return tell(arguments.keep)


def tell(directory: Path) -> int:
    """Exports, expands, proves and runs, with the files in `directory`."""
    started = time.perf_counter()
    program = exported().serialize()
    (directory / "step.jax_export").write_bytes(program)
    say(
        f"\nOne export of a decoder's training step, {LAYERS} layers, {MICROBATCHES} microbatches: "
        f"{len(program):,} bytes.\nA flag makes a program for each of {RANKS} ranks of it:"
    )
    rows = [row_of(directory, schedule) for schedule in SCHEDULES]
    headings = [
        "schedule",
        "idle on h100",
        "messages",
        "check-mpmd",
        "exact",
        "processes",
        "XLA:GPU",
    ]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    say("", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (headings, *rows)))
    say(f"{time.perf_counter() - started:.0f} s")
    cells = [cell for row in rows for cell in row]
    return 1 if any(cell.isupper() or cell.endswith("DIFFERS") for cell in cells) else 0


def row_of(directory: Path, schedule: str) -> list[str]:
    """A row of the table: what came of a schedule."""
    options = ("--schedule", schedule, "--ranks", str(RANKS))
    written = tool(directory, "expand-mpmd", "step.jax_export", "-o", schedule, *options)
    proof = tool(directory, "check-mpmd", schedule, "--of", "step.jax_export")
    is_same = proof["proven"] and proof["values"]["same"]
    processes = tool(directory, "run-mpmd", schedule, "step.jax_export", "--how", "processes")
    compiled = tool(directory, "run-mpmd", schedule, "--compile", "gpu")["ranks"]
    is_right = all(rank["in_order"] and not rank["refusal"] for rank in compiled)
    return [
        schedule,
        f"{written['bubble']:.1%}",
        str(written["messages"] + written["finish_messages"]),
        "proven" if proof["proven"] else "NOT PROVEN",
        "identical" if is_same else "DIFFERS",
        differences(processes),
        "in order" if is_right else "NOT COMPILED",
    ]


def differences(found: Any) -> str:
    """`same`, or how far outputs differ."""
    largest = max(o["max_abs_difference"] or 0.0 for o in found["values"]["outputs"])
    return "same" if found["same"] else f"{largest:.1e} DIFFERS"


def tool(directory: Path, *words: str) -> Any:
    """Runs a command of stablehlo-tools in `directory`, shows it, and returns its JSON answer."""
    say(f"    $ stablehlo-tools {' '.join(words)}")
    done = subprocess.run(
        [sys.executable, "-m", "stablehlo_tools.cli.main", *words, "--json"],
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode > 1:
        sys.exit(1)
    return json.loads(done.stdout)


def say(*lines: str) -> None:
    """Prints at once, so that progress shows through a pipe, too."""
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""A training run, exported once: in one process, and as a program for each rank of a pipeline.

    python train_mpmd.py --ranks P --schedule NAME --steps N [--json] [--page PAGE.html]

Exports the step of a small decoder, AdamW with a schedule of its rate and clipped gradients, on the
text of this project's documentation (a copy, train_mpmd.txt). Trains it in one process as it was
exported, and again with its weights moved by one rounding, which says how much of the loss is
rounding. `expand-mpmd` makes a program for each rank, `run-mpmd --train` starts a process for each,
which trains with `stablehlo_tools.mpmd.load`. Prints and draws the losses of both; exit code 1
where they differ by more than rounding makes.

    --chunks V            stages on each rank, of schedules that have several
    --save DIR --every K  a checkpoint each K steps, DIR/step_K
    --resume DIR/step_K   go on from one, under any schedule and number of ranks
    --in-one              the ranks as devices of one process
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # runs anywhere

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from mpmd_training import summed

# A copy of six pages, not the pages: losses stay as they are, whatever is written in these.
TEXT = Path(__file__).resolve().with_suffix(".txt")
LAYERS, WIDTH, INNER, VOCABULARY = 8, 64, 256, 128
BATCH, LENGTH, MICROBATCHES = 16, 64, 8
PEAK_RATE, WARMUP, CLIP = 1e-3, 20, 1.0
TOOL = (sys.executable, "-m", "stablehlo_tools.cli.main")
ROUNDINGS = 8.0  # a set may be off by so many times what one rounding of the weights makes
LEAST = 1e-5  # of a loss


def optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW behind clipping by the global norm, its rate warmed up and let down."""
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARMUP, max(steps, 2 * WARMUP))
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(rate))


def first_state(steps: int) -> dict[str, Any]:
    """Random weights, and the leaves of the optimizer's state."""
    shapes = {
        **dict.fromkeys(("query", "key", "value", "out"), (LAYERS, WIDTH, WIDTH)),
        "up": (LAYERS, WIDTH, INNER),
        "down": (LAYERS, INNER, WIDTH),
    }
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 2))

    def normal(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes) * sizes[-2] ** -0.5

    weights = {
        "embedding": normal(VOCABULARY, WIDTH),
        "head": normal(WIDTH, VOCABULARY),
        "layers": {name: normal(*sizes) for name, sizes in shapes.items()},
    }
    return {"weights": weights, "optimizer": jax.tree.leaves(optimizer(steps).init(weights))}


def step_of(steps: int) -> Any:
    """The step: the next state and the loss of (state, tokens)."""
    rule = optimizer(steps)

    def step(state: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        weights = state["weights"]
        total, gradients = summed(weights, tokens, MICROBATCHES)
        gradients = jax.tree.map(lambda g: g / MICROBATCHES, gradients)
        structure = jax.tree.structure(jax.eval_shape(rule.init, weights))
        before = jax.tree.unflatten(structure, state["optimizer"])
        updates, after = rule.update(gradients, before, weights)
        weights = optax.apply_updates(weights, updates)
        return {"weights": weights, "optimizer": jax.tree.leaves(after)}, total / MICROBATCHES

    return step


def batches(first: int, steps: int) -> Iterator[np.ndarray]:
    """Windows of the text, the same for everybody: `int32[BATCH, LENGTH + 1]`."""
    letters = np.frombuffer(TEXT.read_bytes(), np.uint8)
    letters = letters[letters < VOCABULARY].astype(np.int32)
    for number in range(first, steps):
        rng = np.random.default_rng(number)
        starts = rng.integers(0, len(letters) - LENGTH - 1, BATCH)
        yield letters[starts[:, None] + np.arange(LENGTH + 1)]


def trained_as_exported(exported: export.Exported, state: Any, steps: int) -> list[float]:
    """The losses of the export in this process."""
    step = jax.jit(exported.call, donate_argnums=0)
    state = jax.tree.map(jnp.array, state)  # a copy, which the first step consumes
    losses: list[jax.Array] = []
    for tokens in batches(0, steps):
        state, value = step(state, tokens)
        losses.append(value)
    return [float(value) for value in losses]


def moved(state: Any) -> Any:
    """The state with each weight a rounding away."""

    def away(array: Any) -> Any:
        return np.nextafter(np.asarray(array), np.float32(np.inf))

    return {**state, "weights": jax.tree.map(away, state["weights"])}


def worker(arguments: argparse.Namespace) -> None:
    """The run of the ranks of this process; `run-mpmd --train` has joined it to the others."""
    from stablehlo_tools import mpmd

    with mpmd.load(arguments.worker, silence=arguments.silence) as job:
        if arguments.resume:
            first = int(arguments.resume.name.removeprefix("step_"))
            state = job.restore(arguments.resume, step=first)
        else:
            first, state = 0, job.init(first_state(arguments.steps))
        values: list[Any] = []
        for tokens in batches(first, arguments.steps):
            state, results = job.step(state, tokens)
            values.append(results.later("[1]"))
            if arguments.save and state.step % arguments.every == 0:
                job.save(arguments.save / f"step_{state.step}", state)
            if arguments.die_at == state.step and job.ranks[-1] == arguments.ranks - 1:
                os._exit(3)  # as a machine does
        if values and values[0] is not None:
            losses = [float(value()) for value in values]
            arguments.losses.write_text(json.dumps({"first": first, "losses": losses}))


def trained_as_ranks(arguments: argparse.Namespace, directory: Path) -> list[float]:
    """The losses of a set with a process for each rank, or all ranks in one."""
    chunks = () if arguments.chunks is None else ("--chunks", str(arguments.chunks))
    made = ("--schedule", arguments.schedule, "--ranks", str(arguments.ranks), *chunks)
    tool(directory, arguments, "expand-mpmd", "step.jax_export", "-o", "set", *made)
    own = [str(Path(__file__).resolve()), *sys.argv[1:], "--worker", "set"]
    own += ["--losses", "losses.json"]
    for option, path in (("--save", arguments.save), ("--resume", arguments.resume)):
        own += [option, str(path)] if path else []  # whole, for ranks run in another directory
    if arguments.in_one:
        count = f"--xla_force_host_platform_device_count={arguments.ranks}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {count}"
        variables = {**os.environ, "XLA_FLAGS": flags}
        done = subprocess.run([sys.executable, *own], cwd=directory, env=variables, check=False)
        if done.returncode:
            sys.exit(done.returncode)
    else:
        tool(directory, arguments, "run-mpmd", "set", "--train", *own)
    return json.loads((directory / "losses.json").read_text())["losses"]


def tool(directory: Path, arguments: argparse.Namespace, *words: str) -> None:
    """Runs a command of stablehlo-tools in a directory, and shows it."""
    shown = [Path(word).name if word == str(Path(__file__).resolve()) else word for word in words]
    say(arguments, f"    $ stablehlo-tools {' '.join(shown)}")
    output = subprocess.DEVNULL if arguments.json else None
    done = subprocess.run([*TOOL, *words], cwd=directory, stdout=output, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> int:
    """Runs both and compares; 1 where they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--page", type=Path, metavar="PAGE.html", help="draw the losses")
    parser.add_argument("--save", type=_absolute, metavar="DIR", help="write checkpoints there")
    parser.add_argument("--every", type=int, default=100, metavar="K", help="each K steps")
    parser.add_argument("--resume", type=_absolute, metavar="DIR/step_K")
    parser.add_argument("--in-one", action="store_true", help="all ranks in one process")
    parser.add_argument("--silence", type=float, default=15.0, help="seconds until a rank is lost")
    parser.add_argument("--die-at", type=int, help="let the last rank die behind a step")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        return compared(arguments, Path(directory))


def _absolute(text: str) -> Path:
    return Path(text).resolve()


def compared(arguments: argparse.Namespace, directory: Path) -> int:
    """Exports, trains both ways, and says how far the losses are from each other."""
    steps = arguments.steps
    state = first_state(steps)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    exported = export.export(jax.jit(step_of(steps), donate_argnums=0))(shapes, tokens)
    (directory / "step.jax_export").write_bytes(exported.serialize())
    began = time.perf_counter()
    rounded = trained_as_exported(exported, moved(state), steps)
    plain = trained_as_exported(exported, state, steps)
    taken = (time.perf_counter() - began) / 2
    say(arguments, f"one process, {steps} steps in {taken:.1f} s: loss {plain[-1]:.4f}")
    began = time.perf_counter()
    ranks = trained_as_ranks(arguments, directory)
    taken = time.perf_counter() - began
    how = "one process" if arguments.in_one else f"{arguments.ranks} processes"
    name = f"{arguments.schedule}, {arguments.ranks} ranks in {how}"
    say(arguments, f"{name}, {len(ranks)} steps in {taken:.1f} s: loss {ranks[-1]:.4f}")
    first = steps - len(ranks)
    off = np.abs(np.array(plain[first:]) - ranks)
    noise = np.maximum.accumulate(np.abs(np.array(plain) - rounded))[first:]
    allowed = np.maximum(ROUNDINGS * noise, LEAST)
    same = bool((off <= allowed).all())
    text = f"largest difference {off.max():.2e}, where one rounding makes {noise.max():.2e}"
    say(arguments, f"{text}: {'the same run' if same else 'ANOTHER RUN'}")
    if arguments.page:
        arguments.page.write_text(page(name, plain, ranks, first, text))
    if arguments.json:
        answer = {
            "schedule": arguments.schedule,
            "ranks": arguments.ranks,
            "first_step": first,
            "loss_exported": plain,
            "loss_rounded": rounded,
            "loss_ranks": ranks,
            "same": same,
        }
        print(json.dumps(answer))
    return 0 if same else 1


def page(name: str, plain: Sequence[float], ranks: Sequence[float], first: int, text: str) -> str:
    """Both curves as one drawing."""
    width, height, top = 760, 360, max(plain)

    def line(losses: Sequence[float], start: int, style: str) -> str:
        points = " ".join(
            f"{40 + (start + n) * (width - 60) / max(len(plain) - 1, 1):.1f},"
            f"{height - 30 - value * (height - 60) / top:.1f}"
            for n, value in enumerate(losses)
        )
        return f'<polyline points="{points}" fill="none" {style}/>'

    return f"""<!doctype html><meta charset="utf-8"><title>{name}</title>
<style>body {{ font: 15px system-ui; margin: 2em }} svg {{ max-width: 100% }}</style>
<h1>{name}</h1><p>Loss by step, of {len(plain)} steps: as exported (wide), and the set of rank
programs (narrow). {text}.</p>
<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss by step">
<path d="M40 20V{height - 30}H{width - 20}" fill="none" stroke="#888"/>
<text x="2" y="26" font-size="12">{top:.2f}</text>
<text x="2" y="{height - 26}" font-size="12">0</text>
<text x="{width - 60}" y="{height - 10}" font-size="12">step {len(plain)}</text>
{line(plain, 0, 'stroke="#9ab8e8" stroke-width="6"')}
{line(ranks, first, 'stroke="#b0341f" stroke-width="1.5"')}
</svg>
"""


def say(arguments: argparse.Namespace, text: str) -> None:
    """Prints at once, beside JSON nothing."""
    if not arguments.json:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

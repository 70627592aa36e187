"""What every recipe has in common: a step is exported, written, and taken through the tool.

A recipe imports this file before jax, which then has eight virtual CPU devices. `export_step` is
for the recipes whose library does not export by itself; `tell` runs the commands that a reader
would type, and shows what they print.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
from jax import export

ORDERED = "partition,create-reduce-scatter,thread-tokens"
LINES = 6  # of what a command prints


def export_step(
    step: Callable[..., Any],
    *arguments: Any,
    out_shardings: tuple[Any, ...] | None = None,
    donated: int = 0,
    allow: Sequence[str] = (),
) -> export.Exported:
    """Exports `step(*arguments)`, which returns a tuple; arguments are pytrees of ShapeDtypeStructs
    with shardings.

    Each pytree of the signature becomes a dict from names to arrays: an artifact that has types of
    optax or flax there can only be written where each is registered with `jax.export`, and a
    report can say the names. `out_shardings` is a tuple of pytrees like the results; `donated` says
    how many of the arguments are donated, `allow` names custom calls that jax does not promise to
    keep.
    """
    names = [list(named(argument)) for argument in arguments]
    structures = [jax.tree.structure(argument) for argument in arguments]

    def on_names(*given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        leaves = [[got[name] for name in of] for got, of in zip(given, names, strict=True)]
        results = step(*map(jax.tree.unflatten, structures, leaves))
        return tuple(named(result) for result in results)

    options: dict[str, Any] = {"donate_argnums": tuple(range(donated))}
    if out_shardings is not None:
        options["out_shardings"] = tuple(map(named, out_shardings))
    jitted = jax.jit(on_names, **options)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in allow]
    return export.export(jitted, disabled_checks=checks)(*map(named, arguments))


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by the way to each, such as `params.layers.up.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(way, simple=True, separator="."): leaf for way, leaf in leaves}


def abstract(tree: Any, shardings: Any) -> Any:
    """The shapes and dtypes of a pytree, with the shardings of another of the same structure."""

    def leaf(value: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree, shardings)


def main(build: Callable[[], export.Exported], name: str, *packages: str) -> int:
    """The command line of a recipe; 0 where every command says that the values are the same."""
    parser = argparse.ArgumentParser(prog=f"{name}.py")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the files there")
    parser.add_argument(
        "--optimize", action="store_true", help="search for a faster program, too (XLA:GPU)"
    )
    parser.add_argument(
        "--tool",
        type=Path,
        metavar="FILE",
        help="the stablehlo-tools of another environment, where the jax of this one is older",
    )
    arguments = parser.parse_args()
    tool = [sys.executable, "-m", "stablehlo_tools"]
    if arguments.tool is not None:
        tool = [str(arguments.tool.absolute())]
    started = time.perf_counter()
    exported = build()
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        library = name.removeprefix("from_")
        data = exported.serialize()
        (directory / f"{library}.jax_export").write_bytes(data)
        versions = " ".join(f"{package} {version(package)}" for package in ("jax", *packages))
        print(
            f"{library}.jax_export: {len(data):,} bytes, {exported.nr_devices} devices, "
            f"{len(exported.in_avals)} arguments, {versions} [{seconds:.1f} s]"
        )
        return tell(tool, directory, library, optimize=arguments.optimize)


def tell(tool: Sequence[str], directory: Path, library: str, *, optimize: bool) -> int:
    """Runs the commands on what was written; 0 where each of them ends with 0."""
    step, ordered = f"{library}.jax_export", f"{library}.ordered.jax_export"
    commands = [
        ["inspect", step, "--hardware", "h100"],
        ["opt", step, "-p", ORDERED, "-o", ordered],
        ["verify", step, ordered, "--trials", "1"],
    ]
    if optimize:
        fast = f"{library}.fast.jax_export"
        commands.append(["optimize", step, "--target", "gpu", "--candidates", "8", "-o", fast])
    return max([run(tool, directory, words) for words in commands])


def run(tool: Sequence[str], directory: Path, words: Sequence[str]) -> int:
    """Runs a command in the directory and shows the beginning of what it prints."""
    print(f"\n$ stablehlo-tools {shlex.join(words)}", flush=True)
    started = time.perf_counter()
    done = subprocess.run(
        [*tool, *words],
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = done.stdout.splitlines()
    print(*lines[:LINES], sep="\n")
    if len(lines) > LINES:
        print(f"… {len(lines) - LINES} more lines")
    print(f"[exit code {done.returncode}, {time.perf_counter() - started:.1f} s]", flush=True)
    return done.returncode

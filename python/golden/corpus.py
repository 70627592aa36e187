"""The cases: what is run on both trees, each with a stable id and a digest of its inputs."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from golden.trees import ROOT, Tree

# They go up when records of earlier runs of this harness are no longer good.
VERSION, LIT_VERSION = "2", "2"
LIT = ROOT / "lit_tests"
MODELS = ROOT / "python" / "models"
NEEDED = re.compile(r"%S/([\w./-]+)")

# The large models at sizes that take no minutes, and what the zoo has no defaults for.
RESIZED = {"unrolled": ("--layers=24",), "wide": ("--count=400",)}
VARIANTS = (
    ("decoder-2d-scan-step", "--layers=4", "--stage=2", "--fsdp=2"),
    ("decoder-2d-scan-step", "--fsdp=8", "--model=1", "--remat=true"),
    ("llama", "--layers=4", "--scan-layers=true", "--remat=true"),
)
# Beside the default options, those that do something else altogether.
PIPELINES = (
    *("thread-tokens{minimal}", "thread-tokens{scope=group form=composite}"),
    "expand-pipeline{microbatches=2}",
    "accumulate-gradients{microbatches=2}",
    *(f"pipeline-collectives{{direction={way}}}" for way in ("prefetch", "delay", "sink")),
    "schedule-overlap{hardware=tpu-v5e}",
    "decompose-collective-permute{form=collective-permute validity}",
)
SHAPES = ((2, 4), (4, 8), (4, 6))
RANKS = (
    *(("llama", schedule, 2) for schedule in ("gpipe", "1f1b", "zb-h1")),
    *(("decoder-2d-step", schedule, 2) for schedule in ("1f1b", "interleaved-1f1b", "zb-v")),
    *(("decoder-2d-scan-step", schedule, 2) for schedule in ("1f1b", "zb-h2")),
    ("llama-scan", "1f1b", 2),
    *((name, "1f1b", 2) for name in ("vit-step", "moe-step", "convnet-step", "nnx-llama-step")),
    *((name, "1f1b", 2) for name in ("mamba-scan-step", "encoder-decoder-step")),
)


@dataclass(frozen=True)
class LitFile:
    """A lit test. Each of its RUN lines is a case: `id:1`, `id:2`, ..."""

    id: str
    path: Path  # below lit_tests
    lines: int
    digest: str


@dataclass(frozen=True)
class Command:
    """One command of the tool, a case. A word that starts with OUT is a path where it may write."""

    id: str
    arguments: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Commands:
    """Commands one after the other, where later ones read what the first one wrote."""

    commands: tuple[Command, ...]

    @property
    def id(self) -> str:
        """The id of the first."""
        return self.commands[0].id


OUT = "OUT"
Unit = LitFile | Commands


def units(tree: Tree, only: Sequence[str] = ()) -> list[Unit]:
    """The cases of the working tree whose ids have one of these parts; all without any."""
    every = [*_lit_files(), *_commands(tree)]
    return [chosen for unit in every if (chosen := _chosen(unit, only))]


def _chosen(unit: Unit, only: Sequence[str]) -> Unit | None:
    """What of a unit was asked for, with what that reads."""
    if not only:
        return unit
    if isinstance(unit, LitFile):
        # A part may name one RUN line, but the file runs whole.
        words = [re.sub(r":\d+$", "", word) for word in only]
        return unit if any(word in unit.id for word in words) else None
    chosen = [each for each in unit.commands if any(word in each.id for word in only)]
    return Commands(tuple(dict.fromkeys((unit.commands[0], *chosen)))) if chosen else None


def models_directory(cache: Path) -> Path:
    """Where what these models export is kept."""
    return cache / "inputs" / _models_digest()[:16]


def export(cache: Path, chosen: Iterable[Unit]) -> None:
    """Export the models that these cases read and that have not been before, in one process."""
    directory = models_directory(cache)
    directory.mkdir(parents=True, exist_ok=True)
    read = {
        word
        for unit in chosen
        if isinstance(unit, Commands)
        for command in unit.commands
        for word in command.arguments
    }
    missing = [
        [file_name(words, suffix), *words]
        for words, suffix in _models()
        if f"inputs/{file_name(words, suffix)}" in read
        and not (directory / file_name(words, suffix)).exists()
    ]
    if missing:
        lines = "\n".join(shlex.join(words) for words in missing)
        subprocess.run(
            [sys.executable, Path(__file__).with_name("exporting.py"), directory],
            input=lines,
            text=True,
            check=True,
        )


def file_name(words: Iterable[str], suffix: str) -> str:
    """The file of a model exported with these arguments; `python_client.py` has the same rule."""
    joined = "_".join(words)
    return "".join(c if c.isalnum() or c in "-=.," else "_" for c in joined) + suffix


def _lit_files() -> Iterator[LitFile]:
    shared = _digest(*_contents(LIT / "Inputs"))
    for path in sorted(LIT.rglob("*")):
        below = path.relative_to(LIT)
        if path.suffix not in (".mlir", ".test") or "Inputs" in below.parts:
            continue
        text = path.read_text()
        needed = sorted(path.parent / name for name in NEEDED.findall(text))
        models = _models_digest() if "%{models}" in text else ""
        near = [part for each in needed for part in _contents(each)]
        near += _contents(path.parent / "Inputs")
        digest = _digest(LIT_VERSION, text.encode(), shared, *near, models)
        yield LitFile(f"lit/{below}", below, run_lines(text), digest)


def run_lines(text: str) -> int:
    """How many RUN lines a lit test has; one may go on in those that follow."""
    runs = re.findall(r"RUN:(.*)", text)
    return len(runs) - sum(run.rstrip().endswith("\\") for run in runs)


def _commands(tree: Tree) -> Iterator[Commands]:
    passes, pipelines, schedules = vocabulary(tree)
    every = (*passes, *pipelines, *PIPELINES)
    for words, suffix in _models():
        name, file = ",".join(words), f"inputs/{file_name(words, suffix)}"
        for command in _commands_on(f"zoo/{name}", file, every):
            yield Commands((command,))
        if name in _plain_jits():
            yield _partitioned(f"zoo/{name}/partitioned", file, every)
    for schedule in schedules:
        for ranks, microbatches in SHAPES:
            counts = ("--stages", str(ranks), "--microbatches", str(microbatches))
            words = ("schedule", schedule, *counts, "--format", "json", "--transfers")
            yield Commands((_command(f"schedule/{schedule}/{ranks}x{microbatches}", *words),))
    for name, schedule, ranks in RANKS:
        file = f"inputs/{file_name([name], '.jax_export')}"
        words = ("--ranks", str(ranks), "--microbatches", "2", "--schedule", schedule)
        words = ("expand-mpmd", file, *words, "-o", OUT, "--json")
        yield Commands((_command(f"mpmd/{name}/{schedule}-{ranks}", *words),))


def _commands_on(model: str, file: str, pipelines: Iterable[str]) -> Iterator[Command]:
    for pipeline in pipelines:
        yield _opt(f"{model}/opt/{pipeline}", file, pipeline, f"{OUT}.mlirbc")
    yield _command(f"{model}/inspect", "inspect", file, "--json")
    yield _command(f"{model}/inspect-h100", "inspect", file, "--json", "--hardware", "h100")
    yield _command(f"{model}/check-order", "check-order", file, "--target", "none", "--json")


def _partitioned(identity: str, file: str, pipelines: Iterable[str]) -> Commands:
    """What comes after `partition`, which starts a process and so runs once."""
    part = f"{OUT}.partitioned.mlirbc"
    first = _opt(identity, file, "partition", part)
    rest = [
        _opt(f"{identity}/opt/{pipeline}", part, pipeline, f"{OUT}.mlirbc")
        for pipeline in pipelines
        if pipeline != "partition"
    ]
    return Commands((first, *rest))


def _opt(identity: str, source: str, pipeline: str, target: str) -> Command:
    return _command(identity, "opt", source, "-p", pipeline, "-o", target)


def _command(identity: str, *arguments: str) -> Command:
    from_models = any(word.startswith(("inputs/", f"{OUT}.part")) for word in arguments)
    return Command(identity, arguments, _digest(*arguments, _models_digest() * from_models))


def vocabulary(tree: Tree) -> tuple[list[str], list[str], list[str]]:
    """The passes, named pipelines and schedules that the command itself says it has."""
    text = _said(tree, "opt", "--help")
    own, _, rest = text.partition("\npasses:\n")[2].partition("\n  and every C++ pass")
    pipelines = rest.partition("\nnamed pipelines:\n")[2]
    names = [re.findall(r"^  ([a-z][\w-]*) ", part, re.MULTILINE) for part in (own, pipelines)]
    known = _said(tree, "schedule", "no such schedule").rpartition("known are: ")[2]
    schedules = [name for name in known.partition("\n")[0].strip().split(", ") if name]
    if not all((*names, schedules)):
        raise ValueError(f"no passes, pipelines or schedules in what {tree.name} says of itself")
    return names[0], names[1], schedules


def _said(tree: Tree, *arguments: str) -> str:
    program = f"import sys; from {tree.module} import main; sys.exit(main())"
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PYTHONPATH": str(tree.directory), "COLUMNS": "200", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.stdout + finished.stderr


def _models() -> list[tuple[tuple[str, ...], str]]:
    """Every model, as arguments of export_model.py, and the suffix of its file."""
    names = re.findall(r'(?:Model|_zoo)\(\s*"([\w-]+)"', (MODELS / "zoo.py").read_text())
    plain = [((name, *RESIZED.get(name, ())), _suffix(name)) for name in names]
    return plain + [(words, ".jax_export") for words in VARIANTS]


def _suffix(name: str) -> str:
    return ".mlir" if name == "wide" else ".jax_export"


def _plain_jits() -> set[str]:
    """The models that a partitioner has yet to split: `partition` comes before other passes."""
    names = re.findall(r'_zoo\(\s*"([\w-]+)"', (MODELS / "zoo.py").read_text())
    return {name for name in names if "shard-map" not in name} | {",".join(v) for v in VARIANTS[:2]}


@cache
def _models_digest() -> str:
    return _digest(*(path.read_bytes() for path in sorted(MODELS.glob("*.py"))))


def _contents(path: Path) -> list[bytes]:
    if path.is_dir():
        return [part for file in sorted(path.iterdir()) for part in _contents(file)]
    return [path.name.encode(), path.read_bytes()] if path.is_file() else []


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256(VERSION.encode())
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

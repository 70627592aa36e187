"""The main job on a real program: its communication made explicit, and kept in one order.

    python collective_order.py [--layers N] [--keep DIR]

Exports a Llama-style training step that is sharded by annotations alone (FSDP × tensor parallel,
forward and backward, 8 devices), partitions it, threads one token chain through the collectives,
shows on 8 virtual CPU devices that the values stay, compiles it with and without the chain for
XLA:CPU, XLA:GPU and XLA:TPU to read their schedules back, and says what the communication costs on
H100s, at the size of a published model too. Takes a minute or two and no accelerator.
Exit code 0 when the values and the order are kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS

import jax  # isort: skip

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import duration
from stablehlo_tools.report.document import Document
from stablehlo_tools.report.exposure import Question, exposure
from stablehlo_tools.report.html import render_page
from stablehlo_tools.targets.compilation import Compilation, compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package
from stablehlo_tools.verify import Options, verify_artifacts

if TYPE_CHECKING:
    from jax.export import Exported

    from stablehlo_tools.artifacts.artifact import Artifact

COLUMNS = 10  # of the schedules that are shown
MODEL = "decoder-2d-step"
FULL_MODEL, HARDWARE = "decoder-2d-scan-step", "h100"
PARTITION = "partition,create-reduce-scatter"
THREAD = "thread-tokens"
# One letter for each kind of collective.
LETTERS = {
    "all_gather": "g",
    "all_reduce": "r",
    "all_to_all": "a",
    "collective_permute": "p",
    "reduce_scatter": "s",
}


def main() -> int:
    """Runs the demo; 1 when something is missing or not as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the files there")
    arguments = parser.parse_args()
    missing = [package for target in Target if (package := missing_package(target))]
    if missing:
        print(
            f"all three compilers are needed, and {', '.join(missing)} is not installed: run "
            "`make setup`, or pip install '.[aot]'",
            file=sys.stderr,
        )
        return 1
    try:
        if arguments.keep is None:
            with tempfile.TemporaryDirectory() as directory:
                return run(arguments.layers, Path(directory), kept=False)
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return run(arguments.layers, arguments.keep, kept=True)
    except stablehlo_tools.ToolError as error:
        print(error, file=sys.stderr)
        return 1


def run(layers: int, directory: Path, *, kept: bool) -> int:
    """The six steps, with the files in `directory`."""
    started = time.perf_counter()
    say("stablehlo-tools: explicit collectives in one order, kept by three compilers", "")
    exported = export_model(layers, directory / "step.jax_export")
    partitioned = partition(exported, directory / "step.partitioned.jax_export")
    thread(partitioned, directory / "step.threaded.jax_export")
    files = [f"step{form}.jax_export" for form in ("", ".partitioned", ".threaded")]
    export, before, after = (stablehlo_tools.load(directory / name) for name in files)
    # Adam's running means of squares are no random numbers: they are never negative.
    fixed = dict.fromkeys(means_of_squares(exported), 0.01)
    same = compare_values(export, before, after, fixed)
    compiled = compile_both(before, after, directory if kept else None)
    show_schedules(compiled)
    show_costs(directory)
    ordered = [pair.target.title for pair in compiled if pair.after.order.same_order]
    reordered = [pair.target.title for pair in compiled if not pair.before.order.same_order]
    say(
        "",
        f"Values: {'the same' if same else 'NOT THE SAME'}. Program order: broken by "
        f"{listed(reordered)} before,",
        f"kept by {listed(ordered)} after. {time.perf_counter() - started:.0f} s.",
        f"Artifacts, schedules, report.html: {directory}"
        if kept
        else "--keep DIR keeps the files.",
    )
    return 0 if same and len(ordered) == len(compiled) else 1


def export_model(layers: int, path: Path) -> Exported:
    """Step 1: an artifact of jax.export, as any JAX program has one."""
    clock = Clock()
    exported = MODELS[MODEL].build(layers=layers)
    assert not isinstance(exported, str), "this model is an artifact of jax.export"
    path.write_bytes(exported.serialize())
    say(
        f"1 export     Llama-style training step, {layers} layers, AdamW, forward and backward, "
        f"{exported.nr_devices} devices",
        "             (FSDP 4 x tensor parallel 2, by annotations alone): "
        f"{path.stat().st_size:,} bytes, {count(stablehlo_tools.load(path))}{clock}",
    )
    return exported


def partition(exported: Exported, path: Path) -> Exported:
    """Step 2: what compilers would do unseen, in the artifact."""
    clock = Clock()
    partitioned = stablehlo_tools.transform(exported, PARTITION)
    path.write_bytes(partitioned.serialize())
    say(f"2 partition  {PARTITION}{clock}:", f"             {count(stablehlo_tools.load(path))}")
    return partitioned


def thread(exported: Exported, path: Path) -> None:
    """Step 3: the rewrite, on the artifact and not on the code that made it."""
    clock = Clock()
    path.write_bytes(stablehlo_tools.transform(exported, THREAD).serialize())
    say(f"3 thread     {THREAD}: one token chain through all of them{clock}")


def count(program: Artifact) -> str:
    """How many collectives of each kind a program has."""
    kinds = Counter(collective.kind for collective in find_collectives(program.module))
    listed_kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return listed_kinds or "no collective"


def means_of_squares(exported: Exported) -> list[int]:
    """The numbers of the inputs that are Adam's second moments."""
    arguments = jax.tree.unflatten(exported.in_tree, range(len(exported.in_avals)))
    paths, _ = jax.tree_util.tree_flatten_with_path(arguments)
    return [number for path, number in paths if "nu" in jax.tree_util.keystr(path).split("'")]


def compare_values(
    export: Artifact, before: Artifact, after: Artifact, fixed: dict[int, float]
) -> bool:
    """Step 4: the artifacts on virtual devices, on the same random inputs."""
    clock = Clock()
    close = verify_artifacts(export, before, Options(trials=1))
    bits = Options(arithmetic="floats", fixed=fixed, trials=1)
    same = verify_artifacts(before, after, bits)
    say(
        f"4 verify     random inputs on {same.devices} virtual CPU devices: "
        f"{len(same.outputs)} outputs, {same.elements:,} elements{clock}",
        f"             partitioned: {'exactly the same' if close.same else 'THEY DIFFER'}; "
        f"threaded: {'bitwise the same' if same.same else 'THEY DIFFER'}",
    )
    return close.same and same.same


@dataclass(frozen=True)
class Pair:
    """What one compiler made of the two artifacts."""

    target: Target
    before: Compilation
    after: Compilation


def compile_both(before: Artifact, after: Artifact, directory: Path | None) -> list[Pair]:
    """Step 5: three production compilers, ahead of time; schedules go to `directory`."""
    say("5 compile    without and with the chain for three compilers; the schedules read back")
    pairs: list[Pair] = []
    for target in Target:
        pair = Pair(target, compile_artifact(before, target), compile_artifact(after, target))
        pairs.append(pair)
        say(
            f"  {pair.before.compiler}: {pair.before.topology.describe()}",
            f"    before: {verdict(pair.before)}",
            *(f"            {line}" for line in changes(pair.before)),
            f"    after:  {verdict(pair.after)}",
            *(f"            {line}" for line in changes(pair.after)),
        )
        for name, compilation in (("before", pair.before), ("after", pair.after)):
            if directory is not None:
                text = directory / f"schedule.{target.value}.{name}.hlo"
                text.write_text(compilation.text)
    return pairs


def verdict(compilation: Compilation) -> str:
    """Whether the schedule keeps the program's order, and where it does not."""
    order, kinds = compilation.order, kinds_of(compilation)
    clock = f" [{compilation.seconds:.1f} s]"
    if order.difference is None:
        return f"same as the program{clock}"
    issues = [event for event in compilation.schedule.events if event.issues]
    position = next(
        (n for n, event in enumerate(issues) if event.position == order.difference.position),
        len(issues),
    )
    issued, expected = order.difference.issued, order.difference.expected
    found = "ends" if issued is None else f"issues {kinds[issued]} #{issued}"
    due = f"#{expected[0]}" if expected else "nothing"
    return f"differs from the program at position {position}: {found}, not {due}{clock}"


def changes(compilation: Compilation) -> list[str]:
    """What else the compiler did to the collectives: a line or none."""
    order = compilation.order
    merged = sum(map(len, order.merged))
    parts = [f"{merged} merged into {len(order.merged)}"] if merged else []
    parts += [f"{len(order.deleted)} folded away"] if order.deleted else []
    total = len(compilation.program_ids)
    return [f"of {total} collectives {' and '.join(parts)}"] if parts else []


def show_schedules(pairs: Sequence[Pair]) -> None:
    """The first collectives of every schedule under those of the program."""
    kinds = kinds_of(pairs[0].before)
    used = sorted(set(kinds.values()))
    say(
        "",
        f"The first {COLUMNS} collectives, numbered in program order: "
        + ", ".join(f"{LETTERS.get(kind, '?')} {kind}" for kind in used)
        + ";",
        "+ is merged with others",
        "",
        row("position", [str(n) for n in range(COLUMNS)]),
        row("program", [label((id_,), kinds) for id_ in pairs[0].before.program_ids[:COLUMNS]]),
    )
    for pair in pairs:
        for name, compilation in (("before", pair.before), ("after", pair.after)):
            issues = [event for event in compilation.schedule.events if event.issues]
            shown = [label(event.ids, kinds) for event in issues[:COLUMNS]]
            say(row(f"{pair.target.title} {name}", shown))


def show_costs(directory: Path) -> None:
    """Step 6: the same model at full size, timed on the devices that it would run on."""
    clock = Clock()
    exported = MODELS[FULL_MODEL].full()
    (timed,) = exposure([from_exported(exported)], Question(load_hardware(HARDWARE)))
    page = render_page(Document(FULL_MODEL, version("stablehlo-tools"), (timed,)))
    (directory / "report.html").write_text(page)
    most = max(timed.collectives, key=lambda collective: collective.exposed_ns)
    say(
        "",
        f"6 cost       the 32 layers of Llama 3 8B on {timed.devices} x {timed.hardware}{clock}",
        f"             {duration(timed.exposed_ns)} of {duration(timed.total_ns)} is exposed "
        f"communication; no order is faster than {duration(timed.floor_ns)}",
        f"             most of it in {most.times} runs of {most.kind} over {', '.join(most.axes)}: "
        f"{duration(most.exposed_ns)}, {most.place.rpartition('/')[2]}",
    )


def row(title: str, cells: Sequence[str]) -> str:
    """One line of the table."""
    return f"  {title:15}" + "".join(f"{cell:>7}" for cell in cells)


def label(ids: Sequence[int], kinds: dict[int, str]) -> str:
    """`g12`; `g12+` for a merged collective, `xla` for one that is the compiler's own."""
    if not ids:
        return "xla"
    return f"{LETTERS.get(kinds[ids[0]], '?')}{ids[0]}{'+' if len(ids) > 1 else ''}"


def kinds_of(compilation: Compilation) -> dict[int, str]:
    """The kind of each collective of the program, by its number."""
    return {op.id: op.kind for op in compilation.tagged}


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return ", ".join(names) or "none"


class Clock:
    """Prints as the time since it was made: ` [1.2 s]`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def __str__(self) -> str:
        return f" [{time.perf_counter() - self.started:.1f} s]"


def say(*lines: Any) -> None:
    """Prints at once, so that progress shows through a pipe, too."""
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())

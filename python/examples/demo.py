"""The main job on a real program: one order of collectives, kept by three compilers.

    python demo.py [--layers N] [--keep DIR]

Exports a Llama-style training step (FSDP × tensor parallel, forward and backward) for 8 devices,
threads one token chain through its collectives, shows on 8 virtual CPU devices that the values are
bitwise the same, and compiles both for XLA:CPU, XLA:GPU and XLA:TPU to read their schedules back.
Takes a minute or two and no accelerator. Exit code 0 when the values and the order are kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.llama import LlamaConfig, export_train_step, input_numbers

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.targets.compilation import Compilation, compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package
from stablehlo_tools.verify import Options, verify_artifacts

if TYPE_CHECKING:
    from jax.export import Exported

    from stablehlo_tools.artifact import Artifact

COLUMNS = 10  # of the schedules that are shown
PIPELINE = "thread-tokens"
# One letter for each kind of collective.
LETTERS = {"all_gather": "g", "all_reduce": "r", "reduce_scatter": "s", "collective_permute": "p"}


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
            f"the demo needs all three compilers, and {', '.join(missing)} is not installed: run "
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
    """The four steps, with the files in `directory`."""
    started = time.perf_counter()
    say("stablehlo-tools: one order of collectives, kept by three compilers", "")
    exported = export_model(layers, directory / "step.jax_export")
    thread(exported, directory / "step.threaded.jax_export")
    before = stablehlo_tools.load(directory / "step.jax_export")
    after = stablehlo_tools.load(directory / "step.threaded.jax_export")
    # AdamW's running means of squares are no random numbers: they are never negative.
    same = compare_values(before, after, dict.fromkeys(input_numbers(exported, "second"), 0.01))
    compiled = compile_both(before, after, directory if kept else None)
    show_schedules(compiled)
    ordered = [pair.target.title for pair in compiled if pair.after.order.same_order]
    reordered = [pair.target.title for pair in compiled if not pair.before.order.same_order]
    say(
        "",
        f"Values: {'bitwise the same' if same else 'NOT THE SAME'}. Program order: broken by "
        f"{listed(reordered)} before,",
        f"kept by {listed(ordered)} after. {time.perf_counter() - started:.0f} s.",
        f"Artifacts and schedules: {directory}" if kept else "--keep DIR keeps the files.",
    )
    return 0 if same and len(ordered) == len(compiled) else 1


def export_model(layers: int, path: Path) -> Exported:
    """Step 1: an artifact of jax.export, as any JAX program has one."""
    clock = Clock()
    config = LlamaConfig(layers=layers)
    exported = export_train_step(config)
    path.write_bytes(exported.serialize())
    say(
        f"1 export   Llama-style training step, {layers} layers, AdamW, forward and backward, "
        f"{exported.nr_devices} devices",
        f"           (FSDP {config.fsdp} x tensor parallel {config.model}): "
        f"{path.stat().st_size:,} bytes{clock}",
    )
    return exported


def thread(exported: Exported, path: Path) -> None:
    """Step 2: the rewrite, on the artifact and not on the code that made it."""
    clock = Clock()
    threaded = stablehlo_tools.transform(exported, PIPELINE)
    path.write_bytes(threaded.serialize())
    threaded_module = stablehlo_tools.load(path).module
    kinds = Counter(collective.kind for collective in find_collectives(threaded_module))
    say(
        f"2 thread   {PIPELINE}: one token chain through {kinds.total()} collectives{clock}",
        f"           {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}",
    )


def compare_values(before: Artifact, after: Artifact, fixed: dict[int, float]) -> bool:
    """Step 3: both artifacts on virtual devices, on the same random inputs, bit for bit."""
    clock = Clock()
    found = verify_artifacts(before, after, Options(fixed=fixed))
    say(
        f"3 verify   {found.trials} sets of random inputs on {found.devices} virtual CPU devices: "
        f"{len(found.outputs)} outputs,",
        f"           {found.elements:,} elements: "
        f"{'bitwise the same' if found.same else 'THEY DIFFER'}{clock}",
    )
    return found.same


@dataclass(frozen=True)
class Pair:
    """What one compiler made of the two artifacts."""

    target: Target
    before: Compilation
    after: Compilation


def compile_both(before: Artifact, after: Artifact, directory: Path | None) -> list[Pair]:
    """Step 4: three production compilers, ahead of time; schedules go to `directory`."""
    say("4 compile  both for the three compilers, and read the schedules back")
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

"""Time against memory: `rematerialize` beside jax.checkpoint's policies, as XLA schedules both.

    python python/benchmarks/rematerialize.py [PROGRAM ...] [--target gpu|tpu] [--hardware NAME]
                                              [--levels N]

A PROGRAM is a model of the zoo that takes `remat` and `policy`, of full size, or an artifact. Of a
model, the step is exported without jax.checkpoint and with each policy in the user's code; all are
partitioned for the hardware and compiled. For each policy the artifact without jax.checkpoint is
rematerialized until XLA's own figure is no more than the policy's. Then, for N limits between the
least that is found and what the program needs as it is, what comes of it. A program of 64 devices
takes about ten minutes; no device is needed.

    ms         a run of the compiler's schedule, with what collectives take of compute beside them
    GiB        what the compiler counts for a device
    expected   the same two by the model, before the compiler has seen the program
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS, ZOO

from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.tasks.expected import expected_run
from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")
SHARES = (1.4, 1.2, 1.1, 1.0, 0.95, 0.9, 0.8)  # of a policy's memory, until the compiler's is less
MACHINES = {"gpu": "h100", "tpu": "tpu-v5p"}
DEFAULT = ["decoder-2d-scan-step"]
_GIB = 2.0**30
_ROW = "{:58s} {:>9s} {:>8s}   {:>9s} {:>8s}"


@dataclass(frozen=True)
class Measured:
    """A program as compiled, and as expected; ms and GiB."""

    ms: float
    gib: float
    expected_ms: float
    expected_gib: float

    def row(self, name: str) -> str:
        """A line of the table."""
        figures = (self.ms, self.gib, self.expected_ms, self.expected_gib)
        return _ROW.format(name, *(f"{figure:.2f}" for figure in figures))


def main() -> None:
    """Prints a table for each program."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", default=DEFAULT)
    parser.add_argument("--target", choices=("gpu", "tpu"), default="gpu")
    parser.add_argument("--hardware")
    parser.add_argument("--levels", type=int, default=6)
    arguments = parser.parse_args()
    name = arguments.hardware or MACHINES[arguments.target]
    for program in arguments.programs:
        print(_ROW.format(f"{program}, {name}", "ms", "GiB", "expected", "GiB"), flush=True)
        for line in lines(program, arguments.target, load_hardware(name), name, arguments.levels):
            print(line, flush=True)


def lines(program: str, target: str, hardware: Hardware, name: str, levels: int) -> Iterator[str]:
    """The table of a program."""
    plain = local(program, "", name)
    whole = measured(plain, target, hardware)
    yield refused(whole) if isinstance(whole, ToolError) else whole.row("as exported")
    for policy in POLICIES if program in ZOO else ():
        theirs = measured(local(program, policy, name), target, hardware)
        if isinstance(theirs, ToolError):
            yield f"{policy}: {refused(theirs)}"
            continue
        yield theirs.row(policy)
        for share in SHARES:
            ours = level(plain, share * theirs.gib, target, hardware, name)
            if isinstance(ours, Measured) and ours.gib <= theirs.gib:
                ratio = f"  {ours.ms / theirs.ms:.3f} of the time"
                yield (
                    ours.row(f"    rematerialize{{memory-limit={share * theirs.gib:.2f}}}") + ratio
                )
                break
        else:
            yield f"    nothing was found in {theirs.gib:.2f} GiB"
    for limit in limits(plain, hardware, name, levels):
        found = level(plain, limit, target, hardware, name)
        if isinstance(found, ToolError):
            yield f"{limit:.2f} GiB: {refused(found)}"
        else:
            yield found.row(f"rematerialize{{memory-limit={limit:.2f}}}")


def local(program: str, policy: str, hardware: str) -> Artifact:
    """What one device runs of a program, with a policy in the user's code if there is one."""
    if program in MODELS:
        options = {"remat": True, "policy": policy} if policy else {}
        given = artifact.from_exported(MODELS[program].full(**options))
    else:
        given = artifact.load(program)
    if left_to_the_partitioner(given.module) is None:
        return given
    return transform(given, f"partition{{hardware={hardware}}}")


def limits(plain: Artifact, hardware: Hardware, name: str, levels: int) -> list[float]:
    """GiB from what the program is expected to need down to the least that is found."""
    most = expected_run(plain.module, hardware).peak_bytes / _GIB
    try:
        transform(plain, f"rematerialize{{hardware={name} memory-limit=0.001}}")
    except ToolError as error:
        found = re.search(r"was found is ([\d.e+-]+) GiB", error.diagnostic.message)
        assert found, "the error names the least"
        low = 1.06 * float(found.group(1))
    else:
        return []
    most = max(low, most)
    return [low * (most / low) ** (step / max(levels - 1, 1)) for step in range(levels)][::-1]


def level(
    plain: Artifact, limit: float, target: str, hardware: Hardware, name: str
) -> Measured | ToolError:
    """The program within a limit of GiB."""
    try:
        made = transform(plain, f"rematerialize{{hardware={name} memory-limit={limit:.4f}}}")
    except ToolError as error:
        return error
    return measured(made, target, hardware)


def measured(program: Artifact, target: str, hardware: Hardware) -> Measured | ToolError:
    """A program as the compiler schedules it."""
    told = expected_run(program.module, hardware)
    try:
        made = compile_artifact(program, target, 3600.0, hardware=hardware)
    except ToolError as error:
        return error
    graph = hlo_task_graph(made.text, hardware, made.topology.devices)
    run = simulate(graph, contended=True)
    size = made.memory.peak_bytes or made.memory.total_bytes
    return Measured(
        run.total_ns / 1e6, size / _GIB, told.contended_ns / 1e6, told.peak_bytes / _GIB
    )


def refused(error: ToolError) -> str:
    """The first words of a refusal."""
    return error.diagnostic.message.splitlines()[0][:100]


if __name__ == "__main__":
    main()

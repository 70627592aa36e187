"""Time against memory: `rematerialize` beside jax.checkpoint's policies, as XLA schedules both.

    python python/benchmarks/rematerialize.py [PROGRAM ...] [--target gpu|tpu] [--hardware NAME]
                                              [--levels N] [--offload]

A PROGRAM is a model of the zoo that takes `remat` and `policy`, of full size, or an artifact. Of a
model, the step is exported without jax.checkpoint and with each policy in the user's code; all are
partitioned for the hardware and compiled. For each policy the artifact without jax.checkpoint is
rematerialized with the policy's memory as its limit, which the compiler holds it to. Then, for N
limits between the least that is found and what the program needs as it is, what comes of it. With
--offload the same again, where what is kept may lie in the host's memory. A program of 64 devices
takes about ten minutes; no device is needed.

    ms         a run of the compiler's schedule, with what collectives take of compute beside them
    GiB        what a device has to have: what the compiler allocates, or what its schedule keeps
               alive if that is more
    expected   the same two by the model, before the compiler has seen the program
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS, ZOO

from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.transforms.parts.rematerialize.compiled_candidates import compiled_run

POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")
PROFILES = {"gpu": "h100", "tpu": "tpu-v5p"}
DEFAULT = ["decoder-2d-scan-step"]
_GIB = 2.0**30
_ROW = "{:58s} {:>9s} {:>8s}   {:>9s} {:>8s}"


@dataclass(frozen=True)
class Machine:
    """What is compiled for, and the profile's name and figures."""

    target: str
    name: str
    hardware: Hardware


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
    parser.add_argument("--offload", action="store_true")
    arguments = parser.parse_args()
    options = ("", " offload") if arguments.offload else ("",)
    name = arguments.hardware or PROFILES[arguments.target]
    for program in arguments.programs:
        print(_ROW.format(f"{program}, {name}", "ms", "GiB", "expected", "GiB"), flush=True)
        machine = Machine(arguments.target, name, load_hardware(name))
        for line in lines(program, machine, arguments.levels, options):
            print(line, flush=True)


def lines(program: str, machine: Machine, levels: int, options: Sequence[str]) -> Iterator[str]:
    """The table of a program, with each of some options of the pass."""
    plain = local(program, "", machine.name)
    whole = measured(plain, machine)
    yield refused(whole) if isinstance(whole, ToolError) else whole.row("as exported")
    for policy in POLICIES if program in ZOO else ():
        theirs = measured(local(program, policy, machine.name), machine)
        if isinstance(theirs, ToolError):
            yield f"{policy}: {refused(theirs)}"
            continue
        yield theirs.row(policy)
        for option in options:
            yield anchored(plain, theirs, machine, option)
    for limit in limits(plain, machine, levels):
        for option in options:
            found = level(plain, limit, machine, option)
            if isinstance(found, ToolError):
                yield f"{limit:.2f} GiB{option}: {refused(found)}"
            else:
                yield found.row(f"rematerialize{{memory-limit={limit:.2f}{option}}}")


def anchored(plain: Artifact, theirs: Measured, machine: Machine, option: str) -> str:
    """What the pass makes of a program in no more memory than a policy needs, by the compiler."""
    held = f" margin=0 compiler={machine.target}{option}"
    ours = level(plain, theirs.gib, machine, held)
    if isinstance(ours, ToolError):
        return f"    {refused(ours)}"
    named = f"    rematerialize{{memory-limit={theirs.gib:.2f}{option}}}"
    return f"{ours.row(named)}  {ours.ms / theirs.ms:.3f} of the time"


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


def limits(plain: Artifact, machine: Machine, levels: int) -> list[float]:
    """GiB from what the program is expected to need down to the least that is found."""
    most = expected_run(plain.module, machine.hardware).peak_bytes / _GIB
    try:
        transform(plain, f"rematerialize{{hardware={machine.name} memory-limit=0.001}}")
    except ToolError as error:
        found = re.search(r"was found is ([\d.e+-]+) GiB", error.diagnostic.message)
        assert found, "the error names the least"
        low = 1.12 * float(found.group(1))
    else:
        return []
    most = max(low, most)
    return [low * (most / low) ** (step / max(levels - 1, 1)) for step in range(levels)][::-1]


def level(plain: Artifact, limit: float, machine: Machine, option: str) -> Measured | ToolError:
    """The program within a limit of GiB."""
    options = f"hardware={machine.name} memory-limit={limit:.4f}{option}"
    try:
        made = transform(plain, f"rematerialize{{{options}}}")
    except ToolError as error:
        return error
    return measured(made, machine)


def measured(program: Artifact, machine: Machine) -> Measured | ToolError:
    """A program as the compiler schedules it."""
    told = expected_run(program.module, machine.hardware)
    try:
        run = compiled_run(program.module, Target(machine.target), machine.hardware)
    except ToolError as error:
        return error
    if math.isinf(run.ns):
        return ToolError(f"refused: it needs {run.peak_bytes / _GIB:.1f} GiB")
    figures = (run.ns / 1e6, run.peak_bytes / _GIB)
    return Measured(*figures, told.contended_ns / 1e6, told.peak_bytes / _GIB)


def refused(error: ToolError) -> str:
    """The first words of a refusal."""
    return error.diagnostic.message.splitlines()[0][:100]


if __name__ == "__main__":
    main()

"""Compiles an artifact for XLA:CPU, XLA:GPU or XLA:TPU without such a device.

The compiler runs in a separate process (`compiler_process`). Even if that process crashes, the
caller gets a `Compilation` or one ToolError.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.diagnostics import ToolError, naming, note
from stablehlo_tools.processes import activity, child
from stablehlo_tools.processes.ending import shorten_message
from stablehlo_tools.targets import compiler_process
from stablehlo_tools.targets.chips import Chip, Target, chip_for
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions
from stablehlo_tools.targets.dumped_schedule import is_dumped, read_dump
from stablehlo_tools.targets.preparation import PreparedModule, prepare
from stablehlo_tools.targets.schedule_order import OrderReport, compare_order
from stablehlo_tools.targets.scheduled_hlo import HloSchedule, parse_schedule
from stablehlo_tools.targets.tagging import TaggedOp, read_combined, read_host_transfers
from stablehlo_tools.targets.topologies import (
    Topology,
    check_installed,
    compiler_version,
    environment,
    topology,
)

DEFAULT_TIMEOUT = 600.0  # seconds
_DUMP = "dump"  # directory of the files that the compiler dumps
_TUPLED_ARGUMENTS = 2000  # with more, jax passes main's arguments to a TPU as one tuple


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int  # of outputs that reuse the memory of donated arguments
    code_bytes: int
    peak_bytes: int  # as the compiler counts it; 0 if it does not

    @property
    def total_bytes(self) -> int:
        """The bytes of arguments, outputs and temporaries, with shared memory counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True)
class Compilation:
    """The result of compiling an artifact."""

    topology: Topology
    compiler: str
    tagged: tuple[TaggedOp, ...]
    program_ids: tuple[int, ...]  # in the program's order
    schedule: HloSchedule
    order: OrderReport
    memory: Memory
    seconds: float  # of compiling
    text: str  # the scheduled HLO
    options: CompilerOptions = NO_OPTIONS
    stand_in: str = ""  # a remark if it was compiled for another chip than the hardware's
    foreign: str = ""  # a remark if the program was exported for another accelerator
    erased: int = 0  # collectives of groups of one, which the compiler did not see

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks that qualify the figures."""
        said = f"removed, because XLA may refuse them: {self.erased} collectives of groups of one"
        return tuple(filter(None, (self.stand_in, self.foreign, said if self.erased else "")))


def compile_artifact(
    artifact: Artifact,
    target: Target | str,
    timeout: float = DEFAULT_TIMEOUT,
    *,
    hardware: Hardware | None = None,
    options: CompilerOptions = NO_OPTIONS,
    schedule_only: bool = False,
) -> Compilation:
    """Compiles an artifact for as many devices as it runs on and reads its schedule back.

    `timeout` is in seconds, `options` are the compiler's. `schedule_only` ends XLA:GPU and XLA:TPU
    before they generate code, which changes neither the schedule nor the memory. The chip is that
    of `hardware` or its substitute (default: H100 or TPU v5e). Raises ToolError if the artifact
    cannot be compiled, the hardware belongs to another target, or the compiler lacks an option.
    Also raises it if the compiler is not installed, rejects the program, crashes or exceeds
    `timeout`.
    """
    target = Target(target)
    chip, stand_in = chip_for(target, hardware)
    activity.show(f"{target.title} compiles {artifact.name}")
    with naming(artifact.name):
        return _compile(artifact, target, timeout, chip, stand_in, options, schedule_only)


def _compile(
    artifact: Artifact,
    target: Target,
    timeout: float,
    chip: Chip | None,
    stand_in: str,
    options: CompilerOptions,
    schedule_only: bool,
) -> Compilation:
    check_installed(target)
    schedule_only &= target is not Target.CPU
    prepared = prepare(artifact, target)
    machine = topology(target, prepared.grid.size, chip)
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as name:
        directory = Path(name)
        began = time.monotonic()
        answer = _run_compiler(directory, prepared, machine, timeout, options, schedule_only)
        dump = directory / _DUMP
        if answer is None:
            text, memory = read_dump(dump)
            seconds = time.monotonic() - began
        else:
            text, memory = (directory / compiler_process.SCHEDULE).read_text(), answer["memory"]
            seconds = answer["seconds"]
        recovered = read_combined(dump)
    recovered |= read_host_transfers(text, {op.id: op.kind for op in prepared.tagged})
    try:
        schedule = parse_schedule(text, recovered)
    except ValueError as error:
        raise ToolError(
            f"{target.title} compiled the program, but the result is unreadable: {error}"
        ) from None
    return Compilation(
        topology=machine,
        compiler=compiler_version(target),
        tagged=prepared.tagged,
        program_ids=prepared.program_ids(),
        schedule=schedule,
        order=compare_order(prepared.program, schedule),
        memory=Memory(**memory),
        seconds=seconds,
        text=text,
        options=options,
        stand_in=stand_in,
        foreign="" if "cpu" in prepared.exported_for else _foreign(prepared, target),
        erased=prepared.erased,
    )


def _run_compiler(
    directory: Path,
    prepared: PreparedModule,
    machine: Topology,
    timeout: float,
    options: CompilerOptions,
    schedule_only: bool,
) -> dict[str, Any] | None:
    """Returns the answer of the compiler's process; None if it was ended after it had dumped its
    schedule. Raises ToolError if it fails or times out."""
    target = machine.target
    request = {
        "target": target.value,
        "topology": machine.name,
        "config": machine.config,
        "replicas": prepared.grid.num_replicas,
        "partitions": prepared.grid.num_partitions,
        "options": dict(options.values),
        "tuple_arguments": target is Target.TPU and prepared.arguments > _TUPLED_ARGUMENTS,
    }
    (directory / compiler_process.MODULE).write_bytes(prepared.bytecode)
    dump = directory / _DUMP
    variables = environment(machine, os.environ, dump, schedule_only=schedule_only)
    outcome = child.ask(
        compiler_process.__name__,
        directory,
        request,
        timeout,
        variables,
        enough=(lambda: is_dumped(dump, target)) if schedule_only else None,
    )
    if schedule_only and is_dumped(dump, target):
        return None
    overdue = (
        f"{target.title} took more than {timeout:g} s and was stopped; --timeout gives it more time"
    )
    if outcome.in_time(overdue) or outcome.answer is None:
        raise outcome.death(f"the compiler {target.title}", "compiling")
    if outcome.error:
        error = outcome.error
        for name, value in options.values:
            if f"'{name}'" in error and "No such compile option" in error:
                raise ToolError(
                    f"{target.title} has no compiler option {name}",
                    hint="a name of this compiler, as in XLA_FLAGS without the dashes",
                )
            if name in error and _NO_VALUE.search(error):
                raise ToolError(f"{target.title} refuses {name}={value}: {shorten_message(error)}")
        message = f"{target.title} refused the program: {shorten_message(outcome.error)}"
        foreign = _foreign(prepared, target)
        notes = [note(foreign)] if foreign else []
        if unknown := _UNKNOWN_CALL.search(outcome.error):
            notes.append(
                note(
                    f"only a process that loads the library of {unknown[1]} can compile it; "
                    "`inspect --hardware NAME` predicts times without a compiler"
                )
            )
        raise ToolError(message, notes=tuple(notes))
    return outcome.answer


_NO_VALUE = re.compile(r"While setting option|Failed to parse|is not valid|[Ee]xpected")
_UNKNOWN_CALL = re.compile(
    r"(?:No FFI handler registered for|No registered implementation for (?:untyped )?custom call to"
    r"|Custom emitter for) (\S+)"
)
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED.*?\b([\d.]+)([KMGT])", re.DOTALL)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def bytes_refused(error: ToolError) -> float | None:
    """Returns the bytes that a program needs, from XLA:TPU's error that it exceeds the memory.

    Returns None for any other error. XLA:GPU compiles such programs.
    """
    said = _OUT_OF_MEMORY.search(error.diagnostic.message)
    return None if said is None else float(said[1]) * _UNITS[said[2]]


def _foreign(prepared: PreparedModule, target: Target) -> str:
    """Returns a remark if a program was lowered for another platform, with its custom calls."""
    platforms = prepared.exported_for
    if not platforms or target.platform in platforms:
        return ""
    return f"it was exported for {', '.join(platforms)}, not for {target.platform}"

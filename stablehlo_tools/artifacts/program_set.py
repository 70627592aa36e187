"""Reads several programs that run together: the devices and the collectives of each.

By default, N programs of one job of D devices are N equal parts of it, in order: D / N devices
each. A module that does not state its number of processes (torch-xla's do not) is assumed to run as
all of them. `separate` programs each have their own devices, numbered one program after the other.
"""

from __future__ import annotations

import gc
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from stablehlo_tools.analysis.collectives import ModuleFacts, stated_grid
from stablehlo_tools.analysis.effects import unknown_calls_counted
from stablehlo_tools.analysis.entry import erase_groups_of_one, is_per_device, path_of
from stablehlo_tools.analysis.issued import Inlined, IssuedProgram, inline_module, read_issued
from stablehlo_tools.analysis.partitioner_work import (
    EXPLICIT,
    Annotation,
    left_to_the_partitioner,
    op_that_may_add,
    partly_manual_computation,
)
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.diagnostics import ToolError, naming, nearest
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.platform_index import argument_number, fix_platform
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, terminator
from stablehlo_tools.order.communicators import COMPONENTS
from stablehlo_tools.order.program import CompiledOrder, issues_of, shift_devices

_WORTH_A_POOL = 8  # programs
_DEEPEST_NESTING = 20_000  # regions nest by recursion, in Python alone
_TRANSFERS = frozenset({"send", "recv"})
_GPU = ("cuda", "rocm", "gpu")


@dataclass(frozen=True)
class JobOptions:
    """The assignment of devices to programs, and the assumptions about them.

    `devices[i]` are those of program i; empty for the rule of the module's docstring. `platform`
    is one of those that an artifact was exported for. `trust_partitioner` assumes that XLA adds no
    collective outside manual computations. Custom calls with the targets in `local` are assumed to
    reach no other device. `strict`: each device compiles its program by itself.
    `judges_rewriting`: no compiler will run, so each collective is read with the reason why one may
    rewrite it. `equal` are arguments with the same value on all devices: `INDEX` or `PATH` of each
    program, `PROGRAM:INDEX` or `PROGRAM:PATH` of one. The n-th argument given for one program
    equals the n-th of the others.
    """

    devices: tuple[tuple[int, ...], ...] = ()
    separate: bool = False
    platform: str | None = None
    trust_partitioner: bool = False
    local: tuple[str, ...] = ()
    strict: bool = False
    judges_rewriting: bool = False
    equal: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ProgramPart:
    """Part `index` of `count` of a job, which has `size` devices if that is known."""

    index: int
    count: int
    options: JobOptions
    size: int | None = None


@dataclass(frozen=True)
class _ProgramRead[T]:
    """The result of reading a program, the size of its grid; True if the module states that."""

    read: T
    size: int
    is_stated: bool


@dataclass(frozen=True)
class ProgramJob:
    """Programs that run together, in memory."""

    artifacts: tuple[Artifact, ...]
    options: JobOptions

    def read(self, *, keeps_platforms: bool = False) -> list[IssuedProgram]:
        """Reads the collectives of each program; inlines calls in place.

        An artifact for several platforms is specialized to the platform of the options. With
        `keeps_platforms` it is not, and values used on other platforms also count as used. Raises a
        located ToolError.
        """

        def read_all(parts: Sequence[_ProgramPart]) -> list[_ProgramRead[IssuedProgram]]:
            return [
                _read(self.artifacts[part.index], part, keeps_platforms=keeps_platforms)
                for part in parts
            ]

        parts = _read_programs([loaded.name for loaded in self.artifacts], self.options, read_all)
        programs = _renumber_devices([part.read.program for part in parts], parts, self.options)
        pairs = zip(parts, programs, strict=True)
        return [replace(part.read, program=program) for part, program in pairs]


def read_programs(
    paths: Sequence[str], options: JobOptions, *, workers: int = 1
) -> list[CompiledOrder]:
    """Reads the programs of files, each on its devices.

    Many files are read by `workers` processes; the caller's main module must be safe to import.
    Raises a located ToolError if a program cannot be read, or states another number of devices than
    the others.
    """
    parts = _read_programs(
        paths, options, lambda some: _read_files([paths[p.index] for p in some], some, workers)
    )
    return _renumber_devices([part.read for part in parts], parts, options)


def _read_programs[T](
    names: Sequence[str],
    options: JobOptions,
    read_all: Callable[[Sequence[_ProgramPart]], list[_ProgramRead[T]]],
) -> list[_ProgramRead[T]]:
    """Reads each program, and again those that assumed another number of devices than the job's."""
    if options.devices and len(options.devices) != len(names):
        raise ToolError(
            f"--devices is given for {len(options.devices)} of {len(names)} programs: give it for "
            "each program, in order"
        )
    parts = [_ProgramPart(index, len(names), options) for index in range(len(names))]
    reads = read_all(parts)
    if options.separate:
        return reads
    size = max(part.size for part in reads)
    for name, part in zip(names, reads, strict=True):
        if part.is_stated and part.size != size:
            with naming(name):
                raise ToolError(
                    f"the program states {part.size} processes, and another program of the job "
                    f"{size}: programs of one job state the same number (or give --separate, if "
                    "each has devices of its own)"
                )
    again = [i for i, part in enumerate(reads) if part.size != size]
    for i, part in zip(again, read_all([replace(parts[i], size=size) for i in again]), strict=True):
        reads[i] = part
    return reads


def _renumber_devices(
    programs: Sequence[CompiledOrder], parts: Sequence[_ProgramRead[Any]], options: JobOptions
) -> list[CompiledOrder]:
    """Renumbers the devices of separate programs. Raises ToolError if programs share a device."""
    placed = list(programs)
    if options.separate:
        first = 0
        for i, part in enumerate(parts):
            placed[i] = shift_devices(placed[i], first)
            first += part.size
    seen: set[int] = set()
    for program in placed:
        for device in program.devices:
            if device in seen:
                raise ToolError(
                    f"device {device} is given to two programs, and programs that run one after "
                    "the other on the same devices cannot be checked together: check each by "
                    "itself"
                )
            seen.add(device)
    return placed


def _read(
    loaded: Artifact, part: _ProgramPart, *, keeps_platforms: bool = False
) -> _ProgramRead[IssuedProgram]:
    """Reads the program of a loaded artifact, its calls inlined and its platform fixed in place."""
    module, options = loaded.module, part.options
    with naming(loaded.name), unknown_calls_counted(module, options.local):
        platform, by_channel = _platform(loaded, part), options.separate
        if platform is not None and not keeps_platforms:
            fix_platform(module, platform)
        erase_groups_of_one(module)
        inlined = inline_module(module)
        # The pairs of separate programs' transfers name devices of the others.
        own = [c for c in inlined.collectives if not (options.separate and c.kind in _TRANSFERS)]
        facts = ModuleFacts.from_module(module, own)
        is_stated = stated_grid(module) is not None
        if not is_stated and not options.separate:
            wanted = part.size or max(facts.grid.size, part.count, *map(_end, options.devices))
            grid = facts.grid  # inferred, and grown to the size of the job
            if grid.num_partitions > 1 and wanted % grid.num_replicas == 0:
                grid = ProcessGrid(grid.num_replicas, wanted // grid.num_replicas)
            elif grid.num_partitions == 1:
                grid = ProcessGrid(wanted, 1)
            facts = ModuleFacts(grid, facts.meshes)
        size = facts.grid.size
        devices = tuple(range(size)) if options.separate else _devices(part, size)
        issued = read_issued(
            inlined,
            loaded.name,
            facts,
            devices,
            platform=platform,
            by_channel=by_channel,
            is_scheduled=loaded.is_scheduled,
            judges_rewriting=options.judges_rewriting,
            equal=equal_arguments(loaded, part.index, options.equal),
        )
        is_shared = part.count == 1 and not options.strict  # one compilation for all devices
        if not is_shared and not loaded.is_scheduled:  # a schedule has all its collectives
            _check_apart(loaded, inlined, facts, issued, options)
        platforms = set() if loaded.exported is None else set(loaded.exported.platforms)
        if options.platform is not None:
            platforms &= {options.platform}
        program = replace(
            issued.program,
            may_run_on_gpu=not platforms or not platforms.isdisjoint(_GPU),
            permutes_on_components=loaded.hlo is not None
            and re.search(rf"{COMPONENTS}\W+true", loaded.hlo.text) is not None,
        )
        return _ProgramRead(replace(issued, program=program), size, is_stated)


def equal_arguments(loaded: Artifact, program: int, equal: Sequence[str]) -> dict[int, str]:
    """Maps numbers of arguments to symbols, by `JobOptions.equal`. Raises ToolError."""
    arguments = list(Function(entry_function(loaded.module)).body.arguments)
    numbers = {str(argument_number(argument)): i for i, argument in enumerate(arguments)}
    numbers |= {path_of(argument): i for i, argument in enumerate(arguments)}
    found: dict[int, str] = {}
    own = 0
    for text in equal:
        first, colon, rest = text.partition(":")
        is_of_one = bool(colon) and first.isdigit()
        if is_of_one and int(first) != program:
            continue
        own += is_of_one
        word = rest if is_of_one else text
        if word not in numbers:
            near = nearest(word, [path_of(each) for each in arguments if path_of(each)])
            raise ToolError(
                f"--equal {text}: none of the program's {len(arguments)} arguments is {word!r}",
                instead=(text, f"{first}:{near}" if is_of_one else near) if near else None,
            )
        found[numbers[word]] = f"equal({own if is_of_one else word})"
    return found


def _devices(part: _ProgramPart, size: int) -> tuple[int, ...]:
    """Returns the devices of a program, by the options or the rule of equal parts."""
    if part.options.devices:
        devices = part.options.devices[part.index]
        if _end(devices) > size:
            raise ToolError(f"device {max(devices)} is not among the program's {size} processes")
        return devices
    if size % part.count:
        raise ToolError(
            f"{part.count} programs do not divide {size} devices evenly: assign devices to each "
            "program with --devices"
        )
    share = size // part.count
    return tuple(range(part.index * share, (part.index + 1) * share))


def _platform(loaded: Artifact, part: _ProgramPart) -> int | None:
    """Returns the index of the platform to read the artifact for; None if no choice is needed."""
    platforms = () if loaded.exported is None else tuple(loaded.exported.platforms)
    listed, given = ", ".join(platforms), part.options.platform
    # The devices of a single program have the same platform.
    if len(platforms) < 2 or (given is None and part.count == 1):
        return None
    if given is None:
        raise ToolError(
            f"the artifact was exported for {listed}: choose one to check with --platform",
            added=("--platform", platforms[0]),
        )
    if given not in platforms:
        raise ToolError(
            f"the artifact was exported for {listed}, not for {given}",
            instead=(f"platform={given}", f"platform={platforms[0]}"),
        )
    return platforms.index(given)


def _check_apart(
    loaded: Artifact,
    inlined: Inlined,
    facts: ModuleFacts,
    issued: IssuedProgram,
    options: JobOptions,
) -> None:
    """Raises ToolError if a separately compiled program cannot be compared with another's."""
    for issue in issues_of(issued.program.block):
        if any("?" in text for text in issue.signature.types):
            raise ToolError(
                f"{issue.signature.text}: a symbolic shape cannot be compared with another "
                "program's; export with concrete shapes",
                issued.ops[issue.id].op.location,
            )
    if options.trust_partitioner:
        return
    left = left_to_the_partitioner(inlined.module)
    if left is not None and left.annotation is not Annotation.SHARDY:
        raise ToolError(
            f"the program leaves collectives to XLA's partitioner, by {left.annotation.value}: "
            "they are not in the program, and their order may differ from another program's: "
            "partition it first (or give --trust-partitioner, if you know that it adds none)",
            left.place,
            hint=_partitioned_first(loaded),
        )
    if facts.grid.num_partitions == 1 and left is None:
        return
    partly = partly_manual_computation(inlined.module) if options.judges_rewriting else None
    if left is not None and partly is not None:
        raise ToolError(
            "XLA's partitioner divides this manual computation over its other axes and may add "
            "collectives inside of it: only a compiler can tell",
            partly.location,
            instead=("none", "cpu"),
        )
    is_local = is_per_device(inlined.module, inlined.collectives)
    op = None if is_local else op_that_may_add(inlined.main)
    if op is not None:
        where = "is outside every manual computation, where"
        if op.name == MANUAL_COMPUTATION or op == terminator(Function(inlined.main).body):
            where = "takes a value that is sharded in another way, where"
        raise ToolError(
            f"{op.name} {where} XLA's partitioner may add collectives that are not in the program: "
            "partition it first (or give --trust-partitioner, if you know that it adds none)",
            op.location,
            hint=_partitioned_first(loaded),
        )


def _partitioned_first(loaded: Artifact) -> str:
    """Returns the command that makes the collectives of a program explicit."""
    suffix = ArtifactForm.TEXT.value if loaded.exported is None else ArtifactForm.JAX_EXPORT.value
    # Each program of a job needs a file of its own.
    own = "" if loaded.name == "<stdin>" else f"{Path(loaded.name).stem}."
    words = [loaded.name, "-p", EXPLICIT, "-o", f"{own}explicit{suffix}"]
    return f"stablehlo-tools opt {shlex.join(words)}"


def _read_files(
    paths: Sequence[str], parts: Sequence[_ProgramPart], workers: int
) -> list[_ProgramRead[CompiledOrder]]:
    """Reads files, many of them in several processes."""
    with naming("<stdin>"):
        if len(paths) < _WORTH_A_POOL or workers < 2:
            return list(map(_read_file, paths, parts))
        # Not forked: the threads of native libraries would be missing in the children.
        context = get_context("spawn")
        # Garbage collection is off: a program has many small objects, and all of them are kept.
        with ProcessPoolExecutor(workers, mp_context=context, initializer=gc.disable) as pool:
            size = -(-len(paths) // (4 * workers))
            return list(pool.map(_read_file, paths, parts, chunksize=size))


def _read_file(path: str, part: _ProgramPart) -> _ProgramRead[CompiledOrder]:
    """Reads a program in a worker; returns only the parts that can be pickled, without MLIR."""
    sys.setrecursionlimit(_DEEPEST_NESTING)
    read = _read(artifact.load(path), part)
    return _ProgramRead(read.read.program, read.size, read.is_stated)


def _end(devices: Sequence[int]) -> int:
    return max(devices, default=-1) + 1

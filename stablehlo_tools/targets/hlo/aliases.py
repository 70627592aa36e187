"""Which results of an HLO kernel lie in the memory of an operand. Pure Python."""

from __future__ import annotations

import re

from stablehlo_tools.targets.hlo.module import Computation, HloInstruction, HloModule
from stablehlo_tools.targets.hlo.values import Given, Path

VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})
_PASSED = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "while"})
UPDATES = frozenset({"dynamic-update-slice", "scatter"})

_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?)\)\}")
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


def aliases(instruction: HloInstruction, module: HloModule) -> dict[Path, tuple[int, Path]]:
    """From a part of the result to the operand, and the part of it, in whose memory it is.

    An update writes in place, alone or at the end of a fusion; XLA has put a copy before it where
    it may not.
    """
    if instruction.opcode in UPDATES:
        return {(): (0, ())}
    found: dict[Path, tuple[int, Path]] = {}
    if instruction.opcode in ("fusion", "fusion-start"):
        body = module.called(instruction, "calls")
        for path, output in outputs(body):
            number = updated_parameter(output, body)
            if number is not None:
                found[path] = (number, ())
    said = _ALIASING.search(instruction.line, instruction.after_opcode)
    for output, number, inside in _PAIR.findall(said.group(1)) if said else ():
        found[_path(output)] = (int(number), _path(inside))
    return found


def outputs(body: Computation) -> list[tuple[Path, HloInstruction]]:
    """The results of a fused computation, each with its place."""
    root = body.root
    if root.opcode != "tuple":
        return [((), root)]
    return [((i,), body.by_name[name]) for i, name in enumerate(root.operands)]


def through_views(instruction: HloInstruction, body: Computation) -> HloInstruction:
    """What an instruction is a view of, or itself."""
    while instruction.opcode in VIEWS and instruction.operands:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def updated_parameter(output: HloInstruction, body: Computation) -> int | None:
    """The number of the parameter that a result updates in place or passes on."""
    source = through_views(output, body)
    if source.opcode in UPDATES:
        source = through_views(body.by_name[source.operands[0]], body)
    return int(source.literal) if source.opcode == "parameter" else None


def homes(computation: Computation, places: Given, module: HloModule) -> dict[str, Given]:
    """Which instruction writes which part of its result straight into storages that are there.

    `places` are parts of the computation's result and the storages that they end up in.
    """
    found: dict[str, dict[Path, tuple[int, ...]]] = {}
    for path, storages in places.items():
        source = written_by(computation, path, module)
        if source is not None:
            found.setdefault(source[0].name, {}).setdefault(source[1], storages)
    return dict(found)


def written_by(
    computation: Computation, path: Path, module: HloModule
) -> tuple[HloInstruction, Path] | None:
    """The instruction, and the part of its result, whose memory a part of the result is in.

    None where that is a parameter.
    """
    instruction = computation.root
    while True:
        updated = aliases(instruction, module).get(path)
        if updated is not None:
            name, path = instruction.operands[updated[0]], updated[1]
        elif instruction.opcode == "tuple" and path:
            name, path = instruction.operands[path[0]], path[1:]
        elif instruction.opcode == "get-tuple-element":
            name, path = instruction.operands[0], (*instruction.numbers("index"), *path)
        elif instruction.opcode in _PASSED:
            name = instruction.operands[0]
        else:
            return None if instruction.opcode == "parameter" else (instruction, path)
        instruction = computation.by_name[name]


def _path(text: str) -> Path:
    return tuple(int(part) for part in text.split(",") if part.strip())

"""The bytes that an HLO kernel reads and writes, and which results lie in an operand's memory.

Arrays of XLA:TPU, in device memory or in vector memory, count in whole registers: rows and columns
filled up to tiles, tiles of fewer than 8 rows to 8, and written elements of fewer than 32 bits as
32, for they are packed one register at a time. That is what libtpu's estimated_cycles grow with.
"""

from __future__ import annotations

import math
import re

from stablehlo_tools.targets.hlo.graph import Given, Path
from stablehlo_tools.targets.hlo.module import Computation, HloInstruction, HloModule
from stablehlo_tools.targets.hlo.shapes import DEVICE_MEMORY, Array
from stablehlo_tools.targets.hlo_text import COLLECTIVES

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
    operand_of: dict[Path, tuple[int, Path]] = {}
    if instruction.opcode in ("fusion", "fusion-start"):
        body = module.called(instruction, "calls")
        for path, output in outputs(body):
            number = updated_parameter(output, body)
            if number is not None:
                operand_of[path] = (number, ())
    said = _ALIASING.search(instruction.line, instruction.after_opcode)
    for output, number, inside in _PAIR.findall(said.group(1)) if said else ():
        operand_of[_path(output)] = (int(number), _path(inside))
    return operand_of


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
    storages_by_writer: dict[str, dict[Path, tuple[int, ...]]] = {}
    for path, storages in places.items():
        source = written_by(computation, path, module)
        if source is not None:
            storages_by_writer.setdefault(source[0].name, {}).setdefault(source[1], storages)
    return dict(storages_by_writer)


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


_VECTOR_MEMORY = 1  # XLA:TPU's memory space on the chip
_SUBLANES = 8  # XLA:TPU's registers: 8 rows of 128 lanes of 32 bits
_LANE_BITS = 32
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def _memory_bytes(array: Array, written: bool = False) -> float:
    """The bytes of an array as traffic, in whole registers of XLA:TPU."""
    if array.space not in (DEVICE_MEMORY, _VECTOR_MEMORY):
        return 0.0
    traffic = float(array.padded_bytes)
    if array.tiles:
        tile = array.tiles[0]
        if len(tile) > 1 and tile[-2] < _SUBLANES:
            traffic *= _SUBLANES / tile[-2]
        if written and 0 < array.bits < _LANE_BITS:
            traffic *= _LANE_BITS / array.bits
    return traffic


def _all_bytes(instruction: HloInstruction, written: bool = False) -> float:
    return sum(_memory_bytes(array, written) for array in instruction.results)


def bytes_alone(instruction: HloInstruction, computation: Computation) -> float:
    """The traffic of an instruction outside of a fusion."""
    operands = [computation.by_name[name] for name in instruction.operands]
    opcode = instruction.opcode
    written = _all_bytes(instruction, written=True)
    if opcode in ("dynamic-slice", "slice"):
        return written + _all_bytes(instruction)
    if opcode == "gather":
        return written + _all_bytes(instruction) + _all_bytes(operands[1])
    if opcode == "dynamic-update-slice":
        return 2 * _all_bytes(operands[1])
    if opcode == "scatter":
        updates = sum(_all_bytes(o) for o in operands[len(operands) // 2 :])
        return 3 * updates
    moved = written + sum(_all_bytes(operand) for operand in operands)
    if opcode == "sort":
        return moved * _sort_passes(instruction, computation)
    return moved


def _sort_passes(instruction: HloInstruction, computation: Computation) -> float:
    """How often a bitonic sort reads and writes its keys: log2(n) (log2(n) + 1) / 2, of which those
    over up to 2**10 neighbours are done in one pass."""
    array = computation.by_name[instruction.operands[0]].results[0]
    dimension = (instruction.numbers("dimensions") or (len(array.dims) - 1,))[0]
    depth = math.ceil(math.log2(max(2, array.dims[dimension])))
    above = max(0, depth - 10)
    return 1 + above * (above + 1) / 2


def fusion_bytes(instruction: HloInstruction, outer: Computation, module: HloModule) -> float:
    """The bytes that a fusion reads and writes."""
    body = module.called(instruction, "calls")
    total = 0.0
    for name, parameter in zip(instruction.operands, body.parameters, strict=True):
        whole = sum(_memory_bytes(array) for array in outer.by_name[name].results)
        total += min(whole, _read(parameter, body, whole, module))
    return total + sum(_written(root, body) for _, root in outputs(body))


def _read(value: HloInstruction, body: Computation, whole: float, module: HloModule) -> float:
    """What a fused computation reads of one of its parameters."""
    total = 0.0
    for user in body.users.get(value.name, []):
        place = user.operands.index(value.name)
        if user.opcode in VIEWS:
            total += _read(user, body, whole, module)
        elif user.opcode in _SLICES and place == 0:
            total += _share(user, whole, value)
        elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
            continue
        elif user.opcode == "fusion":
            inner = module.called(user, "calls")
            total += _read(inner.parameters[place], inner, whole, module)
        elif user.opcode != "tuple" and not _is_communication(user):
            return whole
    return total


def _share(slice_: HloInstruction, whole: float, value: HloInstruction) -> float:
    """The bytes of a slice of an operand, as the operand's memory counts."""
    size = sum(array.padded_bytes for array in value.results)
    taken = sum(array.padded_bytes for array in slice_.results)
    return whole * taken / size if size else 0.0


def _written(output: HloInstruction, body: Computation) -> float:
    """What a fused computation writes of one of its results."""
    share = _all_bytes(output, written=True)
    source = through_views(output, body)
    if source.opcode == "parameter" or _is_communication(source):
        return 0.0
    in_place = updated_parameter(source, body) is not None
    if source.opcode == "dynamic-update-slice" and in_place:
        return _share(body.by_name[source.operands[1]], share, source)
    if source.opcode == "scatter" and in_place:
        updates = body.by_name[source.operands[-1]]
        return 2 * min(share, _share(updates, share, source))
    return share


def _is_communication(instruction: HloInstruction) -> bool:
    """Whether it is a collective or what marks one: XLA:TPU passes its buffers through fusions."""
    return instruction.opcode in COLLECTIVES or instruction.target.startswith("AsyncCollective")

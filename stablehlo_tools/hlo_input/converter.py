"""XLA's converter in a separate process: `python -m stablehlo_tools.hlo_input.converter DIR`.

DIR holds `module.hlo` and a request; the process writes `module.mlirbc` and an answer there
(`processes.child`). It is a separate process because XLA's parser and converter abort on some texts
that they do not understand.

The converter drops an instruction's name and its position in the schedule, but it keeps the
`op_name` of its metadata, as the location. So each instruction is marked in its `op_name`, to be
identified in MLIR: `op_name` + U+001F + `COMPUTATION.INSTRUCTION`, both counted in the order of the
text. The serialized protocol buffer is edited directly, which keeps unknown fields. Field numbers:
XLA's `hlo.proto` and `xla_data.proto`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import Place, ToolError, first_line
from stablehlo_tools.hlo_input.hlo_text import HloText
from stablehlo_tools.processes import child
from stablehlo_tools.processes.ending import shorten_message

_MODULE = "stablehlo_tools.hlo_input.converter"
_INPUT, _OUTPUT = "module.hlo", "module.mlirbc"
_SECONDS = 60.0  # for a text of any size, and
_SECONDS_PER_MIB = 30.0  # more for each MiB of it

_WHERE = re.compile(r"was parsing (\d+):(\d+): (?:error: )?([^\n]*)")
_NAMED = re.compile(r"%([\w.-]+) = ")
_STATUS = re.compile(r"^(?:[A-Z_]+: )+")

MARK = "\x1f"

_COMPUTATIONS = 3  # of HloModuleProto
_INSTRUCTIONS, _ID = 2, 5  # of HloComputationProto
_METADATA, _INSTRUCTION_ID = 7, 35  # of HloInstructionProto
_OP_NAME = 2  # of OpMetadata
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_LOCAL_ID = 0xFFFFFFFF  # the part of an instruction's id that counts it within its computation

type Field = tuple[int, int, int, int]  # number; value, or its begin; its end; the field's begin


def to_stablehlo(source: HloText) -> bytes:
    """Returns the module as MLIR bytecode, with every instruction marked in its location.

    Raises ToolError, at the line of the text, if XLA cannot parse or convert it.
    """
    timeout = _SECONDS + _SECONDS_PER_MIB * len(source.text) / 2**20
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as name:
        directory = Path(name)
        (directory / _INPUT).write_text(source.converted)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        outcome = child.ask(_MODULE, directory, {}, timeout, environment)
        if outcome.error:
            raise _conversion_error(outcome.error, source)
        overdue = f"XLA took more than {timeout:g} s to read the HLO text"
        if outcome.in_time(overdue) or outcome.answer is None:
            raise outcome.death("XLA's converter", "reading the HLO text")
        return (directory / _OUTPUT).read_bytes()


def _conversion_error(message: str, source: HloText) -> ToolError:
    """Returns the error for XLA's message, at the line that the message refers to."""
    where = _WHERE.search(message)
    if where is not None:
        line, column = int(where.group(1)), int(where.group(2))
        line = source.origins[line - 1] if line <= len(source.origins) else line
        return ToolError(
            f"not HLO text that XLA can read: {where.group(3)}",
            Place(None, line, column),
            hint="have XLA write it: XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'",
        )
    named = _NAMED.search(message)
    line = source.line_of_name(named.group(1)) if named else 0
    said = shorten_message(_STATUS.sub("", first_line(message)))
    place = Place(None, line, 1) if line else None
    return ToolError(f"XLA cannot write this HLO as StableHLO: {said}", place)


def convert(directory: Path, _request: dict[str, Any]) -> dict[str, Any]:
    """Converts the text in the directory to bytecode there; runs in the child process.

    Marks each instruction first, because XLA's converter drops its name and its line.
    """
    from stablehlo_tools import bindings

    module = bindings.hlo_text_to_proto((directory / _INPUT).read_text())
    (directory / _OUTPUT).write_bytes(bindings.hlo_proto_to_stablehlo(mark_instructions(module)))
    return {}


def mark_instructions(module: bytes) -> bytes:
    """Returns the module with every instruction marked. Raises ValueError if it is not HLO."""
    parts: list[bytes] = []
    computations: list[tuple[int, int, tuple[int, int]]] = []  # id, where in `parts`, its bytes
    for number, begin, end, start in _fields(module, 0, len(module)):
        if number == _COMPUTATIONS:
            computations.append((_number_of(module, begin, end, _ID), len(parts), (begin, end)))
        parts.append(module[start:end])
    # XLA numbers computations in the order of the text.
    for rank, (_, position, (begin, end)) in enumerate(sorted(computations)):
        parts[position] = _message(_COMPUTATIONS, _marked_computation(module, begin, end, rank))
    return b"".join(parts)


def mark_of(name: str) -> tuple[str, tuple[int, int] | None]:
    """Splits an `op_name` from its mark: computation and instruction; None without a mark."""
    plain, separator, mark = name.partition(MARK)
    if not separator:
        return name, None
    computation, _, instruction = mark.partition(".")
    return plain, (int(computation), int(instruction))


def _marked_computation(data: bytes, begin: int, end: int, computation: int) -> bytes:
    parts: list[bytes] = []
    instructions: list[tuple[int, int]] = []  # where in `parts`, id
    for number, first, last, start in _fields(data, begin, end):
        if number == _INSTRUCTIONS:
            number_in_text = _number_of(data, first, last, _INSTRUCTION_ID) & _LOCAL_ID
            instructions.append((len(parts), number_in_text))
            parts.append(data[first:last])
        else:
            parts.append(data[start:last])
    in_text = sorted(instructions, key=lambda entry: entry[1])  # ids are given out in this order
    for instruction, (position, _) in enumerate(in_text):
        mark = f"{MARK}{computation}.{instruction}"
        parts[position] = _message(_INSTRUCTIONS, _marked_instruction(parts[position], mark))
    return b"".join(parts)


def _marked_instruction(data: bytes, mark: str) -> bytes:
    name = b""
    for number, begin, end, _ in _fields(data, 0, len(data)):
        if number == _METADATA:
            for inner, first, last, _ in _fields(data, begin, end):
                name = data[first:last] if inner == _OP_NAME else name
    # Protocol buffers merge a repeated message: a later value of a field overrides the earlier.
    return data + _message(_METADATA, _message(_OP_NAME, name + mark.encode()))


def _number_of(data: bytes, begin: int, end: int, field: int) -> int:
    """Returns the number in a field; 0 if absent, because zeros are not serialized."""
    return next((value for number, value, _, _ in _fields(data, begin, end) if number == field), 0)


def _fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """Yields the fields of a message; for a number, the second item is its value."""
    while at < end:
        start = at
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value, at, start
            continue
        size = 8 if wire_type == _FIXED64 else 4
        if wire_type == _BYTES:
            size, at = _varint(data, at)
        elif wire_type not in (_FIXED64, _FIXED32):
            raise ValueError(f"wire type {wire_type}")
        if at + size > end:
            raise ValueError("a field ends after the end of its message")
        yield key >> 3, at, at + size, start
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("a number without an end")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _message(number: int, data: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(data)) + data


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


if __name__ == "__main__":
    child.answer_request(convert)

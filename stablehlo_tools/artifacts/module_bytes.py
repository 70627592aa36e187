"""Converts a file's bytes to a module, and a module to a file's bytes.

**Reading.** MLIR's readers can end the process on damaged bytes, or never return. So a process
without a watching parent, such as a user's own, passes them only bytes that this package wrote.
Other bytes are read by a process that may die, which writes the module again.

**Writing.** A module is written only in a form that can be read back as the same module. Bytes that
MLIR's writer wrote in this process are trusted.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import outside_reader
from stablehlo_tools.artifacts.parsing import ArtifactForm, parse_module, too_new
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, capture_diagnostics, first_line, to_place
from stablehlo_tools.processes import activity

_REMEMBERED = 64 << 20  # bytes

# Dialects that StableHLO or Shardy promise to read for years; XLA's own dialects change with XLA.
_PORTABLE_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy", "shape"})
_ILLEGAL = re.compile(r"failed to legalize operation '([\w.]+)'|found unstable op: ([\w.]+)")


def read_module(data: bytes, form: ArtifactForm, name: str = "") -> ir.Module:
    """Reads a module from bytes, in a new context. Raises ToolError.

    Damaged bytes do not end this process, unless it is a command's child, which may die.
    """
    if activity.may_end():
        with activity.busy(activity.READER, "reading it", name, len(data), too_new(data)):
            return parse_module(data, form)
    digest = _digest(data)
    if digest in _own:
        return parse_module(data, form)
    written = _outside.get(digest)
    if written is None:
        written = outside_reader.read_outside(data, form)
        _outside[digest] = written
        while sum(map(len, _outside.values())) > _REMEMBERED:
            _outside.popitem(last=False)
    return parse_module(written, ArtifactForm.BYTECODE)


def prepare_reader() -> None:
    """Starts the process that `read_module` may need, while the caller continues."""
    if not activity.may_end():
        outside_reader.reader.start()


def vouch(data: bytes) -> None:
    """Trusts bytes that MLIR's own writer wrote in this process."""
    _own.add(_digest(data))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_own: set[bytes] = set()  # the digests of all bytes that this process wrote
_outside: OrderedDict[bytes, bytes] = OrderedDict()  # digests of bytes to the rewritten bytecode


def write_module(module: ir.Module, form: ArtifactForm, *, locations: bool = False) -> bytes:
    """Writes a module in a form; `locations` prints them in text (binary always has them).

    Raises ToolError, located at the op that the form cannot represent.
    """
    with activity.busy("the writer", f"writing {form.value}"):
        if form is ArtifactForm.TEXT:
            return to_text(module, locations=locations).encode()
        data = (
            bindings.write_bytecode(module) if form is ArtifactForm.BYTECODE else _portable(module)
        )
    vouch(data)
    return data


def to_text(module: ir.Module, *, locations: bool = False) -> str:
    """Returns the module as MLIR text, ending in a newline."""
    # Without `assume_verified`, MLIR verifies first and prints invalid modules in another form.
    text = module.operation.get_asm(enable_debug_info=locations, assume_verified=True)
    return str(text).rstrip("\n") + "\n"


def _portable(module: ir.Module) -> bytes:
    version = bindings.export_version()
    for op in _operations(module.operation):
        dialect = op.name.partition(".")[0]
        if dialect not in _PORTABLE_DIALECTS:
            raise ToolError(
                f"{op.name} cannot be written as a StableHLO {version} artifact, which holds no "
                f"ops of {dialect}: write .mlir or .mlirbc, or replace it by StableHLO ops",
                op.location,
            )
    with capture_diagnostics(module.context) as reported:
        try:
            return bindings.serialize_portable_artifact(module)
        except Exception as error:  # jaxlib raises several types here, none of them public
            said = reported[0].message if reported else str(error)
    raise _not_portable(module, version, said)


def _not_portable(module: ir.Module, version: str, said: str) -> ToolError:
    """Returns the error at the op that MLIR could not convert, from MLIR's message `said`."""
    illegal = _ILLEGAL.search(said)
    if illegal is None:
        return ToolError(f"cannot be written as a StableHLO {version} artifact: {first_line(said)}")
    name = illegal[1] or illegal[2]
    candidates = [op for op in _operations(module.operation) if op.name == name]
    places: list[ir.Location] = []
    for op in candidates:
        place = to_place(op.location)
        # The location as it starts MLIR's message.
        begin = f"{place.file or '-'}:{place.line}:{place.column}: "
        if (begin if place.line else str(op.location)) in said:
            places.append(op.location)
    return ToolError(
        f"{name} cannot be written as a StableHLO {version} artifact, which cannot express its "
        "types or attributes: write .mlir or .mlirbc",
        next(iter(places or [op.location for op in candidates]), None),
    )


def _operations(op: ir.Operation) -> Iterator[ir.Operation]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation)

"""A file's bytes become a module, and a module a file's bytes.

**Reading.** MLIR's readers can end the process on damaged bytes, or never return. So a process that
nobody watches, a user's own, gives them only what this package wrote: bytes of another origin are
read by a process that may die, which writes the module anew.

**Writing.** Only such bytes are written as can be read back for what they are; what MLIR's own
writer wrote here is vouched for.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import outside_reader
from stablehlo_tools.artifacts.parsing import Form, parse_module, too_new
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, captured, first_line, to_place
from stablehlo_tools.processes import activity

_REMEMBERED = 64 << 20  # bytes

# What StableHLO or Shardy promise to read for years; XLA's own dialects change with XLA.
_PORTABLE_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy", "shape"})
_ILLEGAL = re.compile(r"failed to legalize operation '([\w.]+)'|found unstable op: ([\w.]+)")


def read_module(data: bytes, form: Form, name: str = "") -> ir.Module:
    """The module that the bytes hold, in a context of its own. Raises ToolError.

    No bytes end this process, unless it is a command's child, which is there for that.
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
    return parse_module(written, Form.BYTECODE)


def prepare_reader() -> None:
    """Starts what `read_module` may need, while the caller does something else."""
    if not activity.may_end():
        outside_reader.reader.start()


def vouch(data: bytes) -> None:
    """Says that these bytes are what MLIR's own writer wrote in this process, unchanged."""
    _own.add(_digest(data))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_own: set[bytes] = set()  # the digests of what this package wrote in this process
_outside: OrderedDict[bytes, bytes] = OrderedDict()  # what was read, as it was written anew


def write_module(module: ir.Module, form: Form, *, locations: bool = False) -> bytes:
    """The module in a form; `locations` prints them in text (binary always has them).

    Raises ToolError, at the op that the form cannot hold.
    """
    with activity.busy("the writer", f"writing {form.value}"):
        if form is Form.TEXT:
            return to_text(module, locations=locations).encode()
        data = bindings.write_bytecode(module) if form is Form.BYTECODE else _portable(module)
    vouch(data)
    return data


def to_text(module: ir.Module, *, locations: bool = False) -> str:
    """The module as MLIR text, ending in a newline."""
    text = module.operation.get_asm(enable_debug_info=locations, assume_verified=True)
    return str(text).rstrip("\n") + "\n"


def _portable(module: ir.Module) -> bytes:
    version = bindings.export_version()
    for op in _operations(module.operation):
        dialect = op.name.partition(".")[0]
        if dialect not in _PORTABLE_DIALECTS:
            raise ToolError(
                f"{op.name} cannot be written as a StableHLO {version} artifact, which holds no "
                f"ops of {dialect}: write .mlir or .mlirbc, or put StableHLO in its place",
                op.location,
            )
    with captured(module.context) as reported:
        try:
            return bindings.serialize_portable_artifact(module)
        except Exception as error:  # jaxlib raises several types here, none of them public
            said = reported[0].message if reported else str(error)
    raise _not_portable(module, version, said)


def _not_portable(module: ir.Module, version: str, said: str) -> ToolError:
    """Names the op that MLIR could not convert: its message has the op's name and its place."""
    illegal = _ILLEGAL.search(said)
    if illegal is None:
        return ToolError(f"cannot be written as a StableHLO {version} artifact: {first_line(said)}")
    name = illegal[1] or illegal[2]
    candidates = [op for op in _operations(module.operation) if op.name == name]
    places: list[ir.Location] = []
    for op in candidates:
        place = to_place(op.location)
        # The location as MLIR begins a message with it.
        begin = f"{place.file or '-'}:{place.line}:{place.column}: "
        if (begin if place.line else str(op.location)) in said:
            places.append(op.location)
    return ToolError(
        f"{name} cannot be written as a StableHLO {version} artifact, which has no form for its "
        "types or attributes: write .mlir or .mlirbc",
        next(iter(places or [op.location for op in candidates]), None),
    )


def _operations(op: ir.Operation) -> Iterator[ir.Operation]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation)

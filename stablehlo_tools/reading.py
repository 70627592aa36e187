"""A file's bytes become a module: told apart by content, checked, parsed and verified.

MLIR's readers can end the process on damaged bytes, or never return. So a process that nobody
watches, a user's own, gives them only what this package wrote: bytes of another origin are read by
a process that may die, which writes the module anew.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict

from stablehlo_tools import activity, bindings, bytecode
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, captured, first_line, from_mlir_error
from stablehlo_tools.hlo_input.text import is_hlo_text

_DEEPEST = 500  # levels of regions; programs have ten, and a stack of 8 MiB room for 2,000
_REMEMBERED = 64 << 20  # bytes


class Form(enum.Enum):
    """The file formats of an artifact, by the suffix that selects each on output."""

    TEXT = ".mlir"
    BYTECODE = ".mlirbc"
    PORTABLE = ".bc"
    JAX_EXPORT = ".jax_export"
    HLO = ".hlo"  # read, not written


def form_of(data: bytes) -> Form:
    """Which form the bytes are in. Raises ToolError for what is none of them."""
    if not data.strip():
        raise ToolError("the file is empty")
    if data.startswith(bytecode.MAGIC):
        portable = bindings.portable_version(data) or bytecode.names_dialect(data, b"vhlo")
        return Form.PORTABLE if portable else Form.BYTECODE
    if b"\x00" in data:
        return Form.JAX_EXPORT
    return Form.HLO if is_hlo_text(data) else Form.TEXT


def read_module(data: bytes, form: Form, name: str = "") -> ir.Module:
    """The module that the bytes hold, in a context of its own. Raises ToolError.

    No bytes end this process, unless it is a command's child, which is there for that.
    """
    if activity.may_end():
        with activity.busy(activity.READER, "reading it", name, len(data)):
            return parse_module(data, form)
    if _own.holds(data):
        return parse_module(data, form)
    return parse_module(_read_outside(data, form), Form.BYTECODE)


def prepare() -> None:
    """Starts what `read_module` may need, while the caller does something else."""
    if not activity.may_end():
        from stablehlo_tools.outside_reader import start

        start()


def vouch(data: bytes) -> None:
    """Says that these bytes are what MLIR's own writer wrote in this process, unchanged."""
    _own.add(data)


def parse_module(data: bytes, form: Form) -> ir.Module:
    """Parses and verifies the module here, whatever may come of it. Raises ToolError."""
    context = bindings.new_context()
    if form is not Form.TEXT:
        _check_whole(data)
    if form is Form.PORTABLE:
        module = _parse_portable(data, context)
    else:
        try:
            text = data if form is Form.BYTECODE else _decoded(data)
            module = bindings.parse_module(text, context)
        except ir.MLIRError as error:
            raise from_mlir_error(error) from None
    _check_depth(module)
    return module


def _read_outside(data: bytes, form: Form) -> bytes:
    from stablehlo_tools.outside_reader import read_outside

    digest = _digest(data)
    written = _outside.get(digest)
    if written is None:
        written = read_outside(data, form)
        _outside[digest] = written
        while sum(map(len, _outside.values())) > _REMEMBERED:
            _outside.popitem(last=False)
    return written


class _Digests:
    """Bytes that this package wrote in this process, known by their digests."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, data: bytes) -> None:
        self._digests.add(_digest(data))

    def holds(self, data: bytes) -> bool:
        return bool(self._digests) and _digest(data) in self._digests


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_own = _Digests()
_outside: OrderedDict[bytes, bytes] = OrderedDict()  # what was read, as it was written anew


def _check_whole(data: bytes) -> None:
    try:
        bytecode.check_whole(data)
    except ValueError as error:
        raise ToolError(f"truncated MLIR bytecode: {error}") from None


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"neither an artifact nor text: byte {error.start} is not UTF-8") from None


def _parse_portable(data: bytes, context: ir.Context) -> ir.Module:
    with captured(context) as reported:
        try:
            module = bindings.deserialize_portable_artifact(data, context)
            module.operation.verify()
            return module
        except Exception as error:  # jaxlib raises several types here, none of them public
            detail = reported[0].message if reported else first_line(str(error))
            raise ToolError(
                f"not a readable StableHLO portable artifact (truncated, or from a newer "
                f"StableHLO than {bindings.current_version()}): {detail}"
            ) from None


def _check_depth(module: ir.Module) -> None:
    """Refuses what MLIR, which goes through regions by recursion, may not come back from."""
    level = [module.operation]
    for _ in range(_DEEPEST):
        level = [
            op.operation
            for parent in level
            for region in parent.regions
            for block in region.blocks
            for op in block.operations
        ]
        if not level:
            return
    raise ToolError(
        f"regions nest more than {_DEEPEST} deep, as no program does: "
        "a loop that calls a function nests in no other",
        level[0].location,
    )

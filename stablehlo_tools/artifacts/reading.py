"""A file's bytes become a module, in a process that may end on them.

MLIR's readers can end the process on damaged bytes, or never return. So a process that nobody
watches, a user's own, gives them only what this package wrote: bytes of another origin are read by
a process that may die, which writes the module anew.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from stablehlo_tools.artifacts import outside_reader
from stablehlo_tools.artifacts.parsing import Form, parse_module, too_new
from stablehlo_tools.bindings import ir
from stablehlo_tools.processes import activity

_REMEMBERED = 64 << 20  # bytes


def read_module(data: bytes, form: Form, name: str = "") -> ir.Module:
    """The module that the bytes hold, in a context of its own. Raises ToolError.

    No bytes end this process, unless it is a command's child, which is there for that.
    """
    if activity.may_end():
        with activity.busy(activity.READER, "reading it", name, len(data), too_new(data)):
            return parse_module(data, form)
    if _own.holds(data):
        return parse_module(data, form)
    return parse_module(_read_outside(data, form), Form.BYTECODE)


def prepare() -> None:
    """Starts what `read_module` may need, while the caller does something else."""
    if not activity.may_end():
        outside_reader.start()


def vouch(data: bytes) -> None:
    """Says that these bytes are what MLIR's own writer wrote in this process, unchanged."""
    _own.add(data)


def _read_outside(data: bytes, form: Form) -> bytes:
    digest = _digest(data)
    written = _outside.get(digest)
    if written is None:
        written = outside_reader.read_outside(data, form)
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

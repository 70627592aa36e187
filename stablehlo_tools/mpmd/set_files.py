"""The files of a set of rank programs: one rule for their names, for all who read or write them.

A name in a manifest is that of a file in the set's own directory, and nothing else: no path, no
control character, a suffix that programs have. A link is followed within the directory only. So a
manifest that comes from elsewhere leads to no other file, read or written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stablehlo_tools.diagnostics import ToolError

SUFFIXES = (".mlir", ".mlirbc", ".bc")
_LONGEST = 255  # bytes; no file system takes more


def refusal_of_name(name: str) -> str:
    """Why a program of a set cannot be called so; empty where it can."""
    if not name or name in (".", ".."):
        return f"{name!r} names no file"
    if "/" in name or "\\" in name or (len(name) > 1 and name[1] == ":"):
        return f"{name!r} is a path, and a program lies beside its manifest: a plain file name"
    if not name.isprintable() or name != name.strip():
        return f"{name!r} has characters that a file name should not have"
    if len(name.encode()) > _LONGEST:
        return f"the name has {len(name.encode())} bytes, and a file's has {_LONGEST} at most"
    if not name.endswith(SUFFIXES) or name.startswith("."):
        return f"{name!r} is no name of a program: NAME{', NAME'.join(SUFFIXES)}"
    return ""


def files_in(root: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names in a set's directory, there or not.

    Raises ToolError for what is no regular file, a link that leads out of the directory, and names
    that lead to one and the same file.
    """
    files = [root / name for name in names]
    own = Path(os.path.realpath(root))
    taken: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        target = Path(os.path.realpath(file))
        if target.parent != own:
            raise _about(file, f"the link leads to {os.fspath(target)!r}, out of the set")
        if target.exists() and not target.is_file():
            raise _about(file, "this is no regular file")
        other = taken.setdefault(os.fspath(target).casefold(), name)
        if other != name:
            raise _about(file, f"this is the same file as {other!r}")
    return files


def _about(file: Path, message: str) -> ToolError:
    error = ToolError(message)
    error.input_name = os.fspath(file)
    return error

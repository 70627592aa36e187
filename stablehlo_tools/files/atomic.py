"""Reads whole files, and writes files atomically."""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stablehlo_tools.diagnostics import ToolError, nearest

STDIN = "-"
_ALIKE = 0.75  # similarity from which on a file name may be another one, mistyped
_DIGITS = re.compile(r"\d")
written: set[str] = set()  # the paths that this process wrote, for the line that names them
_NAME_BYTES = 200  # of the target's name in the temporary one; file systems allow 255


def read_input(path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """Returns the bytes of a file (`-`: standard input), and its name for messages.

    Raises ToolError if it cannot be read."""
    name = os.fspath(path)
    try:
        if name == STDIN:
            return sys.stdin.buffer.read(), "<stdin>"
        return Path(name).read_bytes(), name
    except OSError as error:
        failure = unreadable(name, error)
        failure.input_name = name
        raise failure from None


def unreadable(name: str, error: OSError) -> ToolError:
    """Returns the error for a file that cannot be read; suggests a similar name in its folder."""
    said, hint, near = f"cannot read the file: {error.strerror}", "another path", ""
    folder = Path(name).parent
    if isinstance(error, FileNotFoundError) and folder.is_dir():
        stem, suffix = Path(name).stem, Path(name).suffix
        others = {  # step1 is not a mistyped step2, so names that differ in digits are left out
            each.stem: each.name
            for each in sorted(folder.iterdir(), key=lambda each: (each.suffix == suffix, each))
            if _DIGITS.sub("", each.stem) != _DIGITS.sub("", stem)
        }
        near = others.get(nearest(stem, others, _ALIKE), "")
        hint = f"another path: the file was looked for in {os.path.realpath(folder)!r}"
    return ToolError(said, hint=hint, instead=(name, os.fspath(folder / near)) if near else None)


def unwritable(path: str | os.PathLike[str], error: OSError) -> ToolError:
    """Returns the error for a path that cannot be written."""
    said = f"cannot write {os.fspath(path)!r}: {error.strerror}"
    return ToolError(said, hint="another path")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises ToolError if `write_atomically` would fail; call it before minutes of work."""
    target = Path(os.path.realpath(path))
    try:
        target.lstat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # such as a name that is too long
            raise unwritable(path, error) from None
    if target.is_dir():
        raise ToolError(
            f"cannot write {os.fspath(path)!r}: it is a directory",
            hint=f"the name of a file in it, such as {Path(path) / 'out.mlir'}",
        )
    if target.parent.exists() and not target.parent.is_dir():
        raise ToolError(
            f"cannot write {os.fspath(path)!r}: {str(target.parent)!r} is a file, not a directory",
            instead=(os.fspath(path), f"{Path(path).parent}.{Path(path).name}"),
        )
    if not target.parent.is_dir():
        raise ToolError(
            f"cannot write {os.fspath(path)!r}: no directory {str(target.parent)!r}",
            hint=f"mkdir -p {shlex.quote(str(Path(path).parent))}",
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise unwritable(path, PermissionError(errno.EACCES, "permission denied"))


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes through a temporary file in the target's folder, so that no reader sees half a file.

    Links are followed. A target that is not a regular file (a terminal, /dev/null) is written
    directly. Raises ToolError if it cannot be written.
    """
    write_all_atomically([(path, data)])


def write_all_atomically(files: Sequence[tuple[str | os.PathLike[str], bytes]]) -> None:
    """Writes several files like `write_atomically`; replaces none before all are staged."""
    staged: list[tuple[Path, Path]] = []
    path: str | os.PathLike[str] = ""
    try:
        for path, data in files:
            target = Path(os.path.realpath(path))
            if target.exists() and not target.is_file():
                target.write_bytes(data)
                continue
            if target.exists():
                mode = target.stat().st_mode & 0o777
            else:
                mask = os.umask(0)  # the mask can only be read by setting it
                os.umask(mask)
                mode = 0o666 & ~mask
            descriptor, temporary = tempfile.mkstemp(
                dir=target.parent,
                prefix=os.fsdecode(b"." + os.fsencode(target.name)[:_NAME_BYTES] + b"."),
            )
            staged.append((Path(temporary), target))
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            # mkstemp lets only the owner read.
            Path(temporary).chmod(mode)
        for temporary, target in staged:
            temporary.replace(target)
        written.update(os.fspath(path) for path, _ in files)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)

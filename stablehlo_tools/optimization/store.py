"""A cache of answers by content, so that a second run need not compute them again.

The key of an answer has all that it depends on: the inputs' bytes, the request, this package's own
code, the compiler and its flags. Large parts of answers (modules, schedules) are stored once, by
their digest. A file that is damaged or missing counts as never written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.atomic import write_atomically

DIRECTORY = "STABLEHLO_TOOLS_CACHE"
_MOST_BYTES = 4 << 30  # of the cache; the least recently used files are deleted first


def default_directory() -> Path:
    """Returns `$STABLEHLO_TOOLS_CACHE`, else `stablehlo-tools` in the user's cache directory."""
    named = os.environ.get(DIRECTORY)
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "stablehlo-tools"


def is_writable(directory: Path) -> bool:
    """Returns True if files can be written in a directory, which is created if missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


class AnswerStore:
    """Answers and blobs below one directory, which is created at the first write."""

    def __init__(self, directory: Path) -> None:
        self._answers = directory / "answers"
        self._blobs = directory / "blobs"

    def answer(self, *question: object) -> dict[str, Any] | None:
        """Returns the stored answer to a question; None if there is none."""
        try:
            answer = json.loads(_mark_used(self._answers / _digest_of(question)).read_bytes())
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None  # pyright: ignore[reportUnknownVariableType]

    def keep(self, answer: dict[str, Any], *question: object) -> None:
        """Stores an answer, unless the directory is not writable."""
        with contextlib.suppress(ToolError, OSError):
            self._write(self._answers / _digest_of(question), json.dumps(answer).encode())

    def keep_blob(self, data: bytes) -> str:
        """Stores bytes and returns their digest. Raises ToolError if they cannot be written."""
        digest = hashlib.sha256(data).hexdigest()
        if not self.has(digest):
            self._write(self.path(digest), data)
        return digest

    def has(self, digest: str) -> bool:
        """Returns True if the bytes with this digest are stored."""
        return self.path(digest).exists()

    def path(self, digest: str) -> Path:
        """Returns the path of the bytes with this digest."""
        return self._blobs / digest

    def blob(self, digest: str) -> bytes | None:
        """Returns the bytes with this digest; None if they are missing or damaged."""
        try:
            data = _mark_used(self.path(digest)).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def prune(self) -> None:
        """Deletes the least recently used files until the cache is within its limit."""
        files: list[tuple[float, int, Path]] = []
        folders = [folder for folder in (self._answers, self._blobs) if folder.is_dir()]
        for path in [path for folder in folders for path in folder.iterdir()]:
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - _MOST_BYTES
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"cannot write the cache {path.parent}: {error.strerror}") from None
        write_atomically(path, data)


def _mark_used(path: Path) -> Path:
    """Marks a file as used now; returns its path."""
    with contextlib.suppress(OSError):
        os.utime(path)
    return path


def _digest_of(question: tuple[object, ...]) -> str:
    text = json.dumps([tool_digest(), *question], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def tool_digest() -> str:
    """Returns the digest of this package's code, so that other versions' answers are not used."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(
        (*package.rglob("*.py"), *package.rglob("*.toml"), *package.rglob("*.txtpb"))
    ):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

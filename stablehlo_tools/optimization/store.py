"""What was found out before, kept by content, so that a second run need not find it out again.

An answer is found by all that it depends on: the inputs' bytes, the request, this package's own
code, the compiler and the flags it is given. Large parts of answers (modules, schedules) are kept
once, by their digest. A file that is damaged or gone counts as never written.
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
_MOST_BYTES = 4 << 30  # of what is kept from run to run; the longest unused go first


def default_directory() -> Path:
    """Where answers are kept: `$STABLEHLO_TOOLS_CACHE`, else the user's cache directory."""
    named = os.environ.get(DIRECTORY)
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "stablehlo-tools"


def is_writable(directory: Path) -> bool:
    """Whether files can be made in a directory, which is made where it is not there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


class Store:
    """Answers and blobs below one directory, made when something is first kept."""

    def __init__(self, directory: Path) -> None:
        self._answers = directory / "answers"
        self._blobs = directory / "blobs"

    def answer(self, *question: object) -> dict[str, Any] | None:
        """The answer that was kept for a question; None where there is none."""
        try:
            answer = json.loads(_touched(self._answers / _digest_of(question)).read_bytes())
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None  # pyright: ignore[reportUnknownVariableType]

    def keep(self, answer: dict[str, Any], *question: object) -> None:
        """Keeps an answer. A store that cannot be written to keeps nothing."""
        with contextlib.suppress(ToolError, OSError):
            self._write(self._answers / _digest_of(question), json.dumps(answer).encode())

    def keep_blob(self, data: bytes) -> str:
        """The digest to find these bytes by. Raises ToolError where they cannot be written."""
        digest = hashlib.sha256(data).hexdigest()
        if not self.has(digest):
            self._write(self.path(digest), data)
        return digest

    def has(self, digest: str) -> bool:
        """Whether the bytes with this digest are here."""
        return self.path(digest).exists()

    def path(self, digest: str) -> Path:
        """The file of the bytes with this digest."""
        return self._blobs / digest

    def blob(self, digest: str) -> bytes | None:
        """The bytes with this digest; None where they are gone or damaged."""
        try:
            data = _touched(self.path(digest)).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def prune(self) -> None:
        """Drops what was not used for longest, down to the most that is kept."""
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


def _touched(path: Path) -> Path:
    """The path, marked as used now."""
    with contextlib.suppress(OSError):
        os.utime(path)
    return path


def _digest_of(question: tuple[object, ...]) -> str:
    text = json.dumps([tool_digest(), *question], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def tool_digest() -> str:
    """Of this package's own code: what another version found out is not taken over."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(
        (*package.rglob("*.py"), *package.rglob("*.toml"), *package.rglob("*.txtpb"))
    ):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

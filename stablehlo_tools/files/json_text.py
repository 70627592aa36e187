"""Reads untrusted JSON, within limits.

Every failure is a ToolError. Accepted JSON has no NaN or infinity and no key twice, and nests no
deeper than `DEEPEST`. Files have at most `MOST_BYTES`, also after inflating. `JsonValue` reads such
a document field by field; its errors name the path of the value: `transfers[3].source: …`.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, cast

from stablehlo_tools.diagnostics import Place, ToolError
from stablehlo_tools.files.atomic import STDIN, read_input, unreadable

MOST_BYTES = 512 * 2**20
DEEPEST = 100
_MOST_SHOWN = 60  # characters of a value in a message
_MOST_DIGITS = 300  # of a whole number, so that it also fits a float
_CHUNK = 2**20  # bytes
_GZIP = b"\x1f\x8b"

type Steps = tuple[str | int, ...]  # from the whole document to a value in it


def read_json(path: str | os.PathLike[str], *, repeated_keys: bool = False) -> object:
    """Returns the value in a file, gzipped or not; `-` is standard input.

    Raises ToolError if the file cannot be read, is too large, or is not valid JSON."""
    return parse_json(read_bounded(path), repeated_keys=repeated_keys)


def read_bounded(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file, inflated if it is gzipped.

    Raises ToolError if the file cannot be read, or if it has more than MOST_BYTES; it is then not
    read to the end."""
    if os.fspath(path) == STDIN:
        data = read_input(path)[0]
    else:
        try:
            with Path(path).open("rb") as file:
                data = _at_most(file)
        except OSError as error:
            raise unreadable(os.fspath(path), error) from None
    if len(data) > MOST_BYTES:
        raise ToolError(f"the file has more than {_mebibytes()}, the most that is read")
    if not data.startswith(_GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            inflated = _at_most(file)
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise ToolError(f"cannot inflate the file: {error}") from None
    if len(inflated) > MOST_BYTES:
        raise ToolError(f"the file inflates to more than {_mebibytes()}, the most that is read")
    return inflated


def parse_json(data: bytes | str, *, repeated_keys: bool = False) -> object:
    """Returns the value of JSON text; `repeated_keys` accepts a key twice, as other tools write it.

    Raises a located ToolError if the text is not valid JSON, and ToolError beyond the limits."""
    hook = None if repeated_keys else _dict_of_unique_keys
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value: object = json.loads(
            text, object_pairs_hook=hook, parse_constant=_no_constant, parse_int=_whole_number
        )
    except UnicodeDecodeError as error:
        raise ToolError(f"invalid JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        place = Place(line=error.lineno, column=error.colno)
        raise ToolError(f"invalid JSON: {error.msg}", place) from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    return value


@dataclass(frozen=True)
class JsonValue:
    """A value in a JSON document, and its path, which is named in errors.

    All methods raise ToolError if the value is not of the kind that they return.
    """

    content: object
    steps: Steps = ()

    @staticmethod
    def from_text(data: bytes | str) -> JsonValue:
        """Returns the value of a whole document. Raises ToolError as `parse_json` does."""
        return JsonValue(parse_json(data))

    @property
    def path(self) -> str:
        """`transfers[3].source`; empty for the whole document."""
        return "".join(
            f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps
        ).removeprefix(".")

    def refuse(self, message: str) -> NoReturn:
        """Raises a ToolError that names the path of this value."""
        raise ToolError(f"{self.path}: {message}" if self.steps else message)

    def fields(
        self, required: Collection[str], optional: Collection[str] = ()
    ) -> dict[str, JsonValue]:
        """Returns the fields of an object with all `required` fields and no unknown ones."""
        known = (*required, *optional)
        content = self._content(dict, f"an object with the fields {', '.join(known)}")
        missing = [name for name in required if name not in content]
        if missing:
            self.refuse(f"there is no {' and no '.join(missing)}")
        strange = next((name for name in content if name not in known), None)
        if strange is not None:
            self.refuse(f"unknown field {_shown(strange)}; known: {', '.join(known)}")
        return self.entries()

    def entries(self) -> dict[str, JsonValue]:
        """Returns the fields of an object with any names."""
        content = self._content(dict, "an object")
        return {name: JsonValue(value, (*self.steps, name)) for name, value in content.items()}

    def items(self) -> list[JsonValue]:
        """Returns the values of a list."""
        content = self._content(list, "a list")
        return [JsonValue(value, (*self.steps, place)) for place, value in enumerate(content)]

    def string(self) -> str:
        """Returns a string that can be encoded, without half surrogate pairs."""
        content = self._content(str, "a string")
        if not content.isascii() and any("\ud800" <= letter <= "\udfff" for letter in content):
            self.refuse("half of a surrogate pair in a string, which is not valid text")
        return content

    def whole(self, least: int = 0, most: int = 2**31 - 1) -> int:
        """Returns a whole number from `least` to `most`."""
        content = self.content
        if type(content) is not int or not least <= content <= most:
            self._raise_not(f"a whole number from {least} to {most}")
        return content

    def amount(self, most: float = math.inf) -> float:
        """Returns a number from 0 to `most`, such as a time or a size."""
        content = self.content
        if isinstance(content, bool) or not isinstance(content, int | float):
            self._raise_not("a number")
        if not 0 <= content <= most or content == math.inf:
            self._raise_not("a number from 0 up" + ("" if most == math.inf else f" to {most:g}"))
        return float(content)

    def one_of(self, known: Collection[str]) -> str:
        """Returns a string that is one of `known`."""
        if not isinstance(self.content, str) or self.content not in known:
            self._raise_not(f"one of {', '.join(known)}")
        return self.content

    def _content[T](self, type_: type[T], what: str) -> T:
        if not isinstance(self.content, type_):
            self._raise_not(what)
        return self.content

    def _raise_not(self, what: str) -> NoReturn:
        self.refuse(f"{_shown(self.content)} is not {what}")


def _at_most(file: IO[bytes] | gzip.GzipFile) -> bytes:
    """Reads a file to its end, or until more than MOST_BYTES are read."""
    parts: list[bytes] = []
    size = 0
    while size <= MOST_BYTES and (part := file.read(_CHUNK)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _dict_of_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ToolError(f"the key {_shown(key)} appears twice in an object")
            seen.add(key)
    return by_key


def _no_constant(name: str) -> NoReturn:
    raise ToolError(f"invalid JSON: {name} is not a JSON number")


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ToolError(f"a number in this JSON has {len(digits)} digits, too many to read")
    return int(digits)


def _check_depth(content: object) -> None:
    """Raises ToolError if a value nests deeper than `DEEPEST`, so that readers may recurse.

    Goes level by level, without recursion."""
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ToolError:
    return ToolError(
        f"this JSON nests deeper than {DEEPEST} lists and objects, the most that is read"
    )


def _mebibytes() -> str:
    return f"{MOST_BYTES // 2**20} MiB"


def _shown(content: object) -> str:
    """Renders a value for a message: short, without control characters of a terminal."""
    if isinstance(content, dict):
        return f"an object of {len(cast('Mapping[str, object]', content))} fields"
    if isinstance(content, list):
        return f"a list of {len(cast('list[object]', content))}"
    text = repr(content[:_MOST_SHOWN]) if isinstance(content, str) else json.dumps(content)
    return text if len(text) <= _MOST_SHOWN + 2 else f"{text[:_MOST_SHOWN]}…"

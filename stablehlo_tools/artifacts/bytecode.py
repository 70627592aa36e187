"""The envelope of MLIR bytecode, read far enough to tell a whole file from a truncated one.

MLIR's reader can end the process on a file that was cut off, so that is found out first.

Source: MLIR, "MLIR Bytecode Format": magic, version, producer, then sections that say how long
they are.
"""

from __future__ import annotations

from stablehlo_tools.bindings import BYTECODE_MAGIC

_HAS_ALIGNMENT = 0x80
# Strings, dialects, attributes and types, their offsets, IR; properties since version 5.
_REQUIRED_SECTIONS = frozenset({0, 1, 2, 3, 4})
_PROPERTIES_SECTION, _PROPERTIES_SINCE = 8, 5
_STRING_SECTION = 0
_PADDING = 0xCB


def check_whole(data: bytes) -> None:
    """Raises ValueError unless all sections are there and fill the bytecode to its last byte."""
    version, position = _variable_integer(data, len(BYTECODE_MAGIC))
    position = data.find(b"\x00", position) + 1  # after the producer, a string
    if not position:
        raise ValueError("it ends inside its header")
    missing = set(_REQUIRED_SECTIONS)
    if version >= _PROPERTIES_SINCE:
        missing.add(_PROPERTIES_SECTION)
    while position < len(data):
        flags = data[position]
        missing.discard(flags & ~_HAS_ALIGNMENT)
        length, position = _variable_integer(data, position + 1)
        if flags & _HAS_ALIGNMENT:
            _, position = _variable_integer(data, position)
            while position < len(data) and data[position] == _PADDING:
                position += 1
        position += length
    if position != len(data):
        raise ValueError(f"its last section is {position - len(data)} bytes short")
    if missing:
        raise ValueError(f"{len(missing)} of its sections are missing")


def holds_text_only(data: bytes) -> bool:
    """Whether all strings of whole bytecode are UTF-8."""
    _, position = _variable_integer(data, len(BYTECODE_MAGIC))
    position = data.find(b"\x00", position) + 1
    while position < len(data):
        flags = data[position]
        length, position = _variable_integer(data, position + 1)
        if flags & _HAS_ALIGNMENT:
            _, position = _variable_integer(data, position)
            while position < len(data) and data[position] == _PADDING:
                position += 1
        if flags & ~_HAS_ALIGNMENT == _STRING_SECTION:
            return _is_text(data[position : position + length])
        position += length
    return False


def _is_text(section: bytes) -> bool:
    """Whether a string section, lengths before strings, has strings of UTF-8."""
    count, position = _variable_integer(section, 0)
    for _ in range(min(count, len(section))):
        _, position = _variable_integer(section, position)
    try:
        section[position:].decode()
    except UnicodeDecodeError:
        return False
    return True


def names_dialect(data: bytes, dialect: bytes) -> bool:
    """Whether the name of a dialect is among the strings of the bytecode."""
    return b"\x00" + dialect + b"\x00" in data


def _variable_integer(data: bytes, position: int) -> tuple[int, int]:
    """A prefix-coded integer and the position after it: trailing zeros count the further bytes."""
    if position >= len(data):
        raise ValueError("it ends inside a section's header")
    first = data[position]
    extra = 8 if first == 0 else (first & -first).bit_length() - 1
    end = position + 1 + extra
    if end > len(data):
        raise ValueError("it ends inside a number")
    if first == 0:
        return int.from_bytes(data[position + 1 : end], "little"), end
    return int.from_bytes(data[position:end], "little") >> (extra + 1), end

"""Parses and verifies a file's bytes in this process, after detecting their form by content.

MLIR's readers can end the process on damaged bytes, or never return; `module_bytes` decides which
process calls this. A truncated file is detected before MLIR reads it, from the envelope of its
bytecode. Names that jaxlib cannot convert to a Python string are refused before any use.

Source of the envelope: MLIR, "MLIR Bytecode Format": magic, version, producer, then sections with
their lengths.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

from stablehlo_tools import bindings
from stablehlo_tools.bindings import BYTECODE_MAGIC, ir
from stablehlo_tools.diagnostics import (
    Diagnostic,
    Place,
    ToolError,
    capture_diagnostics,
    first_line,
    from_mlir_error,
)
from stablehlo_tools.hlo_input.hlo_text import is_hlo_text

HOW_TO_EXPORT = (
    "give it what jax.export writes: "
    "open('step.jax_export', 'wb').write(jax.export.export(jax.jit(step))(*arguments).serialize())"
)
WANTED = (
    "expected a program: a jax.export file, MLIR text or bytecode, a StableHLO portable artifact "
    "or HLO text"
)
AGAIN = "copy the file again, or write it again"
TEXT_AGAIN = "correct that line, or write the text again: jax.jit(step).lower(…).as_text()"
_DEEPEST = 500  # levels of regions; programs have ten, and a stack of 8 MiB room for 2,000

# MLIR text begins with an op by its name, or with an alias.
_MLIR_LINE = re.compile(r'(module\b|[a-z_]\w*\.[a-z_][\w.]*\b|"[\w.]+"\s*\(|[#!][\w.]+\s*=|%|\{-#)')
_OF_VERIFIER = re.compile(r"'[\w.]+' op ")

# Escapes of bytes that are not ASCII in text, and strings in text.
_ESCAPED = re.compile(rb"\\[89A-Fa-f][0-9A-Fa-f]")
_ESCAPED_BYTE = re.compile(rb"\\([0-9A-Fa-f]{2})")
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
# A string, or a dictionary of strings and dictionaries; Triton's kernels are in a dictionary.
_CONFIGURATION = re.compile(
    rb'backend_config = (?:STRING|\{(?:[^{}"]|STRING|\{(?:[^{}"]|STRING)*+\})*+\})'.replace(
        b"STRING", rb'"(?:[^"\\]|\\.)*+"'
    )
)

_HAS_ALIGNMENT = 0x80
# Strings, dialects, attributes and types, their offsets, IR; properties since version 5.
_REQUIRED_SECTIONS = frozenset({0, 1, 2, 3, 4})
_PROPERTIES_SECTION, _PROPERTIES_SINCE = 8, 5
_STRING_SECTION = 0
_PADDING = 0xCB


class ArtifactForm(enum.Enum):
    """The file formats of an artifact, by the suffix that selects each on output."""

    TEXT = ".mlir"
    BYTECODE = ".mlirbc"
    PORTABLE = ".bc"
    JAX_EXPORT = ".jax_export"
    HLO = ".hlo"  # read, not written


def form_of(data: bytes) -> ArtifactForm:
    """Detects the form of bytes. Raises ToolError if they are empty."""
    if not data.strip():
        raise ToolError("the file is empty", hint=HOW_TO_EXPORT)
    if data.startswith(bindings.BYTECODE_MAGIC):
        # The bytecode lists the names of its dialects among its strings.
        portable = bindings.portable_version(data) or b"\x00" + b"vhlo" + b"\x00" in data
        return ArtifactForm.PORTABLE if portable else ArtifactForm.BYTECODE
    # Text has no null bytes; the flatbuffer of jax.export has.
    if b"\x00" in data:
        return ArtifactForm.JAX_EXPORT
    return ArtifactForm.HLO if is_hlo_text(data) else ArtifactForm.TEXT


def parse_module(data: bytes, form: ArtifactForm) -> ir.Module:
    """Parses and verifies a module in this process, which may die. Raises ToolError."""
    context = bindings.new_context()
    if form is not ArtifactForm.TEXT:
        try:
            check_sections(data)
        except ValueError as error:
            raise ToolError(f"MLIR bytecode that was cut off: {error}", hint=AGAIN) from None
    if b"quant" in data:
        bindings.load_quantized_types(context)
    if form is ArtifactForm.PORTABLE:
        module = _parse_portable(data, context)
    else:
        module = _parse_plain(data, form, context)
    _check_depth(module)
    if _ESCAPED.search(data) if form is ArtifactForm.TEXT else not _holds_text_only(data):
        # Refuses names and locations that are not UTF-8: jaxlib cannot convert them to a Python
        # string and may end the process. A backend's configuration may have any bytes.
        text = module.operation.get_asm(enable_debug_info=True, assume_verified=True)
        for string in _STRING.findall(_CONFIGURATION.sub(b"", str(text).encode())):
            try:
                _ESCAPED_BYTE.sub(lambda byte: bytes.fromhex(byte[1].decode()), string).decode()
            except UnicodeDecodeError:
                raise _damage_error(f"a name that is not UTF-8: {string.decode()!r}") from None
    return module


def too_new(data: bytes) -> str:
    """Returns why bytes of a StableHLO newer than this jaxlib's may be unreadable; "" for others.

    Some of them are readable, because an op's form changes only with its own version."""
    version, newest = bindings.portable_version(data), bindings.current_version()
    if version is None or _numbers(version) <= _numbers(newest):
        return ""
    return (
        f"an artifact of StableHLO {version}, but this jaxlib reads StableHLO up to {newest}: "
        "install a newer jaxlib, or write the artifact for an older StableHLO"
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _parse_plain(data: bytes, form: ArtifactForm, context: ir.Context) -> ir.Module:
    source: bytes | str = data
    if form is not ArtifactForm.BYTECODE:
        try:
            source = data.decode()
        except UnicodeDecodeError as error:
            said = f"neither an artifact nor text: byte {error.start} is not UTF-8"
            raise ToolError(f"{said}; {WANTED}", hint=HOW_TO_EXPORT) from None
    try:
        return bindings.parse_module(source, context)
    except ir.MLIRError as error:
        failure = from_mlir_error(error)
        if _OF_VERIFIER.match(failure.diagnostic.message):
            raise failure from None
        if isinstance(source, bytes):
            raise _damage_error(failure.diagnostic.message) from None
        raise _syntax_error(failure.diagnostic, source) from None
    except (ValueError, RuntimeError) as error:  # of the C++ library: too long, out of range
        raise _damage_error(str(error)) from None


def _damage_error(said: str) -> ToolError:
    return ToolError(f"damaged: {first_line(said)}", hint=AGAIN)


def _syntax_error(told: Diagnostic, text: str) -> ToolError:
    """Returns the parser's error if the text looks like MLIR, else an error that it is not MLIR."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("//")), "")
    if not _MLIR_LINE.match(first):
        place = Place(line=told.place.line or 1, column=1)
        if first.startswith("```"):
            fences = "text with ``` lines, as chats and pages have them"
            return ToolError(fences, place, hint="delete the ``` lines")
        return ToolError(f"text, but not MLIR; {WANTED}", place, hint=HOW_TO_EXPORT)
    ends = told.place.file is None and told.place.line >= len(text.rstrip().splitlines())
    cut = "; the text ends here: was it cut off?" if ends else ""
    message = f"invalid MLIR text: {told.message}{cut}"
    return ToolError(message, told.place, told.notes, AGAIN if ends else TEXT_AGAIN)


def _parse_portable(data: bytes, context: ir.Context) -> ir.Module:
    with capture_diagnostics(context) as reported:
        try:
            module = bindings.deserialize_portable_artifact(data, context)
            module.operation.verify()
            return module
        except Exception as error:  # jaxlib raises several types here, none of them public
            detail = reported[0].message if reported else first_line(str(error))
            why = too_new(data) or "not a readable StableHLO portable artifact"
            hint = "" if why == too_new(data) else AGAIN
            raise ToolError(f"{why}: {detail}", hint=hint) from None


def _check_depth(module: ir.Module) -> None:
    """Raises ToolError if regions nest so deeply that MLIR's recursion may overflow the stack."""
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
        f"regions nest more than {_DEEPEST} deep, which no real program does: call functions "
        "instead of nesting regions",
        level[0].location,
    )


def check_sections(data: bytes) -> None:
    """Raises ValueError unless all required sections exist and fill the bytecode to its end."""
    version, _ = _variable_integer(data, len(BYTECODE_MAGIC))
    missing = set(_REQUIRED_SECTIONS)
    if version >= _PROPERTIES_SINCE:
        missing.add(_PROPERTIES_SECTION)
    sections = list(_sections(data))
    missing -= {section for section, _, _ in sections}
    end = sections[-1][2] if sections else len(data)
    if end != len(data):
        raise ValueError(
            f"it ends at byte {len(data):,}, and its last section goes to byte {end:,}"
        )
    if missing:
        raise ValueError(f"it ends at byte {len(data):,}, and lacks {len(missing)} of its sections")


def _sections(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the number of each section of bytecode, and its first and last offset (exclusive).

    Raises ValueError if the bytecode ends inside a header.
    """
    _, position = _variable_integer(data, len(BYTECODE_MAGIC))
    position = data.find(b"\x00", position) + 1  # after the producer, a string
    if not position:
        raise ValueError(f"it ends at byte {len(data):,}, inside its header")
    while position < len(data):
        flags = data[position]
        length, position = _variable_integer(data, position + 1)
        if flags & _HAS_ALIGNMENT:
            _, position = _variable_integer(data, position)
            while position < len(data) and data[position] == _PADDING:
                position += 1
        yield flags & ~_HAS_ALIGNMENT, position, position + length
        position += length


def _holds_text_only(data: bytes) -> bool:
    """Returns True if all strings of whole bytecode are UTF-8."""
    for section, start, end in _sections(data):
        if section == _STRING_SECTION:  # lengths before strings
            strings = data[start:end]
            count, position = _variable_integer(strings, 0)
            for _ in range(min(count, len(strings))):
                _, position = _variable_integer(strings, position)
            try:
                strings[position:].decode()
            except UnicodeDecodeError:
                return False
            return True
    return False


def _variable_integer(data: bytes, position: int) -> tuple[int, int]:
    """Decodes a prefix-coded integer, whose trailing zeros count its further bytes.

    Returns the integer and the position after it. Raises ValueError if the data ends before it."""
    if position >= len(data):
        raise ValueError(f"it ends at byte {len(data):,}, inside a section's header")
    first = data[position]
    extra = 8 if first == 0 else (first & -first).bit_length() - 1
    end = position + 1 + extra
    if end > len(data):
        raise ValueError(f"it ends at byte {len(data):,}, inside a number")
    if first == 0:
        return int.from_bytes(data[position + 1 : end], "little"), end
    return int.from_bytes(data[position:end], "little") >> (extra + 1), end

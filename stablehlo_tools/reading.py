"""A file's bytes become a module: told apart by content, checked, parsed and verified."""

from __future__ import annotations

import enum

from stablehlo_tools import bindings, bytecode
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, captured, first_line, from_mlir_error


class Form(enum.Enum):
    """The file formats of an artifact, by the suffix that selects each on output."""

    TEXT = ".mlir"
    BYTECODE = ".mlirbc"
    PORTABLE = ".bc"
    JAX_EXPORT = ".jax_export"


def form_of(data: bytes) -> Form:
    """Which form the bytes are in. Raises ToolError for what is none of the four."""
    if not data.strip():
        raise ToolError("the file is empty")
    if data.startswith(bytecode.MAGIC):
        return Form.PORTABLE if bindings.portable_version(data) else Form.BYTECODE
    if b"\x00" in data:
        return Form.JAX_EXPORT
    return Form.TEXT


def read_module(data: bytes, form: Form) -> ir.Module:
    """The module that the bytes hold, in a context of its own. Raises ToolError."""
    context = bindings.new_context()
    if form is not Form.TEXT:
        _check_whole(data)
    if form is Form.PORTABLE:
        return _parse_portable(data, context)
    try:
        return bindings.parse_module(data if form is Form.BYTECODE else _decoded(data), context)
    except ir.MLIRError as error:
        raise from_mlir_error(error) from None


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

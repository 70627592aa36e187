"""Artifacts: read by content, replace the module, write atomically.

An artifact is one StableHLO module and, where it came from `jax.export`, the `Exported` around it.
Passes edit `Artifact.module` in place; `to_exported` puts the edited module back into the calling
convention it came in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools import bindings, reading
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import (
    Diagnostic,
    Place,
    ToolError,
    captured,
    first_line,
    naming,
    warning,
)
from stablehlo_tools.exported_shardings import restated
from stablehlo_tools.files import read_input, write_atomically
from stablehlo_tools.hlo_input.legalization import tiled_bitcast
from stablehlo_tools.hlo_input.reading import read_hlo
from stablehlo_tools.hlo_input.text import HloText
from stablehlo_tools.reading import Form, form_of, read_module

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass
class Artifact:
    """One module, where it came from, and what it is written back into.

    `name` is used in messages only. `exported` is the untouched original, and `hlo` the text that
    an artifact was read from which came as HLO.
    """

    name: str
    form: Form
    module: ir.Module
    exported: Exported | None = None
    hlo: HloText | None = None

    @property
    def is_scheduled(self) -> bool:
        """Whether a device issues the ops in the order in which they stand."""
        return self.hlo is not None and self.hlo.is_scheduled

    def check_values_known(self) -> None:
        """Raises a located ToolError where HLO text does not say what the program computes."""
        if self.hlo is None:
            return
        with naming(self.name):
            line = self.hlo.elided_constant()
            if line:
                raise ToolError(
                    "constant({...}): the text leaves the elements out; have XLA write them with "
                    "--xla_dump_large_constants",
                    Place(None, line, 1),
                )
            unclear = tiled_bitcast(self.module)
            if unclear is not None:
                raise ToolError(
                    "a bitcast between tiled layouts, whose elements the text does not place: take "
                    "the program before XLA:TPU has assigned layouts",
                    unclear.location,
                )

    def left_behind(self) -> tuple[Diagnostic, ...]:
        """What HLO text says that the module does not."""
        if self.hlo is None:
            return ()
        told: list[Diagnostic] = []
        if self.hlo.is_scheduled:
            told.append(warning("the schedule of this text is left behind: compilers order anew"))
        line = self.hlo.control_dependence()
        if line:
            told.append(
                warning("control-predecessors are left behind", Place(None, line, 1)),
            )
        return tuple(told)

    def copy(self) -> Artifact:
        """An artifact whose module can be rewritten without touching this one's."""
        data = bindings.write_bytecode(self.module)
        return replace(self, module=bindings.parse_module(data, self.module.context))

    def to_exported(self) -> Exported:
        """The original `Exported` around the present module, without the stale VJP."""
        if self.exported is None:
            raise ToolError(
                f"only an artifact of jax.export can become one, and this is {self.form.value}: "
                "write .mlir, .mlirbc or .bc, or start from the .jax_export file"
            )
        return replace(
            self.exported,
            mlir_module_serialized=_portable(self.module),
            _get_vjp=None,
            **restated(self.exported, self.module),
        )


def load(path: str | os.PathLike[str]) -> Artifact:
    """Reads a file (`-`: standard input) in any of the forms, told apart by content."""
    return parse(*read_input(path))


def parse(data: bytes, name: str = "<bytes>") -> Artifact:
    """Builds an artifact from a file's bytes. Raises ToolError naming what is wrong, and where."""
    try:
        form = form_of(data)
        if form is Form.JAX_EXPORT:
            reading.prepare()  # loading jax takes longer
            return from_exported(_deserialize_exported(data), name)
        if form is Form.HLO:
            module, text = read_hlo(data, name, bindings.new_context())
            return Artifact(name, form, module, hlo=text)
        return Artifact(name, form, read_module(data, form, name))
    except ToolError as error:
        raise _named(name, error) from None


def from_exported(exported: Exported, name: str | None = None) -> Artifact:
    """An artifact around an `Exported` in memory, named after its function."""
    name = name or exported.fun_name
    module = read_module(exported.mlir_module_serialized, Form.PORTABLE, name)
    return Artifact(name, Form.JAX_EXPORT, module, exported)


def save(
    program: Artifact | Exported, path: str | os.PathLike[str], *, locations: bool = False
) -> None:
    """Writes a program in the form that the suffix names: whole, or not at all."""
    artifact = program if isinstance(program, Artifact) else from_exported(program)
    write_atomically(path, encode(artifact, output_form(path), locations=locations))


def output_form(path: str | os.PathLike[str]) -> Form:
    """The form that an output path's suffix asks for; text for a device such as /dev/null."""
    suffix = Path(path).suffix
    if not suffix and Path(path).exists() and not Path(path).is_file():
        return Form.TEXT
    written = [form.value for form in Form if form is not Form.HLO]
    if suffix not in written:
        known = ", ".join(written)
        raise ToolError(f"output {os.fspath(path)!r}: unknown suffix {suffix!r}; use {known}")
    return Form(suffix)


def encode(artifact: Artifact, form: Form, *, locations: bool = False) -> bytes:
    """The artifact's bytes in a form; `locations` prints them in text (binary always has them)."""
    artifact.check_values_known()
    if form is Form.TEXT:
        return to_text(artifact.module, locations=locations).encode()
    if form is Form.BYTECODE:
        data = bindings.write_bytecode(artifact.module)
        reading.vouch(data)
        return data
    if form is Form.PORTABLE:
        return _portable(artifact.module)
    try:
        return bytes(artifact.to_exported().serialize())
    except ValueError as error:
        raise ToolError(f"jax.export cannot serialize this: {first_line(str(error))}") from None


def to_text(module: ir.Module, *, locations: bool = False) -> str:
    """The module as MLIR text, ending in a newline."""
    text = module.operation.get_asm(enable_debug_info=locations, assume_verified=True)
    return str(text).rstrip("\n") + "\n"


def _portable(module: ir.Module) -> bytes:
    with captured(module.context) as reported:
        try:
            data = bindings.serialize_portable_artifact(module)
            reading.vouch(data)
            return data
        except Exception as error:  # as above
            detail = reported[0] if reported else None
            raise ToolError(
                f"cannot be written as a StableHLO {bindings.export_version()} artifact: "
                f"{detail.message if detail else first_line(str(error))}",
                detail.place if detail else None,
            ) from None


def _deserialize_exported(data: bytes) -> Exported:
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    except Exception as error:  # flatbuffers raises whatever the damaged bytes lead it to
        raise ToolError(
            "neither MLIR text, MLIR bytecode nor a readable jax.export file (truncated?): "
            f"{first_line(str(error) or type(error).__name__)}"
        ) from None


def _named(name: str, error: ToolError) -> ToolError:
    error.input_name = error.input_name or name
    return error

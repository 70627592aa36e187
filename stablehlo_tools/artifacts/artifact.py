"""Artifacts: read by content, replace the module, write atomically.

An artifact is one StableHLO module and, if it came from `jax.export`, the `Exported` around it.
Passes edit `Artifact.module` in place. `to_exported` puts the edited module back into its original
calling convention.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.exported import (
    changed_fields,
    check_fits,
    deserialize_exported,
    module_of,
    state_mesh,
)
from stablehlo_tools.artifacts.module_bytes import (
    prepare_reader,
    read_module,
    to_text,
    write_module,
)
from stablehlo_tools.artifacts.parsing import ArtifactForm, form_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Place, ToolError, first_line, naming, warning
from stablehlo_tools.files.atomic import read_input, write_atomically
from stablehlo_tools.hlo_input.hlo_text import HloText
from stablehlo_tools.hlo_input.legalization import read_hlo, tiled_bitcast

if TYPE_CHECKING:
    from jax.export import Exported

__all__ = [
    "Artifact",
    "ArtifactForm",
    "encode",
    "form_of",
    "from_exported",
    "load",
    "output_form",
    "parse",
    "save",
    "to_text",
]


@dataclass
class Artifact:
    """One module, with its origin.

    `name` is used in messages only. `exported` is the unchanged original of a jax.export file, and
    `hlo` is the text of an HLO file.
    """

    name: str
    form: ArtifactForm
    module: ir.Module
    exported: Exported | None = None
    hlo: HloText | None = None

    @property
    def binary_form(self) -> ArtifactForm:
        """The binary form that keeps all of it: a jax.export file, else bytecode."""
        return ArtifactForm.BYTECODE if self.exported is None else ArtifactForm.JAX_EXPORT

    @property
    def is_scheduled(self) -> bool:
        """True if a device issues the ops in text order."""
        return self.hlo is not None and self.hlo.is_scheduled

    def check_values_known(self) -> None:
        """Raises a located ToolError if HLO text does not fully define the program's values."""
        if self.hlo is None:
            return
        with naming(self.name):
            line = self.hlo.elided_constant()
            if line:
                raise ToolError(
                    "constant({...}): the text omits the elements; have XLA write them with "
                    "--xla_dump_large_constants",
                    Place(None, line, 1),
                )
            unclear = tiled_bitcast(self.module)
            if unclear is not None:
                raise ToolError(
                    "a bitcast between tiled layouts, and the text does not say where their "
                    "elements are: take the program before XLA:TPU has assigned layouts",
                    unclear.location,
                )

    def left_behind(self) -> tuple[Diagnostic, ...]:
        """Returns warnings about facts of HLO text that the module does not have."""
        if self.hlo is None:
            return ()
        told: list[Diagnostic] = []
        if self.hlo.is_scheduled:
            told.append(
                warning("the schedule of this text is dropped: compilers choose a new order")
            )
        if line := self.hlo.control_dependence():
            told.append(warning("control-predecessors are dropped", Place(None, line, 1)))
        return tuple(told)

    def copy(self) -> Artifact:
        """Returns an artifact with a copy of the module, in the same context."""
        data = bindings.write_bytecode(self.module)
        return replace(self, module=bindings.parse_module(data, self.module.context))

    def to_exported(self) -> Exported:
        """Returns the original `Exported` with the present module, without the stale VJP.

        Raises ToolError if the artifact did not come from jax.export."""
        if self.exported is None:
            raise ToolError(
                "only an artifact of jax.export can become a .jax_export file, and this is "
                f"{self.form.value}: write .mlir, .mlirbc or .bc, or start from the .jax_export "
                "file",
                hint="the program in another form: -o out.mlirbc",
            )
        return replace(
            self.exported,
            mlir_module_serialized=write_module(self.module, ArtifactForm.PORTABLE),
            _get_vjp=None,
            **changed_fields(self.exported, self.module),
        )


def load(path: str | os.PathLike[str], *, module_only: bool = False) -> Artifact:
    """Reads a file (`-`: standard input) in any of the forms, detected by content.

    With `module_only`, reads only the module of a jax.export file, which works with every jax.
    Raises ToolError.
    """
    return parse(*read_input(path), module_only=module_only)


def parse(data: bytes, name: str = "<bytes>", *, module_only: bool = False) -> Artifact:
    """Builds an artifact from a file's bytes. Raises ToolError with the error and its place."""
    with naming(name):
        form = form_of(data)
        if form is ArtifactForm.HLO:
            module, text = read_hlo(data, name, bindings.new_context())
            return Artifact(name, form, module, hlo=text)
        if form is not ArtifactForm.JAX_EXPORT:
            return Artifact(name, form, read_module(data, form, name))
        prepare_reader()  # loading jax takes longer
        if not module_only:
            return from_exported(deserialize_exported(data), name)
        return Artifact(
            name, ArtifactForm.PORTABLE, read_module(module_of(data), ArtifactForm.PORTABLE, name)
        )


def from_exported(exported: Exported, name: str | None = None) -> Artifact:
    """Returns an artifact of an `Exported` in memory, by default named after its function.

    Raises ToolError if it is not an `Exported`, or is damaged."""
    if not hasattr(exported, "mlir_module_serialized"):
        raise ToolError(
            f"a {type(exported).__name__} is not a program: give an object that jax.export.export "
            "returns, or that load reads from a file",
            hint='stablehlo_tools.load("step.jax_export")',
        )
    name = name or exported.fun_name
    module = read_module(exported.mlir_module_serialized, ArtifactForm.PORTABLE, name)
    with naming(name):
        check_fits(exported, module)
        state_mesh(exported, module)
    return Artifact(name, ArtifactForm.JAX_EXPORT, module, exported)


def save(
    program: Artifact | Exported, path: str | os.PathLike[str], *, locations: bool = False
) -> None:
    """Writes a program atomically in the form of the suffix. Raises ToolError."""
    artifact = program if isinstance(program, Artifact) else from_exported(program)
    write_atomically(path, encode(artifact, output_form(path), locations=locations))


def output_form(path: str | os.PathLike[str]) -> ArtifactForm:
    """Returns the form of an output path's suffix; text for a device such as /dev/null.

    Raises ToolError if the suffix is unknown."""
    suffix = Path(path).suffix
    if not suffix and Path(path).exists() and not Path(path).is_file():
        return ArtifactForm.TEXT
    written = [form.value for form in ArtifactForm if form is not ArtifactForm.HLO]
    if suffix not in written:
        known = ", ".join(written)
        meant = Path(path).with_suffix(ArtifactForm.TEXT.value)
        if meant.exists():  # perhaps the input
            meant = meant.with_suffix(f".out{ArtifactForm.TEXT.value}")
        raise ToolError(
            f"output {os.fspath(path)!r}: unknown suffix {suffix!r}; use {known}",
            instead=(os.fspath(path), os.fspath(meant)),
        )
    return ArtifactForm(suffix)


def encode(artifact: Artifact, form: ArtifactForm, *, locations: bool = False) -> bytes:
    """Encodes an artifact in a form; `locations` prints them in text (binary always has them)."""
    artifact.check_values_known()
    try:
        with naming(artifact.name):
            if form is not ArtifactForm.JAX_EXPORT:
                return write_module(artifact.module, form, locations=locations)
            return bytes(artifact.to_exported().serialize())
    except ValueError as error:
        raise ToolError(f"jax.export cannot serialize this: {first_line(str(error))}") from None

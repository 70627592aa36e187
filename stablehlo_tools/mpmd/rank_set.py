"""A set of rank programs in memory: read from a directory and checked, written whole or not at all.

DIR/manifest.json      what belongs to the set
DIR/rank_0.mlir …      the program of each rank
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stablehlo_tools.analysis.entry import main_function
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, Form
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.atomic import write_all_atomically
from stablehlo_tools.files.json_text import read_bounded
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.mpmd import manifest as manifests
from stablehlo_tools.mpmd.manifest import Entry, Manifest, Piece
from stablehlo_tools.mpmd.manifest_schema import decode
from stablehlo_tools.mpmd.set_files import files_in, refusal_of_name


@dataclass(frozen=True)
class RankSet:
    """The manifest, and the program of each rank in order; `name` is used in messages only."""

    name: str
    manifest: Manifest
    programs: tuple[Artifact, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.programs)

    def main(self, rank: int) -> ir.Operation:
        """The entry function of a rank."""
        main = main_function(self.programs[rank].module)
        assert main is not None, "load refuses a program without one"
        return main


def load(directory: str | os.PathLike[str]) -> RankSet:
    """Reads a set and checks that manifest and programs speak of the same values.

    Raises ToolError, about the file that is missing or odd.
    """
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise _about(ToolError("this is no directory of rank programs"), os.fspath(root))
    (path,) = files_in(root, [manifests.NAME])
    with naming(os.fspath(path)):
        manifest = decode(read_bounded(path))
    files = files_in(root, [rank.program for rank in manifest.ranks])
    programs = tuple(map(artifact.load, files))
    loaded = RankSet(os.fspath(root), manifest, programs)
    for rank, program in enumerate(programs):
        with naming(program.name):
            _check_main(program)
            _check_grid(program, manifest)
            _check_pieces(loaded, rank)
    return loaded


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Raises ToolError early where a set could not be written to a directory."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise ToolError(f"cannot write to {os.fspath(root)!r}: it is no directory")
    parent = next(p for p in (root, *root.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise ToolError(f"cannot write to {os.fspath(root)!r}: permission denied")


def write(
    directory: str | os.PathLike[str], manifest: Manifest, modules: Sequence[ir.Module]
) -> None:
    """Writes a set: all its files or none, each in the form that its suffix names. The directory is
    made where it is missing."""
    root = Path(directory)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot write {os.fspath(root)!r}: {error.strerror}") from None
    names = [rank.program for rank in manifest.ranks]
    refused = next(filter(None, map(refusal_of_name, names)), None)
    if refused is not None:
        raise ToolError(f"cannot write a program of a set: {refused}")
    *files, listed = files_in(root, [*names, manifests.NAME])
    written = [
        artifact.encode(Artifact(name, Form.TEXT, module), artifact.output_form(name))
        for name, module in zip(names, modules, strict=True)
    ]
    content = manifests.encode(manifest).encode()
    write_all_atomically([*zip(files, written, strict=True), (listed, content)])


def piece_type(entry: Entry, piece: Piece) -> str:
    """The type of what a rank has of an input or output: `tensor<4x16xf32>`."""
    if piece.dim is None:
        return entry.type
    sizes = entry.type.removeprefix("tensor<").split("x")
    sizes[piece.dim] = str(piece.limit - piece.start)
    return "tensor<" + "x".join(sizes)


def _check_main(program: Artifact) -> None:
    main = main_function(program.module)
    if main is None or not len(main.regions[0].blocks):
        raise ToolError("there is no @main: this is no program of a rank")


def _check_grid(program: Artifact, manifest: Manifest) -> None:
    count = manifest.devices * len(manifest.ranks)
    stated = program.module.operation.attributes.get("mhlo.num_partitions")
    found = 1 if stated is None else ir.IntegerAttr(stated).value
    if found != count:
        raise ToolError(
            f"the program is for {found} devices, and the set is for {count}: "
            f"{len(manifest.ranks)} ranks of {manifest.devices}"
        )


def _check_pieces(loaded: RankSet, rank: int) -> None:
    """Every argument and result of a rank is a piece of an input or output, of that type."""
    main = loaded.main(rank)
    block = main.regions[0].blocks[0]
    sides = (
        ("argument", loaded.manifest.inputs, list(block.arguments)),
        ("result", loaded.manifest.outputs, list(terminator(block).operands)),
    )
    for what, entries, values in sides:
        expected: dict[int, tuple[str, str]] = {}
        for entry in entries:
            for piece in entry.pieces:
                if piece.rank == rank:
                    expected[piece.number] = (entry.path, piece_type(entry, piece))
        for number, value in enumerate(values):
            path, kind = expected.pop(number, ("", ""))
            if not kind and loaded.manifest.form == "permutes" and number == len(values) - 1:
                continue  # what keeps watched permutes alive
            if not kind:
                raise ToolError(
                    f"the manifest does not say what {what} {number} of @main is", main.location
                )
            if kind != str(value.type):
                raise ToolError(
                    f"{what} {number} of @main is {value.type}, and as a piece of {path} the "
                    f"manifest has it as {kind}",
                    main.location,
                )
        if expected:
            number = min(expected)
            raise ToolError(
                f"@main has no {what} {number}, which the manifest has as a piece of "
                f"{expected[number][0]}",
                main.location,
            )


def _about(error: ToolError, name: str) -> ToolError:
    error.input_name = name
    return error

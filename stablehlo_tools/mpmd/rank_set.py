"""Reads a set of rank programs from a directory and checks it; writes all files of a set or none.

DIR/manifest.json      the description of the set
DIR/rank_0.mlir …      the program of each rank

A program name in a manifest must be a plain file name in the set's own directory. It has no path
and no control character, and the suffix of a program. A link is followed within the directory only.
So a manifest from elsewhere cannot name any other file to read or write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stablehlo_tools.analysis.entry import counted_name, path_of
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.artifacts.parsing import HOW_TO_EXPORT, TEXT_AGAIN
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.atomic import write_all_atomically
from stablehlo_tools.files.json_text import read_bounded
from stablehlo_tools.ir.platform_index import own_arguments
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, main_function, terminator
from stablehlo_tools.mpmd.manifest import (
    NAME,
    Manifest,
    ManifestEntry,
    ManifestPiece,
    decode_manifest,
    encode_manifest,
    refusal_of_name,
)
from stablehlo_tools.processes import activity
from stablehlo_tools.processes.sharing import beside

_WRITE = "stablehlo-tools expand-mpmd {} -o ranks --schedule 1f1b --ranks 2"
_WORTH_A_FORK = 1 << 20  # bytes of a manifest above which it is checked in a fork
_AGAIN = "copy the set again, or write it again with expand-mpmd"


@dataclass(frozen=True)
class RankSet:
    """The manifest, and the program of each rank in order. `name` is the path of its directory."""

    name: str
    manifest: Manifest
    programs: tuple[Artifact, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.programs)

    def main(self, rank: int) -> ir.Operation:
        """Returns the entry function of a rank."""
        main = main_function(self.programs[rank].module)
        assert main is not None, "load refuses a program without one"
        return main


def load(directory: str | os.PathLike[str]) -> RankSet:
    """Returns the set in a directory, and checks that manifest and programs agree on all values.

    Raises ToolError, about the file that is missing or invalid.
    """
    root = Path(directory)
    _check_directory(root)
    (path,) = files_in(root, [NAME])
    with naming(os.fspath(path)):
        data = read_bounded(path)

    def parse_manifest() -> Manifest:
        with naming(os.fspath(path)):
            return decode_manifest(data)

    # A command reads programs itself. Other callers use another process, which may crash.
    is_reader = activity.may_end() and len(data) >= _WORTH_A_FORK
    read, check = (_read_here, beside) if is_reader else (_read_beside, contextlib.nullcontext)
    with check(parse_manifest) as manifest_of, read(_named_files(root, data)) as reading:
        manifest = manifest_of()
        files_in(root, [rank.program for rank in manifest.ranks])
        programs = tuple(program.result() for program in reading)
    loaded = RankSet(os.fspath(root), manifest, programs)
    for rank, program in enumerate(programs):
        with naming(program.name):
            main = main_function(program.module)
            if main is None or not len(main.regions[0].blocks):
                raise ToolError("there is no @main: not the program of a rank")
            count = manifest.devices * len(manifest.ranks)
            stated = program.module.operation.attributes.get("mhlo.num_partitions")
            stated_count = 1 if stated is None else ir.IntegerAttr(stated).value
            if stated_count != count:
                raise ToolError(
                    f"the program is for {stated_count} devices, but the set is for {count}: "
                    f"{len(manifest.ranks)} ranks of {manifest.devices}"
                )
            _check_pieces(loaded, rank)
    return loaded


def _check_directory(root: Path) -> None:
    """Raises ToolError if `root` is not a directory with a manifest."""
    if root.is_dir() and os.path.lexists(root / NAME):
        return
    if not root.exists():
        said = "no such directory"
    elif not root.is_dir():
        said = "not a directory of rank programs"
    else:
        said = f"not a directory of rank programs: {NAME} is missing, which expand-mpmd writes"
    name = os.fspath(root)
    given = shlex.quote(name) if root.is_file() else "step.jax_export"
    refusal = ToolError(said, hint=_WRITE.format(given))
    refusal.input_name = name
    raise refusal


@contextlib.contextmanager
def _read_here(files: Sequence[Path]) -> Generator[list[Future[Artifact]]]:
    """Yields the programs in some files, up to the first that cannot be read."""
    read: list[Future[Artifact]] = []
    for rank, file in enumerate(files):
        read.append(Future())
        try:
            read[-1].set_result(_program(file, rank))
        except ToolError as error:
            read[-1].set_exception(error)
            break
    yield read


@contextlib.contextmanager
def _read_beside(files: Sequence[Path]) -> Generator[list[Future[Artifact]]]:
    """Yields the programs in some files, which a thread reads one after the other.

    Most of the work happens in another process, so this one can continue.
    """
    pool = ThreadPoolExecutor(1)
    try:
        yield [pool.submit(_program, file, rank) for rank, file in enumerate(files)]
    finally:
        pool.shutdown(cancel_futures=True)


def _named_files(root: Path, data: bytes | str) -> list[Path]:
    """Returns the program files that a manifest names, so that they are read while it is checked.

    The list is empty if the manifest is invalid; the check then reports it.
    """
    try:
        names = [rank["program"] for rank in json.loads(data)["ranks"]]
        if any(refusal_of_name(name) for name in names):
            return []
        return files_in(root, names)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ToolError):
        return []


def _program(file: Path, rank: int) -> Artifact:
    """Returns the program of a rank. Raises a located ToolError with a hint about the set."""
    try:
        return artifact.load(file)
    except ToolError as error:
        told = error.diagnostic
        if not file.exists():
            message = f"{told.message}; the manifest lists it as the program of rank {rank}"
            error.diagnostic = replace(told, message=message, hint=_AGAIN, instead=None)
        elif told.hint in (HOW_TO_EXPORT, TEXT_AGAIN):
            error.diagnostic = replace(told, hint=_AGAIN)
        raise


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Raises ToolError early if a set cannot be written to a directory."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise ToolError(
            f"cannot write to {os.fspath(root)!r}: not a directory",
            instead=(os.fspath(directory), f"{root.stem}.ranks"),
        )
    parent = next(p for p in (root, *root.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise ToolError(f"cannot write to {os.fspath(root)!r}: permission denied")


def write(
    directory: str | os.PathLike[str], manifest: Manifest, modules: Sequence[ir.Module]
) -> None:
    """Writes all files of a set or none, each in the form of its suffix. Creates the directory."""
    root = Path(directory)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot write {os.fspath(root)!r}: {error.strerror}") from None
    names = [rank.program for rank in manifest.ranks]
    refused = next(filter(None, map(refusal_of_name, names)), None)
    if refused is not None:
        raise ToolError(f"cannot write a program of a set: {refused}")
    *files, listed = files_in(root, [*names, NAME])
    written = [
        artifact.encode(Artifact(name, ArtifactForm.TEXT, module), artifact.output_form(name))
        for name, module in zip(names, modules, strict=True)
    ]
    content = encode_manifest(manifest).encode()
    write_all_atomically([*zip(files, written, strict=True), (listed, content)])


def files_in(root: Path, names: Sequence[str]) -> list[Path]:
    """Returns the paths of these names in a set's directory; the files need not exist.

    Raises ToolError for a path that is not a regular file, a link that leads out of the directory,
    and two names of the same file.
    """
    files = [root / name for name in names]
    own = Path(os.path.realpath(root))
    taken: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        target = Path(os.path.realpath(file))
        if target.parent != own:
            raise _refused_file(file, f"the link leads to {os.fspath(target)!r}, outside the set")
        if target.exists() and not target.is_file():
            raise _refused_file(file, "not a regular file")
        other = taken.setdefault(os.fspath(target).casefold(), name)
        if other != name:
            raise _refused_file(file, f"this is the same file as {other!r}")
    return files


def _refused_file(file: Path, message: str) -> ToolError:
    error = ToolError(message)
    error.input_name = os.fspath(file)
    return error


def piece_type(entry: ManifestEntry, piece: ManifestPiece) -> str:
    """Returns the type of a piece of an input or output: `tensor<4x16xf32>`."""
    if piece.dim is None:
        return entry.type
    sizes = entry.type.removeprefix("tensor<").split("x")
    sizes[piece.dim] = str(piece.limit - piece.start)
    return "tensor<" + "x".join(sizes)


def _check_pieces(loaded: RankSet, rank: int) -> None:
    """Checks that every argument and result of a rank is a piece of its type."""
    main = loaded.main(rank)
    block = Function(main).body
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
            path, type_ = expected.pop(number, ("", ""))
            if not type_ and loaded.manifest.form == "permutes" and number == len(values) - 1:
                continue  # the result that keeps watched permutes alive
            if not type_:
                raise ToolError(
                    f"the manifest does not list {what} {number} of @main", main.location
                )
            if type_ != str(value.type):
                raise ToolError(
                    f"{what} {number} of @main is {value.type}, but the manifest lists it as a "
                    f"piece of {path} of type {type_}",
                    main.location,
                )
        if expected:
            number = min(expected)
            raise ToolError(
                f"@main has no {what} {number}, which the manifest lists as a piece of "
                f"{expected[number][0]}",
                main.location,
            )


def digest_of(program: Artifact) -> str:
    """Returns the SHA-256 of a program's text without locations, equal for all artifact forms."""
    text = artifact.to_text(program.module, locations=False)
    return hashlib.sha256(text.encode()).hexdigest()


def argument_paths(artifact: Artifact) -> list[str]:
    """Returns a name for each argument.

    It is the path from the arguments of the exported function, `[0]['w']`. Without an export it
    comes from the location of the argument.
    """
    main = entry_function(artifact.module)
    arguments = list(Function(main).body.arguments)
    if artifact.exported is not None:
        names = _paths(artifact.exported.in_tree, positional=True)
        kept = artifact.exported.module_kept_var_idx
        chosen = [names[index] for index in kept]
        return [""] * (len(arguments) - len(chosen)) + chosen  # a platform's index comes first
    own = [path_of(argument) or counted_name(argument) for argument in own_arguments(main)]
    return [""] * (len(arguments) - len(own)) + own


def result_paths(artifact: Artifact) -> list[str]:
    """Returns a name for each result: its path in the exported function's result, `['loss']`."""
    main = entry_function(artifact.module)
    count = len(ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results)
    if artifact.exported is not None:
        return _paths(artifact.exported.out_tree, positional=False)
    return [f"result {number}" for number in range(count)]


def _paths(structure: Any, *, positional: bool) -> list[str]:
    import jax

    tree = jax.tree_util.tree_unflatten(structure, list(range(structure.num_leaves)))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    # without the first key, which distinguishes arguments and keyword arguments
    return [re.sub(r"^\[[01]\]", "", name) for name in names] if positional else names

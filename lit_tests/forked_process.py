"""What a fork does to become a command: loading beforehand, and then all that is its own."""

import ast
import atexit
import importlib
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

import lit

MAINS = {"stablehlo-tools": "stablehlo_tools.cli.main", "filecheck": "filecheck.main"}
LIT = os.fsencode(Path(lit.__file__).parent)
MODELS = Path(__file__).resolve().parents[1] / "python"
# What lit sets only after it has read its configuration; the last once it has run its own `diff`.
SET_BY_LIT = frozenset(
    (b"LIT_CURRENT_TESTCASE", b"TMP", b"TMPDIR", b"TEMP", b"TEMPDIR", b"PYTHONPATH")
)
ONE_THREAD = b"OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class Request:
    """One use of the command: its arguments, where it runs, and its three standard streams."""

    arguments: list[str]
    directory: bytes
    environment: dict[bytes, bytes]
    streams: tuple[int, ...]


def load(command: str) -> None:
    """Import what the command needs, without a thread, which would not live on in the forks."""
    os.environb[ONE_THREAD] = b"1"  # numpy's would be one
    _import(command)
    del os.environb[ONE_THREAD]


def _import(command: str) -> None:
    if command == "python":
        sys.path.insert(0, str(MODELS))
        importlib.import_module("models.zoo")
        sys.path.remove(str(MODELS))
        return
    importlib.import_module(MAINS[command])
    if command == "stablehlo-tools":
        for module in _without_jax():
            importlib.import_module(module)
        if "jax" in sys.modules:
            raise ImportError("one of these modules loads jax, which starts threads")


def _without_jax() -> list[str]:
    """The modules of the tool that load neither jax nor a module that does, by what they import."""
    import stablehlo_tools

    listed = pkgutil.walk_packages(stablehlo_tools.__path__, "stablehlo_tools.")
    imports = {module.name: _imported(module.name) for module in listed}
    loading, before = {name for name, names in imports.items() if "jax" in names}, set[str]()
    while loading != before:
        before = loading
        loading = loading | {name for name, names in imports.items() if names & before}
    return [name for name in imports if name not in loading]


def _imported(name: str) -> set[str]:
    """What a module imports when it is loaded: packages that are not ours by their first name."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    names = set[str]()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            of_tool = node.module.startswith("stablehlo_tools")
            names.add(node.module if of_tool else node.module.split(".")[0])
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def run(command: str, request: Request, environment: Mapping[bytes, bytes]) -> NoReturn:
    """Become the command, which was loaded with this environment, and end as it does."""
    _take_streams(request)
    program = str(Path(sys.executable).with_name(command))
    if _set_by_suite(request.environment) != _set_by_suite(environment):
        os.execve(program, [program, *request.arguments], request.environment)
    _take_on(request, program)
    _end(command, request.arguments)


def _take_streams(request: Request) -> None:
    """Make the command's directory and descriptors those of this process."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.directory)


def _take_on(request: Request, program: str) -> None:
    """Make the rest of what the command is to find in its process so."""
    # Everything else is as it was, or as a module that is loaded has set it.
    os.environb.update({n: v for n, v in request.environment.items() if n in SET_BY_LIT})
    sys.argv[:] = [program, *request.arguments]
    # The server's streams know what its own descriptors could do: seek, be a terminal.
    sys.stdin = sys.__stdin__ = _like(sys.stdin, 0)
    sys.stdout = sys.__stdout__ = _like(sys.stdout, 1)
    sys.stderr = sys.__stderr__ = _like(sys.stderr, 2)


def _end(command: str, arguments: list[str]) -> NoReturn:
    """Run the command, and end without the long way through all modules that Python would go."""
    try:
        status = _script(arguments) if command == "python" else _main(command)
    except SystemExit as end:
        status = end.code
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(status or 0)


def _main(command: str) -> int | None:
    return importlib.import_module(MAINS[command]).main()


def _script(arguments: list[str]) -> None:
    """Run a script as Python does."""
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _set_by_suite(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables that lit did not set; a search path of a RUN line's own is not lit's."""
    others = {name: value for name, value in environment.items() if name not in SET_BY_LIT}
    path = environment.get(b"PYTHONPATH", LIT)
    return others if path == LIT else {**others, b"PYTHONPATH": path}


def _like(stream: TextIO, number: int) -> TextIOWrapper:
    """A stream on a standard descriptor, set up as Python did `stream`."""
    raw = FileIO(number, "r" if number == 0 else "w", closefd=False)
    return TextIOWrapper(
        BufferedReader(raw) if number == 0 else BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=number == 2 or raw.isatty(),
    )

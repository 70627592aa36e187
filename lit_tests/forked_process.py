"""What a fork does to become a command: loading beforehand, and then all that is its own."""

import atexit
import faulthandler
import importlib
import importlib.util
import os
import pkgutil
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

import lit

MAINS = {"stablehlo-tools": "stablehlo_tools.cli.main", "filecheck": "filecheck.main"}
CHILDREN = "children"  # Python, for the tool's own child processes
# What most commands on artifacts load; the last three jax loads when it calls one.
MODULES_FOR_ARTIFACTS = (
    "jax.export",
    "jax.experimental.multihost_utils",
    "scipy.linalg.cython_blas",
    "scipy.linalg.cython_lapack",
)
MODULES_OF_CHILDREN = (
    *MODULES_FOR_ARTIFACTS,
    "stablehlo_tools.artifacts.outside_reader",
    "stablehlo_tools.optimization.worker",
    "stablehlo_tools.passes.native_passes",
    "stablehlo_tools.verify.execution_process",
)
# An import that stands in no block; to parse all modules takes ten times as long.
IMPORT = re.compile(r"^(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*))", re.MULTILINE)
LIT = os.fsencode(Path(lit.__file__).parent)
MODELS = Path(__file__).resolve().parents[1] / "python"
# What lit sets only after it has read its configuration; the last once it has run its own `diff`.
SET_BY_LIT = frozenset(
    (b"LIT_CURRENT_TESTCASE", b"TMP", b"TMPDIR", b"TEMP", b"TEMPDIR", b"PYTHONPATH")
)
# What a shell between the suite and a command sets, or drops.
SET_BY_SHELLS = frozenset((b"_", b"PWD", b"OLDPWD", b"SHLVL", b"PS1"))
ONE_THREAD = b"OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class Request:
    """One use of the command: its arguments, where it runs, and its three standard streams."""

    arguments: list[str]
    directory: bytes
    environment: dict[bytes, bytes]
    streams: tuple[int, ...]


def load(command: str, more: Iterable[str] = ()) -> None:
    """Import what the command needs, and more modules, without a thread, which would not live on in
    the forks."""
    os.environb[ONE_THREAD] = b"1"  # numpy's would be one
    _import(command)
    for module in more:
        importlib.import_module(module)
    del os.environb[ONE_THREAD]


def _import(command: str) -> None:
    if command == "python":
        sys.path.insert(0, str(MODELS))
        importlib.import_module("models.zoo")
        sys.path.remove(str(MODELS))
        return
    if command == CHILDREN:
        for module in MODULES_OF_CHILDREN:
            importlib.import_module(module)
        return
    importlib.import_module(MAINS[command])
    if command == "stablehlo-tools":
        for module in _without_jax():
            importlib.import_module(module)
        if "jax" in sys.modules:
            raise ImportError("one of these modules loads jax, which makes every fork dearer")


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
    for whole, module, listed in IMPORT.findall(Path(spec.origin).read_text()):
        if whole:
            names.add(whole.split(".")[0])
            continue
        names.add(module if module.startswith("stablehlo_tools") else module.split(".")[0])
        names.update(f"{module}.{each}" for each in re.findall(r"\w+", listed))
    return names


def run(command: str, request: Request, environment: Mapping[bytes, bytes]) -> NoReturn:
    """Become the command, which was loaded with this environment, and end as it does."""
    _take_streams(request)
    if command == CHILDREN:
        _become_child(request, environment)
    program = str(Path(sys.executable).with_name(command))
    if _set_by_suite(request.environment) != _set_by_suite(environment):
        os.execve(program, [program, *request.arguments], request.environment)
    _take_on(request, program)
    if command == "python":
        _end(lambda: _script(request.arguments))
    _end(importlib.import_module(MAINS[command]).main)


def fork_children(directory: Path) -> None:
    """From now on the tool's child processes are forks of the server in a directory; those of
    modules that are not the tool's start in the usual way."""
    from stablehlo_tools.processes import child

    plain = child.command

    def command(module: str, *words: str, traced: bool) -> list[str]:
        python, *rest = plain(module, *words, traced=traced)
        return [
            str(directory / CHILDREN) if module.startswith("stablehlo_tools.") else python,
            *rest,
        ]

    child.command = command


def _become_child(request: Request, environment: Mapping[bytes, bytes]) -> NoReturn:
    """Run a module as Python does with these arguments, `-P [-X faulthandler] -m MODULE WORD...`.

    XLA reads its flags when it makes its client, and so after this; of jax's variables those that
    children set are set here, others are read while it is loaded.
    """
    if _read_while_loading(request.environment) != _read_while_loading(environment):
        os.execve(sys.executable, [sys.executable, *request.arguments], request.environment)
    import jax

    from stablehlo_tools.processes import child

    start = request.arguments.index("-m") + 1
    module, *words = request.arguments[start:]
    os.environb.clear()
    os.environb.update(request.environment)
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64") == "1")
    if "faulthandler" in request.arguments[:start]:
        faulthandler.enable()
    # The parent of this process is the server, which ends it where its client ends.
    child.end_with_parent = lambda parent: None
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    sys.path.remove(str(Path(__file__).parent))
    os.setsid()
    _take_on(request, module)
    sys.argv[1:] = words
    _end(lambda: _module(module))


def _read_while_loading(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables of Python and jax but for those that a child sets."""
    known = {b"JAX_PLATFORMS", b"JAX_ENABLE_X64", b"PYTHONPATH"}
    return {
        name: value
        for name, value in environment.items()
        if name.startswith((b"JAX_", b"PYTHON")) and name not in known
    }


def _take_streams(request: Request) -> None:
    """Make the command's directory and descriptors those of this process."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.directory)


def _take_on(request: Request, program: str) -> None:
    """Make the rest of what the command is to find in its process so."""
    # Everything else is as it was, or as a module that is loaded has set it.
    changing = SET_BY_LIT | SET_BY_SHELLS
    os.environb.update({n: v for n, v in request.environment.items() if n in changing})
    sys.argv[:] = [program, *request.arguments]
    # The server's streams know what its own descriptors could do: seek, be a terminal.
    sys.stdin = sys.__stdin__ = _like(sys.stdin, 0)
    sys.stdout = sys.__stdout__ = _like(sys.stdout, 1)
    sys.stderr = sys.__stderr__ = _like(sys.stderr, 2)


def _end(main: Callable[[], object]) -> NoReturn:
    """Run a program, and end without the long way through all modules that Python would go."""
    status = None
    try:
        status = main()
    except SystemExit as end:
        status = end.code
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(status if isinstance(status, int) else 0)


def _module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(arguments: list[str]) -> None:
    """Run a script as Python does."""
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _set_by_suite(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables that neither lit nor a shell did set; a search path of a RUN line's own is not
    lit's."""
    names = environment.keys() - SET_BY_LIT - SET_BY_SHELLS
    others = {name: environment[name] for name in names}
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

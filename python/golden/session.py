"""Runs cases with one tree under one seed of hashes, and records what came out."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lit.LitConfig
import lit.Test
import lit.TestingConfig
import lit.TestRunner

from golden import corpus
from golden.corpus import OUT, Commands, LitFile, Unit
from golden.trees import PACKAGE, ROOT, Tree

HERE = Path(__file__).resolve().parent
# They compile or run programs, which takes seconds; the first seed has to do for them.
SLOW = ("verify", "compile", "run-mpmd")
LIMIT = 300  # seconds a command
LATE = "late"  # the status of a command that took longer, as `server.py` has it
# What stands for other commands of RUN lines: nothing is to be checked, to be nested, or to hang on
# how busy the machine is; and a link to a path like `out/...` would lead nowhere.
REPLACED = {
    "filecheck": "exec cat > /dev/null",
    "lit": "exit 0",
    "timeout": 'shift; exec "$@"',
    "ln": 'exec /bin/ln "$1" "$(realpath -m "$2")" "$3"',
}
ADDRESS = re.compile(rb"\bat 0x[0-9a-f]{6,}\b")
TEMPORARY = re.compile(rb"/tmp/[\w.-]+")
PROCESS = re.compile(rb"\bpid[ =:]\d+\b")
# What a command says of how long it took: compilers, schedulers, runs of rank programs, passes.
TOOK = re.compile(
    rb"(compiled in |scheduled in +|^\d+ ranks, .*, )\d+\.\d+(?= s$| s,)"
    rb'|("(?:compile_)?seconds": )[\d.e-]+'
    rb"|^ +\d+\.\d{4} s(?: +\d+\.\d%)?(?=  )",
    re.MULTILINE,
)
# Models are exported once for all trees that share a cache: locations name the tree that did it.
EXPORTED_FROM = re.compile(rb"/[\w./-]+(?=/python/models/)")

Record = dict[str, Any]
Records = dict[str, Record]


class Blobs:
    """Outputs by their hash, so that two of them can be shown side by side."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "blobs"

    def put(self, data: bytes) -> str:
        """Keep the bytes, and return their hash."""
        key = hashlib.sha256(data).hexdigest()
        path = self._path(key)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{key}.{os.getpid()}.{time.monotonic_ns()}")
            part.write_bytes(zlib.compress(data, 1))
            part.rename(path)
        return key

    def get(self, key: str) -> bytes:
        """The bytes of a hash."""
        return zlib.decompress(self._path(key).read_bytes())

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / key[2:]


@dataclass
class Session:
    """A tree under a seed: the directory where its commands run, and their environment."""

    tree: Tree
    seed: int
    slow: bool  # whether slow commands run too, and text is printed with locations
    work: Path
    programs: Path  # the directory of the commands; first in PATH
    blobs: Blobs
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def run(self, unit: Unit) -> Iterator[tuple[str, Record]]:
        """The records of a unit's cases, by their ids."""
        start = time.monotonic()
        directory = self.work / "out" / _file(unit.id)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        runs = self._run_lit(unit) if isinstance(unit, LitFile) else self._run_commands(unit)
        for identity, record in runs:
            yield identity, {"seconds": round(time.monotonic() - start, 3), **record}
            start = time.monotonic()
        shutil.rmtree(directory)

    def _run_commands(self, unit: Commands) -> Iterator[tuple[str, Record]]:
        out = f"out/{_file(unit.id)}/out"
        for command in unit.commands:
            words = [re.sub(rf"^{OUT}(?=$|\.)", out, word) for word in command.arguments]
            with self._recording(unit.id, command.digest) as (environment, record):
                subprocess.run(
                    ["stablehlo-tools", *words],
                    executable=self.programs / "stablehlo-tools",
                    cwd=self.work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    check=False,
                )
            yield command.id, record

    def _run_lit(self, unit: LitFile) -> Iterator[tuple[str, Record]]:
        settings = _lit_settings()
        config = lit.TestingConfig.TestingConfig.fromdefaults(settings)
        config.substitutions = [("%{inputs}", "lit_tests/Inputs"), ("%{models}", "python/models")]
        suite = lit.Test.TestSuite("lit", str(self.work / "lit_tests"), str(self.work), config)
        test = lit.Test.Test(suite, unit.path.parts, config)
        parsed = lit.TestRunner.parseIntegratedTestScript(test)
        if isinstance(parsed, lit.Test.Result):
            raise ValueError(f"{unit.id}: {parsed.output}")
        base = f"{self.work}/out/{_file(unit.id)}/{unit.path.name}"
        # Paths in messages and locations are to be the same wherever the trees lie.
        substitutions = [
            (pattern, value.replace(f"{self.work}/", ""))
            for pattern, value in lit.TestRunner.getDefaultSubstitutions(test, "", base)
        ]
        lines = lit.TestRunner.applySubstitutions(parsed, substitutions, {})
        if len(lines) != unit.lines:
            raise ValueError(f"{unit.id}: {unit.lines} RUN lines, and {len(lines)} for lit")
        for number, line in enumerate(lines, start=1):
            identity = f"{unit.id}:{number}"
            with self._recording(unit.id, unit.digest) as (environment, record):
                config.environment = environment
                try:
                    *_, status, _, _ = lit.TestRunner.executeScriptInternal(
                        test, settings, base, [line], str(self.work), debug=False
                    )
                except lit.TestRunner.ScriptFatal as error:
                    status = str(error)
            record["status"] = status
            yield identity, record

    @contextmanager
    def _recording(self, identity: str, digest: str) -> Generator[tuple[dict[str, str], Record]]:
        """The environment of commands to record, and the record, which is filled at the end."""
        directory = self.work / "out" / _file(identity)
        before = _states(directory)
        record: Record = {"digest": digest}
        with tempfile.TemporaryDirectory(dir=self.work) as kept:
            own = {"GOLDEN_RECORD": kept, "GOLDEN_LIMIT": str(LIMIT)}
            own |= {"GOLDEN_LOCATED": "1"} if self.slow else {"GOLDEN_SKIPPED": ",".join(SLOW)}
            yield {**self.environment, **own}, record
            commands = [self._command(path) for path in sorted(Path(kept).glob("*.json"))]
        # Commands of one pipe start in any order.
        record["commands"] = sorted(commands, key=lambda command: command["arguments"])
        after = _states(directory)
        record["files"] = {
            name: self._kept(directory / name)
            for name in sorted(after)
            if after[name] != before.get(name)
        }
        record |= {} if self.slow else {"quick": True}
        record["removed"] = sorted(before.keys() - after.keys())

    def _command(self, path: Path) -> Record:
        said = json.loads(path.read_text())
        said["arguments"] = [self._cleaned(word.encode()).decode() for word in said["arguments"]]
        for name, suffix in (("stdout", ".out"), ("stderr", ".err")):
            output = path.with_suffix(suffix)
            if output.exists():
                said[name] = self._keep(output.read_bytes())
        # The command ran once more, to print the locations, into one of these.
        for suffix in (".mlir", ".loc"):
            output = path.with_suffix(suffix)
            if output.exists() and output.stat().st_size:
                said["locations"] = self._keep(output.read_bytes())
        return said

    def _kept(self, path: Path) -> str:
        if path.is_symlink():
            return self._keep(f"-> {path.readlink()}".encode())
        return self._keep(path.read_bytes())

    def _keep(self, data: bytes) -> str:
        return self.blobs.put(data if b"\0" in data else self._cleaned(data))

    def _cleaned(self, data: bytes) -> bytes:
        """Text without what differs between two runs by nature."""
        for path, name in (
            (self.programs, b"<work>/bin"),
            (self.work, b"<work>"),
            (self.tree.directory, b"<tree>"),
            (ROOT, b"<root>"),
        ):
            data = data.replace(os.fsencode(path), name)
        data = TEMPORARY.sub(b"/tmp/<name>", data)
        data = PROCESS.sub(b"pid <number>", data)
        data = TOOK.sub(rb"\1\2<time>", data)
        data = EXPORTED_FROM.sub(b"<root>", data)
        return ADDRESS.sub(b"at <address>", data)


@contextmanager
def opened(tree: Tree, seed: int, cache: Path, *, slow: bool) -> Generator[Session]:
    """A session with its fork server, which ends with it."""
    (cache / "work").mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="", dir=cache / "work"))
    # Not in the cache, which may lie deep: the path of a socket has at most 107 bytes.
    programs = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        inputs = corpus.models_directory(cache)
        inputs.mkdir(parents=True, exist_ok=True)
        for name, target in (
            ("lit_tests", corpus.LIT),
            ("python", ROOT / "python"),
            ("inputs", inputs),
        ):
            (work / name).symlink_to(target)
        session = Session(tree, seed, slow, work, programs, Blobs(cache))
        session.environment = _environment(session, inputs)
        with _server(session):
            yield session
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(programs, ignore_errors=True)


def run_all(
    session: Session, units: list[Unit], jobs: int, report: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[str, Record]]:
    """The records of all units, as they are done; `report` is called with the number of units."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(lambda unit=unit: list(session.run(unit))) for unit in units]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                yield from future.result()
                report(done)
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _environment(session: Session, inputs: Path) -> dict[str, str]:
    """The variables of all commands; writes the commands that come first in PATH."""
    interpreter = session.programs / "interpreter"
    interpreter.symlink_to(sys.executable)
    head = f"#!{interpreter} -IS\n"
    fork_client = (ROOT / "lit_tests" / "fork_client.py").read_text()
    client = (HERE / "python_client.py").read_text()
    client = client.replace('PYTHON = ""', f"PYTHON = {sys.executable!r}")
    programs = {
        "stablehlo-tools": head + fork_client,
        "python": head + client.replace('KEPT = ""', f"KEPT = {str(inputs)!r}"),
        **{name: f"#!/bin/sh\n{script}\n" for name, script in REPLACED.items()},
    }
    for name, program in programs.items():
        (session.programs / name).write_text(program)
        (session.programs / name).chmod(0o755)
    search = [
        str(session.programs),
        str(Path(sys.executable).parent),
        os.environ.get("PATH", os.defpath),
    ]
    kept = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "PATH": os.pathsep.join(search),
        "PYTHONPATH": str(session.tree.directory),
        "PYTHONHASHSEED": str(session.seed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@contextmanager
def _server(session: Session) -> Generator[None]:
    path = session.programs / "stablehlo-tools.socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, HERE / "server.py", session.tree.module, PACKAGE, str(number)],
            env=session.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            cwd=session.work,
        )
    try:
        yield
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()


def _lit_settings() -> lit.LitConfig.LitConfig:
    return lit.LitConfig.LitConfig(
        progname="golden",
        path=[],
        diagnostic_level="error",
        useValgrind=False,
        valgrindLeakCheck=False,
        valgrindArgs=[],
        noExecute=False,
        debug=False,
        isWindows=False,
        order=None,
        params={},
    )


def _states(directory: Path) -> dict[str, tuple[int, ...]]:
    """What shows that a file was written anew, by its path."""
    states: dict[str, tuple[int, ...]] = {}
    for path in directory.rglob("*"):
        if path.is_symlink() or path.is_file():
            state = path.lstat()
            states[str(path.relative_to(directory))] = (
                *(state.st_mtime_ns, state.st_ctime_ns),
                *(state.st_size, state.st_ino, state.st_mode),
            )
    return states


def _file(identity: str) -> str:
    return re.sub(r"[^\w.,=/-]", "_", identity)

"""Which releases of jax and Python work: a core of the suite, and round trips of artifacts.

    make compat                                      # every release of the table
    make compat COMPAT_ARGS='--releases 0.12.0 --again'

For each release an environment is made in a temporary folder, with the wheel that this tree builds,
that jax and its jaxlib, and the other packages of this environment; then a core of pytest and of
lit runs there, from the sources of the tests, on the installed package. `bindings.MINIMUM_JAXLIB`
is lifted in these environments, so that what is seen of an older release is what really breaks.

A round trip keeps the job's environment and the tool's apart: a job with that jax alone exports a
step, the tool of this environment rewrites it, and the job runs the result and compares values.
For each other Python in PATH, the wheel is installed there, and has to write the same bytes.

Results are kept in build/compat/, a file a release, and written as
docs/project/compatibility.md.
Needs a package index, and takes minutes a release.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import environments

ROOT = Path(__file__).resolve().parents[2]
SEEN = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "project" / "compatibility.md"
JOB = Path(__file__).with_name("job.py")
PYTHONS = ("3.13", "3.14")
PASSES = "partition,create-reduce-scatter,thread-tokens"
RELEASES = (
    "0.9.2",
    "0.10.0",
    "0.10.1",
    "0.10.2",
    "0.11.0",
    "0.11.1",
    "0.11.2",
    "0.12.0",
    "0.12.0.1",
)
_OTHERS = {"stablehlo-tools", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu"}
CORE = (
    "python/tests/artifacts/test_artifact.py",
    "python/tests/dialect/test_traits.py",
    "python/tests/ir",
    "python/tests/passes/test_pipeline_text.py",
    "python/tests/passes/thread_tokens",
    "python/tests/api/test_api.py",
)
CORE_LIT = "transforms.(thread_tokens|strip_tokens|bucket_coll|create_reduce_s)|cli.round_trip"
_MINIMUM = re.compile(r"^MINIMUM_JAXLIB = .*$", re.MULTILINE)
_PYTEST = re.compile(r"(\d+) (passed|failed|error|errors)\b")
_LIT = re.compile(r"^\s*(Passed|Failed|Unresolved|Timed Out)\s*:\s+(\d+)", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_LIT_FAILED = re.compile(r"^(?:FAIL|UNRESOLVED|TIMEOUT): stablehlo-tools :: (\S+)", re.MULTILINE)
_SHOWN = 1  # failures that the page names
_LONGEST = 1200.0  # seconds for a core


@dataclass(frozen=True)
class Seen:
    """What was seen of a release. `broken` is why nothing ran; "" where the core did."""

    release: str
    jaxlib: str
    numpy: str
    broken: str
    passed: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()
    round_trip: str = ""

    @property
    def works(self) -> bool:
        """Whether all of the core passed."""
        return not self.broken and not self.failed and bool(self.passed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what has not been seen, writes the page; 0 whatever was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--releases", default=",".join(RELEASES), help="of jax, by commas")
    parser.add_argument("--again", action="store_true", help="run what was seen before, too")
    options = parser.parse_args(arguments)
    SEEN.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        wheel = environments.build_wheel(ROOT, Path(folder))
        for release in options.releases.split(","):
            kept = SEEN / f"{release}.json"
            if kept.exists() and not options.again:
                continue
            print(f"--- jax {release}", flush=True)
            seen = _seen(release, wheel, Path(folder) / release)
            seen = replace(seen, round_trip=_round_trip(release, Path(folder) / f"job-{release}"))
            kept.write_text(json.dumps(asdict(seen), indent=1) + "\n")
            print(_row(seen), flush=True)
        for version in PYTHONS:
            kept = SEEN / f"python-{version}.txt"
            if _runs(f"python{version}") and (options.again or not kept.exists()):
                kept.write_text(_other_python(version, wheel, Path(folder) / f"python-{version}"))
                print(f"--- Python {version}: {kept.read_text()}", flush=True)
    PAGE.write_text(page([_read(path) for path in sorted(SEEN.glob("*.json"))]))
    return 0


def _runs(interpreter: str) -> bool:
    """Whether an interpreter is in PATH and starts, which a shim without a version does not."""
    found = shutil.which(interpreter)
    return bool(found) and not subprocess.run([found, "-c", ""], check=False).returncode


def _round_trip(release: str, folder: Path) -> str:
    """Whether a step that this jax exports has the same values after the tool rewrote it."""
    names = environments.required("jax") | {"flatbuffers"}
    python = environments.make(folder, sorted(names - {"jax", "jaxlib"}))
    made = environments.install(python, f"jax=={release}", f"jaxlib=={release}")
    if made.returncode:
        return f"pip: {_last_line(made.stderr)}"
    step, out = folder / "step.jax_export", folder / "out.jax_export"
    before = _output([python, "-P", JOB, "export", step])
    written = _output(
        [sys.executable, "-P", "-m", "stablehlo_tools", "opt", step, "-p", PASSES, "-o", out]
    )
    after = _output([python, "-P", JOB, "run", out]) if out.exists() else written
    return "the same values" if after == before else f"other values: {_last_line(after)[:200]}"


def _other_python(version: str, wheel: Path, folder: Path) -> str:
    """Whether the wheel writes the same bytes with another Python."""
    subprocess.run([f"python{version}", "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    jax = [f"{name}=={metadata.version(name)}" for name in ("jax", "jaxlib")]
    command = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        wheel,
        *jax,
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        return f"pip: {_last_line(made.stderr)}"
    step = folder / "step.jax_export"
    _output([sys.executable, "-P", JOB, "export", step])
    outputs = [folder / f"{name}.jax_export" for name in ("this", "that")]
    for interpreter, out in zip((Path(sys.executable), python), outputs, strict=True):
        said = _output(
            [interpreter, "-P", "-m", "stablehlo_tools", "opt", step, "-p", PASSES, "-o", out]
        )
        if not out.exists():
            return _last_line(said)
    same = outputs[0].read_bytes() == outputs[1].read_bytes()
    return "writes the same bytes" if same else "writes other bytes"


def _output(command: Sequence[str | Path]) -> str:
    """The standard output of a command; standard error if it fails."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else done.stdout


def _seen(release: str, wheel: Path, folder: Path) -> Seen:
    names = {each.name for each in metadata.distributions()} - _OTHERS
    python = environments.make(folder, sorted(names))
    made = environments.install(python, f"jax=={release}", f"jaxlib=={release}", wheel)
    if made.returncode:
        return Seen(release, "", "", f"pip: {_last_line(made.stderr)}")
    numpy = metadata.version("numpy")
    bindings = environments.site_packages(folder) / "stablehlo_tools" / "bindings.py"
    bindings.write_text(_MINIMUM.sub("MINIMUM_JAXLIB = (0, 0)", bindings.read_text()))
    code = "import stablehlo_tools.bindings"
    loaded = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False)
    if loaded.returncode:
        return Seen(release, release, numpy, _last_line(loaded.stderr))
    passed, failures = 0, list[str]()
    for count, failing in (_pytest(python), _lit(python)):
        passed += count
        failures += failing
    return Seen(release, release, numpy, "", passed, len(failures), tuple(failures))


def _pytest(python: Path) -> tuple[int, list[str]]:
    """How many passed, and which did not."""
    said = _run(
        [
            python,
            "-P",
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "-rfE",
            "--continue-on-collection-errors",
            *CORE,
        ]
    )
    counts = {word: int(number) for number, word in _PYTEST.findall(said)}
    failing = [name.removeprefix("python/tests/") for name in _FAILED.findall(said)]
    passed = counts.get("passed", 0)
    return passed, failing or ([] if passed else [f"pytest: {_last_line(said)}"])


def _lit(python: Path) -> tuple[int, list[str]]:
    code = "from lit.main import main; main()"
    said = _run([python, "-P", "-c", code, "--filter", CORE_LIT, "lit_tests"])
    counts = {word: int(number) for word, number in _LIT.findall(said)}
    return counts.get("Passed", 0), sorted(set(_LIT_FAILED.findall(said)))


def _run(command: Sequence[str | Path]) -> str:
    dropped = ("PYTHONPATH", "PYTHONHOME")
    environment = {name: text for name, text in os.environ.items() if name not in dropped}
    try:
        finished = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "did not end"
    return finished.stdout + finished.stderr


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word")


def _read(path: Path) -> Seen:
    fields: dict[str, Any] = json.loads(path.read_text())
    fields["failures"] = tuple(fields["failures"])
    return Seen(**fields)


def page(seen: Sequence[Seen]) -> str:
    """docs/project/compatibility.md."""
    rows = sorted(seen, key=lambda each: [int(part) for part in each.release.split(".")])
    return _PAGE.format(
        rows="\n".join(map(_row, rows)),
        python=platform.python_version(),
        core=_core_text(),
        pythons="\n".join(
            f"| {path.stem.partition('-')[2]} | {path.read_text()} |"
            for path in sorted(SEEN.glob("python-*.txt"))
        ),
    )


def _row(seen: Seen) -> str:
    if seen.broken:
        verdict, core = "no", seen.broken.replace("|", "\\|")
    else:
        verdict = "yes" if seen.works else "no"
        core = f"{seen.passed} passed"
        if seen.failed:
            named = ", ".join(f"`{name}`" for name in seen.failures[:_SHOWN])
            more = f" and {seen.failed - _SHOWN} more" if seen.failed > _SHOWN else ""
            core += f", {seen.failed} failed: {named}{more}"
    trip = seen.round_trip.replace("|", "\\|")
    return f"| {seen.release} | {trip} | {verdict} | {core} |"


def _core_text() -> str:
    return ", ".join(f"`{path.removeprefix('python/tests/')}`" for path in CORE)


_PAGE = """\
# Which jax it works with

The tool and your job may use different releases of jax, because an artifact is a file.
`make compat` tests both sides, for each release of jax, with Python {python} on Linux x86-64:

| jax | your job: export, rewrite, run | the tool itself | its core of the tests |
|---|---|---|---|
{rows}

## Your job

A job with that jax exports a step for eight devices. The tool, with the newest jax of the table,
runs `partition,create-reduce-scatter,thread-tokens` on it. The job runs the result and compares
values.

- XLA:CPU before jaxlib 0.12 ignores tokens: there, `thread-tokens` keeps no order on CPUs.
- The tool reads what its own jax reads: exports of about the last six months. For older ones,
  `opt --module-only FILE -o FILE.bc` reads the module. `python/tests/fixtures/older_jax` has files
  of jax 0.7.2 to 0.12.0.
- The tool writes the version of StableHLO that `jax.export` writes. Each release of the table
  reads it.

## The tool

The tool needs jax 0.12. Older releases of jaxlib drop token chains, and their bindings lack names
that it uses. The upper bound `<0.13` is there because minor releases move such names. The core is
pytest of {core}, and the lit tests of tokens, buckets, reduce_scatter and round trips. There the
minimum is lifted, to see what breaks.

With another Python, the wheel is installed and rewrites the same step:

| Python | the wheel |
|---|---|
{pythons}
"""


if __name__ == "__main__":
    sys.exit(main())

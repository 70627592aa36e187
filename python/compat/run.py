"""Which releases of jax this toolkit works with: a core of the suite, in an environment for each.

    make compat                                      # every release of the table
    make compat COMPAT_ARGS='--releases 0.12.0 --again'

For each release an environment is made in a temporary folder, with the wheel that this tree builds,
that jax and its jaxlib, and the other packages of this environment; then a core of pytest and of
lit runs there, from the sources of the tests, on the installed package. `bindings.MINIMUM_JAXLIB`
is lifted in these environments, so that what is seen of an older release is what really breaks.

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
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import environments

ROOT = Path(__file__).resolve().parents[2]
SEEN = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "compatibility.md"
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
_SHOWN = 3  # failures that the page names
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
            kept.write_text(json.dumps(asdict(seen), indent=1) + "\n")
            print(_row(seen), flush=True)
    PAGE.write_text(page([_read(path) for path in sorted(SEEN.glob("*.json"))]))
    return 0


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
        rows="\n".join(map(_row, rows)), python=platform.python_version(), core=_core_text()
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
    return f"| {seen.release} | {seen.jaxlib} | {seen.numpy} | {verdict} | {core} |"


def _core_text() -> str:
    return ", ".join(f"`{path.removeprefix('python/tests/')}`" for path in CORE)


_PAGE = """\
# Which jax it works with

`make compat` makes an environment for each release of jax, installs the wheel of this tree there
and runs a core of the suite. What was seen with Python {python} on Linux x86-64:

| jax | jaxlib | numpy | works | the core |
|---|---|---|---|---|
{rows}

The core is pytest of {core}, and the lit tests of tokens, buckets, reduce_scatter and round trips.
The whole suite runs on the newest release of the table alone. In these environments the least
jaxlib that the package asks for is lifted: an older release says itself what breaks.

Before 0.12 the package refuses to load: XLA:CPU of these releases drops token chains, as
`bindings.py` says; the core does not look at that. Of 0.11.1 and 0.11.2 it sees only that MLIR
prints a call's attributes in another form; before 0.10.1 jaxlib has no `AxisRefAttr`. The upper
bound `<0.13` is there because `bindings.py` takes names from `jax._src` and jaxlib that a minor
release may move.

Files that other releases exported are read as far as jax itself reads them, for about six months;
of older ones `opt --module-only FILE -o FILE.bc` reads the module. One file of each of seven
releases, 0.7.2 to 0.12.0, is in `python/tests/fixtures/older_jax`.
"""


if __name__ == "__main__":
    sys.exit(main())

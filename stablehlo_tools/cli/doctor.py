"""List the installed packages, the compilers that work here, and the missing extras.

Each installed compiler compiles one small program in its own process. No accelerator is needed or
touched. Exit code 0: every installed compiler works; 1: one does not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

KNOWN = ("0.12.0", "0.12.0.1")  # of jax and jaxlib: those that `make compat` saw a core pass on
_PACKAGES = ("stablehlo-tools", "jax", "jaxlib", "numpy")
_EXTRAS = {  # a package of each extra, and the features that need it
    "aot": ("libtpu", "schedules of XLA:GPU and XLA:TPU"),
    "train": ("orbax-checkpoint", "checkpoints of `stablehlo_tools.mpmd`"),
    "viewer": ("ipykernel", "page of `stablehlo_tools.inspect` in notebooks"),
    "tests": ("filecheck", "`make-test`"),
}
_PROGRAM = """
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = stablehlo.add %x, %x : tensor<8xf32>
  return %y : tensor<8xf32>
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor` to its parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Examines and prints the installation; returns 1 if an installed compiler does not answer."""
    found = installation_facts()
    print(json.dumps(found, indent=2) if arguments.json else _text(found))
    return 0 if all(each["answers"] is not False for each in found["compilers"].values()) else 1


def installation_facts() -> dict[str, Any]:
    """Returns the facts about the installation as plain data."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "known_to_work": (
            f"jax and jaxlib {' and '.join(KNOWN)}, Python 3.12 and 3.13, Linux x86_64"
        ),
        "is_known": all(versions[name] in KNOWN for name in ("jax", "jaxlib")),
        "extras": {name: _version(package) for name, (package, _) in _EXTRAS.items()},
        "compilers": _compilers(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compilers() -> dict[str, dict[str, Any]]:
    """Returns, by target, its version, and True if it compiles; None if it is not installed.

    If jaxlib cannot be used at all, each target has that error.
    """
    try:
        importlib.import_module("stablehlo_tools.bindings")
    except ImportError as error:
        return {name: {"answers": False, "said": str(error)} for name in ("cpu", "gpu", "tpu")}
    from stablehlo_tools.artifacts.artifact import parse
    from stablehlo_tools.diagnostics import ToolError
    from stablehlo_tools.targets.compilation import compile_artifact
    from stablehlo_tools.targets.topologies import Target, compiler_version, missing_package

    found: dict[str, dict[str, Any]] = {}
    for target in Target:
        missing = missing_package(target)
        if missing is not None:
            said = f"not installed: {missing} is missing"
            found[target.value] = {"answers": None, "said": said}
            continue
        try:
            made = compile_artifact(parse(_PROGRAM.encode(), "doctor"), target)
            said = f"{compiler_version(target)} compiled in {made.seconds:.1f} s"
            found[target.value] = {"answers": True, "said": said}
        except ToolError as error:
            found[target.value] = {"answers": False, "said": error.diagnostic.message}
    return found


def _text(found: dict[str, Any]) -> str:
    from stablehlo_tools.diagnostics import installing

    packages = ", ".join(f"{n} {v or 'missing'}" for n, v in found["packages"].items())
    lines = [
        f"{packages}",
        f"Python {found['python']} on {found['platform']}",
        f"known to work: {found['known_to_work']}" + ("" if found["is_known"] else ": not this"),
        "",
    ]
    for target, each in found["compilers"].items():
        answer = {True: "answers", False: "FAILS", None: "absent"}[each["answers"]]
        lines.append(f"  {target:4} {answer:8} {each['said']}")
    for name, (package, use) in _EXTRAS.items():
        if found["extras"][name] is None:
            lines.append(f"  without {package}: no {use}; {installing(name)}")
    return "\n".join(lines)

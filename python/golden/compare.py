"""Tells records apart, and says of each difference whether it is a named one."""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from golden.session import Blobs, Record
from golden.trees import Tree


@dataclass(frozen=True)
class Named:
    """A difference that is meant: which cases may have it, why, and the test of the mend."""

    cases: str
    reason: str
    test: str


def read_named(path: Path) -> list[Named]:
    """The differences that a file lists.

    Raises ValueError for one without its cases, its reason or its test.
    """
    entries = tomllib.loads(path.read_text()).get("difference", [])
    for entry in entries:
        if set(entry) != {"cases", "reason", "test"} or not all(entry.values()):
            raise ValueError(f"{path}: a difference has cases, a reason and a test: {entry}")
    return [Named(**entry) for entry in entries]


def name_of(identity: str, named: list[Named]) -> Named | None:
    """The listed difference that a case may have."""
    return next((each for each in named if fnmatchcase(identity, _literal(each.cases))), None)


def _literal(pattern: str) -> str:
    """Only `*` is a wild card: ids have brackets of their own."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def differing(
    before: Mapping[str, Record], after: Mapping[str, Record]
) -> Iterator[tuple[str, list[str]]]:
    """Each case whose records differ, and in which parts."""
    for identity in sorted(before.keys() | after.keys()):
        parts = different_parts(before.get(identity), after.get(identity))
        if parts:
            yield identity, parts


def different_parts(before: Record | None, after: Record | None) -> list[str]:
    """Where two records differ. What one of them has left out differs from nothing."""
    if before is None or after is None:
        return ["only one tree has this case"]
    ours, theirs = before["commands"], after["commands"]
    if any(command.get("skipped") for command in (*ours, *theirs)):
        return []
    if len(ours) != len(theirs):
        return [f"{len(ours)} commands became {len(theirs)}"]
    parts: list[str] = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        place = f" of command {number}" if len(ours) > 1 else ""
        parts += [
            f"{name}{place}"
            for name in ("arguments", "status", "stdout", "stderr", "joined")
            if one.get(name) != other.get(name)
        ]
        # Only the first seed has them, and commands that took no longer than `server.QUICK`.
        if "locations" in one and "locations" in other and one["locations"] != other["locations"]:
            parts.append(f"locations{place}")
    names = before["files"].keys() | after["files"].keys()
    parts += [
        f"file {name}"
        for name in sorted(names)
        if before["files"].get(name) != after["files"].get(name)
    ]
    if before.get("status") != after.get("status"):
        parts.append(f"the line's exit status: {before.get('status')} became {after.get('status')}")
    if before["removed"] != after["removed"]:
        parts.append("files removed")
    return parts


def shown(before: Record, after: Record, blobs: Blobs, tree: Tree) -> Iterator[str]:
    """The unified diff of what two records have of one case; bytecode as text with locations."""
    for number, (one, other) in enumerate(
        zip(before["commands"], after["commands"], strict=False), start=1
    ):
        yield f"command {number}: {' '.join(other['arguments'])}"
        if one.get("status") != other.get("status"):
            yield f"exit status {one.get('status')} became {other.get('status')}"
        for name in ("stdout", "stderr", "locations"):
            yield from _diff(name, one.get(name), other.get(name), blobs, tree)
    for name in sorted(before["files"].keys() | after["files"].keys()):
        one, other = before["files"].get(name), after["files"].get(name)
        yield from _diff(f"file {name}", one, other, blobs, tree)


def _diff(name: str, one: str | None, other: str | None, blobs: Blobs, tree: Tree) -> Iterator[str]:
    if one == other:
        return
    ours, theirs = (
        as_text(blobs.get(key), tree).splitlines() if key else [] for key in (one, other)
    )
    lines = list(difflib.unified_diff(ours, theirs, f"{name} (base)", f"{name} (now)", lineterm=""))
    yield from lines or [f"{name}: other bytes, the same text"]


def as_text(data: bytes, tree: Tree) -> str:
    """What was written, as text: a binary artifact as MLIR with locations, if it is one."""
    if b"\0" not in data:
        return data.decode(errors="replace")
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        program = f"import sys; from {tree.module} import main; sys.exit(main())"
        read = subprocess.run(
            [sys.executable, "-c", program, "opt", file.name, "--print-locations"],
            env={"PYTHONPATH": str(tree.directory), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    return read.stdout if read.returncode == 0 else f"{len(data)} bytes\n"


def totals(records: Mapping[str, Record]) -> dict[str, Any]:
    """How many cases and commands there are, and the seconds they took one after the other."""
    commands = [command for record in records.values() for command in record["commands"]]
    return {
        "cases": len(records),
        "commands": len(commands),
        "seconds": round(sum(record["seconds"] for record in records.values()), 1),
    }

"""The reference of the hardware profiles: every figure with its source, from the TOML files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import stablehlo_tools.cost

PROFILES = Path(stablehlo_tools.cost.__file__).parent / "profiles"
HEAD = """# Hardware profiles

The figures of `stablehlo_tools/cost/profiles/`. [The model of time](../concepts/cost.md) uses them.
Units: bandwidths in GB/s, latencies and launches in microseconds, products in TFLOP/s, memory in
GB. `--hardware FILE.toml` reads your own profile; `import-trace` makes one from measured times.
"""
_ADDRESS = re.compile(r"https?://[^\s,;:()]+(?:[:][^\s,;()]+)*")


def page() -> str:
    """The whole page, ending in a newline."""
    return "\n".join([HEAD, *map(_section, sorted(PROFILES.glob("*.toml")))])


def _section(path: Path) -> str:
    profile = tomllib.loads(path.read_text(encoding="utf-8"))
    head = [f"## `{profile['name']}`", "", f"{profile['title']}.", ""]
    return "\n".join([*head, *_tables(profile), ""])


def _tables(profile: Mapping[str, Any]) -> Iterator[str]:
    for name, part in profile.items():
        if isinstance(part, Mapping):
            yield from _table(name, list(_rows(part)))
        elif isinstance(part, list):
            for each in part:
                yield from _table(f"{name} {each.get('name', '')}".strip(), list(_rows(each)))


def _table(title: str, rows: list[str]) -> Iterator[str]:
    if rows:
        yield from [f"### {title}", "", "| figure | value | source |", "|---|---:|---|", *rows, ""]


def _rows(part: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, entry in part.items():
        if isinstance(entry, Mapping) and "value" in entry:
            yield f"| `{prefix}{name}` | {entry['value']} | {_linked(entry.get('source', ''))} |"
        elif isinstance(entry, Mapping):
            yield from _rows(entry, f"{prefix}{name}.")
        elif isinstance(entry, list):
            for number, each in enumerate(entry):
                if isinstance(each, Mapping):
                    yield from _rows(each, f"{prefix}{name}[{number}].")


def _linked(source: str) -> str:
    """A source whose addresses are links, named by their host."""
    text = source.replace("|", "\\|")
    return _ADDRESS.sub(lambda found: f"[{found[0].split('/')[2]}]({found[0]})", text)

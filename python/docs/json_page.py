"""The page of what commands print with --json, from the schemas in docs/reference/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "docs" / "reference" / "schemas"
HEAD = """# JSON

<!-- Written by python/docs/generate.py from the schemas; do not edit. -->

This page describes each field that commands print with `--json` (`schedule`: with
`--format json`). `[]` means each element of a list. Units are in brackets.
The files of `docs/reference/schemas/` contain the same as JSON Schema. A test checks the
commands against them.
Not described: the output of `run-mpmd` for an original, and lists that are seldom filled.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(path) for path in sorted(SCHEMAS.glob("*.json")))


def _section(path: Path) -> str:
    schema = json.loads(path.read_text(encoding="utf-8"))
    rows = "".join(f"| `{name}` | {kind} | {meaning} |\n" for name, kind, meaning in _rows(schema))
    head = f"\n## {path.stem}\n\n{schema['description']}\n\n"
    return f"{head}| Field | Type | Meaning |\n|---|---|---|\n{rows}"


def _rows(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Each field of an object and of what is in it: its name, its type, what it means."""
    for name, field in schema.get("properties", {}).items():
        kinds = field.get("type", "any")
        kind = kinds if isinstance(kinds, str) else " or ".join(kinds)
        yield prefix + name, kind, field["description"]
        yield from _rows(field, f"{prefix}{name}.")
        yield from _rows(field.get("items", {}), f"{prefix}{name}[].")

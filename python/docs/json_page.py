"""What a command prints with --json, from the schemas in docs/reference/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "docs" / "reference" / "schemas"


def sections(command: str) -> Iterator[str]:
    """The lines that describe the fields of a command, for each of its schemas."""
    mine = [json.loads(path.read_text(encoding="utf-8")) for path in _schemas_of(command)]
    if mine:
        yield from ["## JSON", ""]
    for schema in mine:
        yield from [schema["description"], ""]
        yield from (f"- `{name}`, {kind}: {meaning}" for name, kind, meaning in _fields(schema))
        yield ""


def _schemas_of(command: str) -> list[Path]:
    return [*SCHEMAS.glob(f"{command}.json"), *sorted(SCHEMAS.glob(f"{command}-*.json"))]


def _fields(schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each field of an object and of what is in it: its name, its type, what it means.

    A field that has the parts of an earlier one of its name refers to that.
    """
    return _fields_in(schema, "", {})


def _fields_in(
    schema: dict[str, Any], prefix: str, seen: dict[tuple[str, str], str]
) -> Iterator[tuple[str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        kinds = field.get("type", "any")
        kind = kinds if isinstance(kinds, str) else " or ".join(kinds)
        parts = json.dumps([field.get("properties"), field.get("items")], sort_keys=True)
        first = seen.setdefault((name, parts), prefix + name)
        if '"properties"' in parts and first != prefix + name:
            yield prefix + name, kind, f"as `{first}`"
            continue
        yield prefix + name, kind, field["description"]
        yield from _fields_in(field, f"{prefix}{name}.", seen)
        yield from _fields_in(field.get("items", {}), f"{prefix}{name}[].", seen)

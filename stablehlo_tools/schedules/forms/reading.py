"""Reads a table from a file, whichever form it is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.atomic import STDIN, read_input
from stablehlo_tools.schedules.forms import csv_form, json_form, text
from stablehlo_tools.schedules.table import Table

SUFFIXES = (".csv", ".json", ".txt")


def read_table(path: str) -> Table:
    """The table in a file; `-` is standard input. A CSV file gives its own name to the table.

    The suffix says the form where it is .csv or .json, else the content does. Raises ToolError,
    with the name of the file.
    """
    data, shown = read_input(path)
    with naming(shown):
        content = _content(data)
        if not content.strip():
            raise ToolError("the file is empty")
        name = "stdin" if path == STDIN else Path(path).stem
        table = _decoded(content, Path(path).suffix.lower(), name)
        return replace(table, name=_printable(table.name))


def _decoded(content: str, suffix: str, name: str) -> Table:
    if suffix == ".csv":
        return csv_form.decode(content, name)
    if suffix == ".json" or content.lstrip().startswith(("{", "[")):
        return json_form.decode(content)
    said = (line.strip() for line in content.splitlines())
    first = next((line for line in said if line and not line.startswith("#")), "")
    if first.split(" ")[0] == text.FIRST_WORD:
        return text.decode(content)
    return csv_form.decode(content, name)


def _printable(name: str) -> str:
    """Names are shown on terminals, which obey what they cannot print."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _content(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ToolError(f"no schedule and no text: byte {error.start} is not UTF-8") from None

"""The tables before the computations of HLO text: where in the user's program a frame is."""

from __future__ import annotations

import re
from dataclasses import dataclass

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_FIELD = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True)
class Tables:
    """The rows of each table by number."""

    rows: dict[str, dict[int, str]]

    def place(self, frame: int) -> str:
        """`file.py:line` of a stack_frame_id, or nothing where the tables lack it."""
        location = self._field("StackFrames", frame, "file_location_id")
        if location is None:
            return ""
        file = self._field("FileLocations", location, "file_name_id")
        line = self._field("FileLocations", location, "line")
        name = self.rows["FileNames"].get(file or 0, "").strip('"')
        return short_place(name, str(line)) if name else ""

    def _field(self, table: str, row: int, name: str) -> int | None:
        found = dict(_FIELD.findall(self.rows[table].get(row, ""))).get(name)
        return None if found is None else int(found)


def short_place(file: str, line: str) -> str:
    """`file.py:line`, the folders left out."""
    return f"{file.rpartition('/')[2]}:{line}" if line else file.rpartition("/")[2]

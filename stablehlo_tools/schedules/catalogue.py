"""The schedules by the names that the command line knows them by, `auto` among them."""

from __future__ import annotations

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.generators.named import AUTO, NAMED, Entry
from stablehlo_tools.schedules.setting import Setting
from stablehlo_tools.schedules.table import Table


def entries() -> tuple[Entry, ...]:
    """Every named schedule, in the order in which `compare` breaks ties."""
    return _ENTRIES


def build(name: str, setting: Setting) -> Table:
    """The named schedule for a setting. Raises ToolError for an unknown name or setting."""
    entry = {entry.name: entry for entry in _ENTRIES}.get(name)
    if entry is None:
        known = ", ".join(entry.name for entry in _ENTRIES)
        raise ToolError(f"no schedule is called {name!r}; there are: {known}")
    return entry.table(setting)


def _auto(setting: Setting) -> Table:
    from stablehlo_tools.schedules.search.auto import find_best

    return find_best(setting).table


_ENTRIES = (*NAMED, Entry(AUTO, "the best that a search finds", _auto, None))

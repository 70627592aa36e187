"""The files of hardware profiles: one laid over the one it extends, each figure with its source.

memory = { value = 80, source = "https://…" }      ==>      80.0, and the source kept beside it

A figure replaces that of the same name, a table of figures is merged, and so is the network of a
name that the other file has:

    extends = "h100"                                    h100's tables, with another bandwidth of
    [[network]]                              ==>        its network InfiniBand
    name = "InfiniBand"
    bandwidth = { value = 25, source = "…" }
"""

from __future__ import annotations

import difflib
import enum
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.json_text import read_bounded

_MOST = 1e300  # a whole number beyond is no float

type Table = dict[str, object]


class Allowed(enum.Enum):
    """Which numbers a figure may be."""

    POSITIVE = "a number above 0"
    SHARE = "a share, above 0 and at most 1"
    COUNT = "a whole number above 0"
    DURATION = "a number of 0 or more"
    SPEED_UP = "a number of 1 or more"
    DIMENSIONS = "1, 2 or 3"

    def holds(self, value: object) -> bool:
        """Whether `value` is such a number; true and false are none, nor are nan and inf."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not abs(value) < _MOST:  # nor is NaN
            return False
        match self:
            case Allowed.POSITIVE:
                return value > 0
            case Allowed.SHARE:
                return 0 < value <= 1
            case Allowed.COUNT:
                return value > 0 and value == int(value)
            case Allowed.DURATION:
                return value >= 0
            case Allowed.SPEED_UP:
                return value >= 1
            case Allowed.DIMENSIONS:
                return value in (1, 2, 3)


def subtable(table: Table, key: str, where: str) -> Table:
    """The table `key`; where it is missing, an empty one, whose figures are then missed."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ToolError(f"{where} is a table, not {value!r}")
    return cast("Table", value)


def text(table: Table, key: str, where: str) -> str:
    """A string that must be there. Raises ToolError for anything else."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ToolError(
            f"{where}{key} is {_shown(value)}, and must be a string that says something"
        )
    return value


def refuse_unknown(table: Table, known: Iterable[str], where: str) -> None:
    """Raises ToolError for the first key that is not among `known`."""
    names = list(known)
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(names)}"
            raise ToolError(f"{where}{key} is not known; {hint}")


def read_figures(
    table: Table,
    where: str,
    allowed: Mapping[str, Allowed],
    required: Iterable[str],
    beside: Iterable[str] = (),
) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers of the figures among `allowed` that `table` has, and their sources.

    `where` begins each name in messages and in the sources; `beside` are keys of the table that are
    no figures. Raises ToolError for a key that is neither, a required figure that is missing, a
    value out of range, and a figure without a source.
    """
    refuse_unknown(table, (*allowed, *beside), where)
    for name in required:
        if name not in table:
            raise ToolError(f"{where}{name} is missing")
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name, rule in allowed.items():
        if name in table:
            values[name], sources[where + name] = _figure(table[name], where + name, rule)
    return values, sources


def _figure(entry: object, name: str, rule: Allowed) -> tuple[float, str]:
    if not isinstance(entry, dict):
        raise ToolError(
            f"{name} is {entry!r} without a source; "
            f'write {name.rpartition(".")[2]} = {{ value = {entry}, source = "…" }}'
        )
    table = cast("Table", entry)
    refuse_unknown(table, ("value", "source"), f"{name}.")
    value = table.get("value")
    if not rule.holds(value):
        raise ToolError(f"{name} is {_shown(value)}, and must be {rule.value}")
    source = table.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ToolError(f"{name} has no source; say where the figure is published or derived from")
    return float(cast("float", value)), source


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


_PROFILES = Path(__file__).parent / "profiles"


def known_hardware() -> tuple[str, ...]:
    """The names of the profiles in the package."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def read_profile(path: Path) -> Table:
    """The tables of a profile, with what it takes from those it extends. Raises ToolError."""
    return _with_base(path, ())


def networks_of(table: Table) -> list[Table]:
    """The `[[network]]` tables, innermost first. Raises ToolError where they are something else."""
    networks = table.get("network", [])
    if not isinstance(networks, list) or not all(isinstance(entry, dict) for entry in networks):
        raise ToolError("networks are tables of their own, each under [[network]]")
    return cast("list[Table]", networks)


def locate(name_or_path: str, beside: Path = Path()) -> Path:
    """The file of a known name, or the path itself where it ends in .toml or has a slash."""
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return beside / name_or_path
    known, name = known_hardware(), name_or_path.lower()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ToolError(
            f"no hardware profile {name_or_path!r}; {hint}known: {', '.join(known)}, "
            "or the path of a .toml file"
        )
    return _PROFILES / f"{name}.toml"


def _with_base(path: Path, below: tuple[Path, ...]) -> Table:
    """The tables of a file over those of the file it extends."""
    if path in below:
        raise ToolError(f"extends itself through {below[-1]}")
    table = _read_toml(path)
    if "extends" not in table:
        return table
    base = _with_base(locate(text(table, "extends", ""), path.parent), (*below, path))
    return _merged(base, {key: value for key, value in table.items() if key != "extends"})


def _merged(base: Table, over: Table) -> Table:
    """Figures of `over` replace the base's whole; tables of figures are merged."""
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        if key == "network":
            merged[key] = _merged_networks(networks_of(base), networks_of(over))
        elif isinstance(value, dict) and isinstance(known, dict) and "value" not in value:
            merged[key] = _merged(cast("Table", known), cast("Table", value))
        else:
            merged[key] = value
    return merged


def _merged_networks(base: list[Table], over: list[Table]) -> list[Table]:
    changed = {entry.get("name"): entry for entry in over}
    known = [entry.get("name") for entry in base]
    kept = [_merged(entry, changed.get(entry.get("name"), {})) for entry in base]
    return kept + [entry for entry in over if entry.get("name") not in known]


def _read_toml(path: Path) -> Table:
    """The tables of a TOML file. Raises ToolError for one that cannot be read or is not TOML."""
    try:
        return tomllib.loads(read_bounded(path).decode())
    except UnicodeDecodeError:
        raise ToolError("not TOML: this profile is not UTF-8 text") from None
    except RecursionError:
        raise ToolError("this profile nests lists or tables too deep to be read") from None
    except ValueError as error:  # TOMLDecodeError is one, as is that of thousands of digits
        raise ToolError(f"not TOML: {error}") from None

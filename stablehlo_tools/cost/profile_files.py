"""Finds and reads the files of hardware profiles, and lays one over the one it extends.

A figure replaces that of the same name, a table of figures is merged, and so is the network of a
name that the other file has:

    extends = "h100"                                    h100's tables, with another bandwidth of
    [[network]]                              ==>        its network InfiniBand
    name = "InfiniBand"
    bandwidth = { value = 25, source = "…" }
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import cast

from stablehlo_tools.cost.figures import Table, text
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.json_text import read_bounded

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

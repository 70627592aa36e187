"""The reference of the hardware profiles: every figure with its source, from the TOML files.

A figure has the number of its source; the list at the end of the page has each source once.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import stablehlo_tools.cost

PROFILES = Path(stablehlo_tools.cost.__file__).parent / "profiles"
HEAD = """# Hardware profiles

The figures of each profile that `--hardware` knows. [The model of time](../concepts/cost.md) uses
them. Predicted steps are compared with
[published measurements](../project/benchmarks.md#published-measurements): half of the errors are
below 9 %. The small numbers lead to the [sources](#sources). At the end:
[a profile of your own](#a-profile-of-your-own).

Peaks are dense. Bandwidths are in one direction, although many data sheets add up both.

| figure | meaning |
|---|---|
| `memory`, `memory_bandwidth` | GiB; GB/s |
| `memory_efficiency` | share of this bandwidth that a copy reaches |
| `launch` | least time of a kernel in us |
| `vector` | TFLOP/s outside of the matrix units |
| `bf16`, `f32`, … | TFLOP/s of matrix products by type, at default precision |
| `f32_high`, `f32_highest` | the same at that precision |
| matmul_model `efficiency` | share of the peak that huge products reach |
| `tile_m`, `tile_n`, `units` | tile of a product; units that compute tiles at once |
| `half_depth` | contracted size that reaches half of that share |
| `sustained` | share of the peak that the power limit allows in long runs (default: any) |
| `to_host`, `to_device` | GB/s of large copies between the device and its host |
| `devices` | most devices of one domain (default: unlimited) |
| `bandwidth` | GB/s that a device sends; in a torus, over one link |
| `pair_bandwidth` | GB/s that a device sends to one other |
| network `efficiency` | share that large messages reach |
| `latency`, `start` | us of one hop; us of a collective without bytes and hops |
| `in_network_reduction` | speed-up of an all_reduce that the switch adds up |
| `dimensions`, `wraps_from` | of a torus: axes; least length at which an axis is a ring |
| `any_permute_to` | most chips of a slice in which every permute is asynchronous |
| `traffic` | bytes moved in memory for each byte sent |
| `channels` | compute units that a large collective holds |
| `pair_channels` | the same for permutes and all_to_alls |
| `in_network_channels` | the same for reductions in the switch |
| `channel_bytes` | least bytes of each of these units |
"""
_ADDRESS = re.compile(r"https?://[^\s,;:()]+(?:[:][^\s,;()]+)*")


class Figure(NamedTuple):
    """A figure of a profile: `part` is its table in the file, or its network."""

    part: str
    name: str
    value: float
    source: str


def page() -> str:
    """The whole page, ending in a newline."""
    numbers: dict[str, int] = {}  # of the sources, from 1
    sections = [_section(path, numbers) for path in sorted(PROFILES.glob("*.toml"))]
    sources = [
        f'{number}. <a id="s{number}"></a>{_linked(source)}' for source, number in numbers.items()
    ]
    return "\n".join([HEAD, *sections, "## Sources", "", *sources, ""])


def figures_of(profile: Mapping[str, Any]) -> Iterator[Figure]:
    """The figures of a parsed profile, in the order of the file."""
    for name, part in profile.items():
        if isinstance(part, Mapping):
            yield from _figures(name, part)
        elif isinstance(part, list):
            for each in part:
                yield from _figures(each["name"], each)


def _figures(part: str, table: Mapping[str, Any]) -> Iterator[Figure]:
    for name, entry in table.items():
        if isinstance(entry, Mapping) and "value" in entry:
            yield Figure(part, name, entry["value"], entry["source"])
        elif isinstance(entry, Mapping):
            yield from _figures(name, entry)


def _section(path: Path, numbers: dict[str, int]) -> str:
    """A profile's table, with a row for each part; adds its sources to `numbers`."""
    profile = tomllib.loads(path.read_text(encoding="utf-8"))
    base = profile.get("extends")
    rest = f" All other figures are those of `{base}`." if base else ""
    parts: dict[str, list[str]] = {}
    for figure in figures_of(profile):
        number = numbers.setdefault(figure.source, len(numbers) + 1)
        text = f"`{figure.name}` {figure.value}<sup>[{number}](#s{number})</sup>"
        parts.setdefault(figure.part, []).append(text)
    rows = [f"| {part} | {', '.join(texts)} |" for part, texts in parts.items()]
    head = [f"## `{profile['name']}`", "", f"{profile['title']}.{rest}", ""]
    return "\n".join([*head, "| part | figures |", "|---|---|", *rows, ""])


def _linked(source: str) -> str:
    """A source whose addresses are links, named by their host."""
    return _ADDRESS.sub(lambda found: f"[{found[0].split('/')[2]}]({found[0]})", source)

"""The bytes and groups of a collective, and its time: the types that `network_times` works on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """One collective as one device sees it.

    `bytes` is NCCL's size: that of the result of an all_gather, of the operand of any other kind.
    `groups` are the participants' device numbers; for a collective_permute, (source, target) pairs.
    """

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, …
    bytes: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The time of one collective on every device that takes part.

    `latency_ns` is the part of `ns` that does not depend on the bytes; bucketed collectives pay it
    once. `links` are the resources that concurrent transfers share: those of the slowest group
    first, the outermost of each group first. Examples are ("InfiniBand", "NVLink"), or ("ICI x",
    "ICI y") for the axes of a torus. "ICI x+" is one direction of an axis, see `ways`.
    """

    ns: float
    latency_ns: float
    algorithm: str
    links: tuple[str, ...]


NOTHING = TransferTime(0.0, 0.0, "none", ())


# Suffixes of a link's name. "+" and "-": all links of an axis, ahead or back. ">" and "<": some
# links ahead and the others back, as in a ring that turns; "<" is the reverse of ">".
_WAYS = {"+": ("+>", "+<"), "-": ("->", "-<"), ">": ("+>", "->"), "<": ("+<", "-<")}


def ways(link: str) -> tuple[str, ...]:
    """Returns the directions of a link that a transfer occupies, from the link's name.

    "ICI x" is both directions, "ICI x+" or "ICI x-" one of them. "ICI x>" and "ICI x<" use opposite
    directions of each link.
    """
    taken = _WAYS.get(link[-1])
    if taken is not None:
        return tuple(link[:-1] + way for way in taken)
    return tuple(link + way for both in ("+", "-") for way in _WAYS[both])


def slowest(times: Iterable[TransferTime]) -> TransferTime:
    """Returns the longest of the times of parallel groups, with the links of all.

    Returns `NOTHING` if there are none. Ties are broken by name, so that the order of the groups
    does not matter.
    """
    ranked = sorted(times, key=lambda time: (-time.ns, time.links, time.algorithm))
    if not ranked:
        return NOTHING
    links = tuple(dict.fromkeys(link for time in ranked for link in time.links))
    return replace(ranked[0], links=links)


def quickest(times: Iterable[TransferTime]) -> TransferTime:
    """Returns the shortest time, as a library chooses its algorithm; of equals the first."""
    return min(times, key=lambda time: time.ns)

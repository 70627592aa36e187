"""What a collective has to send, and how long that takes: the terms of `collectives`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective as one device sees it.

    `bytes` is NCCL's size: of the gathered result of an all_gather, of the operand of a
    reduce_scatter, of the operand of any other kind. `groups` are the participants' device numbers;
    of a collective_permute, the (source, target) pairs.
    """

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, …
    bytes: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The time of one collective on every device that takes part.

    `latency_ns` of `ns` does not depend on the bytes, and is paid once when collectives are
    bucketed. `links` are the resources that it shares with whatever runs at the same time, those
    of the slowest group first and of each group the outermost: ("InfiniBand", "NVLink"), or
    ("ICI x", "ICI y") for the axes of a torus. "ICI x+" is one way of it, see `ways`.
    """

    ns: float
    latency_ns: float
    algorithm: str
    links: tuple[str, ...]


NOTHING = TransferTime(0.0, 0.0, "none", ())


# Of what goes one way along an axis: ahead or back; or, where some links of it are taken ahead and
# the others back, as by a ring that turns, the one of the two ways round.
_WAYS = {"+": ("+>", "+<"), "-": ("->", "-<"), ">": ("+>", "->"), "<": ("+<", "-<")}


def ways(link: str) -> tuple[str, ...]:
    """What a transfer takes of a link by its name: "ICI x" both ways, "ICI x+" and "ICI x-" one of
    them, "ICI x>" and "ICI x<" of each link the one that the other leaves."""
    taken = _WAYS.get(link[-1])
    if taken is not None:
        return tuple(link[:-1] + way for way in taken)
    return tuple(link + way for both in ("+", "-") for way in _WAYS[both])


def slowest(times: Iterable[TransferTime]) -> TransferTime:
    """The time that decides where groups run side by side, on the links of all; of none `NOTHING`.

    Of equals the first by name, so that the order of the groups does not matter.
    """
    ranked = sorted(times, key=lambda time: (-time.ns, time.links, time.algorithm))
    if not ranked:
        return NOTHING
    links = tuple(dict.fromkeys(link for time in ranked for link in time.links))
    return replace(ranked[0], links=links)


def quickest(times: Iterable[TransferTime]) -> TransferTime:
    """The algorithm that a library would take; the first of equals."""
    return min(times, key=lambda time: time.ns)

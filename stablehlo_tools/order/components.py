"""Connected components of devices that meet each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def connected(meetings: Iterable[Sequence[int]], devices: Iterable[int]) -> list[tuple[int, ...]]:
    """The devices of all meetings, and those given, in classes that no meeting crosses.

    Each class is sorted, and the classes by their first device.
    """
    parent = {device: device for device in devices}

    def root(device: int) -> int:
        parent.setdefault(device, device)
        while parent[device] != device:
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    for members in dict.fromkeys(tuple(meeting) for meeting in meetings):
        first = root(members[0])
        for member in members[1:]:
            parent[root(member)] = first
    classes: dict[int, list[int]] = {}
    for device in sorted(parent):
        classes.setdefault(root(device), []).append(device)
    return [tuple(members) for members in classes.values()]


def parts_without(meetings: Sequence[tuple[int, ...]], device: int) -> dict[int, int]:
    """The component of each other device when one is taken away."""
    rest = [tuple(d for d in members if d != device) for members in dict.fromkeys(meetings)]
    listed = connected([members for members in rest if members], ())
    return {d: number for number, members in enumerate(listed) for d in members}

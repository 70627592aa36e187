"""Channels for the collectives that a rewrite adds or copies.

Above 0, a channel makes the ids of groups and pairs count partitions or processes; 0, like no
handle at all, lets them count replicas (`replica_groups`). So 0 stays 0.
"""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.bindings import ir

_HANDLE = "channel_handle"
_PAIRED = frozenset({"stablehlo.send", "stablehlo.recv"})  # a channel is what makes them meet


def next_channel(module: ir.Module) -> int:
    """A number above all that the module uses."""
    return max((collective.channel_id for collective in find_collectives(module)), default=0) + 1


def channel_number(op: ir.Operation) -> int:
    """The number of an op's channel, 0 where it has none."""
    handle = op.attributes.get(_HANDLE)
    return 0 if handle is None else bindings.ChannelHandle(handle).handle


class Channels:
    """Hands out channels that no op of the module has."""

    def __init__(self, module: ir.Module) -> None:
        self._next = next_channel(module)

    def renew(self, copy: ir.Operation) -> None:
        """Gives a copy of an op a channel of its own where it has one; ids count what they did."""
        if channel_number(copy) <= 0 or copy.name in _PAIRED:
            return
        channel_type = bindings.ChannelHandle(copy.attributes[_HANDLE]).channel_type
        copy.attributes[_HANDLE] = bindings.ChannelHandle.get(
            self._next, channel_type, copy.context
        )
        self._next += 1

"""Channels for the collectives that a rewrite adds."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.bindings import ir


class Channels:
    """Hands out channel handles that no op of the module has."""

    def __init__(self, module: ir.Module) -> None:
        self._last = max((c.channel_id for c in find_collectives(module)), default=0)

    def another(self, op: ir.Operation) -> ir.Attribute:
        """A handle of the type of an op's own, with a new number."""
        self._last += 1
        own = bindings.ChannelHandle(op.attributes["channel_handle"])
        return bindings.ChannelHandle.get(self._last, own.channel_type, op.context)

"""Copies between the memories of a device and of its host, which run beside what it computes."""

from __future__ import annotations

from stablehlo_tools.cost.hardware import HostLink
from stablehlo_tools.overlap.task_graph import Communication

_DOMAIN = "host"  # compilers do not count them among the collectives in flight


def host_copy(size: float, link: HostLink, *, to_host: bool) -> tuple[Communication, float]:
    """A copy of so many bytes, and its ns: one after the other in each direction."""
    stream = "to host" if to_host else "to device"
    sent = Communication(kind="copy", stream=stream, bytes=size, domain=_DOMAIN)
    return sent, size / (link.to_host if to_host else link.to_device)

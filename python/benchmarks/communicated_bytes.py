"""How many bytes each device sends over the network, read from a compiler's schedule.

The bytes are those that a ring needs, per device, for groups of n:

    all-gather, all-to-all    (n - 1) / n of the result       collective-permute   the operand
    reduce-scatter            (n - 1) / n of the operand      all-reduce           both of them

A send counts with its operand; other ops of a schedule (receives, infeeds, custom calls) with
nothing. Loops count as often as they run where XLA knows it, and once where it does not; of
branches the dearest counts. Pure Python: no MLIR and no jax here.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; `nccl-tests/doc/PERFORMANCE.md` calls the same figures bus bandwidth.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from stablehlo_tools.hlo_input.async_forms import COLLECTIVES, AsyncPhase
from stablehlo_tools.hlo_input.shapes import arrays, parse_shape, split_tuple
from stablehlo_tools.targets.scheduled_hlo import (
    CollectiveEvent,
    Conditional,
    HloSchedule,
    Node,
    ScheduledLoop,
)

_IOTA = re.compile(r"\[([\d,]+)\]<=")
_MESH = re.compile(r"mesh\[([^\]]*)\][^{]* \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_AXIS_REF = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")


def volume(schedule: HloSchedule, devices: int) -> Counter[str]:
    """Bytes that a device sends in one run, by the HLO name of the collective."""
    return _of_nodes(schedule.nodes, devices)


def _of_nodes(nodes: Sequence[Node], devices: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, CollectiveEvent):
            if node.phase is not AsyncPhase.DONE:
                total[node.kind] += _of_event(node, devices)
        elif isinstance(node, ScheduledLoop):
            trips = 1 if node.trip_count is None else node.trip_count
            for part, times in ((node.condition, trips + 1), (node.body, trips)):
                for kind, count in _of_nodes(part, devices).items():
                    total[kind] += count * times
        else:
            total += _dearest(node, devices)
    return total


def _dearest(choice: Conditional, devices: int) -> Counter[str]:
    branches = [_of_nodes(branch, devices) for branch in choice.branches]
    return max(branches, key=lambda counts: counts.total(), default=Counter())


def _of_event(event: CollectiveEvent, devices: int) -> int:
    if event.kind == "send":
        return shape_bytes(split_tuple(event.shape)[0])
    if event.kind not in COLLECTIVES:
        return 0
    if event.kind == "collective-permute":
        return shape_bytes(_result(event, 1))
    members = group_size(event.groups, devices)
    result = shape_bytes(_result(event, members))
    if event.kind == "all-reduce":
        return 2 * result * (members - 1) // members
    if event.kind == "reduce-scatter":
        return result * (members - 1)
    return result * (members - 1) // members


def _result(event: CollectiveEvent, members: int) -> str:
    """The shape of the results, without the operands and contexts that a start returns too.

    A start returns `((operands), results, …)`, and that of one all-gather or collective-permute
    `(operand, result, …)`; that of an all-reduce, and whatever else stands for a start, the
    results alone.
    """
    parts = split_tuple(event.shape)
    if event.phase is not AsyncPhase.START or len(parts) < 2:
        return event.shape
    grown = shape_bytes(parts[1]) == members * shape_bytes(parts[0])
    pair = event.kind in ("all-gather", "collective-permute") and grown
    return parts[1] if pair or parts[0].startswith("(") else event.shape


def shape_bytes(shape: str) -> int:
    """The bytes of all arrays in a shape as HLO prints it."""
    return sum(array.bytes for array in arrays(parse_shape(shape)))


def group_size(groups: str, devices: int) -> int:
    """The members of a group in any of HLO's forms of replica groups; all devices for none."""
    iota = _IOTA.match(groups)
    if iota:
        return int(iota.group(1).split(",")[-1])
    first = re.match(r"\{\{([\d,]*)\}", groups)
    if first:
        return len(first.group(1).split(","))
    mesh = _MESH.match(groups)
    if mesh:
        sizes = dict(_MESH_AXIS.findall(mesh.group(1)))
        named = _AXIS_REF.findall(mesh.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    if groups not in ("", "{}"):
        raise ValueError(f"replica groups in an unknown form: {groups}")
    return devices

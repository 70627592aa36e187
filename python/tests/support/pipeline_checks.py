"""What tests of pipelines ask of a program besides its values: what is sent, and its loops.

    assert not [s for s in collectives_after_partition(after) if s.kind == "all_gather"]

`reference` runs a program of the layer scans once in a session.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jax.export import Exported
from kept_values import Known
from models.layer_scan import LayerScanModel

import stablehlo_tools
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.loops import constant_integer, count_trips
from stablehlo_tools.analysis.replica_groups import DeviceMesh, ProcessGroups
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import entry_function

WHILE = "stablehlo.while"


@cache
def reference(program: LayerScanModel, seed: int = 0, **options: Any) -> Known:
    """What a program computes with these options; the truth is that of its form for one device."""
    alone = program.build(**options | {"stage": 1, "data": 1, "model": 1})
    return Known.of(program.build(**options), program.arguments(seed, **options), alone)


class Sent(NamedTuple):
    """A collective: what goes in and comes out on one device, who takes part, and where it is.

    `groups` are flattened device ids, of a collective_permute its pairs. `axes` are those of the
    mesh along which members of one group differ. `depth` counts the loops around it.
    """

    kind: str
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    groups: ProcessGroups
    axes: tuple[str, ...]
    depth: int


def collectives_after_partition(
    exported: Exported, pipeline: str = "partition{choices=shardy}"
) -> list[Sent]:
    """Every collective, in program order, once each device's part of the program is explicit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = artifact.from_exported(stablehlo_tools.transform(exported, pipeline)).module
    facts = ModuleFacts.from_module(module)
    mesh = max(facts.meshes.values(), key=lambda mesh: mesh.size, default=DeviceMesh(()))
    return [_sent(collective, facts, mesh) for collective in find_collectives(module)]


def _sent(collective: Collective, facts: ModuleFacts, mesh: DeviceMesh) -> Sent:
    groups = facts.groups(collective) or ()
    return Sent(
        collective.kind,
        _shapes(collective.inner.operands),
        _shapes(collective.inner.results),
        groups,
        _axes(groups, mesh),
        _depth(collective.op),
    )


def _shapes(values: Sequence[ir.Value]) -> tuple[tuple[int, ...], ...]:
    kinds = [value.type for value in values]
    return tuple(tuple(kind.shape) for kind in kinds if isinstance(kind, ir.RankedTensorType))


def _axes(groups: ProcessGroups, mesh: DeviceMesh) -> tuple[str, ...]:
    ids = mesh.device_ids or range(mesh.size)
    position = {device: place for place, device in enumerate(ids)}
    sizes = [size for _, size in mesh.axes]
    spanned: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index([position[device] for device in group], sizes))
        spanned |= {axis for axis, row in enumerate(places) if len(set(row.tolist())) > 1}
    return tuple(name for axis, (name, _) in enumerate(mesh.axes) if axis in spanned)


def _depth(op: ir.Operation) -> int:
    """How many loops are around an op."""
    depth, parent = 0, op.parent
    while parent is not None:
        depth += parent.name == WHILE
        parent = parent.operation.parent
    return depth


class Loop(NamedTuple):
    """A loop's trip count, None where constants do not say it, and the loops in its body."""

    trips: int | None
    inner: tuple[Loop, ...] = ()


def loops(exported: Exported) -> tuple[Loop, ...]:
    """The loops of a program, those of functions that it calls included, in program order."""
    module = artifact.from_exported(exported).module
    inline_all_calls(module)
    return tuple(_loops(entry_function(module)))


def shown(found: Sequence[Loop]) -> str:
    """Loops in short: `8[4] ?` is one of 8 iterations with one of 4 inside, then an unknown one."""
    return " ".join(
        f"{'?' if loop.trips is None else loop.trips}"
        + (f"[{shown(loop.inner)}]" if loop.inner else "")
        for loop in found
    )


def _loops(op: ir.Operation) -> Iterator[Loop]:
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                inner = _loops(view.operation)
                if view.operation.name == WHILE:
                    yield Loop(_trips(view.operation), tuple(inner))
                else:
                    yield from inner


def _trips(loop: ir.Operation) -> int | None:
    def known(value: ir.Value) -> tuple[int, ...] | None:
        constant = constant_integer(value)
        return None if constant is None else (constant,)

    found = count_trips(loop, known)
    return None if isinstance(found, str) else found.trips[0]

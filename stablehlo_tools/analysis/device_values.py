"""The value of a small integer tensor on every device, where it is known before the run.

Known is what follows from constants and from `partition_id` and `replica_id`: through arithmetic
and lookups in tables, calls, arguments that all callers agree on, carries that a loop hands on as
they came, and the edges of manual computations. Everything is computed for all devices at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.communication import is_public
from stablehlo_tools.analysis.device_arithmetic import COMPUTED, Values, element_dtype, evaluated
from stablehlo_tools.analysis.replica_groups import AxisRef, DeviceMesh, mesh_axes_groups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import CALLS, DEVICE_IDS
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    functions_by_name,
    symbol_name,
    terminator,
    walk,
)
from stablehlo_tools.ir.while_loop import is_invariant

_LARGEST = 1 << 16  # elements of a tensor that is looked at
_LARGEST_ON_ALL = 1 << 20  # the same, all devices together
_MOST_NESTED = 8  # calls, each evaluated by itself
_DEEPEST = 100  # ops in a row, so that Python's stack suffices


class _Call:
    """A call whose callee is evaluated with the arguments of just this call."""

    def __init__(self, op: ir.Operation | None, around: _Call | None) -> None:
        self.op = op
        self.around = around
        self.level: int = 0 if around is None else around.level + 1
        self.known: dict[ir.Value, Values | None] = {}
        self.inner: dict[ir.Value, _Call] = {}


class DeviceValues:
    """Evaluates integer tensors for all devices of a module; valid until the module changes.

    Arrays have a leading dimension for the devices, in flattened ids (`replica_id *
    num_partitions + partition_id`), or of size 1 for values that are the same on all.
    """

    def __init__(self, module: ir.Module, facts: ModuleFacts) -> None:
        self.facts = facts
        self.module = module
        self.root = _Call(None, None)
        self.functions = functions_by_name(module)
        self.callers: dict[str, list[ir.Operation]] | None = None

    def of(self, value: ir.Value) -> Values | None:
        """The tensor on every device: an array of shape (devices or 1, ...); None if unknown."""
        return self._of(value, self.root, _DEEPEST)

    def scalar(self, value: ir.Value) -> Values | None:
        """The integer on every device: an array of shape (devices,); None if unknown."""
        known = self.of(value)
        if known is None or known.ndim != 1:
            return None
        return np.broadcast_to(known, (self.facts.grid.size,))

    def _of(self, value: ir.Value, call: _Call, depth: int) -> Values | None:
        if value in call.known:
            return call.known[value]
        call.known[value] = None  # a recursive function asks for it again
        dtype = element_dtype(value.type)
        known = self._computed(value, call, depth - 1) if dtype is not None and depth else None
        if known is not None and known.size > _LARGEST_ON_ALL:
            known = None
        call.known[value] = known
        return known

    def _computed(self, value: ir.Value, call: _Call, depth: int) -> Values | None:
        if math.prod(ir.RankedTensorType(value.type).shape) > _LARGEST:
            return None
        op = producer(value)
        if op is None:
            return self._argument(ir.BlockArgument(value), call, depth)
        if op.name in COMPUTED:
            return evaluated(op, [self._of(operand, call, depth) for operand in op.operands])
        position = ir.OpResult(value).result_number
        if op.name in DEVICE_IDS:
            return self._ids(op.name)
        if op.name == BARRIER:
            return self._of(op.operands[position], call, depth)
        if op.name == WHILE:
            return self._carry(op, position, call, depth)
        if op.name in CALLS:
            return self._result(op, position, call, depth)
        if op.name == MANUAL_COMPUTATION:
            return self._leaving(op, position, call, depth)
        return None

    def _ids(self, name: str) -> Values:
        devices = np.arange(self.facts.grid.size, dtype=np.uint32)
        width = np.uint32(self.facts.grid.num_partitions)
        return devices % width if name == "stablehlo.partition_id" else devices // width

    def _argument(self, argument: ir.BlockArgument, call: _Call, depth: int) -> Values | None:
        op, position = argument.owner.owner.operation, argument.arg_number
        if op.name == WHILE:
            return self._carry(op, position, call, depth)
        if op.name == "sdy.named_computation":
            return self._of(op.operands[position], call, depth)
        if op.name == MANUAL_COMPUTATION:
            return self._entering(op, position, call, depth)
        if op.name != FUNCTION or argument.owner != op.regions[0].blocks[0]:
            return None
        if call.op is not None and call.around is not None:
            return self._of(call.op.operands[position], call.around, depth)
        return self._agreed(op, position, depth)

    def _carry(self, loop: ir.Operation, position: int, call: _Call, depth: int) -> Values | None:
        """What a loop carries, if its body hands it on as it came."""
        if not is_invariant(loop, position):
            return None
        return self._of(loop.operands[position], call, depth)

    def _result(self, op: ir.Operation, position: int, call: _Call, depth: int) -> Values | None:
        callee = self.functions.get(callee_name(op))
        if callee is None or len(callee.regions[0].blocks) != 1 or call.level == _MOST_NESTED:
            return None
        key = op.results[0]
        inner = call.inner.setdefault(key, _Call(op, call))
        return self._of(terminator(callee.regions[0].blocks[0]).operands[position], inner, depth)

    def _agreed(self, function: ir.Operation, position: int, depth: int) -> Values | None:
        """An argument of a private function, where all calls of it pass the same."""
        callers = self._callers().get(symbol_name(function), [])
        if is_public(function) or not callers:
            return None
        passed = [self._of(op.operands[position], self.root, depth) for op in callers]
        first = passed[0]
        if first is None or any(p is None or not np.array_equal(p, first) for p in passed):
            return None
        return first

    def _callers(self) -> dict[str, list[ir.Operation]]:
        """The calls of each function; none for one that is referred to in another way too."""
        if self.callers is not None:
            return self.callers
        calls: dict[str, list[ir.Operation]] = {}
        otherwise: set[str] = set()

        def visit(op: ir.Operation) -> ir.WalkResult:
            if op.name in CALLS:
                calls.setdefault(callee_name(op), []).append(op)
            elif op.name == "func.constant":
                otherwise.add(ir.FlatSymbolRefAttr(op.attributes["value"]).value)
            elif op.name == "stablehlo.custom_call" and "called_computations" in op.attributes:
                listed = ir.ArrayAttr(op.attributes["called_computations"])
                otherwise.update(ir.FlatSymbolRefAttr(symbol).value for symbol in listed)
            return ir.WalkResult.ADVANCE

        walk(self.module.operation, visit)
        self.callers = {name: ops for name, ops in calls.items() if name not in otherwise}
        return self.callers

    def _entering(self, op: ir.Operation, position: int, call: _Call, depth: int) -> Values | None:
        """A device's shard of an operand of a manual computation."""
        whole = self._of(op.operands[position], call, depth)
        sharding = sharding_per_value(op.attributes["in_shardings"])[position]
        axes_of = _manual_axes_by_dimension(sharding, manual_axes(op))
        if whole is None or axes_of is None:
            return None
        if not any(axes_of):
            return whole
        mesh = self._mesh(sharding)
        if mesh is None:
            return None
        shard: Values | None = whole
        for dimension, axes in enumerate(axes_of, 1):
            if axes and shard is not None:
                shard = _sharded(shard, dimension, mesh_axes_groups(mesh, _refs(axes)))
        return shard

    def _leaving(self, op: ir.Operation, position: int, call: _Call, depth: int) -> Values | None:
        """A result that every device of a manual computation holds whole, and all alike."""
        sharding = sharding_per_value(op.attributes["out_shardings"])[position]
        manual = manual_axes(op)
        mesh = self._mesh(sharding)
        if mesh is None or manual.intersection(sharding_axes(sharding)[1]):
            return None
        known = self._of(terminator(op.regions[0].blocks[0]).operands[position], call, depth)
        if known is None or len(known) == 1:
            return known
        for group in mesh_axes_groups(mesh, _refs(sorted(manual))):
            if (known[list(group)] != known[group[0]]).any():
                return None
        return known

    def _mesh(self, sharding: ir.Attribute) -> DeviceMesh | None:
        mesh = self.facts.meshes.get(sharding_axes(sharding)[0])
        return mesh if mesh is not None and mesh.size == self.facts.grid.size else None


def _refs(axes: Sequence[str]) -> list[AxisRef]:
    return [AxisRef(name) for name in axes]


def _manual_axes_by_dimension(
    sharding: ir.Attribute, manual: frozenset[str]
) -> list[list[str]] | None:
    """The manual axes that divide each dimension; None where one is split into sub-axes."""
    by_dimension: list[list[str]] = []
    for dimension in bindings.TensorShardingAttr(sharding).dimension_shardings:
        refs = [
            bindings.SdyAxisRefAttr(axis)
            for axis in bindings.SdyDimensionShardingAttr(dimension).axes
        ]
        if any(ref.sub_axis_info is not None for ref in refs):
            return None
        by_dimension.append([ref.name for ref in refs if ref.name in manual])
    return by_dimension


def _sharded(whole: Values, dimension: int, groups: Sequence[Sequence[int]]) -> Values | None:
    """Cuts a dimension into equal parts, the n-th for the n-th member of each group."""
    parts, devices = len(groups[0]), sum(len(group) for group in groups)
    if whole.shape[dimension] % parts:
        return None
    size = whole.shape[dimension] // parts
    rows = np.broadcast_to(whole, (devices, *whole.shape[1:]))
    number = {device: n for group in groups for n, device in enumerate(group)}
    shards = [
        np.take(rows[device], number[device] * size + np.arange(size), dimension - 1)
        for device in range(devices)
    ]
    return np.stack(shards)

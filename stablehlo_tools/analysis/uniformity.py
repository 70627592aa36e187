"""Finds the devices that surely hold the same value, and the scalars known before the run.

A program without calls is evaluated once for all its devices. For each value, every device has a
class: two devices of one class hold equal values. Constants, replicated arguments and global values
(those outside of manual computations) are equal everywhere. `partition_id`, sharded arguments and
values computed from them are assumed to differ, unless they are known to be equal. The result of an
all_reduce or all_gather is equal within each replica group, and across groups whose inputs are
equal. Small integer tensors that follow from constants and device ids are computed for each device.
So devices that slice the same rows of a table are found to hold equal ones.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, classify_communication
from stablehlo_tools.analysis.device_values import (
    COMPUTED,
    SCALAR_OPS,
    Values,
    chosen_regions,
    element_dtype,
    evaluate_op,
    has_few_integers,
    scalar_result,
    scalar_rows,
)
from stablehlo_tools.analysis.entry import attributes_of_arguments
from stablehlo_tools.analysis.loop_values import IterationValues
from stablehlo_tools.analysis.loops import constant_integer, trip_count
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_axes_groups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_async_done, is_of_matrices
from stablehlo_tools.dialect.names import CUSTOM_CALL, MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import (
    BRANCHES,
    CALLS,
    COMPUTATIONS,
    Trait,
    ops_with,
    short_names,
)
from stablehlo_tools.ir.platform_index import is_platform_index
from stablehlo_tools.ir.views import Function, While, WithBody
from stablehlo_tools.ir.walk import terminator

_SAME_ON_GROUP = short_names(ops_with(Trait.SAME_ON_GROUP))
# Members of a group get different parts, so results are equal only at equal positions.
_BY_POSITION = frozenset({"reduce_scatter", "all_to_all", "ragged_all_to_all"})
_UNKNOWN = CALLS | {"stablehlo.rng", "stablehlo.custom_call"}
_LARGEST = 1 << 14  # elements of a tensor that is computed
_LARGEST_ON_ALL = 1 << 18  # the same, all devices together


@dataclass(frozen=True)
class Variation:
    """The classes of a value on the devices, and its values if they are known.

    `tensor` is the known value of a tensor, with a row for each device or one for all. A scalar may
    have it, too.
    """

    classes: tuple[int, ...]
    values: tuple[int, ...] | None = None
    tensor: Values | None = field(default=None, compare=False)  # it follows from the others


def join(parts: Sequence[Variation]) -> tuple[int, ...]:
    """Returns the classes of a value computed from all parts: equal if every part is equal."""
    distinct = list(dict.fromkeys(part.classes for part in parts))
    return distinct[0] if len(distinct) == 1 else number_classes(list(zip(*distinct, strict=True)))


def number_classes(keys: Sequence[object]) -> tuple[int, ...]:
    """Returns a number for each key, equal for equal keys, in order of first appearance."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


class Uniformity:
    """Evaluates ops for all devices at once; `env` holds the values met so far.

    `repeatable`: factorisations by a library return the same on all devices for equal operands.
    This holds for costs, but no library promises it, so proofs do not assume it.
    """

    def __init__(
        self,
        module: ir.Module,
        facts: ModuleFacts,
        devices: Sequence[int],
        *,
        repeatable: bool = False,
    ) -> None:
        self.facts = facts
        self._repeatable = repeatable
        self.devices = tuple(devices)
        self.position = {device: i for i, device in enumerate(self.devices)}
        self.classify = classify_communication(module.context)
        self.everywhere = Variation((0,) * len(self.devices))
        self.anywhere = Variation(tuple(range(len(self.devices))))
        self.env: dict[ir.Value, Variation] = {}
        self.carries: dict[ir.Block, list[Variation]] = {}  # of a loop, by its body
        # The decisions of branches and loops inside loops, on each device in each iteration.
        self.iterations = IterationValues(
            len(self.devices), lambda value: _array(value.type, self.variation_of(value))
        )

    def variation_of(self, value: ir.Value) -> Variation:
        """Returns the variation of a value; an unseen one may differ everywhere."""
        return self.env.get(value, self.anywhere)

    def bind(self, values: Sequence[ir.Value], known: Sequence[Variation]) -> None:
        """Sets the variations of some values."""
        self.env.update(zip(values, known, strict=True))

    def bind_arguments(self, main: ir.Operation, is_per_device: bool, platform: int | None) -> None:
        """Sets the variations of the program's arguments.

        `is_per_device`: main is the program of one device. `platform`: the value of the platform
        index.
        """
        listed = attributes_of_arguments(main)
        for position, argument in enumerate(Function(main).body.arguments):
            entry = listed[position] if position < len(listed) else None
            self.env[argument] = self._argument(entry, is_per_device)
            if platform is not None and is_platform_index(entry):
                values = (platform,) * len(self.devices)
                self.env[argument] = Variation(self.everywhere.classes, values)

    def run(self, op: ir.Operation) -> None:
        """Evaluates one op, with its regions and callees."""
        name = op.name
        if name == WHILE:
            self._loop(op)
        elif name in BRANCHES:
            choice = self.variation_of(op.operands[0])
            known = [self.block(region.blocks[0]) for region in op.regions]
            indices = branch_indices(op, choice)
            for position, result in enumerate(op.results):
                parts = [branch[position] for branch in known]
                self.env[result] = self._branch_variation(choice, parts, indices)
        elif name in COMPUTATIONS:
            self.enter(op)
            self.block(WithBody(op).body)
            self.leave(op)
        else:
            self.bind(list(op.results), self._results(op))

    def block(self, block: ir.Block) -> list[Variation]:
        """Evaluates a block, and returns the variations of its terminator's operands."""
        for op in block.operations:
            self.run(op.operation)
        return [self.variation_of(value) for value in terminator(block).operands]

    def enter(self, computation: ir.Operation) -> None:
        """Binds the arguments of a manual or named computation."""
        arguments = list(WithBody(computation).body.arguments)
        outside = [self.variation_of(value) for value in computation.operands]
        if computation.name == MANUAL_COMPUTATION:
            shardings = sharding_per_value(computation.attributes["in_shardings"])
            manual = manual_axes(computation)
            tables = [sharding_axes(sharding) for sharding in shardings]
            outside = [
                self._shard(known, mesh, manual.intersection(axes))
                for known, (mesh, axes) in zip(outside, tables, strict=True)
            ]
        self.bind(arguments, outside)

    def leave(self, computation: ir.Operation) -> None:
        """Binds the results of a computation: global values again after a manual one.

        A result may differ along an axis that its sharding declares replicated, because XLA does
        not check.
        """
        ends = terminator(WithBody(computation).body).operands
        inside = [self.variation_of(value) for value in ends]
        if computation.name == MANUAL_COMPUTATION:
            shardings = sharding_per_value(computation.attributes["out_shardings"])
            manual = manual_axes(computation)
            inside = [
                self.everywhere if manual.issubset(sharding_axes(sharding)[1]) else known
                for known, sharding in zip(inside, shardings, strict=True)
            ]
        self.bind(list(computation.results), inside)

    def choice(self, branch: ir.Operation) -> Variation:
        """Returns the variation of the region of an `if` or `case`, with its index if known."""
        known = self.variation_of(branch.operands[0])
        indices = branch_indices(branch, known)
        return known if indices is None else Variation(number_classes(indices), indices)

    def trips(self, loop: ir.Operation) -> Variation:
        """Returns the variation of the trip count of an evaluated loop, with values if static."""
        counts = trip_count(loop, [self.variation_of(value).values for value in loop.operands])
        if counts is not None:
            return Variation(number_classes(counts), counts)
        predicate = terminator(While(loop).condition).operands[0]
        return Variation(self.variation_of(predicate).classes)

    def bind_carries(self, loop: ir.Operation) -> None:
        """Sets the arguments of an evaluated loop's regions to what holds in every iteration."""
        known = self.carries[While(loop).body]
        for region in loop.regions:
            self.bind(list(region.blocks[0].arguments), known)

    def _argument(self, attributes: ir.DictAttr | None, is_per_device: bool) -> Variation:
        """Returns the variation of an argument of main.

        In a program for all devices, it is one global value for each replica. In a program for one
        device, each device has its own value, unless an attribute says that it is replicated.
        """
        partitions = self.facts.grid.num_partitions
        same_replicas = attributes is not None and (
            "mhlo.is_same_data_across_replicas" in attributes
        )
        same_partitions = not is_per_device
        if is_per_device and attributes is not None:
            if "sdy.sharding" in attributes:
                same_partitions = not sharding_axes(attributes["sdy.sharding"])[1]
            elif "mhlo.sharding" in attributes:
                said = ir.StringAttr(attributes["mhlo.sharding"]).value
                same_partitions = said == "{replicated}"
        keys = [
            (0 if same_replicas else replica, 0 if same_partitions else partition)
            for replica, partition in (divmod(device, partitions) for device in self.devices)
        ]
        return Variation(number_classes(keys))

    def _shard(self, known: Variation, mesh: str, axes: frozenset[str]) -> Variation:
        """Returns the shard of a value: equal if the coordinates on the axes are."""
        if not axes:
            return known
        table = self.facts.meshes.get(mesh)
        if table is None:  # an inline mesh
            return self.anywhere
        others = [AxisRef(name) for name, _ in table.axes if name not in axes]
        groups = mesh_axes_groups(table, others) if others else tuple((d,) for d in self.devices)
        number = {device: i for i, group in enumerate(groups) for device in group}
        shards = Variation(number_classes([number.get(device, -1) for device in self.devices]))
        return Variation(join([known, shards]))

    def _results(self, op: ir.Operation) -> list[Variation]:
        name = op.name
        count = len(op.results)
        collective = self.classify(op)
        if collective is not None:
            return [self._collective(collective)] * count
        if name in ("stablehlo.partition_id", "stablehlo.replica_id"):
            partitions = self.facts.grid.num_partitions
            of_device = operator.mod if name == "stablehlo.partition_id" else operator.floordiv
            values = tuple(of_device(device, partitions) for device in self.devices)
            return [Variation(number_classes(values), values)]
        if is_async_done(op):
            return [self.variation_of(op.operands[0])]
        is_function = name == CUSTOM_CALL and self._repeatable and is_of_matrices(op)
        if name in _UNKNOWN and not is_function:
            return [self.anywhere] * count
        if name == "stablehlo.constant":
            value = constant_integer(op.results[0])
            if value is not None:
                rows = scalar_rows((value,) * len(self.devices), op.results[0].type)
                return [self._of_tensor(rows)]
            return [Variation(self.everywhere.classes, None, self._tensor(op, []))]
        if name == "stablehlo.optimization_barrier":
            return [self.variation_of(value) for value in op.operands]
        operands = [self.variation_of(value) for value in op.operands]
        operands += [  # values that regions of a reduction or a sort read from outside
            self.variation_of(value)
            for region in op.regions
            for block in region.blocks
            for inner in block.operations
            for value in inner.operation.operands
            if value in self.env
        ]
        if not operands:
            return [self.everywhere] * count
        tensor = self._scalar(op, operands) if count == 1 else None
        if tensor is None and name in COMPUTED:
            tensor = self._tensor(op, operands)
        return [Variation(join(operands)) if tensor is None else self._of_tensor(tensor)] * count

    def _scalar(self, op: ir.Operation, operands: Sequence[Variation]) -> Values | None:
        """Returns the values of an integer scalar on each device; None if not computable."""
        if op.name not in SCALAR_OPS or any(part.values is None for part in operands):
            return None
        rows = [
            part.tensor if part.tensor is not None else scalar_rows(part.values or (), value.type)
            for value, part in zip(op.operands, operands, strict=True)
        ]
        return scalar_result(op, rows)

    def _tensor(self, op: ir.Operation, operands: Sequence[Variation]) -> Values | None:
        """Returns a small integer tensor on each device; None if it cannot be computed."""
        if not has_few_integers(op.results[0].type, _LARGEST):
            return None
        pairs = zip(op.operands, operands, strict=True)
        tensor = evaluate_op(op, (_array(value.type, known) for value, known in pairs))
        return None if tensor is None or tensor.size > _LARGEST_ON_ALL else tensor

    def _of_tensor(self, tensor: Values) -> Variation:
        """Returns the variation of a computed tensor: equal on devices with equal rows."""
        rows = np.broadcast_to(tensor, (len(self.devices), *tensor.shape[1:]))
        if tensor.ndim == 1:
            values = tuple(map(int, rows.tolist()))
            return Variation(number_classes(values), values, rows)
        if len(tensor) == 1:
            return Variation(self.everywhere.classes, None, tensor)
        return Variation(number_classes([row.tobytes() for row in rows]), None, tensor)

    def _collective(self, collective: Collective) -> Variation:
        groups = self.facts.groups(collective)
        tensors = [self.variation_of(v) for v in collective.op.operands]
        if groups is None or not tensors:
            return self.anywhere
        inputs = join(tensors)
        keys: list[object] = list(self.devices)  # a device outside of every group has its own key
        if collective.kind == "collective_permute":
            source = {target: origin for origin, target in groups}
            for place, device in enumerate(self.devices):
                # A device that is no target of a pair gets zeros.
                origin = source.get(device)
                if origin in self.position:
                    keys[place] = inputs[self.position[origin]]
                else:
                    keys[place] = "zeros" if origin is None else ("from", origin)
            return Variation(number_classes(keys))
        for number, group in enumerate(groups):
            known = [inputs[self.position[d]] for d in group if d in self.position]
            whole = tuple(known) if len(known) == len(group) else ("group", number)
            for place, device in enumerate(group):
                if device not in self.position:
                    continue
                if collective.kind in _SAME_ON_GROUP:
                    keys[self.position[device]] = whole
                elif collective.kind in _BY_POSITION:
                    keys[self.position[device]] = (whole, place)
        return Variation(number_classes(keys))

    def _branch_variation(
        self, choice: Variation, parts: Sequence[Variation], indices: tuple[int, ...] | None
    ) -> Variation:
        if indices is None:
            return Variation(join([choice, *parts]))
        keys = [(i, parts[i].classes[d]) for d, i in enumerate(indices)]
        taken = [parts[i].values for i in indices]
        values = [row[d] for d, row in enumerate(taken) if row is not None]
        if len(values) == len(taken):
            return Variation(number_classes(values), tuple(values))
        return Variation(number_classes(keys))

    def _loop(self, op: ir.Operation) -> None:
        """Joins the values that enter and leave an iteration, to a fixed point."""
        condition, body = (region.blocks[0] for region in op.regions)
        ends = terminator(body).operands
        initial = [self.variation_of(value) for value in op.operands]
        kept = [ends[i] == argument for i, argument in enumerate(body.arguments)]
        known = [
            known if keep else Variation(known.classes)
            for known, keep in zip(initial, kept, strict=True)
        ]
        while True:
            self.bind(list(condition.arguments), known)
            (predicate,) = self.block(condition)
            self.bind(list(body.arguments), known)
            after = self.block(body)
            counts = trip_count(op, [part.values for part in initial])
            # After different numbers of iterations, carries differ even if each iteration is equal.
            often = predicate if counts is None else Variation(number_classes(counts))
            joined = [
                before if keep else Variation(join([before, end, often]))
                for before, end, keep in zip(known, after, kept, strict=True)
            ]
            if joined == known:
                break
            known = joined
        self.carries[body] = known
        self.bind(list(op.results), known)


def _array(type_: ir.Type, known: Variation) -> Values | None:
    """Returns an operand as an array with a row for each device or one for all, if known."""
    if known.values is None:
        return known.tensor
    dtype = element_dtype(type_)
    if known.tensor is not None and known.tensor.dtype == dtype:
        return known.tensor
    return None if dtype is None else np.array(known.values).astype(dtype)


def branch_indices(op: ir.Operation, choice: Variation) -> tuple[int, ...] | None:
    """Returns the region that each device runs; None if it is unknown."""
    if choice.values is None:
        return None
    return tuple(map(int, chosen_regions(op, np.array(choice.values))))

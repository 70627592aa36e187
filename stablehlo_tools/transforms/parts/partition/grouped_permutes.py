"""Writes permutes that only some devices run as exchanges within groups of devices.

XLA runs a collective_permute on all devices of the program together, even if its pairs join only
some of them. In a branch that only one rank of a pipeline takes, it waits for the others forever
(seen on XLA:CPU; XLA:GPU joins all devices in one clique, too). An all_gather waits for its own
group only:

    stablehlo.if %runs {                            // true on devices 0 to 3 only
      %y = "stablehlo.collective_permute"(%x) pairs [[0, 1], [1, 0], [4, 5], [5, 4]]
    }
  ==>
    stablehlo.if %runs {
      %all = "stablehlo.all_gather"(%x) groups [[0, 1], [2, 3], [4, 5], [6, 7]]
      %y = stablehlo.dynamic_slice %all, %source    // the part of the device that sends
    }

A group has the devices that exchange values with each other; if these sets differ in size, it has
all devices that take the same branches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.uniformity import Uniformity, Variation, join
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ALL_GATHER, COLLECTIVE_PERMUTE, WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.builder import Builder, device_table, shape_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, ops_named

Groups = list[list[int]]


def group_divergent_permutes(module: ir.Module) -> None:
    """Writes the permutes of a module that only some devices run as exchanges within groups."""
    main = entry_function(module)
    permutes = [op for op in ops_named(main, {COLLECTIVE_PERMUTE}) if _around(op)]
    if not permutes:
        return
    facts = ModuleFacts.from_module(module)
    uniform = Uniformity(module, facts, range(facts.grid.size))
    uniform.bind_arguments(main, False, None)
    uniform.block(Function(main).body)
    for op in permutes:
        choices = [
            uniform.trips(each) if each.name == WHILE else uniform.choice(each)
            for each in _around(op)
        ]
        # Loops around that all devices run equally often say nothing of single iterations.
        classes = join([Variation(choice.classes) for choice in choices])
        if len(set(classes)) == 1:
            continue
        pairs = np.array(op.attributes["source_target_pairs"]).tolist()
        # Pairs between classes are left: no group can hold both of their ends.
        groups = _groups(classes, pairs)
        if groups is not None:
            _write_exchange(op, groups, pairs)


def _around(op: ir.Operation) -> list[ir.Operation]:
    """Returns the loops and branches around an op."""
    found: list[ir.Operation] = []
    parent = op.parent
    while parent is not None:
        if parent.operation.name == WHILE or parent.operation.name in BRANCHES:
            found.append(parent.operation)
        parent = parent.operation.parent
    return found


def _groups(classes: Sequence[int], pairs: Sequence[Sequence[int]]) -> Groups | None:
    """Returns groups of one size, within classes of devices, that hold both ends of each pair; None
    if there are none."""
    joined = {device: {device} for device in range(len(classes))}
    for source, target in pairs:
        if classes[source] != classes[target]:
            return None
        together = joined[source] | joined[target]
        joined.update(dict.fromkeys(together, together))
    # Sets of devices that exchange values with each other, through other devices if need be.
    connected = sorted({tuple(sorted(group)) for group in joined.values()})
    largest = max(map(len, connected))
    if largest > 1:
        # Devices that only send to themselves form groups of their own.
        rest = [group[0] for group in connected if len(group) == 1]
        by_class = [[d for d in rest if classes[d] == each] for each in sorted(set(classes))]
        alone = [row[i : i + largest] for row in by_class for i in range(0, len(row), largest)]
        groups = [list(group) for group in connected if len(group) > 1] + alone
        if all(len(group) == largest for group in groups):
            return groups
    # Otherwise a group has all devices of a class.
    alike = [[d for d, own in enumerate(classes) if own == each] for each in sorted(set(classes))]
    return alike if len({len(group) for group in alike}) == 1 else None


def _write_exchange(permute: ir.Operation, groups: Groups, pairs: Sequence[Sequence[int]]) -> None:
    build = Builder(ir.InsertionPoint(permute), permute.location)
    (value,) = permute.operands
    shape, element = shape_of(value), ir.RankedTensorType(value.type).element_type
    type_ = build.tensor([len(groups[0]), *shape], element)
    attributes = {
        "all_gather_dim": build.integer(0),
        "replica_groups": device_table(groups, permute.context),
        "channel_handle": permute.attributes["channel_handle"],
        "use_global_device_ids": ir.UnitAttr.get(permute.context),
    }
    # Each device of the group gets the values of all, and takes its own.
    rows = build.reshape(value, [1, *shape])
    gathered = build.create(ALL_GATHER, [rows], [type_], attributes).results[0]
    place = {device: number for group in groups for number, device in enumerate(group)}
    source = {target: place[origin] for origin, target in pairs}
    unsigned = ir.IntegerType.get_unsigned(32, permute.context)
    device = build.op("partition_id", [], build.tensor([], unsigned))
    table = build.table([source.get(each, 0) for each in range(len(place))])
    row = build.reshape(build.dynamic_slice(table, [device], [1]), [])
    starts = [row, *[build.i32(0)] * len(shape)]
    result = build.reshape(build.dynamic_slice(gathered, starts, [1, *shape]), shape)
    if len(source) < len(place):  # a device that receives nothing gets zeros
        gets = build.table([int(each in source) for each in range(len(place))])
        flag = build.reshape(build.dynamic_slice(gets, [device], [1]), [])
        receives = build.compare("NE", flag, build.i32(0))
        result = build.same("select", receives, result, build.splat_like(0, result))
    permute.results[0].replace_all_uses_with(result)
    permute.erase()

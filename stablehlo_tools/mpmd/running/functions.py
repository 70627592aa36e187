"""A function of a rank's program as a module of its own, for the devices of that rank alone.

    func @stage_1_backward(…) { … func.call @helper_3 … all_reduce groups [[0, 1], [2, 3]] … }
    ==>                                                  // rank 1 of two with two devices each
    func public @main(…) { … func.call @called_1 … all_reduce groups [[0, 1]] … }
    func private @called_1 …

Names and groups are those of the rank, so that functions which do the same are equal as text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import label
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.symbols import (
    FUNCTION,
    callee_name,
    copy_referenced_symbols,
    erase_unused_meshes,
    functions_by_name,
)
from stablehlo_tools.ir.walk import walk

_PARTITION_ID = "stablehlo.partition_id"


def as_module(module: ir.Module, name: str, rank: int, devices: int) -> ir.Module:
    """Function `name` and what it calls, with `main` in its place, in the same context.

    Raises a located ToolError for a collective between ranks.
    """
    functions = functions_by_name(module)
    called = _called(functions, name)
    new_names = {old: f"called_{i}" if i else "main" for i, old in enumerate(called)}
    with module.context, ir.Location.unknown():
        result = ir.Module.create()
        end = ir.InsertionPoint(result.body)
        for old in called:
            copy = functions[old].clone(ip=end)
            copy.attributes["sym_name"] = ir.StringAttr.get(new_names[old])
            visibility = "public" if old == name else "private"
            copy.attributes["sym_visibility"] = ir.StringAttr.get(visibility)
            _rename_calls(copy, new_names)
        copy_referenced_symbols(module.operation, result)
        _localise(module, result, rank, devices)
        erase_unused_meshes(result)  # those of the ranks tell equal functions apart
        number = ir.IntegerType.get_signless(32)
        for what, count in (("partitions", devices), ("replicas", 1)):
            result.operation.attributes[f"mhlo.num_{what}"] = ir.IntegerAttr.get(number, count)
    return result


def constant_module(op: ir.Operation) -> ir.Module:
    """A module whose `main` returns the constant that `op` is."""
    kind = op.results[0].type
    with op.context, ir.Location.unknown():
        result = ir.Module.create()
        function = ir.Operation.create(
            FUNCTION,
            attributes={
                "sym_name": ir.StringAttr.get("main"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get([], [kind])),
            },
            regions=1,
            ip=ir.InsertionPoint(result.body),
        )
        block = function.regions[0].blocks.append()
        constant = op.clone(ip=ir.InsertionPoint(block))
        ir.Operation.create(
            "func.return", operands=[constant.results[0]], ip=ir.InsertionPoint(block)
        )
    return result


def _called(functions: dict[str, ir.Operation], name: str) -> list[str]:
    """A function and those that it calls, directly or not, in the order of their first calls."""
    found = [name]

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in CALLS and callee_name(op) not in found:
            found.append(callee_name(op))
        return ir.WalkResult.ADVANCE

    for callee in found:  # grows while it is walked
        if callee not in functions:
            raise ToolError(f"there is no function @{callee} to call")
        walk(functions[callee], visit)
    return found


def _rename_calls(function: ir.Operation, names: dict[str, str]) -> None:
    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in CALLS:
            attribute = "callee" if "callee" in op.attributes else "decomposition"
            op.attributes[attribute] = ir.FlatSymbolRefAttr.get(names[callee_name(op)])
        return ir.WalkResult.ADVANCE

    walk(function, visit)


def _localise(whole: ir.Module, module: ir.Module, rank: int, devices: int) -> None:
    """Writes groups of devices as the rank counts them, and device numbers as all ranks do."""
    own = range(rank * devices, (rank + 1) * devices)
    stated = ModuleFacts.of(whole, [])
    meshes = ModuleFacts.of(module, []).meshes
    facts = ModuleFacts(stated.grid, meshes)
    for collective in find_collectives(module):
        groups = facts.groups(collective)
        if groups is not None:
            _set_groups(collective, groups, own)
    _offset_numbers(module, own.start)


def _set_groups(collective: Collective, groups: Sequence[Sequence[int]], own: range) -> None:
    kept = [[i - own.start for i in group] for group in groups if set(group) & set(own)]
    if any(i not in range(len(own)) for group in kept for i in group):
        raise ToolError(
            f"{collective.inner.name} in a function goes from one rank to another; only sends and "
            "recvs in @main do that",
            collective.op.location,
        )
    if collective.is_async_call:
        raise ToolError(
            f"{label(collective.op)} in a function: its groups cannot be counted anew for a rank",
            collective.op.location,
        )
    is_permute = collective.kind == "collective_permute"
    name = "source_target_pairs" if is_permute else "replica_groups"
    width = 2 if is_permute else max(map(len, kept), default=0)
    table = np.array([[*g, *[-1] * (width - len(g))] for g in kept], np.int64)
    collective.inner.attributes[name] = ir.DenseElementsAttr.get(table.reshape(len(kept), width))


def _offset_numbers(module: ir.Module, first: int) -> None:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _PARTITION_ID:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in found if first else []:
        number, after = op.results[0], ir.InsertionPoint.after(op)
        value = ir.DenseElementsAttr.get(np.array(first, np.uint32), type=number.type)
        offset = ir.Operation.create(
            "stablehlo.constant", results=[number.type], attributes={"value": value}, ip=after
        )
        total = ir.Operation.create(
            "stablehlo.add",
            results=[number.type],
            operands=[number, offset.results[0]],
            ip=ir.InsertionPoint.after(offset),
        )
        number.replace_all_uses_except(total.results[0], [total])

"""What the `main` of a rank calls, each function as a module of its own, for that rank's devices.

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
from stablehlo_tools.dialect.names import ADD, CONSTANT, PARTITION_ID
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    copy_referenced_symbols,
    erase_unused_meshes,
    functions_by_name,
    ops_named,
    walk,
)


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
        # Writes groups of devices as the rank counts them, and device numbers as all ranks do.
        own = range(rank * devices, (rank + 1) * devices)
        stated = ModuleFacts.of(module, [])
        meshes = ModuleFacts.of(result, []).meshes
        facts = ModuleFacts(stated.grid, meshes)
        for collective in find_collectives(result):
            groups = facts.groups(collective)
            if groups is not None:
                _set_groups(collective, groups, own)
        _offset_numbers(result, own.start)
        erase_unused_meshes(result)  # those of the ranks tell equal functions apart
        number = ir.IntegerType.get_signless(32)
        for what, count in (("partitions", devices), ("replicas", 1)):
            result.operation.attributes[f"mhlo.num_{what}"] = ir.IntegerAttr.get(number, count)
    return result


def module_of(op: ir.Operation) -> ir.Module:
    """A module whose `main` does what `op` does, which is no call and has no regions."""
    inputs, outputs = ([value.type for value in side] for side in (op.operands, op.results))
    with op.context, ir.Location.unknown():
        result = ir.Module.create()
        function = ir.Operation.create(
            FUNCTION,
            attributes={
                "sym_name": ir.StringAttr.get("main"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs)),
            },
            regions=1,
            ip=ir.InsertionPoint(result.body),
        )
        block = function.regions[0].blocks.append(*inputs)
        end = ir.InsertionPoint(block)
        copy = op.clone(ip=end)
        for number, argument in enumerate(block.arguments):
            copy.operands[number] = argument
        ir.Operation.create("func.return", operands=list(copy.results), ip=end)
    return result


def _called(functions: dict[str, ir.Operation], name: str) -> list[str]:
    """A function and those that it calls, directly or not, in the order of their first calls."""
    called = [name]

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in CALLS and callee_name(op) not in called:
            called.append(callee_name(op))
        return ir.WalkResult.ADVANCE

    for callee in called:  # grows while it is walked
        if callee not in functions:
            raise ToolError(f"there is no function @{callee} to call")
        walk(functions[callee], visit)
    return called


def _rename_calls(function: ir.Operation, names: dict[str, str]) -> None:
    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in CALLS:
            attribute = "callee" if "callee" in op.attributes else "decomposition"
            op.attributes[attribute] = ir.FlatSymbolRefAttr.get(names[callee_name(op)])
        return ir.WalkResult.ADVANCE

    walk(function, visit)


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
    for op in ops_named(module.operation, {PARTITION_ID}) if first else []:
        number, after = op.results[0], ir.InsertionPoint.after(op)
        value = ir.DenseElementsAttr.get(np.array(first, np.uint32), type=number.type)
        offset = ir.Operation.create(
            CONSTANT, results=[number.type], attributes={"value": value}, ip=after
        )
        total = ir.Operation.create(
            ADD,
            results=[number.type],
            operands=[number, offset.results[0]],
            ip=ir.InsertionPoint.after(offset),
        )
        number.replace_all_uses_except(total.results[0], [total])

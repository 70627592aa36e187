"""Extracts the functions that the `main` of a rank calls, each as a module for that rank's devices.

    func @stage_1_backward(…) { … func.call @helper_3 … all_reduce groups [[0, 1], [2, 3]] … }
    ==>                                                  // rank 1 of two with two devices each
    func public @main(…) { … func.call @called_1 … all_reduce groups [[0, 1]] … }
    func private @called_1 …

Names and groups are relative to the rank, so that equal functions have equal text. The module also
runs compiled functions on the devices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import label
from stablehlo_tools.dialect.names import CALL, PARTITION_ID
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import Builder, element_of
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    copy_referenced_symbols,
    erase_unused_meshes,
    functions_by_name,
    ops_named,
)

type Parts = list[jax.Array]  # the part of a value on each device
_PERMUTE = re.compile(r"collective-permute(-start)?\(")


def as_module(module: ir.Module, name: str, rank: int, devices: int) -> ir.Module:
    """Returns a module whose `main` is function `name`, with the functions that it calls.

    The module is in the same context. Raises a located ToolError for a collective between ranks.
    """
    functions = functions_by_name(module)
    called = _reachable_functions(functions, name)
    new_names = {old: f"called_{i}" if i else "main" for i, old in enumerate(called)}
    with module.context, ir.Location.unknown():
        result = ir.Module.create()
        end = ir.InsertionPoint(result.body)
        for old in called:
            copy = functions[old].clone(ip=end)
            copy.attributes["sym_name"] = ir.StringAttr.get(new_names[old])
            visibility = "public" if old == name else "private"
            copy.attributes["sym_visibility"] = ir.StringAttr.get(visibility)
            for call in ops_named(copy, CALLS):
                attribute = "callee" if call.name == CALL else "decomposition"
                symbol = ir.FlatSymbolRefAttr.get(new_names[callee_name(call)])
                call.attributes[attribute] = symbol
        copy_referenced_symbols(module.operation, result)
        # Groups name devices within the rank; partition_id still yields the number in the set.
        own = range(rank * devices, (rank + 1) * devices)
        stated = ModuleFacts.from_module(module, [])
        meshes = ModuleFacts.from_module(result, []).meshes
        facts = ModuleFacts(stated.grid, meshes)
        for collective in find_collectives(result):
            groups = facts.groups(collective)
            if groups is not None:
                _set_groups(collective, groups, own)
        for op in ops_named(result.operation, {PARTITION_ID}) if own.start else []:
            number = op.results[0]
            build = Builder(ir.InsertionPoint.after(op), ir.Location.unknown())
            offset = build.splat(own.start, [], element_of(number))
            total = build.same("add", number, offset)
            number.replace_all_uses_except(total, [maker_of(total)])
        erase_unused_meshes(result)  # meshes with the ranks would make equal functions differ
        number = ir.IntegerType.get_signless(32)
        for what, count in (("partitions", devices), ("replicas", 1)):
            result.operation.attributes[f"mhlo.num_{what}"] = ir.IntegerAttr.get(number, count)
    return result


def module_of(op: ir.Operation) -> ir.Module:
    """Returns a module whose `main` runs `op`, which is not a call and has no regions."""
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


def _reachable_functions(functions: dict[str, ir.Operation], name: str) -> list[str]:
    """Returns a function and its direct and indirect callees, in the order of their first calls."""
    called = [name]
    for caller in called:  # the list grows in the loop
        if caller not in functions:
            raise ToolError(f"the called function @{caller} does not exist")
        callees = map(callee_name, ops_named(functions[caller], CALLS))
        called += dict.fromkeys(callee for callee in callees if callee not in called)
    return called


def _set_groups(collective: Collective, groups: Sequence[Sequence[int]], own: range) -> None:
    kept = [[i - own.start for i in group] for group in groups if set(group) & set(own)]
    if any(i not in range(len(own)) for group in kept for i in group):
        raise ToolError(
            f"{collective.inner.name} in a function communicates with another rank, which only "
            "sends and recvs in @main may do",
            collective.op.location,
        )
    if collective.is_async_call:
        raise ToolError(
            f"{label(collective.op)} in a function: its groups cannot be renumbered for a rank",
            collective.op.location,
        )
    is_permute = collective.kind == "collective_permute"
    name = "source_target_pairs" if is_permute else "replica_groups"
    width = 2 if is_permute else max(map(len, kept), default=0)
    table = np.array([[*g, *[-1] * (width - len(g))] for g in kept], np.int64)
    collective.inner.attributes[name] = ir.DenseElementsAttr.get(table.reshape(len(kept), width))


def any_values(devices: Sequence[Any]) -> NamedSharding:
    """Returns the sharding of arrays with any contents on each device.

    It is formally "replicated". No other sharding allows contents that differ in any way.
    """
    return NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())


def run_on(executable: Any, taken: Sequence[Parts], whole: NamedSharding) -> list[Parts]:
    """Runs a per-device program on the devices of this process, with the sharding `whole`."""
    if whole.num_devices == 1:
        results = executable.execute_sharded([part for (part,) in taken])
    else:
        make = jax.make_array_from_single_device_arrays
        results = executable.execute_sharded([make(p[0].shape, whole, p) for p in taken])
    return [list(parts) for parts in results.disassemble_into_single_device_arrays()]


def permutes_left(executable: Any) -> int:
    """Returns the number of permutes in a compiled program: a compiler may have deleted some."""
    return len(_PERMUTE.findall(executable.hlo_modules()[0].to_string()))

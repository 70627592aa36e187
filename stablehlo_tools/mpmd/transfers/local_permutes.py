"""Writes the permutes inside of functions, within a rank, without any: for processes on XLA:CPU.

There every process takes part in every permute, and only the devices of a rank issue these.

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [2, 3]]}   // ranks of two devices
    ==>
    %y = call @permuted(%x)
    func @permuted(%x) {
      %all = "stablehlo.all_gather"(%x as one row) {groups = [[0, 1], [2, 3]]}
      %source = the place of this device in the table [-1, 0, -1, 0]
      return (%source < 0) ? zeros : %all[%source]
    }
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CALL
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.mpmd.transfers.ends import zeros_of

_NAME, _PLACE = "permuted", "@NAME("


def gather_local_permutes(module: ir.Module, ranks: int, devices: int) -> None:
    """Rewrites every permute whose pairs are within ranks of so many devices, in place."""
    facts = ModuleFacts.of(module, [])
    made: dict[str, str] = {}
    taken = set(functions_by_name(module))
    for collective in find_collectives(module):
        op, pairs = collective.op, facts.groups(collective) or ()
        if collective.kind != "collective_permute" or op != collective.inner:
            continue
        if any(source // devices != target // devices for source, target in pairs):
            continue
        name = next(n for i in range(len(taken) + 1) if (n := f"{_NAME}_{i}") not in taken)
        kind = ir.RankedTensorType(op.results[0].type)
        text = _function(kind, pairs, ranks, devices)
        if text not in made:
            made[text] = name
            taken.add(name)
            with module.context:
                parsed = ir.Module.parse(text.replace(_PLACE, f"@{name}("))
            for view in parsed.body.operations:
                view.operation.clone(ip=ir.InsertionPoint(module.body))
        with module.context:
            call = ir.Operation.create(
                CALL,
                results=[kind],
                operands=list(op.operands),
                attributes={"callee": ir.FlatSymbolRefAttr.get(made[text])},
                loc=op.location,
                ip=ir.InsertionPoint(op),
            )
        op.results[0].replace_all_uses_with(call.results[0])
        op.erase()


def _function(
    kind: ir.RankedTensorType, pairs: Sequence[Sequence[int]], ranks: int, devices: int
) -> str:
    """The function that makes a permute, its name left out."""
    sizes, element = "".join(f"{size}x" for size in kind.shape), kind.element_type
    row, rows = (f"tensor<{count}x{sizes}{element}>" for count in (1, devices))
    groups = [[rank * devices + d for d in range(devices)] for rank in range(ranks)]
    sources = {target: source % devices for source, target in pairs}
    table = [sources.get(device, -1) for device in range(ranks * devices)]
    count, axes = len(table), len(kind.shape)
    starts = "".join(", %zero" for _ in range(axes))
    indices = ", ".join(["tensor<i32>"] * (1 + axes))
    cut = ", ".join(map(str, (1, *kind.shape)))
    return f"""
      func.func private {_PLACE}%x: {kind}) -> {kind} {{
        %row = stablehlo.reshape %x : ({kind}) -> {row}
        %all = "stablehlo.all_gather"(%row) <{{
          all_gather_dim = 0 : i64,
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          replica_groups = dense<{groups}> : tensor<{ranks}x{devices}xi64>, use_global_device_ids
        }}> : ({row}) -> {rows}
        %table = stablehlo.constant dense<{table}> : tensor<{count}xi32>
        %device = stablehlo.partition_id : tensor<ui32>
        %entry = stablehlo.dynamic_slice %table, %device, sizes = [1]
          : (tensor<{count}xi32>, tensor<ui32>) -> tensor<1xi32>
        %source = stablehlo.reshape %entry : (tensor<1xi32>) -> tensor<i32>
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %found = stablehlo.dynamic_slice %all, %source{starts}, sizes = [{cut}]
          : ({rows}, {indices}) -> {row}
        %value = stablehlo.reshape %found : ({row}) -> {kind}
        %is_there = stablehlo.compare GE, %source, %zero
          : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %none = stablehlo.constant {zeros_of(kind)}
        %y = stablehlo.select %is_there, %value, %none : tensor<i1>, {kind}
        return %y : {kind}
      }}
    """

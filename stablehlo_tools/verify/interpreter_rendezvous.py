"""Makes the collectives of a module right in the StableHLO reference interpreter, for two devices.

The interpreter keeps what a collective's participants gave under the collective's channel and
process group, and never forgets it (jaxlib 0.12: `ProcessGrid::rendezvous` copies `values` where it
means to move it). When the same two come up again, which two collectives without a channel do, and
any collective in a loop, the first device to arrive is not made to wait: it takes what the other
gave the last time. So each collective gets a channel of its own and runs twice, with the devices
waiting for each other behind each run; what the second run finds is new from both.

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 0]]}
      ==>
    %stale = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 0]], channel = 1}
    call @meet() : () -> ()
    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 0]], channel = 1}
    call @meet() : () -> ()

`@meet` sends and receives, which the interpreter does right where one device sends and one other
receives; sends and recvs of the program are made so. All ids become flattened ids, on a grid of one
replica.
"""

from __future__ import annotations

import json

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.replica_groups import ProcessGrid, ProcessGroups
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.collectives import EXCHANGE_GROUPED, REDUCTION_GROUPED
from stablehlo_tools.verify.interpreter_transfers import separate_transfers

_PERMUTE = "collective_permute"
_REWRITTEN = REDUCTION_GROUPED | EXCHANGE_GROUPED | {_PERMUTE}


def separate_rendezvous(program: ir.Module, grid: ProcessGrid, meet: str) -> str:
    """Rewrites `program` in place, for `grid.size` partitions of one replica.

    Returns the text of the function `@meet`, which it now calls.
    """
    facts = ModuleFacts(grid, {})
    collectives = find_collectives(program)
    channels = [collective.channel_id for collective in collectives]
    for channel, collective in enumerate(collectives, start=1):
        if collective.kind in _REWRITTEN:
            groups = facts.groups(collective) or ()
            _renumber(collective, groups, channel)
            if any(len(set(group)) > 1 for group in groups):
                _repeat(collective.op, meet)
    _flatten_ids(program, grid)
    free = 1 + max([len(collectives), *channels])
    return _meeting(meet, separate_transfers(collectives, facts, free))


def _renumber(collective: Collective, groups: ProcessGroups, channel: int) -> None:
    attributes = collective.inner.attributes
    name = "source_target_pairs" if collective.kind == _PERMUTE else "replica_groups"
    attributes[name] = ir.Attribute.parse(_table(groups))
    attributes["channel_handle"] = ir.Attribute.parse(_channel(channel))
    if collective.kind in REDUCTION_GROUPED:
        attributes["use_global_device_ids"] = ir.UnitAttr.get()


def _repeat(op: ir.Operation, meet: str) -> None:
    again = op.clone(ip=ir.InsertionPoint.after(op))
    for old, new in zip(op.results, again.results, strict=True):
        old.replace_all_uses_with(new)
    for run in (op, again):
        ir.Operation.create(
            "func.call",
            attributes={"callee": ir.FlatSymbolRefAttr.get(meet)},
            ip=ir.InsertionPoint.after(run),
        )


def _flatten_ids(program: ir.Module, grid: ProcessGrid) -> None:
    """replica_id and partition_id out of the one id that is left."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in ("stablehlo.replica_id", "stablehlo.partition_id"):
            found.append(op)
        return ir.WalkResult.ADVANCE

    program.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    for op in found:
        kind = op.results[0].type
        at = ir.InsertionPoint(op)
        flat = ir.Operation.create("stablehlo.partition_id", results=[kind], ip=at)
        width = ir.Operation.create(
            "stablehlo.constant",
            results=[kind],
            attributes={"value": ir.Attribute.parse(f"dense<{grid.num_partitions}> : {kind}")},
            ip=at,
        )
        part = "divide" if op.name == "stablehlo.replica_id" else "remainder"
        own = ir.Operation.create(
            f"stablehlo.{part}",
            results=[kind],
            operands=[flat.results[0], width.results[0]],
            ip=at,
        )
        op.results[0].replace_all_uses_with(own.results[0])
        op.erase()


def _meeting(name: str, channel: int) -> str:
    """A function that device 0 and device 1 leave only after both have entered it."""
    there, back = _channel(channel), _channel(channel + 1)
    first = _receive(there, "1, 0") + _send(back, "0, 1")
    second = _send(there, "1, 0") + _receive(back, "0, 1")
    return f"""
func.func private @{name}() {{
  %word = stablehlo.constant dense<1> : tensor<i32>
  %token = stablehlo.after_all : !stablehlo.token
  %id = stablehlo.partition_id : tensor<ui32>
  %index = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
  %done = "stablehlo.case"(%index) ({{
    {first}
    stablehlo.return %word : tensor<i32>
  }}, {{
    {second}
    stablehlo.return %word : tensor<i32>
  }}) : (tensor<i32>) -> tensor<i32>
  return
}}"""


def _send(channel: str, pair: str) -> str:
    return f"""
    %sent = "stablehlo.send"(%word, %token) <{_transfer(channel, pair)}>
      : (tensor<i32>, !stablehlo.token) -> !stablehlo.token"""


def _receive(channel: str, pair: str) -> str:
    return f"""
    %received:2 = "stablehlo.recv"(%token) <{_transfer(channel, pair)}>
      : (!stablehlo.token) -> (tensor<i32>, !stablehlo.token)"""


def _transfer(channel: str, pair: str) -> str:
    pairs = f"dense<[[{pair}]]> : tensor<1x2xi64>"
    return (
        f"{{channel_handle = {channel}, is_host_transfer = false, source_target_pairs = {pairs}}}"
    )


def _table(groups: ProcessGroups) -> str:
    """A dense attribute; -1 fills short rows."""
    width = max((len(group) for group in groups), default=0)
    rows = [[*group, *[-1] * (width - len(group))] for group in groups]
    return f"dense<{json.dumps(rows) if rows else ''}> : tensor<{len(rows)}x{width}xi64>"


def _channel(number: int) -> str:
    return f"#stablehlo.channel_handle<handle = {number}, type = 1>"

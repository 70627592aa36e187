"""What tests of ranges of layers ask: how a case is cut, and what passes between loops."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jax.export import Exported
from models.layer_scan import LayerScanModel

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import layer_loops
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, functions_by_name

ALONE = {"stage": 1, "data": 1, "model": 1}
COUNTS = {2: (1, 1), 4: (1, 3), 6: (1, 2, 3), 7: (2, 5), 8: (3, 1, 4)}
_WHILE = "stablehlo.while"
_RESTACKING = frozenset(
    f"stablehlo.{name}" for name in ("concatenate", "dynamic_update_slice", "pad", "slice")
)


def height(case: LayerScanModel) -> int:
    """How many iterations the loops over layers of a case have: the most of all loops that stand
    for themselves, or in a loop over microbatches."""
    text = case.loops if case.config.accumulate > 1 else re.sub(r"\[.*?\]", "", case.loops)
    return max(map(int, re.findall(r"\d+", text)))


def listed(counts: tuple[int, ...]) -> str:
    """Counts as an option of a pass."""
    return ",".join(map(str, counts))


def restacked(exported: Exported) -> list[str]:
    """Where the rows that a loop has written are put together, or cut, before a loop reads them."""
    module = artifact.from_exported(exported).module
    inline_all_calls(module)
    block = Function(entry_function(module)).body
    found: list[str] = []
    for loop in layer_loops(block, Effects(functions_by_name(module))):
        for carry in loop.reads:
            if carry in loop.writes:
                continue
            ops = list(_behind_loops(loop.op.operands[carry]))
            if any(op.name == _WHILE for op in ops):
                found += [str(op) for op in ops if op.name in _RESTACKING]
    return found


def carried_shapes(exported: Exported) -> list[list[tuple[int, ...]]]:
    """The shapes of what each outermost loop carries, in the order of the text."""
    module = artifact.from_exported(exported).module
    inline_all_calls(module)
    block = Function(entry_function(module)).body
    loops = [view.operation for view in block.operations if view.operation.name == _WHILE]
    return [
        [tuple(ir.RankedTensorType(result.type).shape) for result in loop.results] for loop in loops
    ]


def _behind_loops(value: ir.Value) -> Iterator[ir.Operation]:
    """The ops that a value is computed by, as far back as loops, which are the last."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        maker = producer(pending.pop())
        if maker is None or not len(maker.results) or maker.results[0] in seen:
            continue
        seen.add(maker.results[0])
        yield maker
        if maker.name != _WHILE:
            pending += maker.operands

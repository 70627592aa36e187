"""Whether a program still has collectives to get, from a partitioner."""

from __future__ import annotations

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.communication import MANUAL_COMPUTATION
from stablehlo_tools.analysis.entry import entry_function, is_per_device
from stablehlo_tools.analysis.shardings import manual_axes
from stablehlo_tools.analysis.tensor_shardings import SHARDING
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.symbols import FUNCTION
from stablehlo_tools.ir.walk import walk

_NO_WORK = frozenset({"func.return", "stablehlo.constant", "stablehlo.optimization_barrier"})


def leaves_work_to_the_partitioner(module: ir.Module) -> bool:
    """Whether some of a program is written for all devices and sharded among them."""
    if ModuleFacts.of(module).grid.num_partitions < 2 or is_per_device(module):
        return False
    if not _is_sharded(module):
        return False
    block = entry_function(module).regions[0].blocks[0]
    return any(not _is_manual(op.operation, module) for op in block.operations)


def _is_sharded(module: ir.Module) -> bool:
    """Whether anything in a module is divided among devices."""
    found = False

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal found
        found = (
            op.name in (MANUAL_COMPUTATION, "sdy.sharding_constraint") or SHARDING in op.attributes
        )
        if op.name == FUNCTION and not found:
            lists = [op.attributes[n] for n in ("arg_attrs", "res_attrs") if n in op.attributes]
            found = any(SHARDING in ir.DictAttr(e) for part in lists for e in ir.ArrayAttr(part))
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found


def _is_manual(op: ir.Operation, module: ir.Module) -> bool:
    """Whether an op of `main` is written for one device, or does nothing."""
    if op.name != MANUAL_COMPUTATION:
        return op.name in _NO_WORK
    free = {
        name
        for mesh in ModuleFacts.of(module).meshes.values()
        for name, size in mesh.axes
        if size > 1
    }
    return free <= manual_axes(op)

"""The program that a module means, without what its shardings make of it.

A sharding says where values are, not what they are. So a program without those outside of its
manual computations is what it computes, whatever a partitioner does with it.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.gspmd import is_gspmd
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import COLLECTIVES, DEVICE_IDS, Trait, ops_with_any
from stablehlo_tools.ir.gspmd_import import import_gspmd
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import enclosing, erase_unused_meshes, ops_named, ops_where

_PLACING = ops_with_any(Trait.SHARDING_ONLY | Trait.RESHARDING)
_GROUPING = "sdy.sharding_group"
_ATTRIBUTES = ("sdy.sharding", "mhlo.sharding")
_BORDER = ("in_shardings", "out_shardings")
_OF_DEVICES = COLLECTIVES | DEVICE_IDS
_PARTITIONS = "mhlo.num_partitions"


def drop_shardings(module: ir.Module, devices: int) -> int | None:
    """Takes all shardings but those of manual computations out of a module, in place.

    Returns how many devices run what is left: 1 without manual computations. None, with a module
    that is not to be used, if there is a collective outside of a manual computation, or parts of a
    sum cross the border of one.
    """
    if any(map(is_gspmd, ops_where(module.operation, lambda op: True))):
        try:
            import_gspmd(module)
        except ToolError:
            return None
    inline_all_calls(module)
    manual = ops_named(module.operation, (MANUAL_COMPUTATION,))
    of_devices = ops_named(module.operation, _OF_DEVICES)
    if any(enclosing(op, MANUAL_COMPUTATION) is None for op in of_devices):
        return None
    if any("unreduced=" in str(op.attributes[side]) for op in manual for side in _BORDER):
        return None
    for op in ops_where(module.operation, lambda op: True):
        for name in _ATTRIBUTES:
            if name in op.attributes:
                del op.attributes[name]
        for side in ("arg_attrs", "res_attrs"):
            if side in op.attributes:
                op.attributes[side] = _without_shardings(ir.ArrayAttr(op.attributes[side]))
    for op in ops_named(module.operation, _PLACING):
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    for op in ops_named(module.operation, (_GROUPING,)):
        op.erase()
    if manual:
        return devices
    erase_unused_meshes(module)
    one = ir.IntegerAttr.get(ir.IntegerType.get_signless(32, module.context), 1)
    module.operation.attributes[_PARTITIONS] = one
    return 1


def _without_shardings(entries: ir.ArrayAttr) -> ir.ArrayAttr:
    kept = [
        {each.name: each.attr for each in ir.DictAttr(entry) if each.name not in _ATTRIBUTES}
        for entry in entries
    ]
    context = entries.context
    return ir.ArrayAttr.get([ir.DictAttr.get(entry, context) for entry in kept], context)

"""Drops the shardings of a program, which computes the same without them."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.gspmd import is_gspmd
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import COLLECTIVES, DEVICE_IDS, Trait, ops_with_any
from stablehlo_tools.ir.gspmd_import import import_gspmd
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import (
    drop_attributes_everywhere,
    enclosing,
    erase_unused_meshes,
    ops_named,
    ops_where,
)

_PLACING = ops_with_any(Trait.SHARDING_ONLY | Trait.RESHARDING)
_BORDER = ("in_shardings", "out_shardings")


def drop_shardings(module: ir.Module, devices: int) -> int | None:
    """Removes all shardings except those of manual computations, in place.

    A sharding places values and does not change them, so the program computes the same without it.

    Returns the number of devices that run the rest: 1 without manual computations. None if there is
    a collective outside manual computations, or partial sums cross the border of one; then do not
    use the module.
    """
    if any(map(is_gspmd, ops_where(module.operation, lambda op: True))):
        try:
            import_gspmd(module)
        except ToolError:
            return None
    inline_all_calls(module, products=True)
    manual = ops_named(module.operation, (MANUAL_COMPUTATION,))
    of_devices = ops_named(module.operation, COLLECTIVES | DEVICE_IDS)
    if any(enclosing(op, MANUAL_COMPUTATION) is None for op in of_devices):
        return None
    if any("unreduced=" in str(op.attributes[side]) for op in manual for side in _BORDER):
        return None
    drop_attributes_everywhere(module, ("sdy.sharding", "mhlo.sharding"))
    for op in ops_named(module.operation, _PLACING):
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    for op in ops_named(module.operation, ("sdy.sharding_group",)):
        op.erase()
    if manual:
        return devices
    erase_unused_meshes(module)
    one = ir.IntegerAttr.get(ir.IntegerType.get_signless(32, module.context), 1)
    module.operation.attributes["mhlo.num_partitions"] = one
    return 1

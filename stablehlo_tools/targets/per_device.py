"""Lets XLA's partitioner pass a program that is written for one device.

`jax.export` writes programs for all devices: their collectives stand inside manual computations.
A module whose collectives stand outside (what Shardy's partitioner makes, or torch-xla) is what
each device runs already. XLA compiles that as it is where every device is a replica; where they
are partitions its partitioner would take the values for global ones and refuse `partition_id`, so
the body goes into a manual computation over all partitions, with nothing sharded:

    func @main(%x: tensor<4xf32>) { %y = "stablehlo.all_reduce"(%x) … return %y }
    ==>
    func @main(%x: tensor<4xf32>) {
      %r = sdy.manual_computation(%x) … manual_axes={"device"} (%a: tensor<4xf32>) {
        %y = "stablehlo.all_reduce"(%a) … sdy.return %y
      }
      return %r
    }
"""

from __future__ import annotations

from stablehlo_tools.analysis.entry import ENTRY
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.manual import wrap_body
from stablehlo_tools.ir.symbols import FUNCTION, functions_by_name, symbol_name
from stablehlo_tools.ir.walk import walk

_SHARDING = "sdy.sharding"
_AXIS = "device"


def make_manual(module: ir.Module, partitions: int) -> None:
    """Puts the body of `main` into a manual computation over `partitions` devices, in place.

    Shardings that a partitioner left on the values of a program for one device are dropped: they
    describe global values.
    """
    main = functions_by_name(module)[ENTRY]
    _drop_shardings(module)
    mesh = _add_mesh(module, partitions)
    block = main.regions[0].blocks[0]
    inputs = [argument.type for argument in block.arguments]
    outputs = [value.type for value in terminator(block).operands]
    taken, given = (_replicated(types, mesh, main.context) for types in (inputs, outputs))
    wrap_body(main, taken, given, [_AXIS], (inputs, outputs))


def _drop_shardings(module: ir.Module) -> None:
    def visit(op: ir.Operation) -> ir.WalkResult:
        if _SHARDING in op.attributes:
            del op.attributes[_SHARDING]
        for name in ("arg_attrs", "res_attrs"):
            if op.name == FUNCTION and name in op.attributes:
                op.attributes[name] = _without_shardings(op.attributes[name])
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def _without_shardings(attribute: ir.Attribute) -> ir.Attribute:
    context = attribute.context
    kept = [
        ir.DictAttr.get({e.name: e.attr for e in entry if e.name != _SHARDING}, context)
        for entry in map(ir.DictAttr, ir.ArrayAttr(attribute))
    ]
    return ir.ArrayAttr.get(kept, context)


def _add_mesh(module: ir.Module, partitions: int) -> str:
    taken = {symbol_name(op) for op in module.body.operations if "sym_name" in op.attributes}
    name = next(n for n in (f"devices_{i}" for i in range(len(taken) + 1)) if n not in taken)
    mesh = ir.Operation.parse(
        f'sdy.mesh @{name} = <["{_AXIS}"={partitions}]>', context=module.context
    )
    ir.InsertionPoint.at_block_begin(module.body).insert(mesh)
    return name


def _replicated(types: list[ir.Type], mesh: str, context: ir.Context) -> ir.Attribute:
    """A sharding for each value that shards nothing."""
    ranks = [t.rank if isinstance(t, ir.RankedTensorType) else 0 for t in types]
    each = ", ".join(f"<@{mesh}, [{', '.join(['{}'] * rank)}]>" for rank in ranks)
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{each}]>", context)

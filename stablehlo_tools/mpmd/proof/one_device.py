"""What one device of a rank exchanges with those of other ranks, as a program of its own.

By M1 the collectives of a function stay within a rank, and its devices run one program: they issue
the same in the same order. Device d sends to device d of another rank, whatever d is. So whether
ranks can wait for each other is seen from one device of each, by its sends and receives alone.
"""

from __future__ import annotations

from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.copying import copy_module
from stablehlo_tools.ir.manual import unwrap_body
from stablehlo_tools.ir.symbols import functions_by_name

_TRANSFERS = frozenset({"stablehlo.send", "stablehlo.recv"})
_PAIRS = "source_target_pairs"
_MESH = "sdy.mesh"


def one_device(program: ir.Module, ranks: int, devices: int) -> ir.Module:
    """A copy for one device of each rank: functions compute nothing, and rank r is device r."""
    module = copy_module(program)
    main = entry_function(module)
    with module.context, ir.Location.unknown():
        for view in list(main.regions[0].blocks[0].operations):
            if view.operation.name == MANUAL_COMPUTATION:
                unwrap_body(main, view.operation)
                break
        for view in main.regions[0].blocks[0].operations:
            if view.operation.name in _TRANSFERS:
                _between_ranks(view.operation, devices)
        for function in functions_by_name(module).values():
            if function != main:
                _compute_nothing(function)
        for view in list(module.body.operations):
            if view.operation.name == _MESH:
                view.operation.erase()
        kind = ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(kind, ranks)
    return module


def _between_ranks(transfer: ir.Operation, devices: int) -> None:
    pairs = [int(number) for number in ir.DenseIntElementsAttr(transfer.attributes[_PAIRS])]
    first = [number // devices for number in pairs[:2]]
    transfer.attributes[_PAIRS] = ir.Attribute.parse(f"dense<[{first}]> : tensor<1x2xi64>")


def _compute_nothing(function: ir.Operation) -> None:
    block = function.regions[0].blocks[0]
    end = terminator(block)
    build = Builder(ir.InsertionPoint(end), function.location)
    for position, value in enumerate(list(end.operands)):
        scalar = build.splat(0, [], element_of(value))
        end.operands[position] = build.broadcast(scalar, shape_of(value), [])
    for view in list(block.operations)[::-1]:
        op = view.operation
        if op != end and not any(list(result.uses) for result in op.results):
            op.erase()

"""Resolves the index of the platform, by which an export for several platforms chooses lowerings.

The `main` of such an artifact takes the index as its first argument, before those of the exported
function. It passes the index to functions and manual computations, and selects lowerings by it:

    func @main(%i: tensor<i32> {jax.global_constant = "_platform_index"}, %x) {
      %y = "stablehlo.case"(%i) ({ … all_gather … }, { … all_gather … })
    ==>
    func @main(%x) { %y = … all_gather … }

Only the forms that jax.export writes are resolved: indices passed to functions and manual
computations, cases over them, and cases over the constants that such cases return.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import CASE, CONSTANT, MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.carriers import drop_entry_argument
from stablehlo_tools.ir.rewriter import inline_block
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Case, Function, ManualComputation
from stablehlo_tools.ir.walk import FUNCTION, functions_by_name

_GLOBAL_CONSTANT = "jax.global_constant"
_PLATFORM_INDEX = "_platform_index"


def is_platform_index(attributes: ir.DictAttr | None) -> bool:
    """Returns True if an argument with these attributes is the platform index."""
    if attributes is None or _GLOBAL_CONSTANT not in attributes:
        return False
    return ir.StringAttr(attributes[_GLOBAL_CONSTANT]).value == _PLATFORM_INDEX


def platform_arguments(function: ir.Operation) -> list[int]:
    """Returns the positions of the arguments that are the platform index."""
    listed = function.attributes.get("arg_attrs")
    if listed is None:
        return []
    entries = map(ir.DictAttr, ir.ArrayAttr(listed))
    return [position for position, entry in enumerate(entries) if is_platform_index(entry)]


def own_arguments(function: ir.Operation) -> list[ir.Value]:
    """Returns the arguments of the exported function, without the platform index."""
    added = platform_arguments(function)
    arguments = Function(function).body.arguments
    return [argument for position, argument in enumerate(arguments) if position not in added]


def own_argument(function: ir.Operation, number: int, asks: str, rule: str) -> ir.Value:
    """Returns the own argument of a number. Raises a located ToolError if there is none; it begins
    with the words `asks` and names the `rule` of a pass."""
    taken = own_arguments(function)
    if not 0 <= number < len(taken):
        raise ToolError(
            f"{asks}there is no argument {number}: the program takes {len(taken)} ({rule})",
            function.location,
        )
    return taken[number]


def argument_number(argument: ir.Value) -> int:
    """Returns the position of a block argument; for `main`, without counting the platform index."""
    taken = ir.BlockArgument(argument)
    number, owner = taken.arg_number, taken.owner.owner.operation
    if owner.name != FUNCTION:
        return number
    return number - sum(position < number for position in platform_arguments(owner))


def fix_platform(module: ir.Module, index: int) -> None:
    """Replaces the platform index by a constant, and each case over it by the selected branch.

    In place; signatures do not change.
    """
    for function in functions_by_name(module).values():
        arguments = platform_arguments(function)
        if not arguments or not function.regions[0].blocks:
            continue
        block = Function(function).body
        for position in arguments:
            _replace_by_constant(block, block.arguments[position], index)
        _resolve_ops([op.operation for op in block.operations])


def drop_platform_argument(function: ir.Operation) -> None:
    """Erases the platform index argument, which must be unused, of a function without callers."""
    if platform_arguments(function)[:1] == [0]:
        drop_entry_argument(function, 0)


def _resolve_ops(ops: list[ir.Operation]) -> None:
    for op in ops:
        if op.name == CASE:
            chosen = _constant_value(op.operands[0])
            if chosen is not None:
                # StableHLO runs the last branch if the index is out of range.
                branches = Case(op).branches
                taken = branches[chosen if 0 <= chosen < len(branches) else -1]
                _resolve_ops(inline_block(taken, op))
                continue
        if op.name == MANUAL_COMPUTATION:
            block = ManualComputation(op).body
            for position, operand in enumerate(op.operands):
                value = _constant_value(operand)
                if value is not None:
                    _replace_by_constant(block, block.arguments[position], value)
        for region in op.regions:
            for block in region.blocks:
                _resolve_ops([inner.operation for inner in block.operations])


def _constant_value(value: ir.Value) -> int | None:
    """Returns the value of a scalar integer constant; None for other values."""
    op = producer(value)
    if op is None or op.name != CONSTANT:
        return None
    attribute = op.attributes["value"]
    if not isinstance(attribute, ir.DenseIntElementsAttr) or len(attribute) != 1:
        return None
    return int(attribute[0])


def _replace_by_constant(block: ir.Block, argument: ir.Value, value: int) -> None:
    type_ = ir.RankedTensorType(argument.type)
    build = Builder(ir.InsertionPoint.at_block_begin(block), block.owner.location)
    argument.replace_all_uses_with(build.splat(value, type_.shape, type_.element_type))

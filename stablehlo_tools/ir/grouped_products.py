"""Products of groups of rows with a matrix each, kept as one op while a program is divided.

jax writes `lax.ragged_dot` for TPU as a composite. Inlined, each group would multiply all rows, and
its decomposition has the size of the batch. So the passes that cut a batch work on a call:

    %y = composite "chlo.ragged_dot" %rows, %w, %sizes       [rows, k], [groups, k, n], [groups]
  ==>
    %y = custom_call @chlo.ragged_dot(%rows, %w, %sizes)

`routing.py` replaces the sizes by the group of each row. Then a row does not depend on the others.
`write_products` writes composites again, with the number of rows in each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import called_target
from stablehlo_tools.dialect.microbatch_marks import ROWS
from stablehlo_tools.dialect.names import COMPOSITE, CUSTOM_CALL, RAGGED_DOT
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.walk import FUNCTION, callee_name, functions_by_name, ops_named

_LISTED = "composite_attributes"
_NUMBERS, _COUNT = "ragged_dot_dimension_numbers", 6


@dataclass(frozen=True)
class GroupedProduct:
    """A product of rows, `[rows, k]`, with the matrix of each row's group, `[groups, …]`, along
    dimension `contracted` of it. A gradient of the matrices has rows instead of them, `[rows, n]`,
    and sums over those of each group."""

    contracted: int
    is_gradient: bool

    @staticmethod
    def from_op(op: ir.Operation) -> GroupedProduct | None:
        """Reads a composite or a call; returns None for other ops, and for other forms."""
        if op.name == COMPOSITE:
            target: str | None = ir.StringAttr(op.attributes["name"]).value
        else:
            target = called_target(op)
        listed = op.attributes.get(_LISTED)
        if target != RAGGED_DOT or listed is None or _NUMBERS not in ir.DictAttr(listed):
            return None
        numbers = [
            [int(each) for each in np.array(ir.DenseIntElementsAttr(dims))]
            for dims in ir.ArrayAttr(ir.DictAttr(listed)[_NUMBERS])
        ]
        if len(numbers) != _COUNT or len(shape_of(op.operands[0])) != 2:
            return None
        *batch, of_rows, of_matrices, ragged, groups = numbers
        if batch != [[], []] or ragged != [0]:
            return None
        if (of_rows, of_matrices, groups) == ([0], [0], []):
            return GroupedProduct(0, is_gradient=True)
        is_plain = of_rows == [1] and of_matrices in ([1], [2]) and groups == [0]
        return GroupedProduct(of_matrices[0], is_gradient=False) if is_plain else None


def hide_products(module: ir.Module, among: Iterable[ir.Operation] | None = None) -> bool:
    """Replaces composites of grouped products by calls, in place: all, or those `among` ops.
    Returns True if there were any."""
    hidden: set[str] = set()
    for op in ops_named(module.operation, {COMPOSITE}) if among is None else among:
        if op.name != COMPOSITE or GroupedProduct.from_op(op) is None:
            continue
        attributes = {
            "call_target_name": ir.StringAttr.get(RAGGED_DOT, op.context),
            "has_side_effect": ir.BoolAttr.get(False, op.context),
            _LISTED: op.attributes[_LISTED],
        }
        hidden.add(callee_name(op))
        _replace(op, CUSTOM_CALL, list(op.operands), attributes)
    if not hidden:
        return False
    still_called = {callee_name(op) for op in ops_named(module.operation, CALLS)}
    functions = functions_by_name(module)
    for name in hidden - still_called:
        functions[name].erase()
    return True


def write_products(module: ir.Module) -> None:
    """Replaces the calls by composites, in place."""
    symbols: dict[tuple[str, ...], str] = {}
    for op in ops_named(module.operation, {CUSTOM_CALL}):
        product = GroupedProduct.from_op(op)
        if product is None:
            continue
        operands = list(op.operands)
        if ROWS in op.attributes:
            operands[2] = _rows_of_groups(op, product)
        listed = op.attributes[_LISTED]
        key = (*(str(value.type) for value in (*operands, op.results[0])), str(listed))
        if key not in symbols:
            symbols[key] = _write_decomposition(module, op, product, operands)
        attributes = {
            "name": ir.StringAttr.get(RAGGED_DOT, op.context),
            "decomposition": ir.FlatSymbolRefAttr.get(symbols[key], op.context),
            "version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32, op.context), 1),
            _LISTED: listed,
        }
        _replace(op, COMPOSITE, operands, attributes)


def _replace(
    op: ir.Operation, name: str, operands: list[ir.Value], attributes: Mapping[str, ir.Attribute]
) -> None:
    build = Builder(ir.InsertionPoint(op), op.location)
    made = build.create(name, operands, [op.results[0].type], attributes)
    op.results[0].replace_all_uses_with(made.results[0])
    op.erase()


def _rows_of_groups(op: ir.Operation, product: GroupedProduct) -> ir.Value:
    """Counts the rows of each group, `[groups]`, for a call that has the group of each row."""
    build, groups = Builder(ir.InsertionPoint(op), op.location), op.operands[2]
    count = shape_of(op.results[0] if product.is_gradient else op.operands[1])[0]
    shape = [count, *shape_of(groups)]
    type_ = build.tensor(shape, element_of(groups))
    spread = build.broadcast(groups, shape, [1])
    ones = build.convert(build.compare("EQ", spread, build.iota(type_, 0)), element_of(groups))
    return build.reduce(ones, build.splat(0, [], element_of(groups)), [1], "add")


def _write_decomposition(
    module: ir.Module, op: ir.Operation, product: GroupedProduct, operands: list[ir.Value]
) -> str:
    """Writes a function that masks the rows of each group; returns its name."""
    taken, number = functions_by_name(module), 0
    while (symbol := f"{RAGGED_DOT}.impl_{number}") in taken:
        number += 1
    types, made = [value.type for value in operands], op.results[0].type
    attributes = {
        "sym_name": ir.StringAttr.get(symbol, op.context),
        "sym_visibility": ir.StringAttr.get("private", op.context),
        "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [made], op.context)),
    }
    function = Builder(ir.InsertionPoint(module.body), op.location).create(
        FUNCTION, [], [], attributes, regions=1
    )
    block = ir.Block.create_at_start(function.regions[0], types, [op.location] * len(types))
    build = Builder(ir.InsertionPoint(block), op.location)
    rows, other, sizes = block.arguments
    element, (groups,) = element_of(sizes), shape_of(sizes)
    # ends[j] is the sum of sizes[i] for i <= j.
    square = build.tensor([groups, groups], element)
    lower = build.compare("LE", build.iota(square, 0), build.iota(square, 1))
    zeros = build.splat(0, [groups, groups], element)
    summed = build.same("select", lower, build.broadcast(sizes, [groups, groups], [0]), zeros)
    ends = build.reduce(summed, build.splat(0, [], element), [0], "add")
    starts = build.same("subtract", ends, sizes)
    # A copy of the rows for each group, with zeros for those of other groups.
    shape = [groups, *shape_of(rows)]
    place = build.iota(build.tensor(shape, element), 1)
    above = build.compare("GE", place, build.broadcast(starts, shape, [0]))
    below = build.compare("LT", place, build.broadcast(ends, shape, [0]))
    copies = build.broadcast(rows, shape, [1, 2])
    mask = build.same("and", above, below)
    masked = build.same("select", mask, copies, build.splat(0, shape, element_of(rows)))
    dims = ([1], [0]) if product.is_gradient else ([0, 2], [0, product.contracted])
    contracted = f"lhs_contracting_dimensions = {dims[0]}, rhs_contracting_dimensions = {dims[1]}"
    stated = {
        "dot_dimension_numbers": ir.Attribute.parse(f"#stablehlo.dot<{contracted}>", op.context)
    }
    listed = ir.DictAttr(op.attributes[_LISTED])
    if "precision_config" in listed:
        names = (ir.StringAttr(each).value for each in ir.ArrayAttr(listed["precision_config"]))
        precision = ", ".join(f"#stablehlo<precision {name}>" for name in names)
        stated["precision_config"] = ir.Attribute.parse(f"[{precision}]", op.context)
    result = build.op("dot_general", [masked, other], made, **stated)
    build.create("func.return", [result], [])
    return symbol

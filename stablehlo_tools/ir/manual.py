"""Putting the body of a function into one manual computation, and taking ops out of one."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import resize_function, terminator


def wrap_body(
    function: ir.Operation,
    in_shardings: ir.Attribute,
    out_shardings: ir.Attribute,
    axes: Sequence[str],
    outside: tuple[Sequence[ir.Type], Sequence[ir.Type]],
) -> None:
    """Moves a function's ops into a manual computation over the axes.

    The values keep their types inside; `outside` are those of the function's arguments and
    results.
    """
    block = function.regions[0].blocks[0]
    end = terminator(block)
    body = [op.operation for op in block.operations][:-1]
    arguments = list(block.arguments)
    inner_types = [argument.type for argument in arguments]
    for argument, type_ in zip(arguments, outside[0], strict=True):
        argument.set_type(type_)
    named = ", ".join(f'"{axis}"' for axis in axes)
    manual = ir.Operation.create(
        "sdy.manual_computation",
        results=list(outside[1]),
        operands=arguments,
        attributes={
            "in_shardings": in_shardings,
            "out_shardings": out_shardings,
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{named}}}>", function.context),
        },
        regions=1,
        loc=function.location,
        ip=ir.InsertionPoint.at_block_begin(block),
    )
    inside = manual.regions[0].blocks.append(
        *inner_types, arg_locs=[function.location] * len(arguments)
    )
    for op in body:
        inside.append(op)
    for outer, inner in zip(arguments, inside.arguments, strict=True):
        outer.replace_all_uses_except(inner, [manual])
    with ir.InsertionPoint(inside):
        ir.Operation.create("sdy.return", operands=list(end.operands), loc=function.location)
    for index, result in enumerate(manual.results):
        end.operands[index] = result


def unwrap_body(function: ir.Operation, manual: ir.Operation) -> None:
    """Makes the body of a manual computation that of the function of which it is all.

    Arguments and results get the types that they have inside, and lose their attributes.
    """
    block = function.regions[0].blocks[0]
    inside = manual.regions[0].blocks[0]
    for outer, inner in zip(list(block.arguments), list(inside.arguments), strict=True):
        outer.set_type(inner.type)
        inner.replace_all_uses_with(outer)
    returned = list(terminator(inside).operands)
    for op in [op.operation for op in inside.operations][:-1]:
        op.move_before(manual)
    end = terminator(block)
    for position, value in enumerate(returned):
        end.operands[position] = value
    manual.erase()
    for name in ("arg_attrs", "res_attrs"):
        if name in function.attributes:
            del function.attributes[name]
    resize_function(function, 0, 0)


def dissolve(computation: ir.Operation) -> list[ir.Operation]:
    """Puts the ops of a computation of Shardy's in its place, and gives them."""
    inside = computation.regions[0].blocks[0]
    for argument, operand in zip(inside.arguments, computation.operands, strict=True):
        argument.replace_all_uses_with(operand)
    end = terminator(inside)
    for result, value in zip(computation.results, end.operands, strict=True):
        result.replace_all_uses_with(value)
    ops = [op.operation for op in inside.operations][:-1]
    for op in ops:
        op.move_before(computation)
    computation.erase()
    return ops

"""Inlines functions and manual computations, and moves bodies between them.

A call becomes a copy of the function's body. A function's body moves into one manual computation,
and back. A manual computation of Shardy is replaced by its ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.carriers import resize_function
from stablehlo_tools.ir.grouped_products import hide_products
from stablehlo_tools.ir.rewriter import inline_block, replace
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import (
    callee_name,
    enclosing,
    functions_by_name,
    ops_named,
    ops_where,
    terminator,
    walk,
)
from stablehlo_tools.ir.while_loop import before_loops

# Inlining may leave this many ops in a module, or this multiple of its ops.
MOST_UNFOLDED = 20_000
MOST_GROWTH = 20


def inline_call(call: ir.Operation, function: ir.Operation) -> list[ir.Operation]:
    """Copies the body of `function` before `call` and erases the call.

    The values that the body returns replace the call's results. Returns the top-level ops that were
    copied. Those without a source line, as jax writes them for `jnp.roll` or `jnp.linalg.svd`, get
    the line of the call.
    """
    point = ir.InsertionPoint(call)
    copies, returned = copy_body(Function(function).body, list(call.operands), point)
    line = call.location.child_loc if isinstance(call.location, ir.NameLoc) else call.location
    if not isinstance(line, ir.UnknownLoc):
        for copy in copies:
            _add_line(copy, line)
    replace(call, returned)
    return copies


def _add_line(op: ir.Operation, line: ir.Location) -> None:
    """Gives an op, and those in its regions, a line if their locations are only names."""

    def visit(inner: ir.Operation) -> ir.WalkResult:
        own = inner.location
        if isinstance(own, ir.UnknownLoc):
            inner.location = line
        elif isinstance(own, ir.NameLoc) and isinstance(own.child_loc, ir.UnknownLoc):
            inner.location = ir.Location.name(own.name_str, line, op.context)
        return ir.WalkResult.ADVANCE

    walk(op, visit)


def copy_body(
    body: ir.Block, operands: Sequence[ir.Value], point: ir.InsertionPoint
) -> tuple[list[ir.Operation], list[ir.Value]]:
    """Copies the ops of a block, except its terminator, with `operands` in place of its arguments.

    Returns the top-level copies, and the values that correspond to the terminator's operands.
    """
    values: dict[ir.Value, ir.Value] = dict(zip(body.arguments, operands, strict=True))
    copies: list[ir.Operation] = []
    end = terminator(body)
    for op in body.operations:
        if op.operation == end:
            break
        copy = copy_with(op.operation, values, point)
        values.update(zip(op.operation.results, copy.results, strict=True))
        copies.append(copy)
    return copies, [values.get(value, value) for value in end.operands]


def inline_all_calls(module: ir.Module, *, products: bool = False) -> None:
    """Inlines every call and composite of functions with bodies; erases the private ones.

    Grouped products in manual computations become calls of kernels unless `products` (see
    `ir/grouped_products.py`; a pass need not replace them, because the pass pipeline does).

    Raises a located ToolError for a recursive call, and for calls that would multiply the ops: for
    example f calls g twice, which calls h twice, and so on.
    """
    functions = functions_by_name(module)
    if len(functions) < 2:
        return
    bodies = _read_bodies(functions)
    order = _callees_first(bodies)
    if not products and hide_products(module, _manual_calls(bodies, order)):
        bodies = _read_bodies(functions := functions_by_name(module))
        order = _callees_first(bodies)
    dropped = _unused_callees(bodies, functions)
    _check_growth(bodies, order, dropped)
    # Callees first, so that a copied body has no calls left in it.
    for name in order:
        for call in bodies[name].calls:
            inline_call(call, functions[callee_name(call)])
    for name in functions:
        if name in dropped:
            functions[name].erase()


def check_unfolding(module: ir.Module) -> None:
    """Raises the same ToolErrors as `inline_all_calls`, for callers that follow calls."""
    functions = functions_by_name(module)
    bodies = _read_bodies(functions)
    _check_growth(bodies, _callees_first(bodies), _unused_callees(bodies, functions))


def _unused_callees(
    bodies: Mapping[str, _CallBody], functions: Mapping[str, ir.Operation]
) -> set[str]:
    """Returns the private functions that are called, which are unused after inlining."""
    called = {callee_name(call) for body in bodies.values() for call in body.calls}
    return {name for name in called if "sym_visibility" in functions[name].attributes}


@dataclass(frozen=True)
class _CallBody:
    """The number of ops in a function, and its calls of functions with a body."""

    ops: int
    calls: tuple[ir.Operation, ...]


def _read_bodies(functions: Mapping[str, ir.Operation]) -> dict[str, _CallBody]:
    """Counts the ops of each function, in all its regions, and finds its calls."""
    with_body = {name for name, op in functions.items() if len(op.regions[0].blocks) == 1}
    bodies: dict[str, _CallBody] = {}
    for name, function in functions.items():
        ops = ops_where(function, lambda _: True)
        calls = [op for op in ops if op.name in CALLS and callee_name(op) in with_body]
        bodies[name] = _CallBody(len(ops), tuple(calls))
    return bodies


def _manual_calls(
    bodies: Mapping[str, _CallBody], callees_first: Sequence[str]
) -> list[ir.Operation]:
    """Returns the calls that only manual computations make."""
    outside = set(bodies) - {callee_name(call) for body in bodies.values() for call in body.calls}
    found: list[ir.Operation] = []
    for name in reversed(callees_first):
        for call in bodies[name].calls:
            if name in outside and enclosing(call, MANUAL_COMPUTATION) is None:
                outside.add(callee_name(call))
            else:
                found.append(call)
    return found


def _callees_first(bodies: Mapping[str, _CallBody]) -> list[str]:
    """Returns the functions, callees first. Raises a located ToolError for recursion."""
    order: list[str] = []
    finished: set[str] = set()
    for start in bodies:
        path = [(start, iter(bodies[start].calls))] if start not in finished else []
        open_ = {start}
        while path:
            name, calls = path[-1]
            call = next(calls, None)
            if call is None:
                path.pop()
                open_.discard(name)
                finished.add(name)
                order.append(name)
                continue
            callee = callee_name(call)
            if callee in open_:
                raise ToolError(f"@{callee} calls itself", call.location)
            if callee not in finished:
                open_.add(callee)
                path.append((callee, iter(bodies[callee].calls)))
    return order


def _check_growth(
    bodies: Mapping[str, _CallBody], callees_first: Sequence[str], dropped: Set[str]
) -> None:
    """Raises a ToolError, located at a call, if inlining would give too many ops."""
    unfolded: dict[str, int] = {}
    for name in callees_first:
        inside = (unfolded[callee_name(call)] for call in bodies[name].calls)
        unfolded[name] = bodies[name].ops + sum(inside)
    whole = sum(ops for name, ops in unfolded.items() if name not in dropped)
    written = sum(body.ops for body in bodies.values())
    if whole <= max(MOST_UNFOLDED, MOST_GROWTH * written):
        return
    largest = max((name for name in unfolded if name not in dropped), key=unfolded.__getitem__)
    call = max(bodies[largest].calls, key=lambda call: unfolded[callee_name(call)])
    raise ToolError(
        f"inlining the calls of @{callee_name(call)} would grow {written:,} ops to {whole:,}, too "
        "many to analyse: make a loop of repeated calls, or call fewer levels deep",
        call.location,
    )


def copy_with(
    op: ir.Operation, values: Mapping[ir.Value, ir.Value], point: ir.InsertionPoint
) -> ir.Operation:
    """Copies an op and replaces the values that it reads, in its regions too."""
    copy = op.clone(ip=point)
    rename(copy, values)
    return copy


def rename(op: ir.Operation, values: Mapping[ir.Value, ir.Value]) -> None:
    """Replaces operands of an op, and of the ops in its regions, by the values mapped to them."""
    for position, value in enumerate(op.operands):
        if value in values:
            op.operands[position] = values[value]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                rename(inner.operation, values)


def wrap_body(
    function: ir.Operation,
    shardings: tuple[Sequence[ir.Attribute], Sequence[ir.Attribute]],
    axes: Sequence[str],
    outside: tuple[Sequence[ir.Type], Sequence[ir.Type]],
) -> None:
    """Moves a function's ops into a manual computation over the axes.

    The values keep their types inside. `outside` has the types of the function's arguments and of
    its results.
    """
    block = Function(function).body
    end = terminator(block)
    body = [op.operation for op in block.operations][:-1]
    arguments = list(block.arguments)
    inner_types = [argument.type for argument in arguments]
    for argument, type_ in zip(arguments, outside[0], strict=True):
        argument.set_type(type_)
    build = Builder(ir.InsertionPoint.at_block_begin(block), function.location)
    manual = build.manual_computation(arguments, outside[1], shardings, axes)
    inside = manual.regions[0].blocks.append(
        *inner_types, arg_locs=[function.location] * len(arguments)
    )
    for op in body:
        # `append` moves the op and keeps its uses.
        inside.append(op)
    for outer, inner in zip(arguments, inside.arguments, strict=True):
        outer.replace_all_uses_except(inner, [manual])
    returning = Builder(ir.InsertionPoint(inside), function.location)
    returning.create("sdy.return", list(end.operands), [])
    for index, result in enumerate(manual.results):
        end.operands[index] = result


def unwrap_body(function: ir.Operation, manual: ir.Operation) -> None:
    """Moves the body of a manual computation into the function that contains only it.

    The function's arguments and results get the types inside, and lose their attributes.
    """
    outside, inside = Function(function).body, ManualComputation(manual).body
    for outer, inner in zip(outside.arguments, inside.arguments, strict=True):
        outer.set_type(inner.type)
        inner.replace_all_uses_with(outer)
    inline_block(inside, manual)
    for name in ("arg_attrs", "res_attrs"):
        if name in function.attributes:
            del function.attributes[name]
    resize_function(function, 0, 0)


def dissolve(computation: ir.Operation) -> list[ir.Operation]:
    """Replaces a manual computation of Shardy by its ops; returns them."""
    inside = ManualComputation(computation).body
    for argument, operand in zip(inside.arguments, computation.operands, strict=True):
        argument.replace_all_uses_with(operand)
    return inline_block(inside, computation)


def copy_from_sources(module: ir.Module) -> None:
    """Copies values into the manual computations that use them, if another one without operands
    makes them.

    jax splits a shard_map. A first one makes values that do not depend on operands, such as an iota
    or zeros. They reach the second one in arrays of all devices.

        %0 = manual_computation() { return iota }         // outside of the loop over layers
        manual_computation(%0, %x) { sort(%arg0, …) }     // in it
      ==>
        manual_computation(%0, %x) { sort(iota, …) }
    """
    for op in ops_named(module.operation, {MANUAL_COMPUTATION}):
        body, copies = ManualComputation(op).body, dict[ir.Value, ir.Value]()
        point = ir.InsertionPoint.at_block_begin(body)
        entering = _per_value(op, "in_shardings")
        for place, operand in enumerate(op.operands):
            value = before_loops(operand)
            source = producer(value)
            if source is None or source.name != MANUAL_COMPUTATION or len(source.operands):
                continue
            number = ir.OpResult(value).result_number
            leaving = _per_value(source, "out_shardings")
            axes = [str(each.attributes["manual_axes"]) for each in (op, source)]
            if str(leaving[number]) != str(entering[place]) or axes[0] != axes[1]:
                continue
            made = ManualComputation(source).yield_of(number)
            if _copy_chain(made, ManualComputation(source).body, copies, point):
                body.arguments[place].replace_all_uses_with(copies[made])


def _copy_chain(
    value: ir.Value, block: ir.Block, copies: dict[ir.Value, ir.Value], point: ir.InsertionPoint
) -> bool:
    """Copies a value and its sources out of a block. Returns False, for a value of
    control flow, or from outside of the block."""
    if value in copies:
        return True
    op = producer(value)
    if op is None or op.block != block or len(op.regions):
        return False
    if not all(_copy_chain(operand, block, copies, point) for operand in op.operands):
        return False
    copies.update(zip(op.results, copy_with(op, copies, point).results, strict=True))
    return True


def _per_value(op: ir.Operation, name: str) -> list[ir.Attribute]:
    return list(bindings.TensorShardingPerValueAttr(op.attributes[name]).shardings)

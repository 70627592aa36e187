"""Restores Shardy's ops from the custom calls and attributes that encode them in HLO.

jax writes HLO with `xla.sdy.*` frontend attributes and custom calls; until 0.5 it also wrote
exports like that. XLA converts them back to Shardy's dialect before it partitions. This module is
that step (XLA's `sdy_round_trip_import`), for the forms that occur in jax's programs:

    frontend attribute xla.sdy.meshes of the module            sdy.mesh
    frontend attribute xla.sdy.sharding of an argument, an op  sdy.sharding
    frontend attribute xla.sdy.sharding_rule of an op          sdy.sharding_rule
    custom_call @Sharding with xla.sdy.sharding                sdy.sharding_constraint
    custom_call @xla.sdy.FuncResultSharding                    the sharding of a result
    custom_call @xla.sdy.ShardingGroup, @…PropagationBarrier   the ops of these names
    GlobalToLocalShape, call of a body, LocalToGlobalShape     sdy.manual_computation
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import called_target
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES as _FRONTEND
from stablehlo_tools.dialect.frontend_attributes import (
    SIDES,
    entries_of,
    set_side_entries,
    side_entries,
)
from stablehlo_tools.dialect.gspmd import GSPMD, is_manual_body
from stablehlo_tools.dialect.names import CALL, MANUAL_COMPUTATION, RESHAPE, SHARDING_CONSTRAINT
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.inline import copy_body
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import (
    FUNCTION,
    MESH,
    callee_name,
    functions_by_name,
    ops_where,
    symbol_name,
    terminator,
)

_SHARDING = "sdy.sharding"
_MESHES = "xla.sdy.meshes"
_CARRIED_SHARDING = "xla.sdy.sharding"
_CONSTRAINT, _RESULT = "Sharding", "xla.sdy.FuncResultSharding"
_ENTER, _LEAVE = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
_GROUP, _BARRIER = "xla.sdy.ShardingGroup", "xla.sdy.PropagationBarrier"
# The frontend attributes of ops, and the names of the restored attributes.
_OF_OPS = {_CARRIED_SHARDING: _SHARDING, "xla.sdy.sharding_rule": "sdy.sharding_rule"}
_REPEATED = "xla.sdy.has_unreduced_axes"  # the sharding beside it names these axes
_ESCAPED = re.compile(r"\\(.)")


def restore_shardy(module: ir.Module) -> None:
    """Restores Shardy's ops and attributes, in place. Leaves modules without them unchanged.

    Raises a ToolError for a manual computation in an unknown form.
    """
    carried = _frontend(module.operation)
    if _MESHES not in carried:
        return
    _restore_meshes(module, carried.pop(_MESHES))
    _keep_frontend(module.operation, carried)
    functions = functions_by_name(module)
    for function in functions.values():
        for side in SIDES:
            _restore_signature(function, side)
    for function in functions.values():
        _restore_manual_computations(function, functions)
    for name, function in functions.items():
        if is_manual_body(name):
            function.erase()
    _restore_ops(module)


def set_entry(
    function: ir.Operation, side: str, number: int, name: str, attribute: ir.Attribute
) -> None:
    """Sets an attribute of an argument (`side` is `arg_attrs`) or a result (`res_attrs`).

    A Shardy sharding replaces the `mhlo.sharding`.
    """
    set_entries(function, side, name, {number: attribute})


def set_entries(
    function: ir.Operation, side: str, name: str, attributes: Mapping[int, ir.Attribute]
) -> None:
    """Sets an attribute of several arguments or results, by their numbers: see `set_entry`."""
    block = Function(function).body
    count = len(block.arguments if side == "arg_attrs" else terminator(block).operands)
    entries = side_entries(function, side) or [{} for _ in range(count)]
    for number, attribute in attributes.items():
        if name == _SHARDING:
            entries[number].pop(GSPMD, None)
        entries[number][name] = attribute
    set_side_entries(function, side, entries)


def _frontend(op: ir.Operation) -> dict[str, str]:
    """Returns the frontend attributes of an op that are strings; empty without any."""
    return _strings(op.attributes.get(_FRONTEND))


def _strings(attribute: ir.Attribute | None) -> dict[str, str]:
    # jax's exports escape the inner quotes; modules converted from HLO do not.
    return {
        name: _ESCAPED.sub(r"\1", entry.value)
        for name, entry in entries_of(attribute).items()
        if isinstance(entry, ir.StringAttr)
    }


def _restore_meshes(module: ir.Module, carried: str) -> None:
    meshes = ir.DictAttr(_parse(carried, module.operation))
    present = {symbol_name(op) for op in module.body.operations if op.operation.name == MESH}
    for named in meshes:
        if named.name not in present:
            name = ir.StringAttr.get(named.name, module.context)
            point = ir.InsertionPoint.at_block_begin(module.body)
            build = Builder(point, module.operation.location)
            build.create(MESH, [], [], {"sym_name": name, "mesh": named.attr})


def _restore_signature(function: ir.Operation, side: str) -> None:
    entries = side_entries(function, side)
    for kept in entries:
        carried = _strings(kept.get(_FRONTEND))
        if _CARRIED_SHARDING in carried:
            kept[_SHARDING] = _parse(carried.pop(_CARRIED_SHARDING), function)
            del kept[_FRONTEND]
            kept.update(_frontend_of(carried, function.context))
        kept.pop(GSPMD, None)
    if entries:
        set_side_entries(function, side, entries)


def _frontend_of(strings: dict[str, str], context: ir.Context) -> dict[str, ir.Attribute]:
    """Returns frontend attributes in the form of op attributes; empty if there are none."""
    named: dict[str, ir.Attribute] = {
        name: ir.StringAttr.get(text, context)
        for name, text in strings.items()
        if name != _REPEATED
    }
    return {_FRONTEND: ir.DictAttr.get(named, context)} if named else {}


def _keep_frontend(op: ir.Operation, strings: dict[str, str]) -> None:
    """Sets the frontend attributes of an op to exactly these."""
    del op.attributes[_FRONTEND]
    for name, attribute in _frontend_of(strings, op.context).items():
        op.attributes[name] = attribute


def _restore_manual_computations(
    function: ir.Operation, functions: dict[str, ir.Operation]
) -> None:
    """Restores the manual computations whose bodies a function calls.

    Handles the bodies first, as their ops are copied.
    """
    for call in ops_where(function, lambda op: op.name == CALL and is_manual_body(callee_name(op))):
        body = functions.get(callee_name(call))
        if body is None:
            raise ToolError(
                f"the called function @{callee_name(call)} does not exist", call.location
            )
        _restore_manual_computations(body, functions)
        _restore_manual_computation(call, body)


def _restore_manual_computation(call: ir.Operation, body: ir.Operation) -> None:
    # the op that makes the body's operands local, if any, and the global operands
    entered = next(filter(None, (producer(value) for value in call.operands)), None)
    if entered is not None and entered.name == "stablehlo.get_tuple_element":
        entered = producer(entered.operands[0])
    if entered is not None and called_target(entered) != _ENTER:
        entered = None
    operands = list((entered or call).operands)
    left, results = _left(call)
    stated = {
        name: text for op in (left, entered, call) if op for name, text in _frontend(op).items()
    }
    if "xla.sdy.manual_axes" not in stated:
        raise ToolError(
            f"@{callee_name(call)} is the body of a manual computation, but neither its call nor "
            f"a {_ENTER.removeprefix('xla.sdy.')} around it states its axes",
            call.location,
        )
    empty = "#sdy.sharding_per_value<[]>"
    build = Builder(ir.InsertionPoint(call), (left or entered or call).location)
    attributes = {
        name: _parse(stated.get(f"xla.sdy.{name}", empty), call)
        for name in ("in_shardings", "out_shardings", "manual_axes")
    }
    types = [value.type for value in results]
    manual = build.create(MANUAL_COMPUTATION, operands, types, attributes, regions=1)
    source = Function(body).body
    block = manual.regions[0].blocks.append(
        *[argument.type for argument in source.arguments],
        arg_locs=[argument.location for argument in source.arguments],
    )
    point = ir.InsertionPoint(block)
    _, returned = copy_body(source, list(block.arguments), point)
    Builder(point, terminator(source).location).create("sdy.return", returned, [])
    for value, new in zip(results, manual.results, strict=True):
        value.replace_all_uses_with(new)
    # Erases the three ops that encoded the computation, and the users that unpack their tuples.
    for op in filter(None, (left, call, entered)):
        for value in op.results:
            for user in [use.owner.operation for use in value.uses]:
                user.erase()
        op.erase()


def _left(call: ir.Operation) -> tuple[ir.Operation | None, list[ir.Value]]:
    """Returns the op that makes a body's results global, if any, and the global results."""
    users = [use.owner.operation for value in call.results for use in value.uses]
    op = next((user for user in users if called_target(user) == _LEAVE), None)
    if op is None:
        return None, list(call.results)
    if not str(op.results[0].type).startswith("tuple<"):
        return op, list(op.results)
    elements = [use.owner.operation for use in op.results[0].uses]
    by_index = {ir.IntegerAttr(e.attributes["index"]).value: e.results[0] for e in elements}
    if len(by_index) != len(elements) or set(by_index) != set(range(len(op.operands))):
        raise ToolError(
            f"{_LEAVE}: the program does not use all results of a manual computation", op.location
        )
    return op, [by_index[index] for index in range(len(by_index))]


def _restore_ops(module: ir.Module) -> None:
    for op in ops_where(module.operation, lambda _: True):
        # The attributes of the module and of functions are restored already.
        if op == module.operation or op.name == FUNCTION:
            continue
        target, carried = called_target(op), _frontend(op)
        if target == _RESULT:
            _restore_result(op, carried)
        elif target == _CONSTRAINT and _CARRIED_SHARDING in carried:
            sharding = _first_sharding(carried[_CARRIED_SHARDING], op)
            _replace_call(op, SHARDING_CONSTRAINT, {"sharding": sharding})
        elif target == _GROUP:
            _replace_call(op, "sdy.sharding_group", {"group_id": _number(op)})
        elif target == _BARRIER:
            _replace_call(op, "sdy.propagation_barrier", {"allowed_direction": _number(op)})
        else:
            if GSPMD in op.attributes:
                del op.attributes[GSPMD]
            restored = {
                own: _parse(carried.pop(n), op) for n, own in _OF_OPS.items() if n in carried
            }
            if restored:
                _keep_frontend(op, carried)
                for name, attribute in restored.items():
                    op.attributes[name] = attribute


def _number(op: ir.Operation) -> ir.Attribute:
    """Returns the number that the call of a group or a barrier carries, such as `2 : i64`."""
    texts = [text for name, text in _frontend(op).items() if name.startswith("xla.sdy.")]
    return _parse(texts[0] if texts else "", op)


def _replace_call(op: ir.Operation, name: str, attributes: dict[str, ir.Attribute]) -> None:
    """Replaces a custom call by an op of Shardy. Raises a ToolError unless it has one operand."""
    if len(op.operands) != 1:
        raise ToolError(
            f"@{called_target(op)} needs one operand, not {len(op.operands)}", op.location
        )
    is_value = name != "sdy.sharding_group"
    types = [result.type for result in op.results] if is_value else []
    build = Builder(ir.InsertionPoint(op), op.location)
    new = build.create(name, list(op.operands), types, attributes)
    replace(op, new.results if is_value else [op.operands[0]] * len(op.results))


def _restore_result(op: ir.Operation, carried: dict[str, str]) -> None:
    """Moves the sharding of a FuncResultSharding call to the function's result; erases the call."""
    if _CARRIED_SHARDING not in carried or len(op.operands) != 1:
        raise ToolError(
            f"@{called_target(op)} does not state the sharding of one value", op.location
        )
    sharding = _first_sharding(carried[_CARRIED_SHARDING], op)
    uses = [(use.owner.operation, use.operand_number) for use in op.results[0].uses]
    op.results[0].replace_all_uses_with(op.operands[0])
    for user, number in uses:
        if user.name == "func.return":
            set_entry(user.parent.operation, "res_attrs", number, _SHARDING, sharding)
        elif user.name == RESHAPE and not has_uses(user.results[0]):
            user.erase()  # it carried the same sharding in HLO's form
    op.erase()


def _first_sharding(carried: str, op: ir.Operation) -> ir.Attribute:
    """Returns the only sharding of `#sdy.sharding_per_value<[<@mesh, ...>]>`."""
    inner = carried.removeprefix("#sdy.sharding_per_value<[").removesuffix("]>")
    return _parse(f"#sdy.sharding{inner}", op)


def _parse(text: str, op: ir.Operation) -> ir.Attribute:
    """Parses an attribute that an op carries as text. Raises a located ToolError if invalid."""
    try:
        return ir.Attribute.parse(text, op.context)
    except ir.MLIRError:
        raise ToolError(f"unreadable Shardy attribute: {text} (P1)", op.location) from None

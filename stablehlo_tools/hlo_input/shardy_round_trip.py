"""Shardy's ops, which HLO does not have, out of the custom calls and attributes they travel in.

jax writes HLO with `xla.sdy.*` frontend attributes and custom calls, which XLA turns back into
Shardy's dialect before it partitions. This is that step (XLA's `sdy_round_trip_import`), for what
jax's programs hold:

    frontend attribute xla.sdy.meshes of the module            sdy.mesh
    frontend attribute xla.sdy.sharding of an argument, an op  sdy.sharding
    custom_call @Sharding with xla.sdy.sharding                sdy.sharding_constraint
    custom_call @xla.sdy.FuncResultSharding                    the sharding of a result
    GlobalToLocalShape, call of a body, LocalToGlobalShape     sdy.manual_computation
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.inline import copy_body
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import callee_name, functions_by_name, terminator, walk

_FRONTEND = "mhlo.frontend_attributes"
_HLO_SHARDING = "mhlo.sharding"
_SHARDING = "sdy.sharding"
_MESHES = "xla.sdy.meshes"
_CARRIED_SHARDING = "xla.sdy.sharding"
_CONSTRAINT, _RESULT = "Sharding", "xla.sdy.FuncResultSharding"
_ENTER, _LEAVE = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
_BODY = "xla.sdy.manual_computation_body"


def restore_shardy(module: ir.Module) -> None:
    """Puts Shardy's ops and attributes back, in place. Leaves a module of GSPMD's as it is.

    Raises a ToolError for a manual computation that is not written in the one form known.
    """
    carried = _frontend(module.operation)
    if _MESHES not in carried:
        return
    _restore_meshes(module, carried[_MESHES])
    for function in functions_by_name(module).values():
        _restore_arguments(function)
    for call in _calls_of_bodies(module):
        _restore_manual_computation(module, call)
    _restore_ops(module)


def set_entry(
    function: ir.Operation, side: str, number: int, name: str, attribute: ir.Attribute
) -> None:
    """Gives an argument (`side` is `arg_attrs`) or a result (`res_attrs`) of a function an
    attribute; what HLO says of its sharding goes, where Shardy says it."""
    block, context = function.regions[0].blocks[0], function.context
    listed = function.attributes.get(side, None)
    count = len(block.arguments if side == "arg_attrs" else terminator(block).operands)
    nothing: ir.Attribute = ir.DictAttr.get({}, context)
    entries = [nothing] * count if listed is None else list(ir.ArrayAttr(listed))
    kept = {named.name: named.attr for named in ir.DictAttr(entries[number])}
    if name == _SHARDING:
        kept.pop(_HLO_SHARDING, None)
    entries[number] = ir.DictAttr.get({**kept, name: attribute}, context)
    function.attributes[side] = ir.ArrayAttr.get(entries, context)


def _frontend(op: ir.Operation) -> dict[str, str]:
    """The frontend attributes of an op, all of which are strings."""
    if _FRONTEND not in op.attributes:
        return {}
    return _strings(op.attributes[_FRONTEND])


def _strings(attribute: ir.Attribute) -> dict[str, str]:
    entries = {named.name: named.attr for named in ir.DictAttr(attribute)}
    return {n: a.value for n, a in entries.items() if isinstance(a, ir.StringAttr)}


def _restore_meshes(module: ir.Module, carried: str) -> None:
    meshes = ir.DictAttr(ir.Attribute.parse(carried, module.context))
    present = {
        ir.StringAttr(view.operation.attributes["sym_name"]).value
        for view in module.body.operations
        if view.operation.name == "sdy.mesh"
    }
    for named in meshes:
        if named.name not in present:
            ir.Operation.create(
                "sdy.mesh",
                attributes={
                    "sym_name": ir.StringAttr.get(named.name, module.context),
                    "mesh": named.attr,
                },
                loc=module.operation.location,
                ip=ir.InsertionPoint.at_block_begin(module.body),
            )


def _restore_arguments(function: ir.Operation) -> None:
    if "arg_attrs" not in function.attributes:
        return
    context = function.context
    entries: list[ir.Attribute] = []
    for entry in ir.ArrayAttr(function.attributes["arg_attrs"]):
        kept = {named.name: named.attr for named in ir.DictAttr(entry)}
        carried = _strings(kept[_FRONTEND]) if _FRONTEND in kept else {}
        if _CARRIED_SHARDING in carried:
            kept[_SHARDING] = ir.Attribute.parse(carried.pop(_CARRIED_SHARDING), context)
            _keep_rest(kept, carried, context)
        kept.pop(_HLO_SHARDING, None)
        entries.append(ir.DictAttr.get(kept, context))
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(entries, context)


def _keep_rest(kept: dict[str, ir.Attribute], rest: dict[str, str], context: ir.Context) -> None:
    if rest:
        strings: dict[str, ir.Attribute] = {
            name: ir.StringAttr.get(text, context) for name, text in rest.items()
        }
        kept[_FRONTEND] = ir.DictAttr.get(strings, context)
    else:
        kept.pop(_FRONTEND, None)


def _calls_of_bodies(module: ir.Module) -> list[ir.Operation]:
    """The calls of bodies of manual computations, the inner ones last."""
    calls: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "func.call" and callee_name(op).startswith(_BODY):
            calls.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return calls


def _restore_manual_computation(module: ir.Module, call: ir.Operation) -> None:
    body = functions_by_name(module)[callee_name(call)]
    entered, operands = _entered(call)
    left, results = _left(call)
    stated = {**(_frontend(left) if left else {}), **(_frontend(entered) if entered else {})}
    if "xla.sdy.manual_axes" not in stated:
        raise ToolError(
            f"@{callee_name(call)} is the body of a manual computation, and no "
            f"{_ENTER.removeprefix('xla.sdy.')} around its call says over which axes",
            call.location,
        )
    empty = "#sdy.sharding_per_value<[]>"
    manual = ir.Operation.create(
        "sdy.manual_computation",
        results=[value.type for value in results],
        operands=operands,
        attributes={
            name: ir.Attribute.parse(stated.get(f"xla.sdy.{name}", otherwise), call.context)
            for name, otherwise in (
                ("in_shardings", empty),
                ("out_shardings", empty),
                ("manual_axes", ""),
            )
        },
        regions=1,
        loc=(left or entered or call).location,
        ip=ir.InsertionPoint(call),
    )
    _fill(manual, body)
    for value, new in zip(results, manual.results, strict=True):
        value.replace_all_uses_with(new)
    _erase_chain(left, call, entered)


def _entered(call: ir.Operation) -> tuple[ir.Operation | None, list[ir.Value]]:
    """What makes the operands of a body local, and the global operands."""
    op = next(filter(None, (producer(value) for value in call.operands)), None)
    if op is not None and op.name == "stablehlo.get_tuple_element":
        op = producer(op.operands[0])
    if op is None or _target(op) != _ENTER:
        return None, list(call.operands)
    return op, list(op.operands)


def _left(call: ir.Operation) -> tuple[ir.Operation | None, list[ir.Value]]:
    """What makes the results of a body global, and the global results."""
    users = [use.owner.operation for value in call.results for use in value.uses]
    op = next((user for user in users if _target(user) == _LEAVE), None)
    if op is None:
        return None, list(call.results)
    if not str(op.results[0].type).startswith("tuple<"):
        return op, list(op.results)
    elements = [use.owner.operation for use in op.results[0].uses]
    by_index = {ir.IntegerAttr(e.attributes["index"]).value: e.results[0] for e in elements}
    if len(by_index) != len(elements) or set(by_index) != set(range(len(op.operands))):
        raise ToolError(f"{_LEAVE}: not all results of a manual computation are used", op.location)
    return op, [by_index[index] for index in range(len(by_index))]


def _target(op: ir.Operation) -> str | None:
    if op.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _fill(manual: ir.Operation, body: ir.Operation) -> None:
    """Copies the body of a function into the region of a manual computation."""
    source = body.regions[0].blocks[0]
    types = [argument.type for argument in source.arguments]
    locations = [argument.location for argument in source.arguments]
    block = manual.regions[0].blocks.append(*types, arg_locs=locations)
    _, returned = copy_body(source, list(block.arguments), ir.InsertionPoint(block))
    ir.Operation.create(
        "sdy.return",
        operands=returned,
        loc=terminator(source).location,
        ip=ir.InsertionPoint(block),
    )


def _erase_chain(
    left: ir.Operation | None, call: ir.Operation, entered: ir.Operation | None
) -> None:
    """Erases the three ops that were a manual computation, and what took their tuples apart."""
    for op in (left, call, entered):
        if op is None:
            continue
        for value in op.results:
            for user in [use.owner.operation for use in value.uses]:
                user.erase()
        op.erase()


def _restore_ops(module: ir.Module) -> None:
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        ops.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in ops:
        # What these carry, meshes and the shardings of arguments, is restored already.
        if op == module.operation or op.name == "func.func":
            continue
        target, carried = _target(op), _frontend(op)
        if target == _RESULT:
            _restore_result(op, carried)
        elif target == _CONSTRAINT and _CARRIED_SHARDING in carried:
            _restore_constraint(op, carried[_CARRIED_SHARDING])
        else:
            _restore_attributes(op, carried)


def _restore_result(op: ir.Operation, carried: dict[str, str]) -> None:
    """The sharding of a result of the function, from the custom call that hands it on."""
    sharding = _first_sharding(carried[_CARRIED_SHARDING], op.context)
    uses = [(use.owner.operation, use.operand_number) for use in op.results[0].uses]
    op.results[0].replace_all_uses_with(op.operands[0])
    for user, number in uses:
        if user.name == "func.return":
            set_entry(user.parent.operation, "res_attrs", number, _SHARDING, sharding)
        elif user.name == "stablehlo.reshape" and next(iter(user.results[0].uses), None) is None:
            user.erase()  # it carried the same sharding in HLO's words
    op.erase()


def _restore_constraint(op: ir.Operation, carried: str) -> None:
    constraint = ir.Operation.create(
        "sdy.sharding_constraint",
        results=[op.results[0].type],
        operands=[op.operands[0]],
        attributes={"sharding": _first_sharding(carried, op.context)},
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    op.results[0].replace_all_uses_with(constraint.results[0])
    op.erase()


def _first_sharding(carried: str, context: ir.Context) -> ir.Attribute:
    """The one sharding of `#sdy.sharding_per_value<[<@mesh, ...>]>`."""
    inner = carried.removeprefix("#sdy.sharding_per_value<[").removesuffix("]>")
    return ir.Attribute.parse(f"#sdy.sharding{inner}", context)


def _restore_attributes(op: ir.Operation, carried: dict[str, str]) -> None:
    if _HLO_SHARDING in op.attributes:
        del op.attributes[_HLO_SHARDING]
    if _CARRIED_SHARDING not in carried:
        return
    op.attributes[_SHARDING] = ir.Attribute.parse(carried.pop(_CARRIED_SHARDING), op.context)
    kept: dict[str, ir.Attribute] = {}
    _keep_rest(kept, carried, op.context)
    if _FRONTEND in kept:
        op.attributes[_FRONTEND] = kept[_FRONTEND]
    else:
        del op.attributes[_FRONTEND]

"""Makes an artifact one that a compiler takes: for one platform, and for one device.

Such a `main` takes the platform's index first, and picks lowerings by it:

    func @main(%i: tensor<i32> {jax.global_constant = "_platform_index"}, %x) {
      %y = "stablehlo.case"(%i) ({ … all_gather … }, { … all_gather … })
    ==>
    func @main(%x) { %y = … all_gather … }

Only what jax.export writes is resolved: indices passed on to functions and manual computations,
cases over them, and cases over the constants that such cases return. XLA folds what is left.

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
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.manual import wrap_body
from stablehlo_tools.ir.symbols import FUNCTION, functions_by_name, symbol_name
from stablehlo_tools.ir.walk import walk

_GLOBAL_CONSTANT = "jax.global_constant"
_PLATFORM_INDEX = "_platform_index"
_CASE = "stablehlo.case"
_CONSTANT = "stablehlo.constant"


def fix_platform(module: ir.Module, main: ir.Operation, index: int) -> None:
    """Specialises the module to one platform index and drops `main`'s argument for it, in place."""
    for op in module.body.operations:
        if op.operation.name == FUNCTION:
            _resolve_function(op.operation, index)
    if _platform_arguments(main)[:1] == [0]:
        _drop_first_argument(main)


def _resolve_function(function: ir.Operation, index: int) -> None:
    arguments = _platform_arguments(function)
    if not arguments or not function.regions[0].blocks:
        return
    block = function.regions[0].blocks[0]
    for position in arguments:
        _replace_by_constant(block, block.arguments[position], index)
    _resolve_ops([op.operation for op in block.operations], index)


def _resolve_ops(ops: list[ir.Operation], index: int) -> None:
    for op in ops:
        if op.name == _CASE:
            chosen = _constant_value(op.operands[0])
            if chosen is not None:
                _resolve_ops(_splice(op, chosen), index)
                continue
        if op.name == MANUAL_COMPUTATION:
            block = op.regions[0].blocks[0]
            for position, operand in enumerate(op.operands):
                value = _constant_value(operand)
                if value is not None:
                    _replace_by_constant(block, block.arguments[position], value)
        for region in op.regions:
            for block in region.blocks:
                _resolve_ops([inner.operation for inner in block.operations], index)


def _splice(case: ir.Operation, chosen: int) -> list[ir.Operation]:
    """Replaces a case by one of its branches (the last, for an index that is out of range)."""
    count = len(case.regions)
    block = case.regions[chosen if 0 <= chosen < count else count - 1].blocks[0]
    end = terminator(block)
    returned = list(end.operands)
    moved = [op.operation for op in block.operations][:-1]
    for op in moved:
        op.move_before(case)
    for result, value in zip(case.results, returned, strict=True):
        result.replace_all_uses_with(value)
    case.erase()
    return moved


def _constant_value(value: ir.Value) -> int | None:
    """The value of a scalar integer constant."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.operation.name != _CONSTANT:
        return None
    attribute = owner.operation.attributes["value"]
    if not isinstance(attribute, ir.DenseIntElementsAttr) or len(attribute) != 1:
        return None
    return int(attribute[0])


def _replace_by_constant(block: ir.Block, argument: ir.Value, value: int) -> None:
    type_ = ir.RankedTensorType(argument.type)
    constant = ir.Operation.create(
        _CONSTANT,
        results=[type_],
        attributes={
            "value": ir.DenseElementsAttr.get_splat(
                type_, ir.IntegerAttr.get(type_.element_type, value)
            )
        },
        loc=block.owner.location,
        ip=ir.InsertionPoint.at_block_begin(block),
    )
    argument.replace_all_uses_with(constant.results[0])


def _platform_arguments(function: ir.Operation) -> list[int]:
    """The positions of the arguments that carry the platform index."""
    attributes = function.attributes.get("arg_attrs")
    if attributes is None:
        return []
    positions: list[int] = []
    for position, entry in enumerate(map(ir.DictAttr, ir.ArrayAttr(attributes))):
        if _GLOBAL_CONSTANT in entry:
            name = ir.StringAttr(entry[_GLOBAL_CONSTANT]).value
            positions += [position] if name == _PLATFORM_INDEX else []
    return positions


def _drop_first_argument(function: ir.Operation) -> None:
    block = function.regions[0].blocks[0]
    block.erase_argument(0)
    attributes = list(ir.ArrayAttr(function.attributes["arg_attrs"]))[1:]
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes, function.context)
    type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    with function.context:
        dropped = ir.FunctionType.get(list(type_.inputs)[1:], list(type_.results))
        function.attributes["function_type"] = ir.TypeAttr.get(dropped)


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

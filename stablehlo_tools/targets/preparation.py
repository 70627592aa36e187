"""Makes of an artifact the one module that is given to a compiler: one platform, every op tagged.

**One platform.** The `main` of an artifact for several platforms takes the platform's index first,
and picks lowerings by it:

    func @main(%i: tensor<i32> {jax.global_constant = "_platform_index"}, %x) {
      %y = "stablehlo.case"(%i) ({ … all_gather … }, { … all_gather … })
    ==>
    func @main(%x) { %y = … all_gather … }

Only what jax.export writes is resolved: indices passed on to functions and manual computations,
cases over them, and cases over the constants that such cases return. XLA folds what is left.

**One device.** `jax.export` writes programs for all devices: their collectives stand inside manual
computations. A module whose collectives stand outside (what Shardy's partitioner makes, or
torch-xla) is what each device runs already. XLA compiles that as it is where every device is a
replica; where they are partitions its partitioner would take the values for global ones and refuse
`partition_id`, so the body goes into a manual computation over all partitions, with nothing
sharded:

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

from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.replica_groups import GroupMode, ProcessGrid
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.inline import wrap_body
from stablehlo_tools.ir.shardy_round_trip import restore_shardy
from stablehlo_tools.ir.token_chain import inline_composites
from stablehlo_tools.ir.walk import (
    ENTRY,
    FUNCTION,
    functions_by_name,
    main_function,
    symbol_name,
    terminator,
    walk,
)
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.order import Item, program_ids
from stablehlo_tools.targets.tagging import TaggedOp, tag_collectives

_GRID = ("replicas", "partitions")
_GLOBAL_CONSTANT = "jax.global_constant"
_PLATFORM_INDEX = "_platform_index"
_CASE = "stablehlo.case"
_CONSTANT = "stablehlo.constant"
_SHARDING = "sdy.sharding"
_AXIS = "device"
_DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class PreparedModule:
    """A module ready to compile, as bytecode, and what it is compared with afterwards."""

    bytecode: bytes
    grid: ProcessGrid
    arguments: int  # of main
    tagged: tuple[TaggedOp, ...]
    program: tuple[Item, ...]
    exported_for: tuple[str, ...] = ()  # platforms, as jax.export names them

    def program_ids(self) -> tuple[int, ...]:
        """The ids that `main` issues, each once, in the program's order."""
        return tuple(program_ids(self.program))


def prepare(artifact: Artifact, target: Target) -> PreparedModule:
    """A tagged copy of the artifact's module, specialised to the target's platform.

    Raises a located ToolError for a module without `main`, with symbolic shapes, with groups that
    name devices it does not have, or exported for several platforms that lack the target's.
    """
    module = artifact.copy().module
    restore_shardy(module)  # XLA ends the process on manual computations as jax 0.4 wrote them
    main = main_function(module)
    if main is None or not main.regions[0].blocks:
        raise ToolError("the module has no function @main to compile")
    index = _platform_index(artifact, target)
    if index is not None:
        _fix_platform(module, main, index)
    _check_shapes(main)
    grid = _process_grid(module)
    inline_composites(module)  # so that collectives that share a decomposition are told apart
    tagged, program = tag_collectives(module)
    if grid.num_partitions > 1 and is_per_device(module):
        _make_manual(module, grid.num_partitions)
    arguments = len(main.regions[0].blocks[0].arguments)
    platforms = () if artifact.exported is None else tuple(artifact.exported.platforms)
    code = bindings.write_bytecode(module)
    return PreparedModule(code, grid, arguments, tagged, program, platforms)


def _platform_index(artifact: Artifact, target: Target) -> int | None:
    """Which of the artifact's platforms is the target's; None where `main` does not ask."""
    if artifact.exported is None or len(artifact.exported.platforms) == 1:
        return None
    platforms = artifact.exported.platforms
    if target.platform not in platforms:
        raise ToolError(
            f"the artifact was exported for {', '.join(platforms)} and has no form for "
            f"{target.platform}: export with {target.platform!r} among the platforms"
        )
    return platforms.index(target.platform)


def _check_shapes(main: ir.Operation) -> None:
    for argument in main.regions[0].blocks[0].arguments:
        type_ = argument.type
        if isinstance(type_, ir.ShapedType) and not type_.has_static_shape:
            raise ToolError(
                f"argument {argument.arg_number} is a {type_}: a symbolic shape where sizes are "
                "needed; export with concrete shapes to compile",
                argument.location,
            )


def _process_grid(module: ir.Module) -> ProcessGrid:
    """What the module states, or else what its collectives and meshes name.

    Collectives that name no device at all (torch-xla's all_reduce over every replica) run on one
    host's worth of replicas.
    """
    facts = ModuleFacts.of(module)
    collectives = find_collectives(module)
    if not any(f"mhlo.num_{name}" in module.operation.attributes for name in _GRID):
        facts = ModuleFacts(_inferred_grid(facts, collectives), facts.meshes)
    for collective in collectives:
        facts.groups(collective)  # raises for a device that the grid does not have
    return facts.grid


def _inferred_grid(facts: ModuleFacts, collectives: list[Collective]) -> ProcessGrid:
    grid = facts.grid
    if grid.num_replicas == 1:
        sizes = [mesh.size for mesh in facts.meshes.values()]
        grid = ProcessGrid(1, max([grid.num_partitions, *sizes]))
    reduces_all = any(c.group_mode is GroupMode.CROSS_REPLICA for c in collectives)
    return ProcessGrid(_DEVICES_PER_HOST) if grid.size == 1 and reduces_all else grid


def _fix_platform(module: ir.Module, main: ir.Operation, index: int) -> None:
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


def _make_manual(module: ir.Module, partitions: int) -> None:
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

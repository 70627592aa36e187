"""Prepares an artifact for a compiler: one module for one platform, with every op tagged.

**One platform.** An artifact for several platforms is specialized to the target's platform
(`ir.platform_index`). XLA folds the remaining constants.

**One device.** `jax.export` writes programs for all devices, with collectives inside manual
computations. A module with collectives outside them (from Shardy's partitioner or torch-xla) is
already the program of each device. XLA compiles it unchanged if every device is a replica. If they
are partitions, XLA's partitioner would treat the values as global and reject `partition_id`. So the
body is moved into a manual computation over all partitions, with no sharded operand:

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
from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives, stated_grid
from stablehlo_tools.analysis.entry import erase_groups_of_one, is_per_device
from stablehlo_tools.analysis.replica_groups import GroupMode, ProcessGrid
from stablehlo_tools.analysis.shardings import tensor_sharding
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.inline import wrap_body
from stablehlo_tools.ir.platform_index import drop_platform_argument, fix_platform
from stablehlo_tools.ir.shardy_round_trip import restore_shardy
from stablehlo_tools.ir.token_chain import inline_composites
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import (
    ENTRY,
    drop_attributes_everywhere,
    functions_by_name,
    main_function,
    symbol_name,
    terminator,
)
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.schedule_order import Item, program_ids
from stablehlo_tools.targets.tagging import TaggedOp, tag_collectives

_SHARDING = "sdy.sharding"
_AXIS = "device"
_DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class PreparedModule:
    """A module ready to compile, as bytecode, and the program order to compare a schedule with."""

    bytecode: bytes
    grid: ProcessGrid
    arguments: int  # of main
    tagged: tuple[TaggedOp, ...]
    program: tuple[Item, ...]
    exported_for: tuple[str, ...] = ()  # platforms, as jax.export names them
    erased: int = 0  # collectives of groups of one

    def program_ids(self) -> tuple[int, ...]:
        """The ids that `main` issues, each once, in the program's order."""
        return tuple(program_ids(self.program))


def prepare(artifact: Artifact, target: Target) -> PreparedModule:
    """A tagged copy of the artifact's module, specialised to the target's platform.

    Raises a located ToolError for a module without `main`, with symbolic shapes, with groups that
    name devices it does not have, or exported for several platforms that lack the target's.
    """
    module = artifact.copy().module
    restore_shardy(module)  # XLA aborts the process on manual computations in jax 0.4's form
    erased = erase_groups_of_one(module)
    main = main_function(module)
    if main is None or not main.regions[0].blocks:
        raise ToolError("the module has no function @main to compile")
    platforms = () if artifact.exported is None else tuple(artifact.exported.platforms)
    if len(platforms) > 1:  # main reads the platform that it runs on
        if target.platform not in platforms:
            raise ToolError(
                f"the artifact was exported for {', '.join(platforms)}, not for "
                f"{target.platform}: export with {target.platform!r} among the platforms"
            )
        fix_platform(module, platforms.index(target.platform))
        drop_platform_argument(main)
    for argument in Function(main).body.arguments:
        type_ = argument.type
        if isinstance(type_, ir.ShapedType) and not type_.has_static_shape:
            raise ToolError(
                f"argument {argument.arg_number} is a {type_}, which has a symbolic shape; export "
                "with concrete shapes to compile",
                argument.location,
            )
    grid = _process_grid(module)
    inline_composites(module)  # so that collectives of a shared decomposition get separate ids
    tagged, program = tag_collectives(module)
    if grid.num_partitions > 1 and is_per_device(module):
        _make_manual(module, grid.num_partitions)
    # jax decides by this number whether a TPU gets the arguments as one tuple.
    arguments = len(Function(main).body.arguments)
    code = bindings.write_bytecode(module)
    return PreparedModule(code, grid, arguments, tagged, program, platforms, erased)


def _process_grid(module: ir.Module) -> ProcessGrid:
    """Returns the grid that the module states, else the one that its collectives and meshes imply.

    If collectives name no devices (torch-xla's all_reduce over every replica), the grid has the
    replicas of one host. Raises an error if a group names a device outside the grid.
    """
    facts = ModuleFacts.from_module(module)
    collectives = find_collectives(module)
    if stated_grid(module) is None:
        grid = facts.grid
        if grid.num_replicas == 1:
            sizes = [mesh.size for mesh in facts.meshes.values()]
            grid = ProcessGrid(1, max([grid.num_partitions, *sizes]))
        reduces_all = any(c.group_mode is GroupMode.CROSS_REPLICA for c in collectives)
        if grid.size == 1 and reduces_all:
            grid = ProcessGrid(_DEVICES_PER_HOST)
        facts = ModuleFacts(grid, facts.meshes)
    for collective in collectives:
        facts.groups(collective)  # raises for a device that the grid does not have
    return facts.grid


def _make_manual(module: ir.Module, partitions: int) -> None:
    """Puts the body of `main` into a manual computation over `partitions` devices, in place.

    Shardings that a partitioner left on the values of a program for one device are dropped: they
    describe global values.
    """
    main, context = functions_by_name(module)[ENTRY], module.context
    drop_attributes_everywhere(module, [_SHARDING])
    taken = {symbol_name(op) for op in module.body.operations if "sym_name" in op.attributes}
    mesh = next(n for n in (f"devices_{i}" for i in range(len(taken) + 1)) if n not in taken)
    text = f'sdy.mesh @{mesh} = <["{_AXIS}"={partitions}]>'
    ir.InsertionPoint.at_block_begin(module.body).insert(ir.Operation.parse(text, context=context))
    block = Function(main).body
    inputs = [argument.type for argument in block.arguments]
    outputs = [value.type for value in terminator(block).operands]

    def replicate(type_: ir.Type) -> ir.Attribute:
        rank = type_.rank if isinstance(type_, ir.RankedTensorType) else 0
        return tensor_sharding(mesh, [((), False)] * rank, context)

    shardings = ([*map(replicate, inputs)], [*map(replicate, outputs)])
    wrap_body(main, shardings, [_AXIS], (inputs, outputs))

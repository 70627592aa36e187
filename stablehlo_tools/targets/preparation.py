"""Makes of an artifact the one module that is given to a compiler, every collective tagged."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.entry import is_per_device, main_function
from stablehlo_tools.analysis.replica_groups import GroupMode, ProcessGrid
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.token_chain import inline_composites
from stablehlo_tools.targets.order import Item, program_ids
from stablehlo_tools.targets.single_platform import fix_platform, make_manual
from stablehlo_tools.targets.tagging import TaggedOp, tag_collectives
from stablehlo_tools.targets.topologies import DEVICES_PER_HOST, Target

_GRID = ("replicas", "partitions")


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
    main = main_function(module)
    if main is None or not main.regions[0].blocks:
        raise ToolError("the module has no function @main to compile")
    index = _platform_index(artifact, target)
    if index is not None:
        fix_platform(module, main, index)
    _check_shapes(main)
    grid = _process_grid(module)
    inline_composites(module)  # so that collectives that share a decomposition are told apart
    tagged, program = tag_collectives(module)
    if grid.num_partitions > 1 and is_per_device(module):
        make_manual(module, grid.num_partitions)
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
    return ProcessGrid(DEVICES_PER_HOST) if grid.size == 1 and reduces_all else grid

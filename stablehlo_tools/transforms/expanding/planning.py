"""Decides what becomes a pipeline, and on which schedule; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stablehlo_tools.analysis.batch_dims.graph import Body, Graph
from stablehlo_tools.analysis.batch_dims.layout import Layout
from stablehlo_tools.analysis.batch_dims.seeds import Seeds
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.entry import entry_function
from stablehlo_tools.analysis.layer_loops.reading import LayerLoop, layer_loops
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, ToolError
from stablehlo_tools.ir.building import element_of
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.schedules.lockstep import (
    Lockstep,
    backward_lockstep,
    forward_lockstep,
    training_lockstep,
)
from stablehlo_tools.transforms.expanding.chunks import Chunks
from stablehlo_tools.transforms.expanding.head import plan_head
from stablehlo_tools.transforms.expanding.microbatches import Cut, find_cut
from stablehlo_tools.transforms.expanding.phases import Phase
from stablehlo_tools.transforms.expanding.region import Axis
from stablehlo_tools.transforms.expanding.training import Training

_MANUAL = "sdy.manual_computation"


@dataclass(frozen=True)
class Options:
    """What the user asks for; `microbatches` 0 for one a rank."""

    axis: str
    microbatches: int
    repeats: int
    schedule: str
    skip: bool
    arguments: tuple[int, ...] = ()
    dimension: int = 0


@dataclass(frozen=True)
class Pipelined:
    """A layer loop, or a forward and a backward one with their head, and its schedule."""

    work: Phase | Training
    schedule: Lockstep
    chunks: Chunks


@dataclass(frozen=True)
class Plan:
    """What becomes of a program."""

    options: Options
    axis: Axis
    microbatches: int
    pipelines: tuple[Pipelined, ...]
    cut: Cut
    warnings: list[Diagnostic] = field(default_factory=list[Diagnostic])


def plan_expansion(module: ir.Module, options: Options) -> Plan:
    """The plan for a module without calls. Raises a located ToolError for what cannot be done."""
    axis = _axis(module, options.axis)
    main = entry_function(module)
    block = main.regions[0].blocks[0]
    effects = Effects(functions_by_name(module))
    loops = _loops(main, effects)
    microbatches = options.microbatches or axis.size
    chunks = [Chunks(axis.size, options.repeats, loop.trips) for loop in loops]
    for loop, each in zip(loops, chunks, strict=True):
        _check_loop(loop, each, effects)
    graph = Graph.of(block)
    cut = find_cut(graph, loops, microbatches, _given(graph, main, options, microbatches))
    for phase in cut.phases:
        _check_types(phase)
    plan = Plan(options, axis, microbatches, tuple(_pipelines(graph, cut, chunks, options)), cut)
    plan.warnings.extend(_warnings(plan, module))
    return plan


def _pipelines(
    graph: Graph, cut: Cut, chunks: Sequence[Chunks], options: Options
) -> Iterator[Pipelined]:
    microbatches = cut.trial.dims.parts
    if options.schedule == "1f1b":
        forward, backward = _pair(cut.phases)
        body = next(body for body in _bodies(graph.root) if forward.node in body.nodes)
        if backward.node not in body.nodes:
            raise _no_pair(forward.loop.op, "the two loops stand in different blocks")
        plan = Training(forward, backward, plan_head(body, forward, backward))
        ranks = chunks[0].ranks
        schedule = training_lockstep(ranks, microbatches, options.repeats, not options.skip)
        yield Pipelined(plan, schedule, chunks[0])
        return
    for phase, each in zip(cut.phases, chunks, strict=True):
        make = backward_lockstep if phase.loop.reverse else forward_lockstep
        yield Pipelined(phase, make(each.ranks, microbatches, options.repeats), each)


def _pair(phases: Sequence[Phase]) -> tuple[Phase, Phase]:
    """A forward loop and the backward loop that reads what it leaves."""
    if len(phases) != 2:
        count = len(phases)
        what = "there is no backward loop" if count == 1 else f"there are {count} loops over layers"
        raise _no_pair(phases[-1].loop.op, what)
    forward, backward = phases
    left = {forward.node.results[carry] for carry in forward.loop.writes}
    if not any(backward.node.operands[carry] in left for carry in backward.loop.reads):
        raise _no_pair(backward.loop.op, "the second loop reads nothing that the first one leaves")
    if forward.loop.reverse or not backward.loop.reverse:
        raise _no_pair(backward.loop.op, "the forward goes through the layers from the last")
    if forward.loop.trips != backward.loop.trips:
        raise _no_pair(backward.loop.op, "the two loops have different numbers of iterations")
    return forward, backward


def _no_pair(op: ir.Operation, why: str) -> ToolError:
    return ToolError(
        "expand-pipeline: schedule=1f1b needs one forward loop over layers and the backward loop "
        f"that belongs to it, and {why} (P7); schedule=gpipe and schedule=circular run each loop "
        "by itself",
        op.location,
    )


def _bodies(body: Body) -> Iterator[Body]:
    yield body
    for node in body.nodes:
        for inner in node.bodies:
            yield from _bodies(inner)


def _axis(module: ir.Module, name: str) -> Axis:
    facts = ModuleFacts.of(module)
    for mesh_name, mesh in facts.meshes.items():
        size = dict(mesh.axes).get(name)
        if size is not None and size > 1:
            return Axis(name, mesh_name, mesh)
    found = [f"{axis} of {size}" for mesh in facts.meshes.values() for axis, size in mesh.axes]
    listed = ", ".join(dict.fromkeys(found))
    raise ToolError(
        f"expand-pipeline: no mesh of the program has an axis {name!r} of at least two ranks (P1): "
        + (f"there are {listed}" if listed else "it has no mesh; export with one"),
        module.operation.location,
    )


def _loops(main: ir.Operation, effects: Effects) -> list[LayerLoop]:
    found = list(layer_loops(main.regions[0].blocks[0], effects))
    inside = [loop for loop in found if _in_manual(loop.op)]
    if inside:
        raise ToolError(
            "expand-pipeline: this loop over layers stands in a manual computation, which has the "
            "program of one device (P2): expand a plain jit, or fold-pipeline first where it is a "
            "pipeline already",
            inside[0].op.location,
        )
    if not found:
        raise ToolError(
            "expand-pipeline: the program has no loop over layers: no `while` with a known number "
            "of iterations that takes stacked weights row by row (P2); write the layers as a "
            "lax.scan over stacked weights",
            main.location,
        )
    return found


def _in_manual(op: ir.Operation) -> bool:
    parent = op.parent
    while parent is not None:
        if parent.operation.name == _MANUAL:
            return True
        parent = parent.operation.parent
    return False


def _check_loop(loop: LayerLoop, chunks: Chunks, effects: Effects) -> None:
    if loop.trips < chunks.ranks * chunks.repeats:
        raise ToolError(
            f"expand-pipeline: {loop.trips} iterations are too few for {chunks.repeats} chunks on "
            f"each of {chunks.ranks} ranks (P2)",
            loop.op.location,
        )
    found = effects.in_block(loop.block)
    if found:
        raise ToolError(
            f"expand-pipeline: {found[0].name} has a side effect, which a pipeline would repeat "
            "(P2)",
            found[0].location,
        )


def _check_types(phase: Phase) -> None:
    for carry in (*phase.flows, *phase.sums):
        element = element_of(phase.loop.op.operands[carry])
        if not isinstance(element, ir.FloatType | ir.IntegerType):
            raise ToolError(
                f"expand-pipeline: the loop hands on a tensor of {element} from layer to layer, "
                "which cannot be collected from the last rank (P6)",
                phase.loop.op.location,
            )


def _given(graph: Graph, main: ir.Operation, options: Options, parts: int) -> Seeds | None:
    """The arguments that carry the batch, where the user names them."""
    seeds: Seeds = {}
    for number in options.arguments:
        if not 0 <= number < len(graph.root.arguments):
            raise ToolError(
                f"expand-pipeline: there is no argument {number}: the program takes "
                f"{len(graph.root.arguments)} (P3)",
                main.location,
            )
        argument = graph.root.arguments[number]
        shape = graph.shape(argument) or ()
        if not 0 <= options.dimension < len(shape) or shape[options.dimension] % parts:
            raise ToolError(
                f"expand-pipeline: {parts} microbatches do not divide dimension "
                f"{options.dimension} of argument {number}, {graph.values[argument].type} (P3)",
                main.location,
            )
        seeds[argument] = Layout(options.dimension)
    return seeds or None


def _warnings(plan: Plan, module: ir.Module) -> Iterator[Diagnostic]:
    """Where another axis divides the batch into more parts than a microbatch has samples."""
    return iter(())


"""Decides which loops over layers become pipelines, their schedules, and the rank of each layer.

`plan_expansion` finds the mesh axis, the loops and the batch, and checks the preconditions P1 to
P7. For 1F1B, it pairs each forward with its backward loop. It writes nothing. `explain_pipeline`
describes the outcome.

The layers are cut into `ranks * repeats` chunks of consecutive layers; rank p mod `ranks` holds
chunk p. If the layers do not divide evenly, the first chunks have one more. The others end with a
row of zeros that is never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from stablehlo_tools.analysis.collectives import ModuleFacts, tensor_bytes
from stablehlo_tools.analysis.dataflow import Body, Node
from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds, no_dimension
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.entry import counted_name
from stablehlo_tools.analysis.loop_carries import LayerLoop, layer_loops
from stablehlo_tools.analysis.replica_groups import mesh_with
from stablehlo_tools.analysis.shardings import MeshAxes, ValueShardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Severity, ToolError, note, to_place
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, SHARDING_CONSTRAINT
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.platform_index import own_argument
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import enclosing, entry_function, functions_by_name
from stablehlo_tools.schedules.lockstep import (
    Lockstep,
    backward_lockstep,
    forward_lockstep,
    training_lockstep,
    turns_of,
)
from stablehlo_tools.transforms.parts.expand_pipeline.head_division import HeadDivision, divide_head
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import LayerPhase
from stablehlo_tools.transforms.parts.expand_pipeline.microbatches import BatchCut, find_cut
from stablehlo_tools.transforms.parts.expand_pipeline.region import Axis
from stablehlo_tools.transforms.parts.expand_pipeline.training_plan import Training, plan_training

RANK_DIMENSION = 1  # of a stack that is spread over the ranks: [repeats, ranks, …]


@dataclass(frozen=True)
class LayerChunks:
    """The chunks of `trips` iterations of a layer loop on the ranks."""

    ranks: int
    repeats: int
    trips: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of iterations of each chunk."""
        count = self.ranks * self.repeats
        return tuple(self.trips // count + (p < self.trips % count) for p in range(count))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first iteration of each chunk."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @property
    def longest(self) -> int:
        """The number of iterations of the largest chunk."""
        return self.sizes[0]

    @property
    def is_even(self) -> bool:
        """True if all chunks have the same number of iterations."""
        return self.sizes[0] == self.sizes[-1]

    def order(self) -> list[int]:
        """Returns the iterations in the order in which the ranks hold them: rank 0's first.

        For uneven chunks, -1 is a row that fills up a chunk.
        """
        rows: list[int] = []
        for rank in range(self.ranks):
            for chunk in range(self.repeats):
                p = chunk * self.ranks + rank
                taken = range(self.firsts[p], self.firsts[p] + self.sizes[p])
                rows += [*taken, *[-1] * (self.longest - self.sizes[p])]
        return rows


EAGER = "eager-1f1b"
TRAINING = ("1f1b", EAGER)

_BY_INDEX = frozenset({"stablehlo.gather", "stablehlo.scatter"})


@dataclass(frozen=True)
class ExpansionOptions:
    """Options of the pass; `microbatches` 0 means one for each rank."""

    axis: str
    microbatches: int
    repeats: int
    schedule: str
    skip: bool
    arguments: tuple[int, ...] = ()
    dimension: int = 0
    head: str = "auto"

    @property
    def is_training(self) -> bool:
        """True if forward and backward loops become one pipeline."""
        return self.schedule in TRAINING


@dataclass(frozen=True)
class PipelinedLoops:
    """A layer loop, or forward and backward loops with the ops between them, and its schedule.
    `chunks` are those of each stack of layers. `head` is the division of the head over the ranks;
    None if it is not divided."""

    work: LayerPhase | Training
    schedule: Lockstep
    chunks: tuple[LayerChunks, ...]
    head: HeadDivision | None = None

    @property
    def last(self) -> LayerPhase:
        """The last loop."""
        return self.work if isinstance(self.work, LayerPhase) else self.work.backward


@dataclass(frozen=True)
class ExpansionPlan:
    """The plan for a program."""

    options: ExpansionOptions
    axis: Axis
    microbatches: int
    pipelines: tuple[PipelinedLoops, ...]
    cut: BatchCut
    warnings: list[Diagnostic] = field(default_factory=list[Diagnostic])


def plan_expansion(module: ir.Module, options: ExpansionOptions) -> ExpansionPlan:
    """Returns the plan for a module without calls. Raises a located ToolError if a precondition
    fails."""
    meshes = ModuleFacts.from_module(module).meshes
    place, called = module.operation.location, "expand-pipeline: axis"
    mesh = mesh_with(options.axis, meshes, called, " (P1)", place, for_stages=True)
    axis = Axis(options.axis, mesh, meshes[mesh])
    main = entry_function(module)
    block = Function(main).body
    effects = Effects(functions_by_name(module))
    loops = _loops(main, effects)
    microbatches = options.microbatches or axis.size
    graph = Graph.from_block(block)
    try:
        cut = find_cut(
            graph, loops, microbatches, _option_seeds(graph, main, options, microbatches)
        )
    except ToolError:
        for loop in loops:
            _check_effects(loop, effects)  # raises a more specific error, if there is one
        raise
    for phase in cut.phases:
        loop, repeats = phase.loop, options.repeats
        if loop.trips < axis.size * repeats:
            raise ToolError(
                f"expand-pipeline: {loop.trips} iterations are too few for {repeats} chunks on "
                f"each of {axis.size} ranks (P2); reduce repeats, or use fewer ranks",
                loop.op.location,
            )
        _check_effects(loop, effects)
        _check_types(phase)
    plan = ExpansionPlan(
        options, axis, microbatches, tuple(_pipelines(graph, cut, axis, options)), cut
    )
    plan.warnings.extend(_warnings(plan))
    return plan


def _chunks(phase: LayerPhase, axis: Axis, options: ExpansionOptions) -> LayerChunks:
    return LayerChunks(axis.size, options.repeats, phase.loop.trips)


def _pipelines(
    graph: Graph, cut: BatchCut, axis: Axis, options: ExpansionOptions
) -> Iterator[PipelinedLoops]:
    """Yields each loop as a pipeline; for 1F1B, loops that belong together as one, in place of the
    last."""
    microbatches = cut.trial.dims.parts
    training = _training(graph, cut.phases, options) if options.is_training else None
    loops = [] if training is None else [each.phase for each in training.passes]
    together = options.schedule == EAGER or not options.skip
    for phase in cut.phases:
        if training is not None and phase in loops:
            # The region of the pipeline is written at the position of its last loop.
            if phase is training.backward:
                chunks = [_chunks(each, axis, options) for each in loops[: training.stacks]]
                count = options.repeats * training.stacks
                schedule = training_lockstep(axis.size, microbatches, count, together)
                head = divide_head(training, axis, options.head)
                yield PipelinedLoops(training, schedule, tuple(chunks), head)
            continue
        # In reverse, microbatches start on the last rank, which holds the last layers.
        make = backward_lockstep if phase.loop.reverse else forward_lockstep
        schedule = make(axis.size, microbatches, options.repeats)
        yield PipelinedLoops(phase, schedule, (_chunks(phase, axis, options),))


def _training(graph: Graph, phases: Sequence[LayerPhase], options: ExpansionOptions) -> Training:
    """Returns the plan for the forward loops and the backward loops that read their residuals, in
    reverse order. Raises ToolError if they do not pair up (P7)."""

    def refusal(phase: LayerPhase, why: str) -> ToolError:
        return ToolError(
            f"expand-pipeline: schedule={options.schedule} needs a backward loop for each forward "
            f"loop over layers, but {why} (P7); use schedule=gpipe or schedule=circular, which run "
            "each loop separately",
            phase.loop.op.location,
        )

    pairs = [
        (forward, backward)
        for place, backward in enumerate(phases)
        for forward in phases[:place]
        if {forward.node.results[carry] for carry in forward.loop.writes}
        & {backward.node.operands[carry] for carry in backward.loop.reads}
    ]
    if not pairs:
        raise refusal(phases[-1], "no loop reads residuals that another one writes")
    pairs.sort(key=lambda pair: phases.index(pair[0]))
    forwards, backwards = [one for one, _ in pairs], [other for _, other in reversed(pairs)]
    # The backward of the last forward comes first, because its residuals are needed first.
    inside_out = sorted(backwards, key=phases.index) == backwards
    if not inside_out or len({id(phase) for phase in (*forwards, *backwards)}) < 2 * len(pairs):
        raise refusal(phases[-1], f"the {len(pairs)} pairs of loops are not nested in each other")
    for forward, backward in pairs:
        if forward.loop.reverse == backward.loop.reverse:
            raise refusal(backward, "both loops of a pair run in the same direction")
        if forward.loop.reverse != forwards[0].loop.reverse:
            raise refusal(forward, "another forward loop runs in the opposite direction")
        if forward.loop.trips != backward.loop.trips:
            raise refusal(backward, "the loops of a pair have different numbers of iterations")
    loops = {phase.node for phase in (*forwards, *backwards)}
    body = body_with(forwards[0].node, graph)
    if not loops <= {*body.nodes}:
        raise refusal(backwards[-1], "the loops are in different blocks")
    training = plan_training(body, forwards, backwards)
    late = {node for nodes in training.late for node in nodes}
    if {phase.node for phase in phases} & {*training.gone, *late}:
        raise refusal(backwards[-1], "another loop over layers is between them")
    return training


def body_with(node: Node, graph: Graph) -> Body:
    """Returns the block that contains an op."""
    inner = (body for each in graph.nodes for body in each.bodies)
    return next(body for body in (graph.root, *inner) if node in body.nodes)


def _loops(main: ir.Operation, effects: Effects) -> list[LayerLoop]:
    """Returns the loops over layers that carry a value from layer to layer. A loop that only maps
    each row of the weights has no stages. Raises ToolError if there is none, or if one is in a
    manual computation."""
    loops = layer_loops(Function(main).body, effects)
    loops = [loop for loop in loops if loop.flows]
    inside = [loop for loop in loops if enclosing(loop.op, MANUAL_COMPUTATION)]
    if inside:
        raise ToolError(
            "expand-pipeline: this loop over layers is in a manual computation, the program of one "
            "device (P2): run this pass before partition, leave the axis of the stages out of "
            "axis_names of jax.shard_map, or run fold-pipeline first if the program is a pipeline "
            "already",
            inside[0].op.location,
        )
    if not loops:
        raise ToolError(
            "expand-pipeline: the program has no loop over layers: no `while` with a known number "
            "of iterations reads stacked weights row by row (P2); write the layers as a lax.scan "
            "over stacked weights, or run roll-layers first if they are written out one after the "
            "other",
            main.location,
            hint="stablehlo-tools opt INPUT -p roll-layers -o rolled.mlirbc",
        )
    return loops


def _check_effects(loop: LayerLoop, effects: Effects) -> None:
    ops = effects.in_block(loop.block)
    if ops:
        raise ToolError(
            f"expand-pipeline: {ops[0].name} has a side effect, which a pipeline would repeat (P2)",
            ops[0].location,
        )


def _check_types(phase: LayerPhase) -> None:
    for carry in (*phase.flows, *phase.sums):
        element = element_of(phase.loop.op.operands[carry])
        if not isinstance(element, ir.FloatType | ir.IntegerType):
            raise ToolError(
                f"expand-pipeline: the loop carries a tensor of {element} from layer to layer, "
                "but only real numbers can be collected from the last rank (P6)",
                phase.loop.op.location,
            )


def _option_seeds(
    graph: Graph, main: ir.Operation, options: ExpansionOptions, parts: int
) -> Seeds | None:
    """Returns the arguments that the user named as the batch; None if there are none. Raises
    ToolError if they cannot be divided (P3)."""
    seeds: Seeds = {}
    for number in options.arguments:
        argument = graph.numbers[own_argument(main, number, "expand-pipeline: ", "P3")]
        missing = no_dimension(graph, argument, options.dimension)
        if missing:
            raise ToolError(f"expand-pipeline: {missing} (P3)", main.location)
        if (graph.shape(argument) or ())[options.dimension] % parts:
            raise ToolError(
                f"expand-pipeline: {parts} microbatches do not divide dimension "
                f"{options.dimension} of argument {number}, {graph.values[argument].type} (P3)",
                main.location,
            )
        seeds[argument] = DimTiling(options.dimension)
    return seeds or None


def _warnings(plan: ExpansionPlan) -> Iterator[Diagnostic]:
    """Yields warnings about shardings that a partitioner handles badly after this pass."""
    # Without other axes, a partitioner has nothing to divide.
    if plan.axis.mesh.size == plan.axis.size:
        return
    trial, axes = plan.cut.trial, MeshAxes(plan.axis.mesh)
    shardings = ValueShardings(axes, plan.axis.mesh_name)
    for number, layout in sorted(trial.seeds.items()):
        value = trial.dims.graph.values[number]
        of_samples = shardings.axes_by_dim(value)[layout.dim]
        devices = axes.size(axis for axis in of_samples if axis.name != plan.axis.name)
        samples = shape_of(value)[layout.dim] // plan.microbatches
        if samples % devices:
            yield _warning(
                f"{counted_name(value)} is divided over {devices} devices along the batch, but a "
                f"microbatch has {samples} samples: each device will hold all of them; use fewer "
                "microbatches",
                plan.pipelines[0],
            )
    divided = _divided_within_layers(plan, shardings) if plan.options.skip else None
    if divided is not None:
        told = _warning(
            f'"{divided}" divides values of the layers: XLA\'s own partitioner may put an exchange '
            "between all devices into the branch that a rank without work skips, which is a "
            "deadlock; run partition after this pass, or use skip=false",
            plan.pipelines[-1],
        )
        yield replace(told, settled_by="partition")
    links = [
        link
        for each in plan.pipelines
        if isinstance(each.work, Training)
        for link in each.work.links
    ]
    if any(node.name in _BY_INDEX for link in links for node in link.nodes):
        told = _warning(
            "the head gathers or scatters by index inside the pipeline, and XLA's own partitioner "
            "may abort on that: run partition after this pass",
            plan.pipelines[-1],
        )
        yield replace(told, settled_by="partition")


def _divided_within_layers(plan: ExpansionPlan, shardings: ValueShardings) -> str | None:
    """Returns an axis, other than that of the stages, that divides values of the layers; None if
    there is none. Axes of the batch may divide samples, but not weights."""
    dims, seeds = plan.cut.trial.dims, plan.cut.trial.seeds
    values, sizes = dims.graph.values, dict(plan.axis.mesh.axes)

    def axes_of(number: int, *along: int) -> set[str]:
        stated = shardings.axes_by_dim(values[number])
        taken = [stated[dim] for dim in along] if along else stated
        names = {axis.name for axes in taken for axis in axes}
        return {name for name in names if sizes[name] > 1} - {plan.axis.name}

    of_batch = {name for number, tiling in seeds.items() for name in axes_of(number, tiling.dim)}
    stacks = {p.node.operands[carry] for p in plan.cut.phases for carry in p.loop.weights}
    nodes = (node for node in dims.graph.nodes if node.name == SHARDING_CONSTRAINT)
    for number in (*dims.graph.root.arguments, *(n for node in nodes for n in node.results)):
        divided = axes_of(number) - (set() if number in stacks else of_batch)
        if divided:
            return min(divided)
    return None


def _warning(text: str, each: PipelinedLoops) -> Diagnostic:
    place = to_place(each.last.loop.op.location)
    return Diagnostic(Severity.WARNING, f"expand-pipeline: {text}", place)


def exchange_notes(permutes: Sequence[ir.Operation]) -> Iterator[Diagnostic]:
    """Yields a note on the bytes that are sent to bring stacks into another order, if there are
    any."""
    if not permutes:
        return
    sent: dict[int, int] = {}
    for permute in permutes:
        size = tensor_bytes(ir.RankedTensorType(permute.operands[0].type)) or 0
        for source, target in np.array(permute.attributes["source_target_pairs"]).tolist():
            # A chunk that stays is permuted from its rank to itself, which sends nothing.
            sent[source] = sent.get(source, 0) + size * (source != target)
    yield note(
        f"expand-pipeline: a rank sends up to {max(sent.values())} bytes to reorder stacks between "
        "the order of the layers and that of the ranks, which hold the chunks in turn; "
        "layout=pipeline sends none",
        permutes[0].location,
    )


def explain_pipeline(each: PipelinedLoops) -> Diagnostic:
    """Returns a note on one pipeline of a plan."""
    schedule, work = each.schedule, each.work
    op = work.loop.op if isinstance(work, LayerPhase) else work.forward.loop.op
    stacks = " and ".join(
        f"{chunks.trips} iterations on {schedule.ranks} ranks, {chunks.repeats} chunks of "
        f"{'' if chunks.is_even else f'{chunks.sizes[-1]} to '}{chunks.longest} on each"
        for chunks in each.chunks
    )
    cells = sum(
        cell is not None
        for direction in schedule.directions
        for column in direction.cells
        for cell in column
    )
    busy = cells / (schedule.ranks * schedule.ticks)
    text = (
        f"expand-pipeline: {schedule.name}: {stacks}; {schedule.microbatches} microbatches in "
        f"{schedule.ticks} ticks, {cells} chunks run, {busy:.3f} a rank and tick"
    )
    if isinstance(work, Training):
        kept = " and ".join(str(turn.kept_slots) for turn in turns_of(schedule, work.stacks))
        text += f"; {kept} chunks' activations kept on a rank"
    if each.head is not None:
        text += f"; {each.head.account}"
    return note(text, op.location)

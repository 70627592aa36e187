"""Which values of a program are stacks of layers, so that all may lie in the order of the ranks.

With layout=pipeline, the layers of a rank lie side by side in the program's own arguments and
results: weights, gradients, moments of an optimizer. They are found from what the layer loops read
and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.graph import Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.loop_carries import Rows
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.values import is_float
from stablehlo_tools.transforms.parts.expand_pipeline.chunks import Chunks
from stablehlo_tools.transforms.parts.expand_pipeline.following import Follower, is_whole
from stablehlo_tools.transforms.parts.expand_pipeline.phases import Phase


@dataclass(frozen=True)
class StackOrder:
    """The stacks of as many layers, in a program without calls.

    `layouts` tells of each such value, by number, how the layers lie in it; `arguments` and
    `results` are those of `main`, each with the dimension that the layers lie along. `constants`
    make stacks that are written in the order of the layers. `rows` are what the loops access of
    stacks, by identity.
    """

    chunks: Chunks
    layouts: dict[int, DimTiling]
    arguments: dict[int, int]
    results: dict[int, int]
    constants: tuple[Node, ...]
    rows: frozenset[int]

    @property
    def order(self) -> list[int]:
        """For each place of a stack in the order of the ranks, the layer that lies there."""
        return self.chunks.order()


def stack_orders(dims: BatchDims, phases: Sequence[Phase], chunks: Chunks) -> StackOrder:
    """The stacks that loops over as many layers read and write, and all that hangs together with
    them. Raises a located ToolError for an op that needs the order of the layers.

    What has no batch and is made of arguments of floats counts as weights. Other stacks keep the
    order of the layers where they cannot be followed: keys of random numbers, what a loop leaves
    for each sample.
    """
    if not chunks.is_even:
        raise ToolError(
            f"expand-pipeline: layout=pipeline cannot cut {chunks.trips} layers into "
            f"{chunks.ranks * chunks.repeats} equal chunks, {chunks.repeats} on each of "
            f"{chunks.ranks} ranks (P8); layout=layers can do with chunks of different lengths",
            phases[0].loop.op.location,
        )
    follower = Follower(dims.graph, phases, chunks.trips)
    optional: list[tuple[int, Phase]] = []
    for phase in phases:
        for carry, rows in _stacks(phase):
            for number in (phase.node.operands[carry], phase.node.results[carry]):
                value = dims.graph.values[number]
                is_weight = number in dims.graph.data and is_float(value.type)
                if not is_weight or phase.body.arguments[carry] in dims.tilings:
                    optional.append((number, phase))
                    continue
                _check_whole(phase, rows, value)
                follower.follow(number, phase.node)
    for number, phase in optional:
        trial = follower.copy()
        try:
            trial.follow(number, phase.node)
            trial.arguments()
            trial.results()
        except ToolError:
            continue
        follower = trial
    return StackOrder(
        chunks,
        follower.layouts,
        follower.arguments(),
        follower.results(),
        tuple(follower.constants),
        frozenset(map(id, follower.rows())),
    )


def _stacks(phase: Phase) -> Iterable[tuple[int, Rows]]:
    """The stacks that a loop reads and writes."""
    taken = {read.rows.carry: read.rows for read in phase.reads}
    taken |= {write.rows.carry: write.rows for write in phase.writes}
    for carry in sorted(taken):
        yield carry, taken[carry]


def _check_whole(phase: Phase, rows: Rows, value: ir.Value) -> None:
    if is_whole(phase, rows, value):
        return
    raise ToolError(
        f"expand-pipeline: layout=pipeline cannot order {value.type}: the loop takes "
        f"{rows.span * phase.loop.trips} of its rows, from {rows.first} (P8); stack the layers of "
        "the loop apart from others, or use layout=layers",
        phase.loop.op.location,
    )

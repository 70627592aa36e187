"""The forms in which a step is planned: as it is, as a loop over microbatches, as a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import layer_loops
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.optimization.plan_request import PlanRequest
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline

STAGE = "stage"
_MOST_MICROBATCHES = 64
_STAGES = (2, 4, 8)
_AGAIN = 4 / 3  # a backward takes twice as long as a forward
_A_STAGE = 4  # microbatches for each stage: a bubble of a fifth


@dataclass(frozen=True)
class StepForm:
    """A form of a step. The search divides `program`; `passes` make the form of the divided step.

    `stages` are the ranks of a pipeline. The devices of one of them run `program` by the model: all
    layers, in loops over microbatches. `stacks` are the shapes of weights whose dimension 0 counts
    layers. If it `recomputes`, its memory is that of its arguments.
    """

    program: Artifact
    passes: str = ""
    microbatches: int = 1
    stages: int = 1
    stacks: frozenset[tuple[int, ...]] = frozenset()
    recomputes: bool = False

    @property
    def time_share(self) -> float:
        """The factor on the time of `program`: a stage runs a part of the layers, and waits while
        the pipeline fills and drains. Recomputing runs the forward again."""
        again = _AGAIN if self.recomputes else 1.0
        return again * (self.microbatches + self.stages - 1) / self.microbatches / self.stages

    @property
    def said(self) -> str:
        """The form as words that follow those of a mesh."""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return parts + (", recomputed" if self.recomputes else "")


def with_microbatches(artifact: Artifact) -> Iterator[StepForm]:
    """Yields the step as a loop over 2, 4, 8 … microbatches, while the pass accepts it."""
    count = 2
    while count <= _MOST_MICROBATCHES:
        form = _accumulating(artifact, count)
        if form is None:
            return
        yield form
        count *= 2


def with_stages(artifact: Artifact, request: PlanRequest) -> Iterator[StepForm]:
    """Yields the step as pipelines of several numbers of stages, each on a part of the devices.

    A step whose layers are written out, or not cut into microbatches, has none."""
    copy = artifact.copy()
    inline_all_calls(copy.module)
    main = entry_function(copy.module)
    loops = layer_loops(Function(main).body, Effects(functions_by_name(copy.module)))
    loops = [loop for loop in loops if loop.flows]
    shapes = frozenset(
        tuple(shape_of(loop.op.operands[carry])) for loop in loops for carry in loop.weights
    )
    given = dict(request.axes).get(STAGE)
    for stages in _STAGES if not request.axes else (given,) if given else ():
        fits = request.devices % stages == 0 and request.devices > stages
        if not loops or not fits or any(loop.trips % stages for loop in loops):
            continue
        for count in (_A_STAGE * stages, 2 * stages, stages):
            form = _accumulating(artifact, count)
            if form is None:
                continue
            is_training = len({loop.reverse for loop in loops}) > 1
            schedule = "eager-1f1b" if is_training else "gpipe"
            options = f"axis={STAGE} microbatches={count} schedule={schedule}"
            yield StepForm(form.program, f"expand-pipeline{{{options}}}", count, stages, shapes)
            break


def _accumulating(artifact: Artifact, count: int) -> StepForm | None:
    """Returns the step as a loop over microbatches; None if it is not cut into so many."""
    text = f"accumulate-gradients{{microbatches={count}}}"
    copy = artifact.copy()
    try:
        run_pipeline(copy, Pipeline.parse(text))
    except ToolError:
        return None
    return StepForm(copy, text, count)

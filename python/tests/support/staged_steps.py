"""A training step of two layers, and its two stages, for the planners of expand-mpmd."""

from __future__ import annotations

from collections.abc import Sequence

from tree import ROOT

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.staging.assignment import Assignment, assign
from stablehlo_tools.mpmd.staging.forward_ops import Forward, find_forward
from stablehlo_tools.mpmd.staging.op_times import Weigher
from stablehlo_tools.mpmd.staging.stage_cuts import read_step
from stablehlo_tools.mpmd.staging.step import TrainingStep

TWO_LAYERS = (ROOT / "lit_tests/cli/Inputs/two_layers.mlir").read_text()


def step_of(text: str) -> tuple[ir.Module, TrainingStep]:
    """The step of a module; the module has to live as long."""
    module = artifact.parse(text.encode(), "step.mlir").module
    with module.context, ir.Location.unknown():
        return module, read_step(module)


def forward_of(step: TrainingStep) -> Forward:
    """The ops that lead to the loss."""
    return find_forward(step, Weigher(load_hardware("h100")))


def names_of(step: TrainingStep, indices: Sequence[int] | set[int]) -> list[str]:
    """`3 tanh`: the place of an op in the loop's body, and its name."""
    nodes = (step.flow.nodes[index] for index in sorted(indices))
    return [f"{node.index} {node.name.removeprefix('stablehlo.')}" for node in nodes]


def assigned(step: TrainingStep, first_of_last: int, forward: Forward | None = None) -> Assignment:
    """Two stages, the second of which begins at an op of the forward."""
    forward = forward or forward_of(step)
    stage_of = {index: int(index >= first_of_last) for index in forward}
    return assign(step, forward, stage_of, 2)

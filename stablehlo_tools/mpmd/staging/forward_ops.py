"""Finds the ops of the forward of a step, and the stages that are assigned to them or named by
users.

Users name stages with `jax.named_scope("stage_0")`, …, which jax writes into locations, or with
Shardy's named computations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.layer_loops.backward_division import backward_loops, layer_chains
from stablehlo_tools.analysis.layer_loops.linked_loops import range_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import NAMED_COMPUTATION
from stablehlo_tools.ir.inline import dissolve
from stablehlo_tools.ir.values import is_float, key_of
from stablehlo_tools.ir.walk import ops_named, ops_where, walk
from stablehlo_tools.mpmd.staging.op_times import Weigher
from stablehlo_tools.mpmd.staging.step import TrainingStep, heavy_ops, staged_inputs

_OWN = "stablehlo_tools."
STAGES = f"{_OWN}stages"
Forward = frozenset[int]  # the staged nodes of the forward, by index
_SCOPE = re.compile(r"(?<![\w])stage_(\d+)(?![\w])")


def find_forward(step: TrainingStep, weigher: Weigher) -> Forward:
    """Returns the staged ops of the forward: those that the loss depends on.

    The loss is assumed to be the term that depends on most weights with least work. Ops that other
    scalars depend on without another product are included.

    If that term depends on all products, the forward is the ops that the first backward loop over
    layers depends on. An example is a step that returns gradients of stacked layers and no loss.

    Raises a located ToolError if no forward with products is found: the step has no backward.
    """
    weights = _weights_below(step)
    needed = [step.flow.nodes[index] for index in sorted(step.needed)]
    ns = {node.index: weigher.ns(node.op) for node in needed}
    products = {node.index for node in needed if heavy_ops(node.op)}
    best: tuple[int, float, int] | None = None
    nodes: set[int] = set()
    for term in step.terms:
        above = _above(step, term) & ns.keys()
        below = frozenset[int]().union(*(weights.get(n, frozenset()) for n in term.inputs))
        # Gradients depend on as many weights as the loss, but need forward and backward work.
        rank = (-len(below), sum(ns[index] for index in above), term.index)
        if above and (best is None or rank < best):
            best, nodes = rank, above
    for term in step.terms:
        above = _above(step, term) & ns.keys()
        is_scalar = not ir.RankedTensorType(step.flow.values[term.results[0]].type).rank
        if is_scalar and above & products <= nodes:
            nodes = nodes | above
    if not products - nodes:
        # the ops that the first backward loop over layers depends on, if there is one
        block = step.loop.block
        loops = backward_loops(layer_chains(block, step.effects), block, step.effects)
        keys = {key_of(loop.op) for loop in loops}
        first = next((node for node in step.flow.nodes if key_of(node.op) in keys), None)
        nodes = (set() if first is None else step.flow.ancestors(first.inputs)) & ns.keys()
    if not nodes & products:
        raise ToolError(
            "expand-mpmd: the loop over microbatches computes only a forward, but rank programs "
            "need a training step; use expand-pipeline for forward programs (P4)",
            step.loop.op.location,
        )
    return Forward(nodes)


def _above(step: TrainingStep, term: Node) -> set[int]:
    return step.flow.ancestors(n for n in term.inputs if step.is_staged(n))


def _weights_below(step: TrainingStep) -> dict[int, frozenset[int]]:
    """Returns the arguments of floats that each staged value depends on."""
    weights: dict[int, frozenset[int]] = {}
    is_weight = {n for n in step.outer.root.arguments if is_float(step.outer.values[n].type)}
    for node in step.staged:
        below: set[int] = set()
        for number in node.inputs:
            if number in step.invariant:
                below |= step.roots(number) & is_weight
            else:
                below |= weights.get(number, frozenset())
        weights.update(dict.fromkeys(node.results, frozenset(below)))
    return weights


def dissolve_named(module: ir.Module) -> None:
    """Inlines Shardy's named computations. Their names become part of the locations of the ops, as
    jax writes those of a named scope."""
    for computation in ops_named(module.operation, {NAMED_COMPUTATION}):
        name = ir.StringAttr(computation.attributes["name"]).value
        for op in dissolve(computation):
            for inner in ops_where(op, lambda _: True):
                inner.location = ir.Location.name(name, inner.location, inner.context)


def mark(step: TrainingStep, stages_of: Mapping[int, Sequence[int]]) -> None:
    """Marks the op of each node of the forward with its stage. Copies of the op keep the mark.

    A loop over layers that will be cut gets the stages of its ranges, in the order of the rows.
    """
    for index, stages in stages_of.items():
        op = step.flow.nodes[index].op
        op.attributes[STAGES] = ir.DenseI64ArrayAttr.get(list(stages), op.context)


def forget_marks(module: ir.Module) -> None:
    """Removes the marks of this toolkit from all ops."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in [each for each in op.attributes if each.startswith(_OWN)]:
            del op.attributes[name]
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


def marked_forward(step: TrainingStep) -> Forward:
    """Returns the marked nodes, and the nodes that they depend on."""
    own = [node for node in step.staged if STAGES in node.op.attributes]
    above = step.flow.ancestors(n for node in own for n in node.results)
    return Forward(above & step.needed)


def stages_by_mark(step: TrainingStep, forward: Forward) -> dict[int, int]:
    """Returns the stage of each node of the forward by its mark. A node without one gets the first
    stage that its operands allow."""
    own: dict[int, int] = {}
    for index in sorted(forward):
        op = step.flow.nodes[index].op
        if STAGES in op.attributes:
            stages = list(ir.DenseI64ArrayAttr(op.attributes[STAGES]))
            own[index] = stages[0] if len(stages) == 1 else stages[range_of(op) or 0]
    return complete_stages(step, forward, own)


def named_by_user(step: TrainingStep, forward: Forward, stages: int) -> dict[int, int] | None:
    """Returns the stages that the program names; None if it names none.

    Raises a located ToolError if they differ from the schedule's, or if one depends on a later one.
    """
    own: dict[int, int] = {}
    for index in sorted(forward):
        op = step.flow.nodes[index].op
        scopes = _SCOPE.findall(str(op.location))
        if scopes:
            own[index] = int(scopes[-1])
        elif len(op.regions):  # a loop, whose ops may name one stage
            names = (_SCOPE.findall(str(inner.location)) for inner in ops_where(op, lambda _: True))
            inside = {int(found[-1]) for found in names if found}
            if len(inside) == 1:
                own[index] = inside.pop()
    if not own:
        return None
    named = sorted(set(own.values()))
    if named != list(range(stages)):
        listed = ", ".join(f"stage_{stage}" for stage in named)
        raise ToolError(
            f"expand-mpmd: the program names {listed}, but the schedule has {stages} stages: "
            f"stage_0 to stage_{stages - 1} (P5)",
            step.loop.op.location,
        )
    stage_of = complete_stages(step, forward, own)
    for index in sorted(own):
        node = step.flow.nodes[index]
        for number in staged_inputs(step, node):
            maker = step.flow.maker[number]
            stage, source = stage_of[index], stage_of[maker.index]
            if source > stage:
                raise ToolError(
                    f"expand-mpmd: {node.name} of stage {stage} reads a result of stage {source}, "
                    "but a forward goes through its stages in order: the ranks would wait for "
                    "each other (P7)",
                    node.op.location,
                    (note(f"made by {maker.name} here", maker.op.location),),
                )
    return stage_of


def complete_stages(step: TrainingStep, forward: Forward, own: Mapping[int, int]) -> dict[int, int]:
    """Returns stages for all nodes of the forward; `own` has those of some.

    Another node gets the last stage of its operands, or else the first of its readers.
    """
    stage_of: dict[int, int] = {}
    loose: list[Node] = []
    for index in sorted(forward):
        node = step.flow.nodes[index]
        made = [step.flow.maker[n].index for n in staged_inputs(step, node)]
        if index in own:
            stage_of[index] = own[index]
        elif any(source in stage_of for source in made):
            stage_of[index] = max(stage_of[source] for source in made if source in stage_of)
        else:
            loose.append(node)
    for node in reversed(loose):
        users = (user for n in node.results for user in step.flow.users.get(n, ()))
        stage_of[node.index] = min(
            (stage_of[u.index] for u in users if u.index in stage_of), default=0
        )
    return stage_of

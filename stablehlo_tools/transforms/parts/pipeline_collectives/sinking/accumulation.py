"""Collectives of what an accumulator takes in: one collective of the whole suffices.

    %g = "stablehlo.all_reduce"(%x)                  // in the loop
    %next = stablehlo.add %sum, %g                   // %sum is read by nothing else
  ==>
    %next = stablehlo.add %local, %x                 // in the loop, from zero
    %g = "stablehlo.all_reduce"(%local_at_the_end)   // after it
    %total = stablehlo.add %sum_at_the_start, %g

Integers are exact, and so are maxima and minima. A sum of floats is taken in another order. With u
the unit roundoff of the accumulator's type (2⁻⁵³ for f64), T iterations, L terms in each, D members
of a group and k roundings of the chain, each of the two results is a sum of at most n = T·L·D + k
roundings away from the exact one, so that for γ = n·u / (1 − n·u) (Higham, Accuracy and Stability
of Numerical Algorithms, section 4.2)

    |before − after| ≤ 2 γ (|start| + Σ |terms|)

where Σ is over iterations, terms and members. What the chain computed in a narrower type than the
accumulator's it now computes in that one, so that `before` has its own rounding besides. A sum
that overflows in one order may not in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.pipeline_collectives.candidates import named
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.chains import (
    ChainOp,
    signature,
    why_not_linear,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.trees import (
    TREES,
    Leaf,
    Tree,
    Trees,
    only_user,
)


@dataclass(frozen=True, eq=False)
class Accumulated:
    """A leaf of a tree that a chain of ops, collectives among them, makes of a local value."""

    tree: Tree
    leaf: Leaf
    steps: Sequence[ChainOp]

    @property
    def local(self) -> ir.Value:
        """What is accumulated in the loop instead."""
        first = self.steps[0]
        return first.op.operands[first.through]

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for leaves that one local accumulator can hold together."""
        shape = tuple(shape_of(self.local))
        steps = [signature(step) for step in self.steps if step.op.name != "stablehlo.convert"]
        return (self.tree.carry, self.leaf.negative, shape, tuple(steps))


def accumulated(body: LoopBody, collective: Collective, trees: Trees) -> Accumulated | str:
    """How a collective can run on an accumulator, or why it cannot."""
    steps: list[ChainOp] = []
    op, value = collective.op, collective.op.operands[0]
    while op.name not in TREES:
        if len(op.results) != 1 or list(op.operands).count(value) != 1:
            return f"the {named(op)} is not linear"
        steps.append(ChainOp(op, list(op.operands).index(value)))
        value = op.results[0]
        following = only_user(body, value)
        if isinstance(following, str):
            return following
        op = following
    tree = trees.over(op)
    if isinstance(tree, str):
        return tree
    element = element_of(body.arguments[tree.carry])
    reason = why_not_linear(body, steps, tree.kind, element)
    if reason:
        return reason
    found = [leaf for leaf in tree.leaves if leaf.value == value]
    if len(found) != 1:
        return f"carry {tree.carry} takes its result in more than once"
    return Accumulated(tree, found[0], steps)

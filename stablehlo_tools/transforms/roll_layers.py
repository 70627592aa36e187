"""Layers that are written out one after the other become a loop over them.

A model whose layers stand in a Python loop exports as many copies of a layer, forward and backward.
This pass finds the copies, proves that they are iterations of a loop, and writes the loop, as a
`lax.scan` over stacked weights would have been exported: what asks for a loop over layers, such as
`expand-pipeline`, takes it.

    %h0 = stablehlo.dot_general %x, %w0
    %h1 = stablehlo.tanh %h0
    %h2 = stablehlo.dot_general %h1, %w1
    %h3 = stablehlo.tanh %h2
  ==>
    %w = stablehlo.concatenate %w0, %w1, dim = 0            // as rows: tensor<2x4x4xf32>
    %h3 = stablehlo.while(%i = 0, %h = %x, %w) {
      %own = stablehlo.dynamic_slice %w, %i
      %dot = stablehlo.dot_general %h, %own
      %next = stablehlo.tanh %dot
    }

The weights stay arguments of their own, and so do gradients and the state of an optimizer: they are
put together in front of the loops, and rows are taken of what comes out. Weights that are stacked
in one argument already, of which the Python loop takes row after row, are read as they are.

What is a layer: the ops that repeat themselves, a product (`dot_general` or `convolution`) among
them, with the same attributes and types in the same order. Each operand of an op is, in all of
them, made by the same op of its own layer; or by the same op of the layer before; or one value for
all; or a value of the layer's own. Where the text agrees with several such readings, that one is
taken which has the most layers and hands on the fewest bytes.

A backward reads what the forward left, layer by layer from the end: the forward writes a stack, and
the backward goes through it in reverse. Two ways in which the first and the last layer of a
backward differ from the others are known:

    - A sum over layers, such as the gradient of a bias that all share, or of an encoder's output
      that all layers of a decoder read, has nothing to add to in the first. The loop adds to -0.0.
    - Nothing asks for the cotangent of what the first layer of the model read. The loop computes it
      as for any other, and nothing takes it.

Preconditions:
  P1  No tokens: thread-tokens comes last.

What is not proven stays as it is: layers that differ in ops or shapes, that read what the layer
before the last made, that have side effects, or between which others stand that read one and are
read by the next. If nothing is rolled, a warning names the op that shows why.

Guarantees: the signature as it was. Values are bitwise as before where the backend computes an op
alike inside and outside of a loop: the ops of a layer are the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, note, warning
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.cleanup import erase_unused, fold_reshapes
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.views import Function, While
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.parts.roll_layers.iterations import NoLoopError
from stablehlo_tools.transforms.parts.roll_layers.planning import RolledLoop, plan_block
from stablehlo_tools.transforms.parts.roll_layers.writing import write_loops


@dataclass(frozen=True)
class RollLayersPass(Pass):
    """Layers that are written out one after the other as a loop over stacked weights.

    `explain`: say which ops become a loop, and what it hands on, reads and writes.
    """

    name: ClassVar[str] = "roll-layers"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        refuse_tokens(module, "roll-layers", "P1")
        copy = copy_module(module)
        inline_all_calls(copy)
        effects = Effects(functions_by_name(copy))
        rolled, refused = list[Diagnostic](), list[NoLoopError]()
        main = entry_function(copy)
        with ir.Location.unknown(copy.context):
            for block in _blocks(Function(main).body):
                plan = plan_block(block, effects, refused)
                rolled += map(_account, plan.loops)
                write_loops(plan)
        if not rolled:
            diagnostics.collected.append(_nothing(main, refused))
            return
        fold_reshapes(copy)
        erase_unused(copy.body)
        if self.explain:
            diagnostics.collected += rolled
        take_over(module, copy)


def _blocks(block: ir.Block) -> Iterator[ir.Block]:
    """Yields a block and the bodies of loops in it, inner ones first."""
    for view in block.operations:
        if view.operation.name == WHILE:
            yield from _blocks(While(view.operation).body)
    yield block


def _account(loop: RolledLoop) -> Diagnostic:
    iterations = loop.iterations
    way = "a loop from the last to the first" if loop.is_reverse else "a loop"
    stacks = len(set(loop.reads.values()))
    return note(
        f"roll-layers: {iterations.count} times {len(iterations.template)} ops become {way}: it "
        f"hands on {len(iterations.carried)} values, reads {stacks} stacks, and writes "
        f"{len(loop.writes)}",
        iterations.template[0].op.location,
    )


def _nothing(main: ir.Operation, refused: list[NoLoopError]) -> Diagnostic:
    if not refused:
        return warning(
            "roll-layers: no ops with a product among them repeat themselves, so nothing is rolled",
            main.location,
        )
    node = refused[0].node
    return warning(
        f"roll-layers: ops repeat themselves here, but they are no layers: {node.name} "
        f"{refused[0].why}; nothing is rolled",
        node.op.location,
    )

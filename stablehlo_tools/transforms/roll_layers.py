"""Turns layers that are written out one after the other into a loop over them.

A model with its layers in a Python loop exports one copy of a layer after the other. This pass
proves that the copies are iterations of a loop, and writes the loop, forward and backward, as a
`lax.scan` over stacked weights would export it: `expand-pipeline` needs such a loop.

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

The weights stay separate arguments, and so do gradients and the state of an optimizer: they are
stacked before the loops, and the results are rows of the loops' stacks. If a Python loop reads row
after row of one argument, the pass reads that argument directly.

A layer is a repeated sequence of ops, including a product (`dot_general` or `convolution`), with
the same attributes and types in the same order. In all layers, an operand has a producer of the
same kind: the same op of the same layer or of the layer before, one value for all layers, or a
value of the layer's own.

A backward reads the residuals of the forward in reverse. In its first layer, a sum over layers has
no value to add to, as for a bias that all layers share: the loop adds to -0.0. In its last layer,
the cotangent of the model's input may be unused; the loop computes it like any other.

Preconditions:
  P1  No tokens: thread-tokens comes last.

Layers without a proof stay unchanged: layers that differ in ops or shapes, that read a value of the
layer before the last, that have side effects, or that have other ops between them which read one
and are read by the next. If no loop is written, a warning names the op that prevents it.

Guarantees: the signature stays. Values are bitwise as before if the backend computes an op the same
way inside and outside of a loop: the ops of a layer are the same, in the same order.
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
from stablehlo_tools.transforms.parts.roll_layers.loop_writing import write_loops
from stablehlo_tools.transforms.parts.roll_layers.stack_plan import RolledLoop, plan_block


@dataclass(frozen=True)
class RollLayersPass(Pass):
    """Layers that are written out one after the other become a loop over stacked weights.

    `explain`: a note for each loop on its ops, and on the values that it carries, reads and writes.
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
            # The copy is dropped, so the calls of the module stay.
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
    # Several arguments of an iteration may be rows of one stack.
    stacks = len(set(loop.reads.values()))
    return note(
        f"roll-layers: {iterations.count} times {len(iterations.template)} ops become {way}: it "
        f"carries {len(iterations.carried)} values, reads {stacks} stacks, and writes "
        f"{len(loop.writes)}",
        iterations.template[0].op.location,
    )


def _nothing(main: ir.Operation, refused: list[NoLoopError]) -> Diagnostic:
    if not refused:
        return warning(
            "roll-layers: no sequence of ops with a product repeats, so nothing is rolled",
            main.location,
        )
    node = refused[0].node
    return warning(
        f"roll-layers: ops repeat here, but they are not layers: {node.name} "
        f"{refused[0].why}; nothing is rolled",
        node.op.location,
    )

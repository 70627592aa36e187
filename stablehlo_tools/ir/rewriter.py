"""Local rewrite patterns: each matches one op and replaces it by values.

    RULES = Patterns()

    # mhlo.copy(x) -> x
    @RULES.on("mhlo.copy")
    def forward_operand(op: ir.Operation, build: Builder) -> ir.Value:
        return op.operands[0]

    RULES.apply(module.operation)

MLIR's walking driver applies them: each op once, in the order of the text, ops in regions before
the op around them. Ops that a pattern writes are not visited. The driver itself folds and erases
nothing, so that the output depends on the patterns only. (MLIR's greedy driver folds constants and
erases dead ops.) A pattern must not erase other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.walk import terminator

# The values that replace the results of the op; None keeps the op, perhaps updated in place.
Pattern = Callable[[ir.Operation, Builder], ir.Value | Sequence[ir.Value] | None]


def replace(op: ir.Operation, values: Iterable[ir.Value]) -> None:
    """Replaces each result of an op by the value at its position, and erases the op."""
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def inline_block(block: ir.Block, op: ir.Operation) -> list[ir.Operation]:
    """Moves the ops of a block of `op` before it, and replaces `op` by the values it returns.

    Returns the moved ops. Arguments of the block must be unused.
    """
    returned = list(terminator(block).operands)
    moved = [view.operation for view in block.operations][:-1]
    for each in moved:
        each.move_before(op)
    replace(op, returned)
    return moved


class Patterns:
    """A set of patterns; if several match an op, the first added wins."""

    def __init__(self) -> None:
        self._patterns: list[tuple[str, Pattern]] = []

    def on(self, *names: str) -> Callable[[Pattern], Pattern]:
        """Adds the decorated function as a pattern for ops of these names."""

        def add(pattern: Pattern) -> Pattern:
            self._patterns += [(name, pattern) for name in names]
            return pattern

        return add

    def apply(self, root: ir.Operation) -> None:
        """Applies the patterns to all ops in `root`. Propagates the exceptions of patterns."""
        with root.context:
            found = bindings.RewritePatternSet(root.context)
            for number, (name, pattern) in enumerate(self._patterns):
                # MLIR tries the pattern of the highest benefit first.
                found.add(name, _rewriting(pattern), benefit=len(self._patterns) - number)
            bindings.walk_and_apply_patterns(root, found.freeze())


def _rewriting(
    pattern: Pattern,
) -> Callable[[ir.Operation | ir.OpView, bindings.PatternRewriter], bool]:
    def rewrite(view: ir.Operation | ir.OpView, rewriter: bindings.PatternRewriter) -> bool:
        op = view.operation
        values = pattern(op, Builder(ir.InsertionPoint(op), op.location))
        if values is None:
            return True  # no match
        rewriter.replace_op(op, [values] if isinstance(values, ir.Value) else list(values))
        return False

    return rewrite

"""Walking a module in a way that exceptions survive."""

from __future__ import annotations

from collections.abc import Callable, Collection

from stablehlo_tools.bindings import ir


def walk(root: ir.Operation, visit: Callable[[ir.Operation], ir.WalkResult]) -> None:
    """Calls `visit` on an op and all ops in it, pre-order.

    MLIR turns whatever a callback raises into a RuntimeError that holds a text; here the exception
    itself ends the walk, a KeyboardInterrupt too.
    """
    raised: list[BaseException] = []

    def guarded(op: ir.Operation) -> ir.WalkResult:
        try:
            return visit(op)
        except BaseException as error:
            raised.append(error)
            return ir.WalkResult.INTERRUPT

    try:
        root.walk(guarded, ir.WalkOrder.PRE_ORDER)
    except RuntimeError as error:  # a signal that came between MLIR and the guard
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise
    if raised:
        raise raised[0]


def ops_where(root: ir.Operation, wanted: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    """The ops in an op, itself among them, of which a question is true, pre-order."""
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if wanted(op):
            ops.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return ops


def ops_named(root: ir.Operation, names: Collection[str]) -> list[ir.Operation]:
    """The ops of these names in an op, itself among them, pre-order."""
    return ops_where(root, lambda op: op.name in names)


def is_inside(op: ir.Operation, outer: ir.Operation) -> bool:
    """Whether an op stands in a region of another."""
    parent = op.parent
    while parent is not None:
        if parent.operation == outer:
            return True
        parent = parent.operation.parent
    return False

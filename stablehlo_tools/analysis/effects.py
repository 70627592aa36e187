"""Finds ops that do more than compute, and calls that may communicate.

For most passes, a custom call without a side effect computes on its device. If its target is
unknown, this is a guess: a user's library may call NCCL in it. So in proofs of an order it counts
as a collective of all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.communication_kinds import RAGGED_ALL_TO_ALL
from stablehlo_tools.dialect.custom_calls import (
    ASYNC_STARTS,
    MAY_COMMUNICATE,
    STAYS,
    is_annotation,
    stays_on_device,
    target_of,
)
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.dialect.traits import CALLS, Trait, ops_with
from stablehlo_tools.ir.walk import callee_name, ops_named, walk

_EFFECTS = ops_with(Trait.EFFECT)
_KNOWN_DIALECTS = frozenset({"stablehlo", "chlo", "sdy", "func"})


class Effects:
    """The ops of a module that do more than compute; each block and function is visited once."""

    def __init__(self, functions: Mapping[str, ir.Operation]) -> None:
        self._functions = functions
        self._of_function: dict[str, bool] = {}
        self._in_block: dict[ir.Block, list[ir.Operation]] = {}

    def in_block(self, block: ir.Block) -> list[ir.Operation]:
        """Returns the ops of a block with effects, also in their regions, in order."""
        if block not in self._in_block:
            ops = [view.operation for view in block.operations]
            self._in_block[block] = [op for op in ops if self.has_effect(op)]
        return self._in_block[block]

    def has_effect(self, op: ir.Operation) -> bool:
        """Returns True if the op must keep its order among others with effects."""
        if not len(op.regions):
            return self._is_effect(op)
        has_effect = False

        def visit(inner: ir.Operation) -> ir.WalkResult:
            nonlocal has_effect
            has_effect = has_effect or self._is_effect(inner)
            return ir.WalkResult.INTERRUPT if has_effect else ir.WalkResult.ADVANCE

        walk(op, visit)
        return has_effect

    def _is_effect(self, op: ir.Operation) -> bool:
        name = op.name
        if name in _EFFECTS or name.partition(".")[0] not in _KNOWN_DIALECTS:
            return True
        if name in CALLS:
            called = callee_name(op)
            if called not in self._of_function:
                self._of_function[called] = True  # a recursive function may not end
                callee = self._functions.get(called)
                self._of_function[called] = callee is None or self.has_effect(callee)
            return self._of_function[called]
        if name != CUSTOM_CALL or is_annotation(op):
            return False
        effect = op.attributes.get("has_side_effect")
        if effect is not None and ir.BoolAttr(effect).value:
            return True
        return any(not isinstance(v.type, ir.ShapedType) for v in (*op.operands, *op.results))


@contextmanager
def unknown_calls_counted(module: ir.Module, local: Collection[str]) -> Generator[None]:
    """Counts custom calls that may leave their device as communication while the context lasts.

    Targets in `local` are assumed to stay on their device, whatever their attributes say.
    """
    marked = ops_named(module.operation, {CUSTOM_CALL})
    for op in marked:
        if target_of(op) in local:
            op.attributes[STAYS] = ir.UnitAttr.get(module.context)
        elif is_unknown(op):
            op.attributes[MAY_COMMUNICATE] = ir.UnitAttr.get(module.context)
    try:
        yield
    finally:
        for op in ops_named(module.operation, {CUSTOM_CALL}) if marked else ():  # also their copies
            for mark in (STAYS, MAY_COMMUNICATE):
                if mark in op.attributes:
                    del op.attributes[mark]


def is_unknown(op: ir.Operation) -> bool:
    """Returns True if a custom call is unknown; compilers delete one without results."""
    target = target_of(op)
    is_collective = target in ASYNC_STARTS or target == RAGGED_ALL_TO_ALL
    return bool(len(op.results)) and not is_collective and not stays_on_device(op)

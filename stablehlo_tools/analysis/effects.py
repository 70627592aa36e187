"""Which ops do more than compute, so that their order among each other must stay."""

from __future__ import annotations

from collections.abc import Mapping

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import is_annotation
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.dialect.traits import CALLS, Trait, ops_with
from stablehlo_tools.ir.symbols import callee_name
from stablehlo_tools.ir.walk import walk

_EFFECTS = ops_with(Trait.EFFECT)
_KNOWN_DIALECTS = frozenset({"stablehlo", "chlo", "sdy", "func"})


class Effects:
    """Which ops of a module do more than compute; each block and function is looked at once."""

    def __init__(self, functions: Mapping[str, ir.Operation]) -> None:
        self._functions = functions
        self._of_function: dict[str, bool] = {}
        self._in_block: dict[ir.Block, list[ir.Operation]] = {}

    def in_block(self, block: ir.Block) -> list[ir.Operation]:
        """The ops of a block, effects in their regions included, in order."""
        if block not in self._in_block:
            ops = [view.operation for view in block.operations]
            self._in_block[block] = [op for op in ops if self.has_effect(op)]
        return self._in_block[block]

    def has_effect(self, op: ir.Operation) -> bool:
        """Whether the order of the op among others with effects must stay."""
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
            return self._calls_effect(callee_name(op))
        if name != CUSTOM_CALL or is_annotation(op):
            return False
        effect = op.attributes.get("has_side_effect")
        if effect is not None and ir.BoolAttr(effect).value:
            return True
        return any(not isinstance(v.type, ir.ShapedType) for v in (*op.operands, *op.results))

    def _calls_effect(self, name: str) -> bool:
        if name not in self._of_function:
            self._of_function[name] = True  # a recursive function may not end
            callee = self._functions.get(name)
            self._of_function[name] = callee is None or self.has_effect(callee)
        return self._of_function[name]

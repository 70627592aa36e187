"""Which carries of a loop surely change, and whether the loop surely stays one.

A carry whose body hands it on as `x * 1` or `min(max(x, a), x)` changes in the text alone:
compilers see that, and move what is computed of it out of the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from stablehlo_tools.analysis.forced_dependence import constant_elements
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.values import producer


def _names(text: str) -> frozenset[str]:
    return frozenset(f"stablehlo.{name}" for name in text.split())


MOVING = ops_with(Trait.IRREVERSIBLE)  # what is computed by one is not what it was before
_STEPS = _names("add subtract")
_FACTORS = _names("multiply")  # of floats: integers run into zero and stay there
_CONNECTIVES = _names("and or not")
_COMPARE = "stablehlo.compare"
_MOST_LOOKED_AT = 64  # ops of a condition


def is_counter(end: ir.Value, argument: ir.Value) -> bool:
    """Whether a carry grows or shrinks by a constant: one added that is not zero, or a factor that
    is neither zero nor one."""
    op = producer(end)
    if op is None or op.name not in _STEPS | _FACTORS or argument not in list(op.operands):
        return False
    position = 1 if op.operands[0] == argument else 0
    step = constant_elements(op.operands[position])
    if step is None or step.dtype.kind not in "iuf" or not (step != 0).all():
        return False
    return op.name in _STEPS or (step.dtype.kind == "f" and bool((step != 1).all()))


def stays_a_loop(loop: ir.Operation, known: Callable[[ir.Value], int], changing: set[int]) -> bool:
    """Whether no compiler knows how often the loop runs: all that its condition compares is open,
    or counted, and something is open.

    `known` tells what values of the condition depend on, `changing` which carries change.
    """
    condition = loop.regions[0].blocks[0]
    counted = {condition.arguments[position] for position in changing}
    pending = [terminator(condition).operands[0]]
    is_open = False
    looked_at = 0
    while pending:
        value = pending.pop()
        op = producer(value)
        looked_at += 1
        if looked_at > _MOST_LOOKED_AT:
            return False
        if op is not None and op.name in _CONNECTIVES:
            pending.extend(op.operands)
            continue
        asked = list(op.operands) if op is not None and op.name == _COMPARE else [value]
        if any(known(operand) for operand in asked):
            is_open = True
        elif counted.isdisjoint(asked):
            return False
    return is_open

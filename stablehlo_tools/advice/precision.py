"""Collectives that send more bits than their values have: f32 of what was, or becomes, bf16."""

from __future__ import annotations

from collections.abc import Iterator

from stablehlo_tools.advice.program import Collective, Program
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import duration, size
from stablehlo_tools.dialect.names import CONVERT
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import producer
from stablehlo_tools.report.document import Advice

_MOVES = frozenset(
    f"stablehlo.{name}" for name in ("reshape", "transpose", "slice", "optimization_barrier")
)
_MOVING = frozenset({"all_gather", "all_to_all", "collective_permute", "collective_broadcast"})
_MOST_FOLLOWED = 6  # moves between a collective and a convert


def wide_collectives(program: Program) -> Iterator[Advice]:
    """One item for collectives that only move values, one for those that reduce them."""
    wide = [(each, share) for each in program.collectives if (share := _narrow_share(each)) < 1]
    for moving in (True, False):
        alike = [(c, share) for c, share in wide if (c.sent.kind in _MOVING) == moving]
        spent = sum(each.exposed_ns * (1 - share) for each, share in alike)
        if not program.is_worth(spent):
            continue
        times = {(c.path, c.task): program.transfer_ns(c, share) for c, share in alike}
        gain = program.total_ns - program.retimed_ns(times)
        if program.is_worth(gain):
            yield _item(program, alike, gain, moving=moving)


def _item(
    program: Program, alike: list[tuple[Collective, float]], gain: float, *, moving: bool
) -> Advice:
    first, _ = max(alike, key=lambda pair: pair[0].ns)
    narrow, was_narrow = _narrow_type(first), _before(first) is not None
    sent = sum(each.times * each.sent.bytes for each, _ in alike)
    spent = sum(each.ns for each, _ in alike)
    cause = (
        f"{len(alike)} {first.sent.kind}{'s' if len(alike) > 1 else ''} of {size(sent)} in "
        f"{first.sent.dtype}, {duration(spent)} in all, of values that "
        f"{'were' if was_narrow else 'become'} {narrow} right {'before' if was_narrow else 'after'}"
    )
    if moving:
        order = "after" if was_narrow else "before"
        remedy = f"convert {order} the collective: it moves {narrow}, and the values stay the same"
    else:
        remedy = f"reduce in {narrow}, where sums so rounded will do: the values change"
    return program.advice(
        "wide-collective" if moving else "wide-reduction",
        gain, cause, program.place(first.op), remedy,
    )  # fmt: skip


def _narrow_share(collective: Collective) -> float:
    """The share of its bytes that a collective needs to send, 1 where that is all."""
    wide = _float_of(collective.op.results[0]) if len(collective.op.results) else None
    narrow = _narrow_type(collective)
    return 1.0 if wide is None or narrow is None else narrow.width / wide.width


def _narrow_type(collective: Collective) -> ir.FloatType | None:
    """The narrower float that all values of a collective were, or all become; None for others."""
    return _before(collective) or _after(collective)


def _before(collective: Collective) -> ir.FloatType | None:
    return _narrower([_converted_from(value) for value in collective.op.operands], collective)


def _after(collective: Collective) -> ir.FloatType | None:
    results = collective.op.results
    return _narrower([t for value in results for t in _converted_to(value, 0)], collective)


def _narrower(types: list[ir.FloatType | None], collective: Collective) -> ir.FloatType | None:
    """The one type, if it is narrower than the collective's."""
    wide = _float_of(collective.op.operands[0])
    narrow = types[0] if len(set(types)) == 1 else None
    return narrow if narrow and wide and narrow.width < wide.width else None


def _float_of(value: ir.Value) -> ir.FloatType | None:
    element = element_of(value) if isinstance(value.type, ir.RankedTensorType) else None
    return element if isinstance(element, ir.FloatType) else None


def _converted_from(value: ir.Value) -> ir.FloatType | None:
    """The float type before the convert that makes a value, moves looked through."""
    for _ in range(_MOST_FOLLOWED):
        op = producer(value)
        if op is None:
            return None
        if op.name == CONVERT:
            return _float_of(op.operands[0])
        if op.name not in _MOVES or len(op.operands) != 1:
            return None
        value = op.operands[0]
    return None


def _converted_to(value: ir.Value, depth: int) -> Iterator[ir.FloatType | None]:
    """The types that a value is converted to by those who read it, None for any other use."""
    for use in value.uses:
        user = use.owner.operation
        if user.name == CONVERT:
            yield _float_of(user.results[0])
        elif user.name in _MOVES and len(user.results) == 1 and depth < _MOST_FOLLOWED:
            yield from _converted_to(user.results[0], depth + 1)
        else:
            yield None

"""What XLA reads of an op beside its semantics: frontend attributes, and layouts of its results.

Some frontend attributes steer how a collective runs: which others it is combined or scheduled with,
on which stream, whether it overlaps at all. The rest describes the op, and says nothing of what
becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from stablehlo_tools.bindings import ir

FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
# XLA:GPU gives the collectives of this domain a slot of its scheduler and a stream for themselves.
SCALE_UP_FABRIC = "scale_up_fabric"

# Read by this package alone; XLA hands it on to the loops and choices of its schedule.
MEAN_RUNS = "stablehlo_tools_mean_runs"

_DOMAIN = "collective_communication_domain"
# How XLA's converter from HLO writes down layouts; of another shape they would be wrong.
LAYOUTS = frozenset({"operand_layout", "result_layout", "xla_shape"})

_XLA_OWN = "_"  # what names begin with that XLA keeps for itself: _scheduling_group_id, _xla_…
_STEERING = frozenset(
    {"async_collective_config", "collective_group_key", "combiner_key", "latency_metadata"}
    | {"sync_collective", _DOMAIN}
)


def steering(op: ir.Operation) -> tuple[tuple[str, str], ...]:
    """The frontend attributes of an op that steer how it runs."""
    return tuple(
        (name, str(value))
        for name, value in sorted(_entries(op).items())
        if name.startswith(_XLA_OWN) or name in _STEERING
    )


def communication_domain(op: ir.Operation) -> str:
    """The communication domain of a collective; "" where none is given."""
    value = _entries(op).get(_DOMAIN)
    return value.value if isinstance(value, ir.StringAttr) else ""


def set_communication_domain(op: ir.Operation, domain: str) -> None:
    """Puts a collective into a communication domain."""
    _add(op, _DOMAIN, domain)


def mean_runs(op: ir.Operation) -> float | None:
    """How often a loop's body runs in the mean, or the dearer branch of a choice, where the program
    says so; None where it does not."""
    value = _entries(op).get(MEAN_RUNS)
    if not isinstance(value, ir.StringAttr):
        return None
    return parsed_mean_runs(value.value)


def parsed_mean_runs(text: str) -> float | None:
    """The number in an attribute's text; None where that says none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) and number >= 0 else None


def set_mean_runs(op: ir.Operation, runs: float) -> None:
    """Says how often a loop's body or a branch runs in the mean, which the text does not: in a
    pipeline each rank reads in a table of its own what it does."""
    _add(op, MEAN_RUNS, f"{runs:.6g}")


def shared(ops: Sequence[ir.Operation]) -> dict[str, ir.Attribute]:
    """The frontend attributes that all of some ops have alike, as an op's attributes."""
    first, *others = [_entries(op) for op in ops]
    kept = {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }
    return {FRONTEND_ATTRIBUTES: ir.DictAttr.get(kept, ops[0].context)} if kept else {}


def _add(op: ir.Operation, name: str, text: str) -> None:
    entries = _entries(op) | {name: ir.StringAttr.get(text, op.context)}
    op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get(entries, op.context)


def _entries(op: ir.Operation) -> dict[str, ir.Attribute]:
    attribute = op.attributes.get(FRONTEND_ATTRIBUTES)
    if not isinstance(attribute, ir.DictAttr):
        return {}
    return {entry.name: entry.attr for entry in attribute}

"""Reads and writes attributes outside the semantics of ops, arguments and results.

Some frontend attributes control how XLA runs a collective: with which others it is combined or
scheduled, on which stream, and if it overlaps. The others only describe the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from stablehlo_tools.bindings import ir

SIDES = ("arg_attrs", "res_attrs")  # of a function: attributes of arguments, of results
FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
# XLA:GPU gives the collectives of this domain their own scheduler slot and stream.
SCALE_UP_FABRIC = "scale_up_fabric"

# Only this package reads it; XLA copies it to the loops and conditionals of its schedule.
MEAN_RUNS = "stablehlo_tools_mean_runs"

_DOMAIN = "collective_communication_domain"
# Layouts as XLA's converter from HLO writes them; they become wrong if the shape changes.
LAYOUTS = frozenset({"operand_layout", "result_layout", "xla_shape"})

_XLA_OWN = "_"  # prefix of names that XLA reserves: _scheduling_group_id, _xla_…
_STEERING = frozenset(
    {"async_collective_config", "collective_group_key", "combiner_key", "latency_metadata"}
    | {"sync_collective", _DOMAIN}
)


def steering(op: ir.Operation) -> tuple[tuple[str, str], ...]:
    """Returns the frontend attributes that control how an op runs, as sorted pairs of text."""
    return tuple(
        (name, str(value))
        for name, value in sorted(frontend_entries(op).items())
        if name.startswith(_XLA_OWN) or name in _STEERING
    )


def communication_domain(op: ir.Operation) -> str:
    """Returns the communication domain of a collective; "" if it has none."""
    value = frontend_entries(op).get(_DOMAIN)
    return value.value if isinstance(value, ir.StringAttr) else ""


def set_communication_domain(op: ir.Operation, domain: str) -> None:
    """Assigns a collective to a communication domain."""
    _add(op, _DOMAIN, domain)


def mean_runs(op: ir.Operation) -> float | None:
    """Returns the mean number of runs of a loop's body, or of a conditional's dearer branch.

    None if the program does not state it.
    """
    value = frontend_entries(op).get(MEAN_RUNS)
    if not isinstance(value, ir.StringAttr):
        return None
    return parsed_mean_runs(value.value)


def parsed_mean_runs(text: str) -> float | None:
    """Returns the number in an attribute's text; None if it is not a finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) and number >= 0 else None


def set_mean_runs(op: ir.Operation, runs: float) -> None:
    """Records the mean number of runs of a loop's body or a branch, if it is not static.

    In pipeline parallelism each rank reads its steps from its own table.
    """
    _add(op, MEAN_RUNS, f"{runs:.6g}")


def shared_attributes(ops: Sequence[ir.Operation]) -> dict[str, ir.Attribute]:
    """Returns the frontend attributes that all ops share, as attributes of an op."""
    first, *others = [frontend_entries(op) for op in ops]
    kept = {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }
    return {FRONTEND_ATTRIBUTES: ir.DictAttr.get(kept, ops[0].context)} if kept else {}


def frontend_entries(op: ir.Operation) -> dict[str, ir.Attribute]:
    """Returns the frontend attributes of an op; empty without any."""
    return entries_of(op.attributes.get(FRONTEND_ATTRIBUTES))


def _add(op: ir.Operation, name: str, text: str) -> None:
    entries = frontend_entries(op) | {name: ir.StringAttr.get(text, op.context)}
    op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get(entries, op.context)


def entries_of(attribute: ir.Attribute | None) -> dict[str, ir.Attribute]:
    """Returns the entries of a dictionary attribute; empty for another attribute or None."""
    if not isinstance(attribute, ir.DictAttr):
        return {}
    return {entry.name: entry.attr for entry in attribute}


def side_entries(function: ir.Operation, side: str) -> list[dict[str, ir.Attribute]]:
    """Returns the attributes of each argument or result of a function; empty if it lists none.

    `side` is `arg_attrs` or `res_attrs`.
    """
    if side not in function.attributes:
        return []
    return [entries_of(entry) for entry in ir.ArrayAttr(function.attributes[side])]


def set_side_entries(
    function: ir.Operation, side: str, entries: Iterable[Mapping[str, ir.Attribute]]
) -> None:
    """Sets the attributes of each argument or result of a function."""
    dicts = [ir.DictAttr.get(dict(entry), function.context) for entry in entries]
    function.attributes[side] = ir.ArrayAttr.get(dicts, function.context)

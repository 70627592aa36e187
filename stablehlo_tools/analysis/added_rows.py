"""Carries of a loop whose iterations add to one row each, and to nothing else.

%old = stablehlo.dynamic_slice %sums, %row
%new = stablehlo.add %old, %term
%put = stablehlo.select %valid, %new, %old            // or %new itself
%next = stablehlo.dynamic_update_slice %sums, %put, %row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.loop_carries import is_sum, only_user
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, SELECT
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import key_of, named, producer


@dataclass(frozen=True, eq=False)
class AddedRow:
    """What an iteration adds to a row of a carry.

    `dims` are the dimensions that the row is one of, `starts` where it begins in them; `valid`
    says whether anything is added. `ops` are those that do it.
    """

    carry: int
    dims: Sequence[int]
    starts: Sequence[ir.Value]
    valid: ir.Value | None
    ops: Sequence[ir.Operation]


def added_row(body: LoopBody, new: ir.Operation, term: ir.Value) -> AddedRow | str:
    """The row that a sum of a term and what was there is stored in, or why there is none."""
    old = next((producer(value) for value in new.operands if value != term), None)
    if new.name != ADD or old is None or old.name != DYNAMIC_SLICE:
        return f"the {named(new)} does not add it to a row of a carry"
    put, valid = new, None
    store = only_user(body, new.results[0])
    if not isinstance(store, str) and store.name == SELECT:
        put, valid = store, store.operands[0]
        if list(put.operands)[1:] != [new.results[0], old.results[0]] or shape_of(valid):
            return f"the {named(put)} does not choose between the sum and what was there"
        store = only_user(body, put.results[0])
    if isinstance(store, str):
        return store
    carry = body.argument_number(store.operands[0])
    if store.name != DYNAMIC_UPDATE_SLICE or carry is None or store.operands[1] != put.results[0]:
        return f"the {named(store)} does not store it in a row of a carry"
    starts = list(store.operands)[2:]
    if list(old.operands) != [store.operands[0], *starts]:
        return f"the {named(old)} reads another row than the {named(store)} writes"
    ops = {key_of(op): op for op in (old, new, put, store)}
    reason = _read_otherwise(body, carry, list(ops.values()))
    if reason:
        return reason
    dims = row_dims(shape_of(store.operands[0]), shape_of(old.results[0]))
    if dims is None:
        return f"the {named(store)} does not write one whole row of the first dimensions"
    return AddedRow(carry, dims, [starts[dim] for dim in dims], valid, list(ops.values()))


def only_adds(body: LoopBody, carry: int) -> bool:
    """Whether iterations do nothing with a carry but add to it, or to a row of it: a loop that
    starts with zeros gives what one that starts with another sum adds to that."""
    end = body.ends[carry]
    if is_sum(end, body.arguments[carry]):
        return True
    store = producer(end)
    put = producer(store.operands[1]) if store and store.name == DYNAMIC_UPDATE_SLICE else None
    new = producer(put.operands[1]) if put is not None and put.name == SELECT else put
    if new is None or new.name != ADD:
        return False
    rows = [added_row(body, new, term) for term in new.operands]
    return any(isinstance(row, AddedRow) and row.carry == carry for row in rows)


def _read_otherwise(body: LoopBody, carry: int, ops: Sequence[ir.Operation]) -> str:
    """Who else reads the sums, before or after the addition; empty for nobody."""
    own = {key_of(op) for op in ops}
    buffer, old, store = body.arguments[carry], ops[0].results[0], ops[-1].results[0]
    for value in (buffer, old, store):
        other = next((u for u in body.users.get(value, ()) if key_of(u) not in own), None)
        if other is not None:
            return f"the sums, carry {carry}, are also read by the {named(other)}"
    if body.carries_of(buffer) or body.carries_of(old) or body.carries_of(store) != [carry]:
        return f"the sums are not just the next value of carry {carry}"
    if body.is_read_by_condition(carry):
        return f"the condition reads the sums, carry {carry}"
    return ""


def row_dims(whole: Sequence[int], part: Sequence[int]) -> list[int] | None:
    """The dimensions that a part is one row of, all others being whole; those before the last of
    them are of size 1."""
    pairs = list(enumerate(zip(whole, part, strict=True)))
    dims = [dim for dim, (size, taken) in pairs if taken != size]
    before = range(dims[-1] if dims else 0)
    if any(part[dim] != 1 for dim in dims) or any(part[dim] != 1 for dim in before):
        return None
    return dims

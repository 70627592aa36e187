"""Writes both ends of every transfer beside each other, as XLA:GPU wants them.

Its verifier refuses a module that sends and does not receive on the same pairs. The other end is
nothing on this rank's devices, for the pairs do not name them as its source or target.

    %t1 = "stablehlo.send"(%x, %t) {channel 1, pairs = [[0, 1]]}         // on rank 0
    ==>
    %t1 = "stablehlo.send"(%x, %t) {channel 1, pairs = [[0, 1]]}
    %_, %t2 = "stablehlo.recv"(%t1) {channel 1, pairs = [[0, 1]]}

    %y, %t1 = "stablehlo.recv"(%t) {channel 1, pairs = [[0, 1]]}         // on rank 1
    ==>
    %t0 = "stablehlo.send"(%zeros, %t) {channel 1, pairs = [[0, 1]]}
    %y, %t1 = "stablehlo.recv"(%t0) {channel 1, pairs = [[0, 1]]}

Every send and recv still takes the token of the one before it.
"""

from __future__ import annotations

from dataclasses import replace

from stablehlo_tools.bindings import ir
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.transfers.ends import RECEIVE, SEND, End, check_form, ends_of, zeros

FORM = "both-ends"
_COPIED = ("channel_handle", "is_host_transfer", "source_target_pairs")


def with_both_ends(ranks: RankSet) -> RankSet:
    """A copy of a set in this form.

    Raises a ToolError for a set that is not in the form `pairs`, or with transfers not chained.
    """
    check_form(ranks, FORM)
    programs = tuple(program.copy() for program in ranks.programs)
    written = replace(ranks, programs=programs)
    for rank in range(written.ranks):
        for end in ends_of(written, rank):
            (_receive_behind if end.is_send else _send_before)(end)
    return replace(written, manifest=replace(ranks.manifest, form=FORM))


def _receive_behind(end: End) -> None:
    kinds = [end.op.operands[0].type, end.token.type]
    made = _other_end(end, RECEIVE, [end.token], kinds, ir.InsertionPoint.after(end.op))
    end.token.replace_all_uses_except(made.results[1], [made])


def _send_before(end: End) -> None:
    point = ir.InsertionPoint(end.op)
    value = zeros(end.op.results[0].type, point, end.op.location)
    made = _other_end(end, SEND, [value, end.taken], [end.token.type], point)
    end.op.operands[len(end.op.operands) - 1] = made.results[0]


def _other_end(
    end: End,
    name: str,
    operands: list[ir.Value],
    results: list[ir.Type],
    point: ir.InsertionPoint,
) -> ir.Operation:
    present = end.op.attributes
    attributes = {name: present[name] for name in _COPIED if name in present}
    return ir.Operation.create(
        name,
        results=results,
        operands=operands,
        attributes=attributes,
        loc=end.op.location,
        ip=point,
    )

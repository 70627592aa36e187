"""Every small mistake that can be made in the program of a rank: for the tests of the proof.

Each mutation changes one thing in a copy of a rank's program and leaves the rest as it is; where
ops move, the chains of tokens follow them, so that only the proof can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import action_mutations as actions
import message_mutations as messages
import outside_mutations as outside
from rank_units import Change

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import RankReading, read_rank

KINDS: dict[str, Callable[[RankReading], Iterator[tuple[str, Change]]]] = {
    "send-removed": messages.send_removed,
    "sends-swapped": messages.sends_swapped,
    "receive-moved-up": messages.receive_moved_up,
    "receive-removed": messages.receive_removed,
    "send-repeated": messages.send_repeated,
    "operands-swapped": messages.operands_swapped,
    "channels-swapped": messages.channels_swapped,
    "channel-changed": messages.channel_changed,
    "devices-changed": messages.devices_changed,
    "type-changed": messages.type_changed,
    "moved": actions.unit_moved,
    "swapped": actions.units_swapped,
    "call-removed": actions.call_removed,
    "microbatch-changed": actions.microbatch_changed,
    "operand-replaced": actions.operand_replaced,
    "operands-exchanged": actions.operands_exchanged,
    "callee-changed": actions.callee_changed,
    "token-changed": actions.token_changed,
    "return-changed": actions.return_changed,
    "barrier-left-out": actions.barrier_left_out,
    "barrier-stretched": actions.barrier_stretched,
}

# What is told only where the manifest says what stands outside of the schedule.
OUTSIDE: dict[str, Callable[[RankReading], Iterator[tuple[str, Change]]]] = {
    "outside-operands-exchanged": outside.operands_exchanged,
    "outside-sends-exchanged": outside.sends_exchanged,
    "outside-results-exchanged": outside.results_exchanged,
}


def mutants(ranks: RankSet, kind: str, most: int | None = None) -> Iterator[tuple[str, RankSet]]:
    """What a kind of mutation makes of a set, one change at a time, each with its description.

    All of them, or at most so many of each rank, evenly chosen. Those that are no valid programs,
    or are the same as before, are left out.
    """
    for rank, program in enumerate(ranks.programs):
        code = bindings.write_bytecode(program.module)
        context = program.module.context
        changes = list((KINDS | OUTSIDE)[kind](read_rank(program.module, rank, program.name)))
        stride = 1 if most is None else -(-len(changes) // most)
        for said, change in changes[:: stride or 1]:
            copy = bindings.parse_module(code, context)
            with context, ir.Location.unknown(context):
                is_changed = change(read_rank(copy, rank, program.name))
            if not is_changed or not _is_valid(copy):
                continue
            programs = list(ranks.programs)
            programs[rank] = replace(program, module=copy)
            yield f"rank {rank}: {said}", replace(ranks, programs=tuple(programs))


def _is_valid(module: ir.Module) -> bool:
    try:
        return bool(module.operation.verify())
    except ir.MLIRError:
        return False

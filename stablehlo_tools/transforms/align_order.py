"""Puts the collectives of several programs into one common order, and threads tokens through it.

Chains of `thread-tokens` are removed first, so that only dataflow and the user's own tokens
constrain the order. Calls are inlined. Ops move within their block only, as far as the order needs.
A collective whose results are unused here, but which another program needs, gets a use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.compiler_hazards import Fences
from stablehlo_tools.analysis.effects import unknown_calls_counted
from stablehlo_tools.analysis.issued import IssuedProgram
from stablehlo_tools.analysis.liveness import has_effect, live_values
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import ProgramJob
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, Severity, naming, to_place
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import FUNCTION, entry_function, values_used
from stablehlo_tools.order.agreement import (
    find_disagreement,
    find_divergence,
    find_foreign_decision,
    find_missing_program,
    pair_transfers,
)
from stablehlo_tools.order.alignment import align
from stablehlo_tools.order.order_findings import OrderFinding
from stablehlo_tools.order.program import CompiledOrder, ProgramBlock, bit_positions, blocks_of
from stablehlo_tools.order.simulation import Choice, Simulator
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.transforms.keep_alive import keep_alive
from stablehlo_tools.transforms.strip_tokens import strip_module
from stablehlo_tools.transforms.thread_tokens import ThreadTokensPass

_STAYS = "is computed from or, kept by the region around one of the two, stays after"
type _Placed = tuple[
    int, ProgramBlock, Sequence[ir.Operation]
]  # a program, a block of it, its sites


@dataclass(frozen=True)
class Aligned:
    """The result of an alignment.

    If there is a `finding`, the programs could not be aligned, and it says why. `warnings`: each
    with the name of its artifact.
    """

    programs: tuple[CompiledOrder, ...]
    finding: OrderFinding | None = None
    warnings: tuple[tuple[str, Diagnostic], ...] = ()


def align_order(
    job: ProgramJob, threading: ThreadTokensPass, *, keeps_all: bool = False
) -> Aligned:
    """Rewrites the modules of a job's artifacts in place.

    `keeps_all`: a compiler deleted a collective, so each collective that no output surely needs
    gets a use by a returned value.

    If the result has a finding the modules are only partly rewritten, and must not be written to
    files. Raises a located ToolError if a program is not understood or cannot be threaded.
    """
    for loaded in job.artifacts:
        # An earlier chain would hold the order of the text, which may change here.
        strip_module(loaded.module)
    warnings: list[tuple[str, Diagnostic]] = []
    if keeps_all:
        for loaded, part in zip(job.artifacts, job.read(keeps_platforms=True), strict=True):
            # Each collective that no output surely needs gets a use.
            needed = Fences(entry_function(loaded.module)).needed
            unsure = [c for c in part.ops if not has_effect(c) and needed.isdisjoint(c.op.results)]
            warnings += [(loaded.name, _keep_alive(loaded, collective)) for collective in unsure]
    issued, finding = _agreeing(job, warnings)
    programs, _ = pair_transfers([part.program for part in issued])
    if finding is not None:
        return Aligned(programs, finding)
    choice = _common_order(programs, issued)
    if isinstance(choice, OrderFinding):
        return Aligned(programs, choice)
    for number, part in enumerate(issued):
        orders = {block: order for (program, block), order in choice.items() if program == number}
        # Moves ops so that the program order is the chosen order.
        program = programs[number]
        for block, sites in zip(blocks_of(program.block), part.sites, strict=True):
            wanted = [sites[position] for position in orders.get(block, ())]
            for where, held in _anchors(wanted):
                _rearrange(where, [anchor for anchor, _ in held.values()])
    for loaded in job.artifacts:
        diagnostics = Diagnostics()
        # Compilers reorder what only the text orders, so tokens hold the order.
        counted = unknown_calls_counted(loaded.module, job.options.local)
        with naming(loaded.name), loaded.module.context, counted:
            threading.run(loaded.module, diagnostics)
        warnings += [(loaded.name, told) for told in diagnostics.collected]
    copies = tuple(loaded.copy() for loaded in job.artifacts)  # `read` changes the artifacts
    decided = decide([part.program for part in replace(job, artifacts=copies).read()])
    return Aligned(decided.programs, decided.finding, tuple(warnings))


def _agreeing(
    job: ProgramJob, warnings: list[tuple[str, Diagnostic]]
) -> tuple[list[IssuedProgram], OrderFinding | None]:
    """Returns the programs after every participant issues every collective; or why it cannot.

    Gives dead collectives a use for that.
    """
    while True:
        issued = job.read(keeps_platforms=True)
        programs, finding = pair_transfers([part.program for part in issued])
        finding = (
            finding
            or find_divergence(programs)
            or find_missing_program(programs)
            or find_foreign_decision(programs)
            or find_disagreement(programs)
        )
        if finding is None or finding.rule != "dead-collective":
            return issued, finding
        dead = finding.actors[-1]
        assert dead.issue is not None
        loaded, collective = job.artifacts[dead.program], issued[dead.program].ops[dead.issue]
        warnings.append((loaded.name, _keep_alive(loaded, collective)))


def _keep_alive(loaded: Artifact, collective: Collective) -> Diagnostic:
    with naming(loaded.name):
        keep_alive(collective, live_values(loaded.module))
    message = f"{collective.inner.name}: others wait for it, so a returned value now uses it"
    return Diagnostic(Severity.WARNING, message, to_place(collective.op.location))


def _common_order(
    programs: Sequence[CompiledOrder], issued: Sequence[IssuedProgram]
) -> Choice | OrderFinding:
    """Returns the text orders if they agree already; otherwise an order that suits all."""
    simulator = Simulator(programs)
    # Without a choice, no op moves: programs that agree keep their text.
    if simulator.run().ended:
        return {}
    blocks = [
        (number, block, ops)
        for number, (program, part) in enumerate(zip(programs, issued, strict=True))
        for block, ops in zip(blocks_of(program.block), part.sites, strict=True)
    ]
    free = {block: _constraints(ops) for _, block, ops in blocks}
    choice = align(programs, free)
    if not _can_be_written(choice, blocks):
        # Collectives that share an anchor must be neighbours. The order of the first program may
        # keep them together; if not, anchors keep their places.
        choice = align(programs, free, first_leads=True)
    if not _can_be_written(choice, blocks):
        bound = {block: _constraints(ops, stays=True) for _, block, ops in blocks}
        choice = align(programs, bound, _STAYS)
    if isinstance(choice, OrderFinding):
        return choice
    outcome = simulator.run(choice)
    if not outcome.ended:
        finding = decide(programs).finding
        assert finding is not None, "the text orders of the programs conflict"
        return finding
    return choice


type _Anchored = dict[ir.Value | ir.Operation, tuple[ir.Operation, list[int]]]


def _anchors(ops: Sequence[ir.Operation]) -> list[tuple[ir.Block, _Anchored]]:
    """Returns for each block the ops (anchors) that move with the ops of a level.

    An anchor is one of the ops, or an op that contains some. These are manual computations, and
    branches that are surely taken, like those of a platform. Each anchor, by its key, is listed
    with the positions of the ops that it holds, in text order. Blocks with only one anchor are left
    out.
    """
    found: dict[ir.Block, _Anchored] = {}
    for position, op in enumerate(ops):
        anchor = op
        while anchor.name != FUNCTION:
            held = found.setdefault(anchor.block, {})
            held.setdefault(key_of(anchor), (anchor, []))[1].append(position)
            anchor = anchor.block.owner.operation
    return [(block, held) for block, held in found.items() if len(held) > 1]


def _can_be_written(choice: Choice | OrderFinding, blocks: Sequence[_Placed]) -> bool:
    """Returns True if no other op is ordered between ops that one anchor holds, or there is no
    order."""
    if isinstance(choice, OrderFinding):
        return True
    return all(
        positions[-1] - positions[0] + 1 == len(positions)
        for number, block, ops in blocks
        for _, held in _anchors([ops[p] for p in choice.get((number, block), ())])
        for _, positions in held.values()
    )


def _constraints(ops: Sequence[ir.Operation], *, stays: bool = False) -> list[int]:
    """Returns for each op the earlier ones that it cannot be moved before, as bits.

    If two ops are in different regions, their anchors move: each stays after the ops that it is
    computed from. With `stays`, an anchor that holds several ops keeps its place among the others,
    so that none of them comes between.
    """
    bound = [0] * len(ops)
    for block, held in _anchors(ops):
        computed = _computed_from(block, [anchor for anchor, _ in held.values()])
        inside = [positions for _, positions in held.values()]
        bits = [sum(1 << position for position in positions) for positions in inside]
        several = [stays and len(positions) > 1 for positions in inside]
        fixed = sum(1 << i for i, is_held in enumerate(several) if is_held)
        for later, positions in enumerate(inside):
            earlier = (1 << later) - 1
            behind = computed[later] | (earlier if several[later] else fixed & earlier)
            before = reduce(or_, (bits[i] for i in bit_positions(behind)), 0)
            for position in positions:
                bound[position] |= before
    return bound


def _computed_from(block: ir.Block, ops: Sequence[ir.Operation]) -> list[int]:
    """Returns for each of some ops of a block the others that it is computed from, as bits."""
    positions = {key_of(op): i for i, op in enumerate(ops)}
    sources = [0] * len(ops)
    known: dict[ir.Value, int] = {}
    for view in block.operations:
        op = view.operation
        bits = 0
        for value in values_used(op):
            bits |= known.get(value, 0)
        position = positions.get(key_of(op))
        if position is not None:
            sources[position] = bits
            bits |= 1 << position
        if bits:
            known.update((result, bits) for result in op.results)
    return sources


def _rearrange(block: ir.Block, wanted: Sequence[ir.Operation]) -> None:
    """Reorders ops of a block to the wanted order; the others stay where they are if they can.

    An op that is before an op of the wanted order stays before it, unless it is computed from an op
    that now comes later.
    """
    listed = [view.operation for view in block.operations]
    ordered = {key_of(op) for op in wanted}
    made_by: dict[ir.Value, ir.Operation] = {r: op for op in listed for r in op.results}
    place = {key_of(op): i for i, op in enumerate(listed)}
    done: set[int] = set()
    result: list[ir.Operation] = []

    def emit(position: int) -> None:
        done.add(position)
        result.append(listed[position])

    def is_ready(op: ir.Operation) -> bool:
        makers = (made_by.get(value) for value in values_used(op))
        return all(place[key_of(maker)] in done for maker in makers if maker is not None)

    reached = 0
    held: list[int] = []  # positions passed over, waiting for an op of the wanted order
    for op in wanted:
        last = place[key_of(op)]
        for position in [*held, *range(reached, last)]:
            if position in done or key_of(listed[position]) in ordered:
                continue
            if is_ready(listed[position]):
                emit(position)
        reached = max(reached, last + 1)
        held = [p for p in range(reached) if p not in done]
        emit(last)  # ready: the common order moves no op before the ops that it is computed from
    for position in range(len(listed)):
        if position not in done:
            emit(position)
    end = listed[-1]
    for op in result[:-1]:  # the last is the terminator in both orders
        op.move_before(end)

"""Reads the issue order of a module: its collectives with participants, loops and branches.

Calls are inlined first, in place, as compilers do. So the order and the uses are those of each call
separately. Collectives that compilers delete, because their results are unused, are kept separate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.communication import (
    Site,
    communicating_functions,
    iterate_collectives,
)
from stablehlo_tools.analysis.compiler_hazards import Fences
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.forced_chains import is_chain
from stablehlo_tools.analysis.issue_reader import BlockLevel, IssueReader
from stablehlo_tools.analysis.liveness import deletable_collectives, live_paths
from stablehlo_tools.analysis.rendezvous import Rendezvousing
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.analysis.uniformity import Uniformity
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import ENTRY, main_function
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CompiledOrder,
    blocks_of,
    in_text_order,
    issues_of,
    rebuilt,
)

_PAIRS = "source_target_pairs"


@dataclass(frozen=True)
class IssuedProgram:
    """A program, its process grid, and the ops that it was read from.

    `ops` are its collectives by the ids of its issues. `sites` are the ops of the nodes of each
    block, the blocks as `blocks_of` lists them.
    """

    program: CompiledOrder
    grid: ProcessGrid
    ops: tuple[Collective, ...]
    sites: tuple[tuple[ir.Operation, ...], ...]


@dataclass(frozen=True)
class Inlined:
    """A module without calls, and where it communicates."""

    module: ir.Module
    main: ir.Operation
    sites: tuple[Site, ...]
    collectives: tuple[Collective, ...]


def inline_module(module: ir.Module) -> Inlined:
    """Inlines every call of the module, in place.

    Raises a located ToolError if the module has no function @main, or if the order of its
    communication is not understood.
    """
    inline_all_calls(module)
    main = main_function(module)
    if main is None or not main.regions[0].blocks:
        raise ToolError("the module has no function @main", module.operation.location)
    functions = communicating_functions(module)
    sites = next((f.sites for f in functions if f.name == ENTRY), [])
    collectives = [c for f in functions for c in iterate_collectives(f.sites)]
    return Inlined(module, main, tuple(sites), tuple(collectives))


def read_issued(
    inlined: Inlined,
    name: str,
    facts: ModuleFacts,
    devices: Sequence[int],
    *,
    platform: int | None = None,
    by_channel: bool = False,
    is_scheduled: bool = False,
    judges_rewriting: bool = False,
    equal: Mapping[int, str] | None = None,
) -> IssuedProgram:
    """Reads the issues of `main` on the devices, some or all of the grid in `facts`.

    `platform` is the index of the platform, in an artifact for several. `by_channel` pairs sends
    and recvs only by their channels, and ignores their pairs of devices. If `is_scheduled`, the
    module issues everything in its text order. `judges_rewriting`: each issue says why a compiler
    may rewrite it. `equal` maps the numbers of arguments that have one value on all devices of the
    job to symbols that programs share. Raises a located ToolError if a group names a device outside
    the grid.
    """
    module, main, sites = inlined.module, inlined.main, inlined.sites
    fences = Fences(main) if judges_rewriting else None
    live = None if fences is None else fences.needed
    if live is None or not all(live.intersection(c.op.results) for c in inlined.collectives):
        live = live_paths(inlined.collectives)
    deletable = None
    if live is None and not is_scheduled:
        deletable = deletable_collectives(module, inlined.collectives)
    uniformity = None
    if _has_control_flow(sites):
        uniformity = Uniformity(module, facts, devices)
        uniformity.bind_arguments(main, is_per_device(module), platform)
    rendezvous = Rendezvousing(facts, devices, by_channel=by_channel)
    reader = IssueReader(module, rendezvous, tuple(devices), deletable, uniformity, fences)
    for number, symbol in (equal or {}).items():
        reader.assume_equal(Function(main).body.arguments[number], symbol)
    level = BlockLevel()
    ours = list(iterate_collectives(list(sites)))
    if uniformity is None and live is not None and is_chain(ours, live):
        reader.chain(ours, level)
    else:
        reader.main(Function(main).body, sites, level)
    deleted = tuple(map(reader.issue, deletable.dead if deletable is not None else ()))
    program = CompiledOrder(
        name,
        tuple(devices),
        level.block(),
        tuple(issue for issue in deleted if issue.rendezvous),
        to_place(main.location),
    )
    listed = blocks_of(program.block)
    sites_of = tuple(tuple(reader.site_of[node] for node in block.nodes) for block in listed)
    if is_scheduled:
        program = replace(program, block=in_text_order(program.block))
    if not by_channel:
        program = _without_ends_of_others(program, reader.ops)
    return IssuedProgram(program, facts.grid, tuple(reader.ops), sites_of)


def _without_ends_of_others(program: CompiledOrder, ops: Sequence[Collective]) -> CompiledOrder:
    """Clears the kind of transfers whose pairs name none of our devices.

    They have no participants here. Transfers without pairs keep their kind: channels pair them.
    """

    def clear_transfer(issue: CollectiveIssue) -> CollectiveIssue:
        if issue.rendezvous or not issue.transfer:
            return issue
        pairs = ops[issue.id].inner.attributes.get(_PAIRS)
        has_pairs = pairs is not None and len(ir.DenseElementsAttr(pairs))
        return replace(issue, transfer="") if has_pairs else issue

    if all(clear_transfer(issue) is issue for issue in issues_of(program.block)):
        return program
    return replace(program, block=rebuilt(program.block, clear_transfer))


def _has_control_flow(sites: Sequence[Site]) -> bool:
    return any(
        site.op.name == WHILE
        or site.op.name in BRANCHES
        or any(_has_control_flow(region) for region in site.regions)
        for site in sites
    )

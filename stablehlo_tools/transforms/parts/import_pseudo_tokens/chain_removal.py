"""Decides which candidate chains are torch-xla's, and which of their links to remove.

The candidate chain of a root consists of the values that are zero because the root is:

    C(x + T)            a link: the collective C takes the token T
    T' = T * C(…)[0]    a maker: T' comes after C
    …, T' = all_reduce(…, T)    a maker that takes T as well

T may be converted and broadcast on the way to each. Other uses of a token are escapes.

A chain may be removed if its root is zero and the user did not write its arithmetic. A constant
root is zero; there the question is whether the user wrote the addition. An argument's uses may have
the form of a chain, but never show that the caller passes zero. That needs torch-xla's own module,
or the user's word.

All links of an accepted chain are removed, with one exception. If a collective's own results are
unused, only its token keeps it alive. Without the token compilers would delete the collective, on
this device only. So its token stays, as a number, in the next input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.liveness import live_values
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.transforms.parts.import_pseudo_tokens.exploration import (
    Base,
    Maker,
    TokenGraph,
    TokenLink,
    TokenProgram,
    element_type,
    explore,
    is_same,
    is_scalar,
)

_TORCH_XLA_MODULES = ("IrToHlo", "SyncTensorsGraph")
_HOW_TO_SAY = "if it always is zero, say so: assume-zero-argument={}"
# Attributes of an op by which XLA's importers state the shapes and layouts of its results.
_RESULT_LISTS = ("xla_shape", "result_layout")


@dataclass(frozen=True, eq=False)
class _Argument:
    """A scalar argument of an entry function at which a chain may begin."""

    number: int
    function: str
    value: ir.Value

    def __str__(self) -> str:
        return f"argument {self.number} of @{self.function}"


def accepted_chains(
    module: ir.Module, program: TokenProgram, assumed: int | None, diagnostics: Diagnostics
) -> list[TokenGraph]:
    """Returns the chains to remove. Raises a located ToolError if one is not shown to be zero."""
    _check_assumed(module, program, assumed)
    chains: list[TokenGraph] = []
    for argument in _scalar_arguments(program):
        graph = explore(program, argument.value)
        if graph.is_empty:
            continue
        # If a token is only an operand of all_reduces, no other result depends on its value.
        # torch-xla with DISABLE_NUMERIC_CC_TOKEN=1 writes only such links.
        needs_no_showing = argument.number == assumed or (
            not graph.links and not graph.escapes and not graph.flows
        )
        if needs_no_showing or _is_shown_zero(module, program, argument, graph, diagnostics):
            chains.append(graph)
    roots = [ir.BlockArgument(graph.root) for graph in chains if graph.root is not None]
    if assumed is not None and all(root.arg_number != assumed for root in roots):
        raise ToolError(
            f"assume-zero-argument={assumed}: no collective takes a token from this argument (P2)",
            _entry_location(module, program),
        )
    constants = _of_constants(module, program, chains)
    return chains if constants.is_empty else [*chains, constants]


def _scalar_arguments(program: TokenProgram) -> list[_Argument]:
    return [
        _Argument(number, name, value)
        for name, function in program.entries()
        for number, value in enumerate(Function(function).body.arguments)
        if is_scalar(value) and isinstance(element_type(value), ir.FloatType)
    ]


def _check_assumed(module: ir.Module, program: TokenProgram, assumed: int | None) -> None:
    if assumed is None:
        return
    option, location = f"assume-zero-argument={assumed}", _entry_location(module, program)
    entries = program.entries()
    if len(entries) != 1:
        raise ToolError(
            f"{option}: of {len(entries)} public functions none is @main, so the argument could "
            "be of any (P2)",
            location,
        )
    name, function = entries[0]
    arguments = list(Function(function).body.arguments)
    if not 0 <= assumed < len(arguments):
        raise ToolError(f"{option}: @{name} has {len(arguments)} arguments (P2)", location)
    if all(argument.number != assumed for argument in _scalar_arguments(program)):
        raise ToolError(
            f"{option} is a {arguments[assumed].type}, and a token is a float of rank 0 (P2)",
            location,
        )


def _entry_location(module: ir.Module, program: TokenProgram) -> ir.Location:
    entries = program.entries()
    return entries[0][1].location if len(entries) == 1 else module.operation.location


def _is_shown_zero(
    module: ir.Module,
    program: TokenProgram,
    argument: _Argument,
    graph: TokenGraph,
    diagnostics: Diagnostics,
) -> bool:
    """Returns True if torch-xla made this token; if not, raises for a chain."""
    doubts = _doubts(module, program, argument, graph)
    first = min(graph.collectives(), key=program.position)
    # torch-xla adds its token to all buckets of one coalesced collective, one for each type.
    ops = [link.collective for link in graph.links]
    types = {element_type(link.collective.operands[link.position]) for link in graph.links}
    is_coalesced = len(types) == len(ops) > 1 and len({op.name for op in ops}) == 1
    if graph.is_chain() or (not doubts and is_coalesced):
        if doubts:
            raise ToolError(
                f"{argument} goes from collective to collective like a token of torch-xla, but it "
                f"is not shown to be zero: {doubts[0].message} (P1); "
                + _HOW_TO_SAY.format(argument.number),
                first.location,
                (note(f"{argument} is here", argument.value.location), *doubts),
            )
        diagnostics.warn(
            f"{argument} is taken as torch-xla's token, which is always zero: by the module's "
            "name, and because every collective takes it and nothing else does",
            argument.value.location,
        )
        return True
    if not doubts:
        diagnostics.warn(
            f"{argument} is added to the input of {first.name} and to nothing else: torch-xla's "
            "token or the user's own number, so it stays; " + _HOW_TO_SAY.format(argument.number),
            first.location,
        )
    return False


def _doubts(
    module: ir.Module, program: TokenProgram, argument: _Argument, graph: TokenGraph
) -> list[Diagnostic]:
    """Returns notes on facts that speak against a token of torch-xla."""
    doubts: list[Diagnostic] = []
    if not _is_of_torch_xla(module):
        names = " or ".join(_TORCH_XLA_MODULES)
        doubts.append(
            note(f"the module's name does not begin with {names}", module.operation.location)
        )
    calls = program.calls[argument.function]
    if calls:
        doubts.append(note(f"@{argument.function} is called from inside", calls[0].location))
    if graph.escapes:
        last = len(program.positions)  # of ops without results
        users = [escape.op for escape in graph.escapes]
        other = min(users, key=lambda op: program.position(op) if len(op.results) else last)
        doubts.append(note(f"{other.name} uses the value as well", other.location))
    missing = _not_in(program, [graph])
    if missing is not None:
        doubts.append(note(f"this {missing.name} does not take it", missing.location))
    return doubts


def _is_of_torch_xla(module: ir.Module) -> bool:
    name = module.operation.attributes.get("sym_name")
    return name is not None and ir.StringAttr(name).value.startswith(_TORCH_XLA_MODULES)


def _not_in(program: TokenProgram, graphs: Sequence[TokenGraph]) -> ir.Operation | None:
    """Returns the first collective that takes none of these tokens, though torch-xla would give it
    one."""
    linked = {op.results[0] for graph in graphs for op in graph.collectives()}
    return next((op for op in program.tokened if op.results[0] not in linked), None)


def _of_constants(
    module: ir.Module, program: TokenProgram, others: Sequence[TokenGraph]
) -> TokenGraph:
    """Returns the chain among the uses of constant zeros; other uses are the user's."""
    not_tokens: set[ir.Value] = set()
    while True:
        graph = explore(program, None, frozenset(not_tokens))
        # An all_reduce's sum of constant zeros is the user's if another op reads it.
        used: set[ir.Value] = set()
        for maker in graph.makers:
            if maker.is_carry:
                reached = graph.downstream(maker.token, through_makers=True)
                if any(escape.base in reached for escape in graph.escapes):
                    used.add(maker.token)
        if not used:
            break
        not_tokens |= used
    taken = {
        (link.collective.results[0], link.position) for other in others for link in other.links
    }
    free = [
        link for link in graph.links if (link.collective.results[0], link.position) not in taken
    ]
    graph = replace(graph, links=free)
    if _is_of_torch_xla(module) and _not_in(program, [graph]) is None:
        return graph
    # Otherwise keeps only links that are ordered after a collective, or before another one.
    made = graph.made_tokens()
    followed = {maker.collective.results[0] for maker in graph.makers if graph.feeds(maker.token)}
    links = [
        link for link in graph.links if link.base in made or link.collective.results[0] in followed
    ]
    linked = {link.collective.results[0] for link in links}
    makers = [
        maker for maker in graph.makers if maker.is_carry or maker.collective.results[0] in linked
    ]
    return replace(graph, links=links, makers=makers)


@dataclass(frozen=True, eq=False)
class KeptLink:
    """A link that stays a float: from the token of `maker` to the collective of `reader`."""

    maker: Maker
    reader: TokenLink | Maker


@dataclass(frozen=True, eq=False)
class ImportPlan:
    """The rewrite; `members` are the chained collectives, in program order."""

    program: TokenProgram
    chains: tuple[TokenGraph, ...]
    members: tuple[ir.Operation, ...]
    kept: tuple[KeptLink, ...]

    def stays(self, link: TokenLink | Maker) -> bool:
        """Returns True if this link into a collective stays a number."""
        return any(link is kept.reader for kept in self.kept)


def plan_import(
    module: ir.Module, program: TokenProgram, chains: Sequence[TokenGraph]
) -> ImportPlan:
    """Plans the removal of accepted chains.

    Raises a located ToolError if a link would have to stay and cannot.
    """
    for chain in chains:
        for carry in (maker for maker in chain.makers if maker.is_carry):
            listed = next((name for name in _RESULT_LISTS if name in carry.op.attributes), None)
            if listed is not None:
                raise ToolError(
                    f"{carry.op.name} carries {listed}, the shapes of all its results, and is to "
                    "lose one of them (P3); remove the attribute",
                    carry.op.location,
                )
    by_result = {op.results[0]: op for chain in chains for op in chain.collectives()}
    members = sorted(by_result.values(), key=program.position)
    kept = tuple(_kept_links(module, program, chains))
    return ImportPlan(program, tuple(chains), tuple(members), kept)


def sources(plan: ImportPlan) -> list[list[ir.Operation]]:
    """Returns for each member the collectives whose tokens it takes, in program order.

    Raises a located ToolError for a token that came through a loop, a branch or a call.
    """
    sources_of: dict[ir.Value, dict[ir.Value, ir.Operation]] = {
        op.results[0]: {} for op in plan.members
    }
    for chain in plan.chains:
        made_after: dict[Base, ir.Operation] = {m.token: m.collective for m in chain.makers}
        carries = [maker for maker in chain.makers if maker.is_carry]
        for taking in (*chain.links, *carries):
            source = made_after.get(taking.base)
            if source is not None:
                sources_of[taking.collective.results[0]][source.results[0]] = source
            elif not is_same(taking.base, chain.root):
                raise not_in_one_block(taking.collective)
    return [sorted(taken.values(), key=plan.program.position) for taken in sources_of.values()]


def not_in_one_block(member: ir.Operation) -> ToolError:
    """Returns the error for a partial order that runs through control flow."""
    return ToolError(
        f"fork=preserve: the token of this {member.name} comes through a loop, a branch or a call, "
        "and a partial order is kept inside one block only (P4); use fork=strengthen",
        member.location,
    )


def _kept_links(
    module: ir.Module, program: TokenProgram, chains: Sequence[TokenGraph]
) -> Iterator[KeptLink]:
    live = live_values(module)
    still_live = live_values(module, _Removed(chains).operands)
    # Refuses a call that, unlike others of its function, only a token result keeps alive.
    # Its collectives would be live in some calls only, but the function has one text.
    for calls in program.calls.values():
        uses = [tuple(result in still_live for result in call.results) for call in calls]
        for call, used in zip(calls, uses, strict=True):
            is_lost = any(result in live and result not in still_live for result in call.results)
            if is_lost and any(
                other and not mine for o in uses for mine, other in zip(used, o, strict=True)
            ):
                raise _cannot_be_saved(call)
    for chain in chains:
        saved: set[ir.Value] = set()
        lost: dict[ir.Value, ir.Operation] = {}
        for maker in sorted(chain.makers, key=lambda maker: program.position(maker.op)):
            results = maker.collective.results
            if live.isdisjoint(results) or not still_live.isdisjoint(results):
                continue
            lost[results[0]] = maker.collective
            reader = _first_reader(program, chain, maker, live)
            if reader is not None and results[0] not in saved:
                saved.add(results[0])
                yield KeptLink(maker, reader)
        unsaved = next((op for key, op in lost.items() if key not in saved), None)
        if unsaved is not None:
            raise _cannot_be_saved(unsaved)


def _first_reader(
    program: TokenProgram, chain: TokenGraph, maker: Maker, live: set[ir.Value]
) -> TokenLink | Maker | None:
    """Returns the first live link that takes the token of this maker; None if there is none.

    Links in the same block have precedence over those in a loop or a branch, which may not run.
    """
    carries = [carry for carry in chain.makers if carry.is_carry]
    readers = [
        reader
        for reader in (*chain.links, *carries)
        if is_same(reader.base, maker.token) and not live.isdisjoint(reader.collective.results)
    ]
    block = maker.collective.block

    def preference(reader: TokenLink | Maker) -> tuple[bool, int]:
        return reader.collective.block != block, program.position(reader.collective)

    return min(readers, key=preference, default=None)


def _cannot_be_saved(op: ir.Operation) -> ToolError:
    return ToolError(
        f"{op.name}: what uses its results is its token alone, which goes through a loop, a branch "
        "or a call: without it compilers delete a collective here (P5); use its results",
        op.location,
        (note("a device that leaves a collective out can leave the others waiting"),),
    )


class _Removed:
    """The operands of ops after all pseudo-tokens are removed from collectives."""

    def __init__(self, chains: Sequence[TokenGraph]) -> None:
        self.plain: dict[ir.Value, dict[int, ir.Value]] = {}
        self.carried: dict[ir.Value, int] = {}
        for chain in chains:
            for link in chain.links:
                self.plain.setdefault(link.collective.results[0], {})[link.position] = link.plain
            for maker in chain.makers:
                if maker.is_carry:
                    self.carried[maker.collective.results[0]] = maker.position

    def operands(self, result: ir.Value) -> Sequence[ir.Value]:
        """Returns the operands that a live result makes live."""
        op = maker_of(result)
        operands = list(op.operands)
        if not len(op.results):
            return operands
        key = op.results[0]
        for position, plain in self.plain.get(key, {}).items():
            operands[position] = plain
        carried = self.carried.get(key)
        if carried is not None and ir.OpResult(result).result_number != carried:
            del operands[carried]
        return operands

"""Which candidate chains are torch-xla's, and may go: their root is zero and they are no user's.

The candidate chain of a root is where the values flow that are zero because the root is:

    C(x + T)            a link: the collective C takes the token T
    T' = T * C(…)[0]    a maker: T' comes after C
    …, T' = all_reduce(…, T)    a maker that takes T as well

T may be converted and broadcast on the way to each. What else uses a token is an escape.

A constant root is zero; there the doubt is whether the user wrote the addition. The form of an
argument shows a chain, never that the caller passes zero: that takes torch-xla's own module, or
the user's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, ToolError, note
from stablehlo_tools.transforms.parts.import_pseudo_tokens.exploration import (
    Base,
    Escape,
    Maker,
    Program,
    TokenGraph,
    element_type,
    explore,
    is_scalar,
)

_TORCH_XLA_MODULES = ("IrToHlo", "SyncTensorsGraph")
_HOW_TO_SAY = "if it always is zero, say so: assume-zero-argument={}"


@dataclass(frozen=True, eq=False)
class _Argument:
    """A scalar argument of an entry function that a chain may start from."""

    number: int
    function: str
    value: ir.Value

    def __str__(self) -> str:
        return f"argument {self.number} of @{self.function}"


def accepted_chains(
    module: ir.Module, program: Program, assumed: int | None, diagnostics: Diagnostics
) -> list[TokenGraph]:
    """The chains to take out. Raises a located ToolError where one is not shown to be zero."""
    _check_assumed(module, program, assumed)
    chains: list[TokenGraph] = []
    for argument in _scalar_arguments(program):
        graph = explore(program, argument.value)
        if graph.is_empty:
            continue
        needs_no_showing = argument.number == assumed or _is_idle(graph)
        if needs_no_showing or _is_shown_zero(module, program, argument, graph, diagnostics):
            chains.append(graph)
    if assumed is not None and all(_number(graph.root) != assumed for graph in chains):
        raise ToolError(
            f"assume-zero-argument={assumed}: no collective takes a token from this argument (P2)",
            _entry_location(module, program),
        )
    constants = _of_constants(module, program, chains)
    return chains if constants.is_empty else [*chains, constants]


def _scalar_arguments(program: Program) -> list[_Argument]:
    return [
        _Argument(number, name, value)
        for name, function in program.entries()
        for number, value in enumerate(function.regions[0].blocks[0].arguments)
        if is_scalar(value) and isinstance(element_type(value), ir.FloatType)
    ]


def _check_assumed(module: ir.Module, program: Program, assumed: int | None) -> None:
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
    arguments = list(function.regions[0].blocks[0].arguments)
    if not 0 <= assumed < len(arguments):
        raise ToolError(f"{option}: @{name} has {len(arguments)} arguments (P2)", location)
    if all(argument.number != assumed for argument in _scalar_arguments(program)):
        raise ToolError(
            f"{option} is a {arguments[assumed].type}, and a token is a float of rank 0 (P2)",
            location,
        )


def _entry_location(module: ir.Module, program: Program) -> ir.Location:
    entries = program.entries()
    return entries[0][1].location if len(entries) == 1 else module.operation.location


def _number(root: Base) -> int | None:
    return None if root is None else ir.BlockArgument(root).arg_number


def _is_idle(graph: TokenGraph) -> bool:
    """Whether the token only goes through all_reduces, so that nothing depends on its value.

    torch-xla with DISABLE_NUMERIC_CC_TOKEN=1 writes no other links.
    """
    return not graph.links and not graph.escapes and not graph.flows


def _is_shown_zero(
    module: ir.Module,
    program: Program,
    argument: _Argument,
    graph: TokenGraph,
    diagnostics: Diagnostics,
) -> bool:
    """Whether torch-xla made this token; if not, raises for a chain, is False for an addition."""
    doubts = _doubts(module, program, argument, graph)
    first = min(graph.collectives(), key=program.position)
    if graph.is_chain() or (not doubts and _is_coalesced(graph)):
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


def _is_coalesced(graph: TokenGraph) -> bool:
    """Whether the token goes into the buckets of one coalesced collective, one for each type."""
    ops = [link.collective for link in graph.links]
    types = [element_type(link.collective.operands[link.position]) for link in graph.links]
    return len(ops) > 1 and len({op.name for op in ops}) == 1 and len(set(types)) == len(types)


def _doubts(
    module: ir.Module, program: Program, argument: _Argument, graph: TokenGraph
) -> list[Diagnostic]:
    """What speaks against a token that torch-xla itself made."""
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
        other = _first_escape(program, graph.escapes)
        doubts.append(note(f"{other.op.name} uses the value as well", other.op.location))
    missing = _not_in(program, [graph])
    if missing is not None:
        doubts.append(note(f"this {missing.name} does not take it", missing.location))
    return doubts


def _is_of_torch_xla(module: ir.Module) -> bool:
    name = module.operation.attributes.get("sym_name")
    return name is not None and ir.StringAttr(name).value.startswith(_TORCH_XLA_MODULES)


def _first_escape(program: Program, escapes: Sequence[Escape]) -> Escape:
    def place(escape: Escape) -> int:
        return program.position(escape.op) if len(escape.op.results) else len(program.positions)

    return min(escapes, key=place)


def _not_in(program: Program, graphs: Sequence[TokenGraph]) -> ir.Operation | None:
    """The first collective, of a kind that torch-xla gives a token, that takes none of these."""
    linked = {op.results[0] for graph in graphs for op in graph.collectives()}
    return next((op for op in program.tokened if op.results[0] not in linked), None)


def _of_constants(module: ir.Module, program: Program, others: Sequence[TokenGraph]) -> TokenGraph:
    """What is a chain among the uses of constant zeros; the rest is the user's."""
    not_tokens: set[ir.Value] = set()
    while True:
        graph = explore(program, None, frozenset(not_tokens))
        used = [maker.token for maker in graph.makers if _is_used_elsewhere(graph, maker)]
        if not used:
            break
        not_tokens.update(used)
    taken = {
        (link.collective.results[0], link.position) for other in others for link in other.links
    }
    free = [
        link for link in graph.links if (link.collective.results[0], link.position) not in taken
    ]
    graph = replace(graph, links=free)
    if _is_of_torch_xla(module) and _not_in(program, [graph]) is None:
        return graph
    return _without_single_additions(graph)


def _without_single_additions(graph: TokenGraph) -> TokenGraph:
    """Only the links that come after a collective or that a further one comes after."""
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


def _is_used_elsewhere(graph: TokenGraph, maker: Maker) -> bool:
    """Whether an all_reduce's sum of constant zeros is the user's: something else reads it."""
    if not maker.is_carry:
        return False
    reached = graph.downstream(maker.token, through_makers=True)
    return any(escape.base in reached for escape in graph.escapes)

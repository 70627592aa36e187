"""Plans the removal of accepted chains: who is on them, and which float links have to stay.

A collective whose own results nobody uses lives by its token alone. Without it compilers delete
the collective, on this device only, so its token stays, as a number, in the next input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.liveness import live_values
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.transforms.parts.import_pseudo_tokens.exploration import (
    Base,
    Link,
    Maker,
    Program,
    TokenGraph,
    is_same,
)

# Attributes of an op by which XLA's importers state the shapes and layouts of its results.
_RESULT_LISTS = ("xla_shape", "result_layout")


@dataclass(frozen=True, eq=False)
class KeptLink:
    """A float link that stays: the token that `maker` makes, into what `reader` takes it by."""

    maker: Maker
    reader: Link | Maker


@dataclass(frozen=True, eq=False)
class ImportPlan:
    """What to rewrite. `members` are the chained collectives, in program order."""

    program: Program
    chains: tuple[TokenGraph, ...]
    members: tuple[ir.Operation, ...]
    kept: tuple[KeptLink, ...]

    def stays(self, link: Link | Maker) -> bool:
        """Whether this link into a collective stays a number."""
        return any(link is kept.reader for kept in self.kept)


def plan_import(module: ir.Module, program: Program, chains: Sequence[TokenGraph]) -> ImportPlan:
    """The plan for accepted chains. Raises a located ToolError for what has to stay and cannot."""
    for chain in chains:
        _check_result_lists(chain)
    by_result = {op.results[0]: op for chain in chains for op in chain.collectives()}
    members = sorted(by_result.values(), key=program.position)
    kept = tuple(_kept_links(module, program, chains))
    return ImportPlan(program, tuple(chains), tuple(members), kept)


def _check_result_lists(chain: TokenGraph) -> None:
    for carry in (maker for maker in chain.makers if maker.is_carry):
        listed = next((name for name in _RESULT_LISTS if name in carry.op.attributes), None)
        if listed is not None:
            raise ToolError(
                f"{carry.op.name} carries {listed}, the shapes of all its results, and is to lose "
                "one of them (P3); remove the attribute",
                carry.op.location,
            )


def sources(plan: ImportPlan) -> list[list[ir.Operation]]:
    """For each member, the collectives whose tokens it takes, in program order.

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
    """The refusal of a partial order that runs through control flow."""
    return ToolError(
        f"fork=preserve: the token of this {member.name} comes through a loop, a branch or a call, "
        "and a partial order is kept inside one block only (P4); use fork=strengthen",
        member.location,
    )


def _kept_links(
    module: ir.Module, program: Program, chains: Sequence[TokenGraph]
) -> Iterator[KeptLink]:
    live = live_values(module)
    still_live = live_values(module, _Removed(chains).operands)
    _check_calls(program, live, still_live)
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


def _check_calls(program: Program, live: set[ir.Value], still_live: set[ir.Value]) -> None:
    """Refuses a call that, unlike others of its function, only a token result keeps alive.

    A collective in the function is alive or not by each call, and its text is one.
    """
    for calls in program.calls.values():
        uses = [tuple(result in still_live for result in call.results) for call in calls]
        for call, used in zip(calls, uses, strict=True):
            is_lost = any(result in live and result not in still_live for result in call.results)
            if is_lost and any(
                other and not mine for o in uses for mine, other in zip(used, o, strict=True)
            ):
                raise _cannot_be_saved(call)


def _first_reader(
    program: Program, chain: TokenGraph, maker: Maker, live: set[ir.Value]
) -> Link | Maker | None:
    """The first live link that takes just the token that a collective makes.

    One in the same block goes before one in a loop or a branch, which may not run.
    """
    carries = [carry for carry in chain.makers if carry.is_carry]
    readers = [
        reader
        for reader in (*chain.links, *carries)
        if is_same(reader.base, maker.token) and not live.isdisjoint(reader.collective.results)
    ]
    block = maker.collective.block

    def preference(reader: Link | Maker) -> tuple[bool, int]:
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
    """What ops are computed from once no collective takes a pseudo-token."""

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
        """The operands that a live result makes live."""
        owner = result.owner
        assert not isinstance(owner, ir.Block)
        op = owner.operation
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

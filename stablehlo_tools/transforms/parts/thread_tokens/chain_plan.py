"""Plans the links of a token chain before any IR changes.

Every site of communication becomes a step. A step lists the chains that pass through it. It says
whether a token must enter it (ordered after earlier communication), and whether one must leave it
(ordered before later communication).

A recv and a send of one transfer are one step, and the chain does not order the two:

    %y, %r = "stablehlo.recv"(%t) {pairs = [[0, 1], [1, 2]], channel = 1}
    %s = "stablehlo.send"(%x, %t) {pairs = [[0, 1], [1, 2]], channel = 1}

If the pairs have no cycle, any device may do either first, even if each blocks until the other side
is ready (see `decompose-collective-permute`). If they were ordered, each device of a chain of pairs
would wait for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.communication import (
    CommunicatingFunction,
    Site,
    communicating_functions,
    iterate_collectives,
)
from stablehlo_tools.analysis.forced_chains import depends_on
from stablehlo_tools.analysis.liveness import has_effect, live_values
from stablehlo_tools.analysis.permute_pairs import PAIRS, find_cycles, pairs_of
from stablehlo_tools.analysis.rendezvous import is_host_transfer
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import is_async_done, label
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.dialect.traits import COMPUTATIONS
from stablehlo_tools.ir.token_chain import is_refined_by_jax, may_decide_platform, token_type
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.views import WithBody

type Unit = tuple[Site, ...]  # one site, or the two halves of a transfer


def in_units(sites: Sequence[Site]) -> Iterator[Unit]:
    """Yields the sites of a block in order; the two neighbours that form a transfer are one
    unit."""
    position = 0
    while position < len(sites):
        two = tuple(sites[position : position + 2])
        unit = two if _is_one_transfer(two) else two[:1]
        yield unit
        position += len(unit)


def _is_one_transfer(sites: Unit) -> bool:
    halves = [site.collective for site in sites if site.collective is not None]
    if sorted(half.kind for half in halves) != ["recv", "send"]:
        return False
    one, other = halves
    if one.channel_id != other.channel_id or _token_operand(one.op) != _token_operand(other.op):
        return False
    return _is_acyclic(one) and _is_acyclic(other) and set(pairs_of(one)) == set(pairs_of(other))


def _is_acyclic(transfer: Collective) -> bool:
    if PAIRS not in transfer.inner.attributes or is_host_transfer(transfer):
        return False
    pairs = pairs_of(transfer)
    ends = [set(side) for side in zip(*pairs, strict=True)]
    return bool(pairs) and all(len(e) == len(pairs) for e in ends) and not find_cycles(pairs)


def _token_operand(op: ir.Operation) -> ir.Value | None:
    return next((v for v in op.operands if bindings.TokenType.isinstance(v.type)), None)


Chain = int
FUTURE = "!stablehlo.future"


@dataclass(frozen=True, eq=False)
class ChainStep:
    """A site on the chain.

    `chains`: those that pass through it, sorted; one for a collective. `token_operand` and
    `token_result`: the positions of tokens that the op already has. The two halves of a transfer
    are one step: the first in program order, with the other `beside` it.
    """

    op: ir.Operation
    chains: tuple[Chain, ...]
    collective: Collective | None = None
    callee: str | None = None
    regions: tuple[tuple[ChainStep, ...], ...] = ()
    enters: bool = True
    leaves: bool = True
    token_operand: int | None = None
    token_result: int | None = None
    done: ir.Operation | None = None
    done_moves_before: ir.Operation | None = None  # the next communication
    beside: ChainStep | None = None  # the other half of a transfer; the two are not ordered
    is_sealed: bool = False  # a computation that no token may enter: its tensors are tied instead


@dataclass(frozen=True, eq=False)
class FunctionPlan:
    """The steps of one function; a public one begins its chains itself."""

    op: ir.Operation
    name: str
    is_public: bool
    steps: tuple[ChainStep, ...]
    chains: tuple[Chain, ...]


def plan_chain(
    module: ir.Module,
    *,
    by_group: bool,
    minimal: bool,
    counts: Callable[[Collective], bool] | None = None,
) -> list[FunctionPlan]:
    """Plans the chains of a module, callees before callers: of all collectives, or those that
    `counts`.

    `by_group`: keep one chain for each set of collectives with common participants. `minimal`:
    leave out the links that dataflow implies. Raises a located ToolError if a precondition fails.
    """
    functions = communicating_functions(module, counts)
    collectives = [c for f in functions for c in iterate_collectives(f.sites)]
    chain_of = _chains_by_group(module, collectives) if by_group else _one_chain
    sealed_arguments = live_values(module) if is_refined_by_jax(module) else None
    planner = _ChainPlanner(chain_of, token_type(module.context), minimal, sealed_arguments)
    return [planner.function(function) for function in functions]


def _one_chain(_: Collective) -> Chain:
    return 0


def _chains_by_group(
    module: ir.Module, collectives: Sequence[Collective]
) -> Callable[[Collective], Chain]:
    """Numbers the classes of collectives that share a participant, directly or through others.

    Two such collectives must keep one order. With overlapping groups, a cycle of waits can include
    devices although no two of them are in both groups. An op with unknown participants is in a
    class with all.
    """
    facts = ModuleFacts.from_module(module)
    grouped = [facts.groups(collective) for collective in collectives]
    if None in grouped:
        return _one_chain
    known_members = [{i for group in groups or () for i in group} for groups in grouped]
    classes: list[set[int]] = []
    for devices in known_members:
        touching = [known for known in classes if known & devices]
        if len(touching) == 1 and devices <= touching[0]:
            continue
        rest = [known for known in classes if not known & devices]
        classes = [*rest, devices.union(*touching)] if devices else rest
    classes.sort(key=min)
    number = {device: i for i, known in enumerate(classes) for device in known}
    chains = {
        collective.op: number[min(devices)] if devices else 0
        for collective, devices in zip(collectives, known_members, strict=True)
    }
    return lambda collective: chains[collective.op]


class _ChainPlanner:
    """Turns sites into steps; callees must be planned before their callers."""

    def __init__(
        self,
        chain_of: Callable[[Collective], Chain],
        token: ir.Type,
        minimal: bool,
        sealed_arguments: set[ir.Value] | None,
    ) -> None:
        self.sealed_arguments = sealed_arguments  # live values, if computations are sealed
        self.chain_of = chain_of
        self.token = token
        self.minimal = minimal
        self.chains_of_function: dict[str, tuple[Chain, ...]] = {}
        self.chains_of_site: dict[Site, tuple[Chain, ...]] = {}

    def function(self, function: CommunicatingFunction) -> FunctionPlan:
        steps = self._block(function.sites, open_ended=not function.is_public)
        chains = tuple(sorted({chain for step in steps for chain in step.chains}))
        self.chains_of_function[function.name] = chains
        return FunctionPlan(function.op, function.name, function.is_public, steps, chains)

    def _block(self, sites: Sequence[Site], *, open_ended: bool) -> tuple[ChainStep, ...]:
        """Returns the steps of a block; an `open_ended` block has communication around it."""
        # By start, the op that its done has to move before. No token leaves a start, so no op may
        # communicate between it and its done.
        moves: dict[ir.Value | ir.Operation, ir.Operation] = {}
        for site, following in zip_longest(sites, sites[1:]):
            if site.collective is None or not site.collective.is_async:
                continue
            done = _async_done(site.op)
            if following is not None and not done.is_before_in_block(following.op):
                moves[key_of(site.op)] = following.op
        units = list(in_units(sites))
        chains = [self._chains(unit[0]) for unit in units]
        needed = self._needed_links(units, chains, open_ended)
        steps: list[ChainStep] = []
        for unit, used, link in zip(units, chains, needed, strict=True):
            step, *others = [self._step(site, used, *link) for site in unit]
            if others:
                step = replace(step, beside=others[0])
            if step.done:
                step = replace(step, done_moves_before=moves.get(key_of(step.op)))
            steps.append(step)
        return tuple(steps)

    def _chains(self, site: Site) -> tuple[Chain, ...]:
        if site.collective is not None:
            return (self.chain_of(site.collective),)
        if site.callee is not None:
            return self.chains_of_function[site.callee]
        if site not in self.chains_of_site:
            inner = {chain for region in site.regions for s in region for chain in self._chains(s)}
            self.chains_of_site[site] = tuple(sorted(inner))
        return self.chains_of_site[site]

    def _needed_links(
        self, units: Sequence[Unit], chains: Sequence[tuple[Chain, ...]], open_ended: bool
    ) -> list[tuple[bool, bool]]:
        """Returns for each unit whether a token must enter it, and whether one must leave it.

        A token leaves every unit that a later token must follow. This includes units whose
        successor is ordered by dataflow: if compilers delete that successor, the chain still holds.
        """
        if not self.minimal:
            return [(True, True)] * len(units)
        enters = [open_ended] * len(units)
        previous: dict[Chain, int] = {}
        for position, unit in enumerate(units):
            for chain in chains[position]:
                if chain in previous:
                    before = units[previous[chain]]
                    enters[position] = any(
                        a.collective is None
                        or b.collective is None
                        or not depends_on(b.collective.op, a.collective.op)
                        for a in before
                        for b in unit
                    )
                previous[chain] = position
        leaves = [open_ended] * len(units)
        awaited: set[Chain] = set()
        for position in reversed(range(len(units))):
            leaves[position] |= not awaited.isdisjoint(chains[position])
            if enters[position]:
                awaited.update(chains[position])
        return list(zip(enters, leaves, strict=True))

    def _step(self, site: Site, chains: tuple[Chain, ...], enters: bool, leaves: bool) -> ChainStep:
        if site.collective is None:
            # Lists, because generators would nest on the C stack.
            regions = tuple([self._block(region, open_ended=True) for region in site.regions])
            is_sealed = self.sealed_arguments is not None and site.op.name in COMPUTATIONS
            if site.op.name in COMPUTATIONS:
                _check_computation(site, self.sealed_arguments)
            return ChainStep(
                site.op, chains, callee=site.callee, regions=regions, is_sealed=is_sealed
            )
        op = site.op
        token_operand = self._position_of_token(op.operands)
        token_result = self._position_of_token(op.results)
        _check_can_be_tied(op, token_operand, token_result)
        return ChainStep(
            op,
            chains,
            collective=site.collective,
            enters=enters,
            leaves=leaves,
            token_operand=token_operand,
            token_result=token_result,
            done=_async_done(op) if site.collective.is_async else None,
        )

    def _position_of_token(self, values: Sequence[ir.Value]) -> int | None:
        return next((i for i, value in enumerate(values) if value.type == self.token), None)


def _check_can_be_tied(
    op: ir.Operation, token_operand: int | None, token_result: int | None
) -> None:
    for position, values, what, verb in (
        (token_operand, op.operands, "operand", "enter"),
        (token_result, op.results, "result", "leave"),
    ):
        if position is not None:
            continue
        if not len(values):
            raise ToolError(
                f"{op.name} has no {what}, and a token can only {verb} beside one (P4)", op.location
            )
        odd = [v.type for v in values if not isinstance(v.type, ir.RankedTensorType)]
        if odd and FUTURE not in str(odd[0]):
            raise ToolError(
                f"{op.name} has a {what} of type {odd[0]}, which no barrier accepts: a token "
                f"cannot {verb} beside it (P4)",
                op.location,
            )


def _has_effect(site: Site) -> bool:
    """Returns True if a site communicates even if its results are unused."""
    if site.collective is not None:
        return has_effect(site.collective)
    return site.callee is not None or any(_has_effect(s) for region in site.regions for s in region)


def _check_computation(site: Site, live: set[ir.Value] | None) -> None:
    """Raises a located ToolError for a communicating computation that no token can enter.

    XLA aborts at two computations with only a token operand. A token enters a sealed one (`live` is
    given) beside its arguments and leaves beside its results. So an argument and a result must be
    used.
    """
    op = site.op
    if not len(op.operands):
        raise ToolError(
            f"{op.name} communicates but has no operand: a token cannot enter it (P8); pass it an "
            "operand",
            op.location,
        )
    if live is not None and live.isdisjoint(op.results) and _has_effect(site):
        raise ToolError(
            f"{op.name} communicates, but none of its results is used: in an artifact with "
            "symbolic dimensions or several platforms a token cannot leave it (P8)",
            op.location,
        )
    inside = WithBody(op).body
    arguments = [a for a in inside.arguments if not may_decide_platform(a)]
    if live is not None and live.isdisjoint(arguments):
        raise ToolError(
            f"{op.name} communicates but uses none of its operands: in an artifact with symbolic "
            "dimensions or several platforms a token cannot enter it (P8)",
            op.location,
        )


def _async_done(start: ir.Operation) -> ir.Operation:
    """Returns the done of an asynchronous start.

    Raises a located ToolError if there is none in the same block.
    """
    users = [use.owner.operation for use in start.results[0].uses]
    done = users[0] if len(users) == 1 else None
    if done is not None and is_async_done(done) and done.block == start.block:
        return done
    if start.name == CUSTOM_CALL:
        raise ToolError(
            f"{label(start)} has no single done in the same block: a token cannot follow it "
            "elsewhere (P5)",
            start.location,
        )
    raise ToolError(
        "the async_done of this async_start is not in the same block: a token cannot follow its "
        "future",
        start.location,
    )

"""Reads what a module issues: its collectives with their participants, loops, branches and order.

Calls are inlined first, in place, as compilers do: order and use are then those of each call by
itself. Collectives that compilers delete, because nobody uses their results, are kept apart.
A manual computation is part of the block around it. A loop's order is judged by its collectives,
not as a whole, because compilers unroll loops of a known trip count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from stablehlo_tools.analysis.chains import is_chain
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.common_values import CommonValues
from stablehlo_tools.analysis.communication import (
    BRANCHES,
    COMPUTATIONS,
    WHILE,
    Site,
    communicating_functions,
    iterate_collectives,
)
from stablehlo_tools.analysis.entry import ENTRY, is_per_device, main_function
from stablehlo_tools.analysis.forced_dependence import (
    GIVEN,
    NOTHING,
    VARIES,
    Dependence,
    Transfer,
)
from stablehlo_tools.analysis.liveness import dead_collectives, live_values
from stablehlo_tools.analysis.rendezvous import Rendezvousing, is_host_transfer
from stablehlo_tools.analysis.uniformity import Uniformity, Variation
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.order.program import (
    Block,
    Branch,
    Decision,
    Issue,
    Loop,
    Node,
    Program,
    Signature,
    TextOrder,
    blocks_of,
)

_DEVICE_IDS = frozenset({"stablehlo.partition_id", "stablehlo.replica_id"})
_TERMINATORS = frozenset({"func.return", "stablehlo.return", "sdy.return"})


@dataclass(frozen=True)
class Issued:
    """A program, and the ops behind it.

    `ops` are its collectives by the ids of its issues; `sites` the ops of the nodes of each block,
    the blocks as `blocks_of` lists them.
    """

    program: Program
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
    """Inlines every call of the module, in place. Raises a located ToolError for one without main.

    Also for communication whose order is not understood.
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
) -> Issued:
    """What `main` issues when it runs on the devices, some or all of the grid that `facts` states.

    `platform` is the index of the platform, in an artifact for several. `by_channel` pairs sends
    and recvs by their channels alone, whatever pairs of devices they name. Raises a located
    ToolError for groups that name devices the grid does not have.
    """
    module, main, sites = inlined.module, inlined.main, inlined.sites
    dead = dead_collectives(module, inlined.collectives)
    uniformity = None
    if _has_control_flow(sites):
        uniformity = Uniformity(module, facts, devices)
        uniformity.bind_arguments(main, is_per_device(module), platform)
    rendezvous = Rendezvousing(facts, devices, by_channel=by_channel)
    reader = _Reader(module, rendezvous, tuple(devices), dead, uniformity)
    level = _Level()
    ours = list(iterate_collectives(list(sites)))
    if uniformity is None and not dead and is_chain(ours):
        reader.chain(ours, level)
    else:
        reader.main(main.regions[0].blocks[0], sites, level)
    deleted = tuple(reader.issue(collective) for collective in dead)
    program = Program(
        name,
        tuple(devices),
        level.block(),
        tuple(issue for issue in deleted if issue.rendezvous),
        to_place(main.location),
    )
    listed = blocks_of(program.block)
    sites_of = tuple(tuple(reader.site_of[node] for node in block.nodes) for block in listed)
    return Issued(program, tuple(reader.ops), sites_of)


@dataclass
class _Level:
    """A block under construction: its nodes, the bit of each, and what each must come after."""

    nodes: list[Node] = field(default_factory=list[Node])
    bits: list[int] = field(default_factory=list[int])
    after: list[int] = field(default_factory=list[int])
    is_chain: bool = False
    name: str = ""  # of the place in the program, the same in programs of the same form
    forms: Counter[Signature] = field(default_factory=Counter[Signature])

    def nested(self, region: int) -> _Level:
        """A level for a region of the next loop or branch."""
        count = sum(1 for node in self.nodes if not isinstance(node, Issue))
        return _Level(name=f"{self.name}/{count}.{region}")

    def block(self) -> Block:
        """The finished block."""
        if self.is_chain:
            return Block(tuple(self.nodes), TextOrder(len(self.nodes)))
        return Block(tuple(self.nodes), tuple(self._positions(after) for after in self.after))

    def all_bits(self) -> int:
        """The bits of all nodes."""
        return reduce(or_, self.bits, 0)

    def _positions(self, after: int) -> int:
        if not self.bits:
            return 0
        first = self.bits[0].bit_length() - 1
        if self.bits[-1].bit_length() - first == len(self.bits):  # bits in a row: the usual case
            return after >> first & (1 << len(self.bits)) - 1
        return sum(1 << i for i, bit in enumerate(self.bits) if after & bit)


@dataclass(frozen=True)
class _Pass:
    """One reading of a loop's regions, and what the body's returned values depend on."""

    condition: _Level
    body: _Level
    ends: list[Dependence]

    def levels(self) -> tuple[_Level, _Level]:
        """The condition and the body."""
        return self.condition, self.body

    def all_bits(self) -> int:
        """The bits of all nodes of an iteration."""
        return self.condition.all_bits() | self.body.all_bits()


class _Reader:
    """Walks a function in text order, making nodes of its sites.

    Each node has a bit. The nodes inside of a loop or a branch have theirs only while it is read;
    then one bit stands for all of them, on those results that come after all of them.
    """

    def __init__(
        self,
        module: ir.Module,
        rendezvous: Rendezvousing,
        devices: tuple[int, ...],
        dead: Sequence[Collective],
        uniformity: Uniformity | None,
    ) -> None:
        self.devices = devices
        self.dead = {collective.op.results[0] for collective in dead}
        self.uniformity = uniformity
        self.rendezvous = rendezvous
        self.transfer = Transfer(lambda: live_values(module))
        self.known: dict[ir.Value, Dependence] = {}
        self.ops: list[Collective] = []
        self.site_of: dict[Node, ir.Operation] = {}
        self.next_bit = VARIES.bit_length()
        self.rereading = uniformity is not None  # loops are read several times
        self.common = CommonValues(rendezvous.facts.grid.size) if uniformity is not None else None

    def main(self, block: ir.Block, sites: Sequence[Site], level: _Level) -> None:
        """Reads the function that the program starts with."""
        self._bind(block.arguments, [GIVEN] * len(block.arguments))
        self.block(block, sites, level)

    def block(self, block: ir.Block, sites: Sequence[Site], level: _Level) -> None:
        """Reads a block into a level; the arguments' dependences are known."""
        waiting = iter(sites)
        site = next(waiting, None)
        for view in block.operations:
            op = view.operation
            if site is not None and op == site.op:
                self._site(op, site, level)
                site = next(waiting, None)
            else:
                self._silent(op, level)

    def chain(self, collectives: Sequence[Collective], level: _Level) -> None:
        """Reads collectives of which each comes after the one before it."""
        for collective in collectives:
            self._place_collective(collective, 0, level)
        level.is_chain = True

    def issue(self, collective: Collective) -> Issue:
        """The collective as an issue of its own id."""
        issue = Issue(
            len(self.ops),
            self.rendezvous.signature(collective),
            self.rendezvous.rendezvous(collective),
            to_place(collective.op.location),
            collective.kind if collective.kind in ("send", "recv") else "",
        )
        self.ops.append(collective)
        return issue

    def _site(self, op: ir.Operation, site: Site, level: _Level) -> None:
        if site.collective is not None:
            self._collective(site.collective, level)
        elif op.name == WHILE:
            self._loop(op, site.regions, level)
        elif op.name in BRANCHES:
            self._branch(op, site.regions, level)
        else:
            self._computation(op, site.regions[0], level)

    def _silent(self, op: ir.Operation, level: _Level) -> None:
        """An op that does not communicate."""
        name = op.name
        if name in COMPUTATIONS:
            self._computation(op, [], level)
            return
        if self.uniformity is not None and name not in _TERMINATORS:
            self.uniformity.run(op)
        if name == WHILE:
            steady, _, _ = self._steady(op, ([], []), level)
            self._bind(op.results, steady)
        elif name in BRANCHES:
            ends = [self._region(region.blocks[0], [], level) for region in op.regions]
            self._bind(op.results, [_either(parts) for parts in zip(*ends, strict=True)])
        elif name in _DEVICE_IDS:
            self._bind(op.results, [GIVEN])
        else:
            self._hand_on(op, name)

    def _hand_on(self, op: ir.Operation, name: str) -> None:
        """Dependences through an op that neither communicates nor controls."""
        found = self.transfer.results(op, name, self.known)
        if found is not None:
            self._bind(op.results, found)
        elif self.rereading:
            for result in op.results:
                self.known.pop(result, None)

    def _collective(self, collective: Collective, level: _Level) -> None:
        op = collective.op
        if self.uniformity is not None:
            self.uniformity.run(op)
        bits = reduce(or_, (self._of(value).whole for value in op.operands), 0)
        if not len(op.results) or op.results[0] not in self.dead:
            bits |= self._place_collective(collective, bits, level)
        given = [self._of(v) for v in op.operands if isinstance(v.type, ir.RankedTensorType)]
        if all(part.each & VARIES for part in given):
            bits |= VARIES
        else:
            bits &= ~VARIES
        self._bind(op.results, [Dependence(bits, bits)] * len(op.results))

    def _place_collective(self, collective: Collective, after: int, level: _Level) -> int:
        issue = self.issue(collective)
        unpaired = issue.transfer and not is_host_transfer(collective)
        if issue.rendezvous or unpaired:
            if self.common is not None:
                self.common.met(collective, issue, level.name, level.forms[issue.signature])
                level.forms[issue.signature] += 1
            return self._place(issue, collective.op, after, level)
        self.ops.pop()  # stays on the device, or no device of ours takes part
        return 0

    def _place(self, node: Node, op: ir.Operation, after: int, level: _Level) -> int:
        """Adds a node to a level; returns its bit."""
        self.site_of[node] = op
        bit = 1 << self.next_bit
        self.next_bit += 1
        level.nodes.append(node)
        level.bits.append(bit)
        level.after.append(after)
        return bit

    def _computation(self, op: ir.Operation, sites: Sequence[Site], level: _Level) -> None:
        body = op.regions[0].blocks[0]
        if self.uniformity is not None:
            self.uniformity.enter(op)
        self._bind(body.arguments, [self._of(value) for value in op.operands])
        self._bind(op.results, self._region(body, sites, level))
        if self.uniformity is not None:
            self.uniformity.leave(op)

    def _region(self, body: ir.Block, sites: Sequence[Site], level: _Level) -> list[Dependence]:
        """Reads a block into a level; what the values it ends with depend on."""
        self.block(body, sites, level)
        return [self._of(value) for value in terminator(body).operands]

    def _branch(self, op: ir.Operation, sites: Sequence[Sequence[Site]], level: _Level) -> None:
        assert self.uniformity is not None
        self.uniformity.run(op)
        choice = self.uniformity.choice(op)
        taken = set(choice.values or ())
        if len(taken) == 1:  # known, and the same everywhere: compilers inline it
            position = taken.pop()
            body = op.regions[position].blocks[0]
            self._bind(op.results, self._region(body, sites[position], level))
            return
        first = self.next_bit
        levels = [level.nested(region) for region in range(len(op.regions))]
        ends = [
            self._region(region.blocks[0], inner, branch)
            for region, inner, branch in zip(op.regions, sites, levels, strict=True)
        ]
        self.next_bit = first
        chosen = self._of(op.operands[0]).whole
        branches = tuple(branch.block() for branch in levels)
        symbol = None
        if self.common is not None and choice.values is None:
            symbol = self.common.of_branch(op)
        node = Branch(self._decision(choice, op, symbol), branches, to_place(op.location))
        bit = 0
        if any(branch.nodes for branch in levels):
            bit = self._place(node, op, chosen | _common(levels) & _below(first), level)
        seen = [
            [_from_outside(part, branch.all_bits(), bit, first) for part in end]
            for end, branch in zip(ends, levels, strict=True)
        ]
        merged = [_either(parts) for parts in zip(*seen, strict=True)]
        self._bind(
            op.results, [part.with_all(chosen) if part.each & bit else part for part in merged]
        )

    def _loop(self, op: ir.Operation, sites: Sequence[Sequence[Site]], level: _Level) -> None:
        assert self.uniformity is not None
        self.uniformity.run(op)
        trips = self.uniformity.trips(op)
        first, mark = self.next_bit, len(self.ops)
        steady, start, once = self._steady(op, sites, level)
        kept = self.ops[mark:]
        last = max((bit.bit_length() for part in once.levels() for bit in part.bits), default=first)
        chained = trips.values is None or self._is_chained(op, sites, steady, once, last, level)
        self.ops[mark:] = kept
        self.next_bit = first
        condition, body = (part.block() for part in once.levels())
        if not condition.nodes and not body.nodes:
            self._bind(op.results, steady)
            return
        leading = once if not chained else start
        foremost = [leading.condition] if leading.condition.nodes else [leading.body]
        symbol = None
        if self.common is not None and trips.values is None:
            symbol = self.common.of_loop(op)
        decision = self._decision(trips, op, symbol)
        node = Loop(decision, condition, body, to_place(op.location), is_chained=chained)
        bit = self._place(node, op, _common(foremost) & _below(first), level)
        ends = terminator(op.regions[1].blocks[0]).operands
        arguments = op.regions[1].blocks[0].arguments
        results: list[Dependence] = []
        for position, outside in enumerate(steady):
            hands_on = ends[position] == arguments[position]
            inside = once.ends[position]
            if trips.values is None and not hands_on:  # the loop is one op, and must have ended
                inside = inside.with_all(once.all_bits())
            covered = NOTHING
            if chained and not hands_on:
                covered = _from_outside(inside, once.all_bits(), bit, first)
            results.append(
                Dependence(outside.each | covered.each & bit, outside.whole | covered.whole & bit)
            )
        self._bind(op.results, results)

    def _steady(
        self, op: ir.Operation, sites: Sequence[Sequence[Site]], around: _Level
    ) -> tuple[list[Dependence], _Pass, _Pass]:
        """What the carries depend on before every iteration and after the last, of what is outside.

        Also the first pass, whose carries are the initial ones, and the last, with the steady ones.
        """
        first, mark = self.next_bit, len(self.ops)
        known = [self._of(value) for value in op.operands]
        start = once = self._iteration(op, sites, known, around)
        while True:
            kept = [
                before.common(_from_outside(end, 0, 0, first))
                for before, end in zip(known, once.ends, strict=True)
            ]
            if kept == known:
                return known, start, once
            known = kept
            self.next_bit = first
            del self.ops[mark:]
            once = self._iteration(op, sites, known, around)

    def _iteration(
        self,
        op: ir.Operation,
        sites: Sequence[Sequence[Site]],
        carries: Sequence[Dependence],
        around: _Level,
    ) -> _Pass:
        levels = around.nested(0), around.nested(1)
        ends: list[list[Dependence]] = []
        for region, inner, level in zip(op.regions, sites, levels, strict=True):
            if self.uniformity is not None:
                self.uniformity.bind_carries(op)
            self._bind(region.blocks[0].arguments, carries)
            ends.append(self._region(region.blocks[0], inner, level))
        return _Pass(*levels, ends[1])

    def _is_chained(
        self,
        op: ir.Operation,
        sites: Sequence[Sequence[Site]],
        steady: Sequence[Dependence],
        once: _Pass,
        last: int,
        around: _Level,
    ) -> bool:
        """Whether every collective of an iteration comes after all of the iteration before."""
        self.next_bit = last
        carries = [
            Dependence(outside.each | end.each, outside.whole | end.whole)
            for outside, end in zip(steady, once.ends, strict=True)
        ]
        following = self._iteration(op, sites, carries, around)
        needed = once.all_bits()
        return all(needed & ~after == 0 for part in following.levels() for after in part.after)

    def _decision(self, known: Variation, op: ir.Operation, symbol: str | None) -> Decision:
        classes = dict(zip(self.devices, known.classes, strict=True))
        values = None
        if known.values is not None:
            values = dict(zip(self.devices, known.values, strict=True))
        return Decision(classes, values, to_place(op.location), symbol)

    def _of(self, value: ir.Value) -> Dependence:
        return self.known.get(value, NOTHING)

    def _bind(self, values: Iterable[ir.Value], found: Iterable[Dependence]) -> None:
        for value, part in zip(values, found, strict=True):
            if part.whole:
                self.known[value] = part
            elif self.rereading:
                self.known.pop(value, None)


def _has_control_flow(sites: Sequence[Site]) -> bool:
    return any(
        site.op.name == WHILE
        or site.op.name in BRANCHES
        or any(_has_control_flow(region) for region in site.regions)
        for site in sites
    )


def _common(levels: Iterable[_Level]) -> int:
    """What every node of the levels must come after."""
    after = [bits for level in levels for bits in level.after]
    return reduce(and_, after, -1) if after else 0


def _below(bit: int) -> int:
    return (1 << bit) - 1


def _from_outside(part: Dependence, inner: int, bit: int, first: int) -> Dependence:
    """A dependence as the outside sees it: `bit` in place of all the `inner` bits."""
    outside = _below(first)
    each = part.each & outside | (bit if inner & ~part.each == 0 else 0)
    whole = part.whole & outside | (bit if inner & ~part.whole == 0 else 0)
    return Dependence(each, whole)


def _either(parts: Sequence[Dependence]) -> Dependence:
    """A result of a branch. Not of its predicate: where both sides are alike, that is dropped."""
    return reduce(Dependence.common, parts)

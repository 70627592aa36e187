"""Walks a function and makes nodes of its collectives, loops and branches, with their order.

A manual computation is part of the block around it. The order of a loop is judged by its
collectives, not as a whole, because compilers unroll loops of a known trip count. `BlockLevel` is a
block under construction. `from_outside` and `either` translate the dependences inside a loop or
branch to its outside.

Two facts matter if a body seems to depend on nothing: that the loop remains a loop, and that a
carry really changes. A carry that is yielded as `x * 1` or `min(max(x, a), x)` changes only in the
text. Compilers move ops that depend on it out of the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from stablehlo_tools.analysis.collectives import Collective
from stablehlo_tools.analysis.common_values import CommonValues, hash_symbol
from stablehlo_tools.analysis.communication import Site
from stablehlo_tools.analysis.compiler_hazards import CollectiveSurroundings, Fences
from stablehlo_tools.analysis.forced_dependence import (
    GIVEN,
    NOTHING,
    VARIES,
    Dependence,
    DependenceTransfer,
    constant_elements,
    has_no_elements,
)
from stablehlo_tools.analysis.liveness import Deletable, surviving_values
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.analysis.rendezvous import Rendezvousing, is_host_transfer
from stablehlo_tools.analysis.uniformity import Uniformity, Variation, number_classes
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.dialect.names import COMPARE, REPLICA_ID, WHILE
from stablehlo_tools.dialect.traits import (
    BRANCHES,
    COMPUTATIONS,
    DEVICE_IDS,
    TERMINATORS,
    Trait,
    full_names,
    ops_with,
)
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import While, WithBody
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    Decision,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
    TextOrder,
)


@dataclass
class BlockLevel:
    """A block under construction: its nodes, their bits, and the bits they must come after."""

    nodes: list[Node] = field(default_factory=list[Node])
    bits: list[int] = field(default_factory=list[int])
    after: list[int] = field(default_factory=list[int])
    is_chain: bool = False
    name: str = ""  # of the place in the program, the same in programs of the same form
    forms: Counter[CollectiveSignature] = field(default_factory=Counter[CollectiveSignature])

    def inner_level(self, region: int) -> BlockLevel:
        """Returns a level for a region of the next loop or branch."""
        count = sum(1 for node in self.nodes if not isinstance(node, CollectiveIssue))
        return BlockLevel(name=f"{self.name}/{count}.{region}")

    def block(self) -> ProgramBlock:
        """Returns the finished block."""
        if self.is_chain:
            return ProgramBlock(tuple(self.nodes), TextOrder(len(self.nodes)))
        bits = self.bits
        first = bits[0].bit_length() - 1 if bits else 0
        if not bits or bits[-1].bit_length() - first == len(bits):  # contiguous: the usual case
            positions = [after >> first & (1 << len(bits)) - 1 for after in self.after]
        else:
            numbered = list(enumerate(bits))
            positions = [sum(1 << i for i, bit in numbered if after & bit) for after in self.after]
        return ProgramBlock(tuple(self.nodes), tuple(positions))

    def all_bits(self) -> int:
        """Returns the bits of all nodes."""
        return reduce(or_, self.bits, 0)


@dataclass(frozen=True)
class Iteration:
    """One reading of a loop's regions, with the dependences of the body's yielded values."""

    levels: tuple[BlockLevel, BlockLevel]  # of the condition and the body
    ends: list[Dependence]

    def all_bits(self) -> int:
        """Returns the bits of all nodes of an iteration."""
        return self.levels[0].all_bits() | self.levels[1].all_bits()


def _afters(levels: Iterable[BlockLevel]) -> list[int]:
    """Returns the bits that each node of the levels must come after."""
    return [after for level in levels for after in level.after]


def below(bit: int) -> int:
    """Returns all bits below one, given by its position."""
    return (1 << bit) - 1


def from_outside(part: Dependence, inner: int, bit: int, first: int) -> Dependence:
    """Returns a dependence as seen from outside: `bit` replaces all `inner` bits together."""
    outside = below(first)
    return part.map_bits(lambda bits: bits & outside | (bit if inner & ~bits == 0 else 0))


def either(parts: Sequence[Dependence]) -> Dependence:
    """Returns the dependences of a branch's result.

    The predicate is left out, because compilers drop it if both sides are the same.
    """
    return reduce(Dependence.common, parts)


MOVING = ops_with(Trait.IRREVERSIBLE)  # no compiler undoes these
_STEPS = full_names("add subtract")
_FACTORS = full_names("multiply")  # of floats: integers overflow to zero and stay there
_CONNECTIVES = full_names("and or not")
_MOST_LOOKED_AT = 64  # ops of a condition


def is_counter(end: ir.Value, argument: ir.Value) -> bool:
    """Returns True if a carry grows or shrinks by a constant.

    The constant is added and not zero, or a factor that is neither zero nor one.
    """
    op = producer(end)
    if op is None or op.name not in _STEPS | _FACTORS or argument not in list(op.operands):
        return False
    position = 1 if op.operands[0] == argument else 0
    step = constant_elements(op.operands[position])
    if step is None or step.dtype.kind not in "iuf" or not (step != 0).all():
        return False
    return op.name in _STEPS or (step.dtype.kind == "f" and bool((step != 1).all()))


def stays_a_loop(loop: ir.Operation, known: Callable[[ir.Value], int], changing: set[int]) -> bool:
    """Returns True if no compiler can find the trip count of a loop.

    Every value that its condition compares must be open or counted, and one must be open. `known`
    returns the bits that a value of the condition depends on: an open value has some. `changing`
    are the carries that change, which are the counted ones.
    """
    condition = While(loop).condition
    counted = {condition.arguments[position] for position in changing}
    pending = [terminator(condition).operands[0]]
    is_open = False
    looked_at = 0
    while pending:
        value = pending.pop()
        op = producer(value)
        looked_at += 1
        if looked_at > _MOST_LOOKED_AT:
            return False
        if op is not None and op.name in _CONNECTIVES:
            pending.extend(op.operands)
            continue
        asked = list(op.operands) if op is not None and op.name == COMPARE else [value]
        if any(known(operand) for operand in asked):
            is_open = True
        elif counted.isdisjoint(asked):
            return False
    return is_open


class IssueReader:
    """Walks a function in text order, and makes nodes of its sites.

    Each node has a bit. The nodes in a loop or branch keep theirs only while it is read. Then one
    bit replaces all of them, on the results that come after all of them.
    """

    def __init__(
        self,
        module: ir.Module,
        rendezvous: Rendezvousing,
        devices: tuple[int, ...],
        deletable: Deletable | None,
        uniformity: Uniformity | None,
        fences: Fences | None = None,
    ) -> None:
        self.devices = devices
        self.fences = fences
        dead = () if deletable is None else deletable.dead
        self.dead = {collective.op.results[0] for collective in dead}
        self.uniformity = uniformity
        self.rendezvous = rendezvous
        self.surroundings = CollectiveSurroundings(() if deletable is None else deletable.folded)
        self.transfer = DependenceTransfer(
            lambda: surviving_values(module) if deletable is None else deletable.live
        )
        self.known: dict[ir.Value, Dependence] = {}
        self.ops: list[Collective] = []
        self.site_of: dict[Node, ir.Operation] = {}
        self.next_bit = VARIES.bit_length()
        # The bit of results of irreversible ops, while `_check_iteration_order` needs it.
        self.moved = 0
        self.rereading = uniformity is not None  # loops are read several times
        self.common = CommonValues(rendezvous.facts.grid.size) if uniformity is not None else None

    def main(self, block: ir.Block, sites: Sequence[Site], level: BlockLevel) -> None:
        """Reads the function that the program starts with."""
        self._bind(block.arguments, [GIVEN] * len(block.arguments))
        self.block(block, sites, level)

    def assume_equal(self, argument: ir.Value, symbol: str) -> None:
        """Assumes that an argument of the program is the same on all devices of the job.

        Programs name such arguments by the same symbols.
        """
        if self.uniformity is not None and self.common is not None:
            self.uniformity.bind([argument], [self.uniformity.everywhere])
            self.common.symbols[argument] = symbol

    def block(self, block: ir.Block, sites: Sequence[Site], level: BlockLevel) -> None:
        """Reads a block into a level; the arguments' dependences must be known."""
        waiting = iter(sites)
        site = next(waiting, None)
        for view in block.operations:
            op = view.operation
            if site is not None and op == site.op:
                if site.collective is not None:
                    self._collective(site.collective, level)
                elif op.name == WHILE:
                    self._loop(op, site.regions, level)
                elif op.name in BRANCHES:
                    self._branch(op, site.regions, level)
                else:
                    self._computation(op, site.regions[0], level)
                site = next(waiting, None)
            else:
                self._silent(op, level)

    def chain(self, collectives: Sequence[Collective], level: BlockLevel) -> None:
        """Reads collectives that each come after the one before."""
        for collective in collectives:
            self._place_collective(collective, 0, level)
        level.is_chain = True

    def issue(self, collective: Collective) -> CollectiveIssue:
        """Returns the collective as an issue with its own id."""
        issue = CollectiveIssue(
            len(self.ops),
            self.rendezvous.signature(collective),
            self.rendezvous.rendezvous(collective),
            to_place(collective.op.location),
            collective.kind if collective.kind in ("send", "recv") else "",
            beside := self.surroundings.describe_hazards(collective),
            self.rendezvous.groups_of_all(collective),
            "" if self.fences is None else beside or self.fences.doubt(collective),
        )
        self.ops.append(collective)
        return issue

    def _silent(self, op: ir.Operation, level: BlockLevel) -> None:
        """Reads an op that does not communicate."""
        name = op.name
        if name in COMPUTATIONS:
            self._computation(op, [], level)
            return
        if self.uniformity is not None and name not in TERMINATORS:
            self.uniformity.run(op)
        if name == WHILE:
            self._bind(op.results, self._steady(op, ([], []), level)[0])
        elif name in BRANCHES:
            taken = self._entered_region(op)
            regions = op.regions if taken is None else [op.regions[taken]]
            ends = [self._region(region.blocks[0], [], level) for region in regions]
            self._bind(op.results, [either(parts) for parts in zip(*ends, strict=True)])
        elif name in DEVICE_IDS:
            counts = self.rendezvous.facts.grid
            count = counts.num_replicas if name == REPLICA_ID else counts.num_partitions
            self._bind(op.results, [GIVEN if count > 1 else NOTHING])
        else:
            # The op neither communicates nor controls.
            dependences = self.transfer.results(op, name, self.known)
            if self.moved and name in MOVING:
                dependences = [
                    part.with_all(self.moved) for part in dependences or [NOTHING] * len(op.results)
                ]
            if dependences is not None:
                self._bind(op.results, dependences)
            elif self.rereading:
                for result in op.results:
                    self.known.pop(result, None)

    def _collective(self, collective: Collective, level: BlockLevel) -> None:
        op = collective.op
        if self.uniformity is not None:
            self.uniformity.run(op)
        if len(op.results) and all(has_no_elements(value.type) for value in op.results):
            # Compilers delete it.
            self._bind(op.results, [NOTHING] * len(op.results))
            return
        bits = reduce(or_, (self._dependence_of(value).whole for value in op.operands), 0)
        if not len(op.results) or op.results[0] not in self.dead:
            bits |= self._place_collective(collective, bits, level)
        given = [
            self._dependence_of(v) for v in op.operands if isinstance(v.type, ir.RankedTensorType)
        ]
        bits = bits | VARIES if all(part.each & VARIES for part in given) else bits & ~VARIES
        dependences = [Dependence(bits, bits)] * len(op.results)
        self._bind(op.results, self.transfer.of_elements(op, dependences))

    def _place_collective(self, collective: Collective, after: int, level: BlockLevel) -> int:
        issue = self.issue(collective)
        if issue.rendezvous or (issue.transfer and not is_host_transfer(collective)):
            if self.common is not None:
                self.common.met(collective, issue, level.name, level.forms[issue.signature])
                level.forms[issue.signature] += 1
            return self._place(issue, collective.op, after, level)
        self.ops.pop()  # it stays on the device, or none of our devices takes part
        return 0

    def _place(self, node: Node, op: ir.Operation, after: int, level: BlockLevel) -> int:
        """Adds a node to a level, and returns its bit."""
        self.site_of[node] = op
        bit = 1 << self.next_bit
        self.next_bit += 1
        level.nodes.append(node)
        level.bits.append(bit)
        level.after.append(after)
        return bit

    def _computation(self, op: ir.Operation, sites: Sequence[Site], level: BlockLevel) -> None:
        body = WithBody(op).body
        if self.uniformity is not None and self.common is not None:
            self.uniformity.enter(op)
            # Arguments that are not divided have the symbols of the values outside.
            for value, argument in zip(op.operands, body.arguments, strict=True):
                symbol = self.common.symbols.get(value)
                is_whole = self.uniformity.variation_of(argument) == self.uniformity.everywhere
                if symbol is not None and is_whole:
                    self.common.symbols[argument] = symbol
        self._bind(body.arguments, [self._dependence_of(value) for value in op.operands])
        self._bind(op.results, self._region(body, sites, level))
        if self.uniformity is not None:
            self.uniformity.leave(op)

    def _region(self, body: ir.Block, sites: Sequence[Site], level: BlockLevel) -> list[Dependence]:
        """Reads a block into a level, and returns the dependences of its terminator's operands."""
        self.block(body, sites, level)
        return [self._dependence_of(value) for value in terminator(body).operands]

    def _branch(self, op: ir.Operation, sites: Sequence[Sequence[Site]], level: BlockLevel) -> None:
        assert self.uniformity is not None
        self.uniformity.run(op)
        taken = self._entered_region(op)
        if taken is not None:  # compilers inline it
            body = op.regions[taken].blocks[0]
            self._bind(op.results, self._region(body, sites[taken], level))
            return
        choice = self.uniformity.choice(op)
        first = self.next_bit
        levels = [level.inner_level(region) for region in range(len(op.regions))]
        ends = [
            self._region(region.blocks[0], inner, branch)
            for region, inner, branch in zip(op.regions, sites, levels, strict=True)
        ]
        self.next_bit = first
        chosen = self._dependence_of(op.operands[0]).whole
        branches = tuple(branch.block() for branch in levels)
        node = ProgramBranch(self._decision(choice, op), branches, to_place(op.location))
        bit = 0
        if any(branch.nodes for branch in levels):
            common = reduce(and_, _afters(levels), below(first))
            bit = self._place(node, op, chosen | common, level)
        seen = [
            [from_outside(part, branch.all_bits(), bit, first) for part in end]
            for end, branch in zip(ends, levels, strict=True)
        ]
        merged = [either(parts) for parts in zip(*seen, strict=True)]
        self._bind(
            op.results, [part.with_all(chosen) if part.each & bit else part for part in merged]
        )

    def _entered_region(self, branch: ir.Operation) -> int | None:
        """Returns the region that all devices enter; None if it is unknown."""
        if self.uniformity is None:
            return None
        taken = set(self.uniformity.choice(branch).values or ())
        return taken.pop() if len(taken) == 1 else None

    def _loop(self, op: ir.Operation, sites: Sequence[Sequence[Site]], level: BlockLevel) -> None:
        assert self.uniformity is not None
        self.uniformity.run(op)
        trips = self.uniformity.trips(op)
        first, mark = self.next_bit, len(self.ops)
        steady, start, once = self._steady(op, sites, level)
        kept = self.ops[mark:]
        last = max((bit.bit_length() for part in once.levels for bit in part.bits), default=first)
        chained, changing = self._check_iteration_order(
            op, sites, steady, once, last, level, is_known=trips.values is not None
        )
        self.ops[mark:] = kept
        self.next_bit = first
        condition, body = (part.block() for part in once.levels)
        if not condition.nodes and not body.nodes:
            self._bind(op.results, steady)
            return
        leading = (once if not chained else start).levels
        foremost = leading[0] if leading[0].nodes else leading[1]
        decision = self._decision(trips, op)
        node = ProgramLoop(decision, condition, body, to_place(op.location), is_chained=chained)
        common = reduce(and_, foremost.after, below(first)) if foremost.nodes else 0
        bit = self._place(node, op, common, level)
        results: list[Dependence] = []
        for position, outside in enumerate(steady):
            inside = once.ends[position]
            if position in changing:  # the loop is one op, and must have ended
                inside = inside.with_all(once.all_bits())
            covered = from_outside(inside, once.all_bits(), bit, first) if chained else NOTHING
            results.append(outside.both(covered.only(bit)))
        self._bind(op.results, self.transfer.of_elements(op, results))

    def _steady(
        self, op: ir.Operation, sites: Sequence[Sequence[Site]], around: BlockLevel
    ) -> tuple[list[Dependence], Iteration, Iteration]:
        """Returns the carries' dependences on the outside, true in every iteration and at the end.

        Also returns the first reading, with the initial carries, and the last, with the steady
        ones.
        """
        first, mark = self.next_bit, len(self.ops)
        known = [self._dependence_of(value) for value in op.operands]
        start = once = self._iteration(op, sites, known, around)
        while True:
            kept = [
                before.common(from_outside(end, 0, 0, first))
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
        around: BlockLevel,
    ) -> Iteration:
        levels = around.inner_level(0), around.inner_level(1)
        ends: list[list[Dependence]] = []
        for region, inner, level in zip(op.regions, sites, levels, strict=True):
            if self.uniformity is not None:
                self.uniformity.bind_carries(op)
            self._bind(region.blocks[0].arguments, carries)
            ends.append(self._region(region.blocks[0], inner, level))
        return Iteration(levels, ends[1])

    def _check_iteration_order(
        self,
        op: ir.Operation,
        sites: Sequence[Sequence[Site]],
        steady: Sequence[Dependence],
        once: Iteration,
        last: int,
        around: BlockLevel,
        *,
        is_known: bool,
    ) -> tuple[bool, set[int]]:
        """Returns True if every collective of an iteration comes after all of the iteration before.

        A loop of unknown length is not unrolled. There, each collective must depend on a carry that
        changes, and the next iteration or the condition must need it. Compilers move invariant
        values, and values that are only accumulated, out of the loop. Also returns the carries that
        change: they are known only once the loop has ended.
        """
        predicate = terminator(While(op).condition).operands[0]
        tested = self._dependence_of(predicate).whole
        self.next_bit = last + 2
        carries = [outside.both(end) for outside, end in zip(steady, once.ends, strict=True)]
        needed = once.all_bits()
        if is_known:
            following = self._iteration(op, sites, carries, around)
            return all(needed & ~after == 0 for after in _afters(following.levels)), set()
        # One bit for values that depend on a carry that changes, one for results of irreversible
        # ops.
        changed, moved = 1 << last, 1 << last + 1
        changing: set[int] = set()
        while True:
            self.next_bit = last + 2
            outer, self.moved = self.moved, self.moved | moved
            given = [
                part.with_all(changed) if position in changing else part
                for position, part in enumerate(carries)
            ]
            following = self._iteration(op, sites, given, around)
            self.moved = outer
            inside = needed | following.all_bits() | changed | moved
            body = While(op).body
            handed = zip(body.arguments, terminator(body).operands, following.ends, strict=True)
            more = {  # carries that surely change: by an irreversible op, or by a constant
                position
                for position, (argument, end, part) in enumerate(handed)
                if end != argument and (part.whole & inside or is_counter(end, argument))
            }
            if more <= changing:
                break
            changing |= more
        tested |= self._dependence_of(predicate).whole
        afters = _afters(following.levels)
        chained = needed & ~reduce(or_, afters, tested) == 0 and all(map(changed.__and__, afters))
        is_open = stays_a_loop(
            op, lambda value: self._dependence_of(value).whole & below(last), changing
        )
        return chained, changing if is_open else set()

    def _decision(self, known: Variation, op: ir.Operation) -> Decision:
        assert self.uniformity is not None
        assert self.common is not None
        place = to_place(op.location)
        classes = dict(zip(self.devices, known.classes, strict=True))
        if known.values is not None:
            values = dict(zip(self.devices, known.values, strict=True))
            is_constant = op.name == WHILE and constant_trips(op) is not None
            return Decision(classes, values, place, is_constant=is_constant)
        series = self.uniformity.iterations.series(op)
        if series is not None:
            classes = dict(zip(self.devices, number_classes(series), strict=True))
            told = [hash_symbol(f"{op.name}{row}") or "" for row in series]
            return Decision(classes, None, place, dict(zip(self.devices, told, strict=True)))
        symbol = self.common.of_loop(op) if op.name == WHILE else self.common.of_branch(op)
        symbols = {} if symbol is None else dict.fromkeys(self.devices, symbol)
        return Decision(classes, None, place, symbols)

    def _dependence_of(self, value: ir.Value) -> Dependence:
        return self.known.get(value, NOTHING)

    def _bind(self, values: Iterable[ir.Value], dependences: Iterable[Dependence]) -> None:
        for value, part in zip(values, dependences, strict=True):
            if part.whole:
                self.known[value] = part
            elif self.rereading:
                self.known.pop(value, None)

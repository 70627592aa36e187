"""Finds the collectives that compilers delete, because no output or effect depends on them.

The analysis goes backwards, by the elements that are surely needed. Of values that are joined and
then sliced, only the part that is sliced is needed. Of other ops, the operands are needed that the
rules of `forced_dependence` keep, if every operand but constants varies. Those rules leave out
predicates, indices and the key of a reduction. Here these are used: an order through them is not
certain, but that does not mean that compilers can ignore them.

Compilers drop an op whose results reach no output, also a collective. A value is live if a result
of a public function, an op with a side effect, or a condition depends on it. Each carry of a loop,
each result of a branch and each element of a barrier is judged separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import (
    Collective,
    classify_communication,
    find_collectives,
)
from stablehlo_tools.analysis.communication import is_public
from stablehlo_tools.analysis.device_values import chosen_regions, fold_value
from stablehlo_tools.analysis.elements.boxes import Box, contains, shape_of, whole_box
from stablehlo_tools.analysis.elements.element_links import Link, link_of
from stablehlo_tools.analysis.elements.element_moves import (
    ElementMoves,
    Links,
    moves_of,
    scatter_writes,
)
from stablehlo_tools.analysis.forced_dependence import (
    VARIES,
    Dependence,
    DependenceTransfer,
    constant_before,
    has_no_elements,
    rule_of,
)
from stablehlo_tools.analysis.loops import constant_trips
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.communication_kinds import TRANSFERS
from stablehlo_tools.dialect.names import BARRIER, DYNAMIC_UPDATE_SLICE, WHILE
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, CARRIERS, COMPUTATIONS, TERMINATORS
from stablehlo_tools.ir.values import is_float, key_of, maker_of
from stablehlo_tools.ir.views import Combining, Function, While
from stablehlo_tools.ir.walk import FUNCTION, callee_name, symbol_name, terminator, walk
from stablehlo_tools.ir.while_loop import is_invariant

OPAQUE = "stablehlo_tools.keeps_alive"  # unit attribute: no compiler sees through the op
ALL: None = None
Demand = tuple[Box, ...] | None  # boxes of elements that are surely needed; None: all are
_MOST_BOXES = 4
_TRANSFER = DependenceTransfer(set)  # never used on barriers, the only ops that need live values
_MOVING = frozenset({"assembly", "order", "scatter", "select", "slice"})
_NEVER_FOLDING = frozenset({"all", "bitcast", "convolution", "first", "mixing"})


def needed_operands(result: ir.Value, demand: Demand) -> list[tuple[ir.Value, Demand]]:
    """Returns the operands, and their elements, that are needed for elements of an op's result."""
    op = maker_of(result)
    if demand is None and _is_reordered(op):
        return [(op.operands[0], ALL)]
    moves = _moves(op)
    if moves is not None:
        if moves.steering:  # unknown indices: any element may be read or written
            used = [*sorted(moves.sources), *moves.steering]
            return [(op.operands[position], ALL) for position in used]
        return _pull_demand(op, moves.links, demand)
    written = _scatter_updates(op)
    if written is not None:
        needed: list[tuple[ir.Value, Demand]] = [(op.operands[0], demand)]
        return needed + _pull_demand(op, written, demand)
    survivors = _computed_survivors(result)
    if demand is None:
        return [(value, ALL) for value in survivors]
    needed = []
    for position, value in enumerate(op.operands):
        if value not in survivors:
            continue
        link = link_of(op, position)
        pulled = [link.pull(box) for box in demand] if link is not None else []
        boxes = [box for box in pulled if box is not None]
        needed.append((value, tuple(boxes) if boxes else ALL))
    return needed


def _is_reordered(op: ir.Operation) -> bool:
    """Returns True if an op's result has all elements of its first operand, and no others."""
    return rule_of(op.name) == "order" and not has_no_elements(op.results[0].type)


def _moves(op: ir.Operation) -> ElementMoves | None:
    """Returns where the elements of an op's result come from; None if the op computes."""
    if rule_of(op.name) not in _MOVING or OPAQUE in op.attributes:
        return None
    return moves_of(op)


def _scatter_updates(op: ir.Operation) -> Links | None:
    """Returns the updates that a scatter combines with its operand; None if they are unknown."""
    if rule_of(op.name) != "scatter":
        return None
    shapes = [shape_of(value.type) for value in op.operands]
    known = [shape for shape in shapes if shape is not None]
    written = scatter_writes(op, known) if len(shapes) == len(known) == 3 else None
    return None if written is None else written[0]


def _pull_demand(
    op: ir.Operation, links: Sequence[tuple[int, Link]], demand: Demand
) -> list[tuple[ir.Value, Demand]]:
    shape = shape_of(op.results[0].type)
    assert shape is not None, "of every op whose moves are known"
    needed: list[tuple[ir.Value, Demand]] = []
    for box in [whole_box(shape)] if demand is None else demand:
        for position, link in links:
            pulled = link.pull(box)
            if pulled is not None:
                needed.append((op.operands[position], (pulled,)))
    return needed


def grown(known: Demand, more: Demand, type_: ir.Type) -> Demand:
    """Returns the union of two demands on a value of a type."""
    if known is None or more is None:
        return ALL
    boxes = list(known)
    for box in more:
        if len(boxes) < _MOST_BOXES and not any(contains(other, box) for other in boxes):
            boxes = [*(other for other in boxes if not contains(box, other)), box]
    shape = shape_of(type_)
    is_whole = shape is not None and whole_box(shape) in boxes
    return ALL if is_whole else tuple(boxes)


def _computed_survivors(result: ir.Value) -> Sequence[ir.Value]:
    """Returns the operands that a result still depends on after simplification.

    Only for ops that compute, or whose moves are unknown.
    """
    op = maker_of(result)
    if rule_of(op.name) == "own":
        position = ir.OpResult(result).result_number
        arguments = Combining(op).combiner.arguments
        return [
            value
            for i, value in enumerate(op.operands)
            if i == position
            or any(list(argument.uses) for argument in arguments[2 * i : 2 * i + 2])
        ]
    operands = list(op.operands)
    if not _may_fold(op):
        return operands
    computed = [value for value in operands if not _is_constant(value)]
    known: dict[ir.Value, Dependence] = {}
    for position, value in enumerate(computed):
        # One bit for each operand: the operand survives if the result keeps its bit.
        bits = VARIES | 2 << position
        known[value] = Dependence(bits, bits)
    dependences = _TRANSFER.results(op, op.name, known)
    if dependences is None:
        return operands
    left = dependences[ir.OpResult(result).result_number].whole
    survivors = [value for i, value in enumerate(computed) if left >> (i + 1) & 1]
    # Predicates and indices also survive: they decide which elements are read.
    rule = rule_of(op.name)
    if rule == "select" and operands[1] != operands[2] and not _is_constant(operands[0]):
        survivors += operands[:1]
    if rule == "slice" or op.name == DYNAMIC_UPDATE_SLICE:
        survivors += operands[1 if rule == "slice" else 2 :]
    return survivors


def _may_vanish(op: ir.Operation) -> bool:
    """Returns True if the use of some computed operand may be folded away."""
    if not _may_fold(op) or _is_reordered(op):
        return False
    computed = {value for value in op.operands if not _is_constant(value)}
    return any(
        computed.difference(value for value, _ in needed_operands(result, ALL))
        for result in op.results
    )


def _may_fold(op: ir.Operation) -> bool:
    rule = rule_of(op.name)
    if rule is None or rule in _NEVER_FOLDING or OPAQUE in op.attributes:
        return False
    if rule == "scatter":  # only _may_vanish asks this, if the moves or updates are known
        return moves_of(op) is not None or _scatter_updates(op) is not None
    if rule == "reduction":
        return len(op.results) == 1
    return rule != "arithmetic" or not is_float(op.results[0].type)


def _is_constant(value: ir.Value) -> bool:
    return constant_before(value) is not None or fold_value(value) is not None


# Ops that always run, even if their results are unused. Other custom calls are assumed to be pure.
_EFFECTS = TRANSFERS | {"custom_call"}
_LONGEST_SEARCH = 500  # values, for one collective


def dead_collectives(module: ir.Module) -> list[Collective]:
    """Returns the collectives whose results are unused, in program order."""
    collectives = find_collectives(module)
    if live_paths(collectives) is not None:
        return []
    liveness = _Liveness(module)
    return [c for c in collectives if not liveness.is_live(c)]


@dataclass(frozen=True)
class Deletable:
    """Collectives that a compiler may delete.

    The results of `dead` ones are unused, those of `folded` ones are used only by ops that
    compilers fold away. `live` are all values of the module with other uses.
    """

    dead: tuple[Collective, ...]
    folded: tuple[Collective, ...]
    live: set[ir.Value]


def deletable_collectives(module: ir.Module, collectives: Sequence[Collective]) -> Deletable:
    """Returns the module's collectives that a compiler may delete."""
    liveness, surviving = _Liveness(module), _Surviving(module)
    dead = [c for c in collectives if not liveness.is_live(c)]
    folded = [c for c in collectives if liveness.is_live(c) and not surviving.is_live(c)]
    return Deletable(tuple(dead), tuple(folded), surviving.live)


def surviving_values(module: ir.Module) -> set[ir.Value]:
    """Returns the values that outputs or effects depend on by more than foldable ops."""
    return _Surviving(module).live


def has_effect(collective: Collective) -> bool:
    """Returns True if the op runs even if its results are unused: a transfer, a custom call."""
    return collective.kind in _EFFECTS


def live_values(
    module: ir.Module, operands_of: Callable[[ir.Value], Sequence[ir.Value]] | None = None
) -> set[ir.Value]:
    """Returns every value that an output or an effect of the module depends on.

    `operands_of` returns the values that a live result of an ordinary op is computed from. The
    default is the op's operands; a client can answer for a rewrite that it only considers.
    """
    return _Liveness(module, operands_of).live


def live_paths(collectives: Sequence[Collective]) -> set[ir.Value] | None:
    """Returns values on short paths from every collective to an output, all of them surely used.

    None if some collective has no such path, though it may still be used. Usually all have one, and
    the search is far cheaper than marking every live value. Collectives are visited last first, so
    each soon meets a value that a later one has shown to be live.
    """
    live: set[ir.Value] = set()
    for collective in reversed(collectives):
        results = collective.op.results
        if not has_effect(collective) and not reaches_an_output(results, live, whole=True):
            return None
    return live


def reaches_an_output(
    values: Iterable[ir.Value], live: set[ir.Value], *, whole: bool = False
) -> bool:
    """Follows uses, depth first, to a live value or an output; adds the path found to `live`.

    Sound, not complete. With `whole`, a start value is live as a whole as soon as a part of it is
    used. If a path slices a value, only that part of the earlier values is used, so they are not
    added to `live`. A path that joins values and then slices them is not followed: the slice may
    drop the start.
    """
    came_from: dict[ir.Value, ir.Value | None] = dict.fromkeys(values)
    pending: list[ir.Value] = list(came_from)
    joined: set[ir.Value] = set()
    parts: set[ir.Value] = set()
    while pending and len(came_from) < _LONGEST_SEARCH:
        value = pending.pop()
        for use in value.uses:
            user, position = use.owner.operation, use.operand_number
            following = _following(user, position)
            moves = _moves(user) if following and rule_of(user.name) != "order" else None
            # The user may leave out elements of the value.
            is_part = bool(following) and (
                position == 2 and rule_of(user.name) == "scatter"
                if moves is None
                else position not in moves.kept
            )
            if is_part and value in joined:
                continue
            if following is None or not live.isdisjoint(following):
                live.update(_path(value, came_from, parts, is_part=is_part, whole=whole))
                return True
            # Elements of the user's results come from several whole operands.
            is_joined = bool(following) and (
                value in joined
                or (moves is not None and rule_of(user.name) != "slice" and len(moves.sources) > 1)
            )
            for reached in following:
                if reached not in came_from:
                    came_from[reached] = value
                    pending.append(reached)
                    if is_part:
                        parts.add(reached)
                    if is_joined:
                        joined.add(reached)
    return False


def _path(
    value: ir.Value,
    came_from: dict[ir.Value, ir.Value | None],
    parts: set[ir.Value],
    *,
    is_part: bool,
    whole: bool,
) -> list[ir.Value]:
    """Returns the values on the path to one, and it, if all of each is used."""
    path: list[ir.Value] = []
    step: ir.Value | None = value
    while step is not None:
        before = came_from[step]
        if not is_part or (whole and before is None):
            path.append(step)
        is_part = is_part or step in parts
        step = before
    return path


def _following(user: ir.Operation, position: int) -> Sequence[ir.Value] | None:
    """Returns the values whose liveness makes the used one live; None for a program output."""
    name = user.name
    if name == BARRIER:
        return [user.results[position]]
    if name in CARRIERS:
        return []  # left to the complete analysis
    if name not in TERMINATORS:
        return [] if _may_vanish(user) else user.results
    parent = user.parent
    assert parent is not None
    if parent.name == FUNCTION:
        return None if is_public(parent) else []
    if parent.name == WHILE and user.block == While(parent).condition:
        return []  # a predicate
    if parent.name in BRANCHES:
        taken = _entered_region(parent)
        if taken is not None and user.block != parent.regions[taken].blocks[0]:
            return []
    return [parent.results[position]] if parent.name in CARRIERS else []


class _Liveness:
    """Marks live values backwards from outputs and effects."""

    def __init__(
        self, module: ir.Module, operands_of: Callable[[ir.Value], Sequence[ir.Value]] | None = None
    ) -> None:
        self.operands_of = operands_of or (lambda value: maker_of(value).operands)
        self.functions: dict[str, ir.Operation] = {}
        self.calls: defaultdict[str, list[ir.Operation]] = defaultdict(list)
        self.wanted: dict[ir.Value, Demand] = {}
        self.kept: set[ir.Value | ir.Operation] = set()  # see `key_of`: ops that run
        self.entered: set[ir.Block] = set()  # blocks of such ops: the ops around them run, too
        self.pending: list[ir.Value] = []
        self._collect(module)
        while self.pending:
            self._visit(self.pending.pop())
        self.live = set(self.wanted)

    def is_live(self, collective: Collective) -> bool:
        """Returns True if the op runs for an effect, or one of its results is used."""
        return key_of(collective.op) in self.kept or any(
            r in self.wanted for r in collective.op.results
        )

    def _collect(self, module: ir.Module) -> None:
        classify = classify_communication(module.context)
        effects: list[ir.Operation] = []

        def visit(op: ir.Operation) -> ir.WalkResult:
            name = op.name
            if name == FUNCTION:
                self.functions[symbol_name(op)] = op
            elif name in CALLS:
                self.calls[callee_name(op)].append(op)
            collective = classify(op)
            if collective is None:
                return ir.WalkResult.ADVANCE
            if has_effect(collective):
                effects.append(op)
            return ir.WalkResult.SKIP

        walk(module.operation, visit)
        for function in self.functions.values():
            if is_public(function):
                self._mark(Function(function).yields)
        for op in effects:
            self._keep(op)
            self._mark(op.operands)

    def _mark(self, values: Iterable[ir.Value], demand: Demand = ALL) -> None:
        for value in values:
            if value not in self.wanted:
                self.wanted[value] = demand
            elif self.wanted[value] is ALL:
                continue
            else:
                more = grown(self.wanted[value], demand, value.type)
                if more == self.wanted[value]:
                    continue
                self.wanted[value] = more
            self.pending.append(value)

    def _keep(self, op: ir.Operation) -> None:
        """Records that an op runs, and marks the values that decide if it does."""
        key = key_of(op)
        if key in self.kept:
            return
        self.kept.add(key)
        if op.name == WHILE:
            self._mark(terminator(While(op).condition).operands)
        elif op.name in BRANCHES:
            self._mark([op.operands[0]])
        self._enter(op)

    def _enter(self, op: ir.Operation) -> None:
        """Records that the ops around an op run, because it does."""
        parent = op.parent
        if parent is None or op.block in self.entered:
            return
        self.entered.add(op.block)
        if parent.name == FUNCTION:
            for call in self.calls[symbol_name(parent)]:
                self._keep(call)
        self._keep(parent)

    def _visit(self, value: ir.Value) -> None:
        owner, demand = value.owner, self.wanted[value]
        if isinstance(owner, ir.Block):
            self._visit_argument(ir.BlockArgument(value), owner, demand)
            return
        op = owner.operation
        name = op.name
        if name in CARRIERS:
            self._visit_carrier(op, ir.OpResult(value).result_number, demand)
            return
        self._enter(op)
        if name == BARRIER:
            self._mark([op.operands[ir.OpResult(value).result_number]], demand)
            return
        self._visit_ordinary(value, demand)
        for region in op.regions:  # values that a reduction or a sort captures from outside
            for block in region.blocks:
                for inner in block.operations:
                    self._mark(inner.operation.operands)

    def _visit_ordinary(self, value: ir.Value, demand: Demand) -> None:
        """Marks all elements of all operands of an op."""
        del demand
        self._mark(self.operands_of(value))

    def _visit_carrier(self, op: ir.Operation, position: int, demand: Demand) -> None:
        if op.name == WHILE and is_invariant(op, position):
            self._mark([op.operands[position]], demand)  # the same, however often the loop runs
            return
        self._keep(op)
        if op.name == WHILE:
            self._mark([op.operands[position]], demand)
            self._mark([While(op).yield_of(position)], demand)
        elif op.name in CALLS:
            callee = self.functions.get(callee_name(op))
            if callee is None or not len(callee.regions[0].blocks):  # may use anything
                self._mark(op.operands)
            else:
                self._mark([Function(callee).yield_of(position)], demand)
        else:
            for region in op.regions:
                self._mark([terminator(region.blocks[0]).operands[position]], demand)

    def _visit_argument(self, argument: ir.BlockArgument, block: ir.Block, demand: Demand) -> None:
        op, position = block.owner.operation, argument.arg_number
        if op.name == WHILE:
            self._mark([op.operands[position]], demand)
            self._mark([op.results[position]], demand)
            self._mark([While(op).yield_of(position)], demand)
        elif op.name in COMPUTATIONS:
            self._mark([op.operands[position]], demand)
        elif op.name == FUNCTION:
            for call in self.calls[symbol_name(op)]:
                self._mark([call.operands[position]], demand)


class _Surviving(_Liveness):
    """Marks values with elements that are surely needed after all folding."""

    def _visit_ordinary(self, value: ir.Value, demand: Demand) -> None:
        for operand, needed in needed_operands(value, demand):
            self._mark([operand], needed)

    def _visit_carrier(self, op: ir.Operation, position: int, demand: Demand) -> None:
        if op.name in BRANCHES:
            taken = _entered_region(op)
            regions = list(op.regions) if taken is None else [op.regions[taken]]
            ends = [terminator(region.blocks[0]).operands[position] for region in regions]
            if len(set(ends)) == 1:  # the branch index does not matter
                self._mark(ends[:1], demand)
                return
        runs = constant_trips(op) if op.name == WHILE and not is_invariant(op, position) else None
        if runs is None:
            super()._visit_carrier(op, position, demand)
        elif runs:  # a carry that a loop overwrites is needed only if the loop reads it
            self._keep(op)
            self._mark([While(op).yield_of(position)], demand)
        else:
            self._mark([op.operands[position]], demand)

    def _visit_argument(self, argument: ir.BlockArgument, block: ir.Block, demand: Demand) -> None:
        op, position = block.owner.operation, argument.arg_number
        trips = constant_trips(op) if op.name == WHILE and not is_invariant(op, position) else None
        if trips is None:
            super()._visit_argument(argument, block, demand)
            return
        end = While(op).yield_of(position)
        if trips > 1:
            self._mark([end], demand)
        # A carry that becomes another one in the next iteration may not need its initial value.
        if trips == 1 or not isinstance(end.owner, ir.Block):
            self._mark([op.operands[position]], demand)


def _entered_region(branch: ir.Operation) -> int | None:
    """Returns the number of the region that a branch surely enters; None if unknown."""
    index = fold_value(branch.operands[0])
    return None if index is None else int(chosen_regions(branch, index))

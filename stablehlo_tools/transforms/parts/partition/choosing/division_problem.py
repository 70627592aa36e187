"""A propagated program as a graph of ops that each choose their division.

A *node* divides its operands and results by one strategy: an op, a loop carry, a result of a
branch, or a constraint. A *link* is a value, between the node that makes it and those that use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from stablehlo_tools.analysis.entry import attributes_of_arguments, is_donated
from stablehlo_tools.analysis.loops import expected_trips
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import (
    Axes,
    Dims,
    ShardingRule,
    ValueShardings,
    function_sharding,
    rank_of,
    result_sharding,
    rule_of,
    sharding_per_value,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    BARRIER,
    CUSTOM_CALL,
    MANUAL_COMPUTATION,
    REDUCE,
    RESHAPE,
    RESHARD,
    WHILE,
)
from stablehlo_tools.dialect.traits import (
    BRANCHES,
    ELEMENTWISE,
    TERMINATORS,
    Trait,
    full_names,
    ops_with,
)
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import is_used_once, producer
from stablehlo_tools.ir.views import Function, While
from stablehlo_tools.ir.walk import terminator, walk
from stablehlo_tools.transforms.parts.partition.added_sums import terms_of_sums
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import (
    AtomList,
    Atoms,
    Layout,
    RuleForm,
    StrategyChoice,
)
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import (
    Extent,
    OpTime,
    bytes_of,
)
from stablehlo_tools.transforms.parts.partition.dividing import is_made_anywhere, made_anywhere
from stablehlo_tools.transforms.parts.partition.sharding_rules import (
    MOVING,
    combines_by,
    element_bytes,
    is_whole_op,
    undividable,
)

_PRODUCTS = ops_with(Trait.CONTRACTION)
_FUSED_INTO = ELEMENTWISE | full_names("broadcast_in_dim reshape transpose slice pad concatenate")
# If a loop adds up the results of these ops, compilers move the sum over devices past them.
_LINEAR = full_names("convert reshape transpose")
_READ_IN_PLACE = full_names("dynamic_slice reshape slice")
_UPDATED_IN_PLACE = ELEMENTWISE | full_names("dynamic_update_slice scatter")
_UNKNOWN_TRIPS = 8  # of a loop without a constant trip count


@dataclass(eq=False, slots=True)
class LoopExtent:
    """The first and the last place of a loop in the order of the text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class OperandPlace:
    """The operand of an op that is a node's tensor.

    `order` is the place in the text; `loops` are the surrounding loops, outermost first.
    """

    op: ir.Operation
    operand: int
    order: int
    loops: tuple[LoopExtent, ...]


@dataclass(eq=False, slots=True)
class NodeUse:
    """A node's use of a value as its tensor."""

    node: StrategyNode
    tensor: int
    place: OperandPlace
    until: int = 0  # the place in the text up to which this use keeps the value live


@dataclass(frozen=True, slots=True)
class Total:
    """A sum of values that a loop carries and only adds to.

    `carry` is the node of that carry, `times` the number of runs of the loop. For an added value in
    parts of a sum, compilers write one all_reduce after the loop, not one in each iteration.
    """

    carry: StrategyNode
    times: int

    def without(self, choice: StrategyChoice, partial: AtomList) -> bool:
        """Returns True if the carry, by this choice, is not divided over the atoms of a sum."""
        layout = self.carry.form.atoms.layouts[choice.layouts[0]]
        return not any(atom in partial for atoms in layout for atom in atoms)


@dataclass(eq=False)
class ValueLink:
    """A value; `size` is the size of the whole value, in bytes, without padding.

    `stated` is the number of the layout that propagation gave it. `left` are the atoms along which
    the program wants it in parts of a sum.
    """

    value: ir.Value
    number: int
    size: float
    stated: int
    times: int  # how often the value is made in one run of the program
    maker: StrategyNode | None = None  # None: every device can make any part of it
    made_as: int = 0  # the maker's tensor
    born: int = 0  # the place of the op that makes it
    around: int = 0  # the place where the loop around it begins
    left: AtomList = ()
    is_fused: bool = False  # True if it is fused into its users, so that no kernel writes it
    at_peak: bool = False  # True if it is live at the memory peak of the propagated program
    uses: list[NodeUse] = field(default_factory=list["NodeUse"])
    total: Total | None = None  # the sum that it is added to
    # Earlier terms of its sum. One collective reduces all that are divided in the same way.
    beside: list[ValueLink] = field(default_factory=list["ValueLink"])
    chained: bool = False  # made of products, and read by products
    is_remade: bool = False  # few ops make it from constants and scalars: no device sends it
    values: int = 1  # the equal values that it stands for; at the peak, if any of them is

    @cached_property
    def extent(self) -> Extent:
        """The dimensions of the whole value."""
        op = None if self.maker is None else self.maker.op
        regathered = op is not None and op.name == REDUCE and combines_by(op) == "all_gather"
        shape = tuple(shape_of(self.value))
        return Extent(shape, element_bytes(self.value), self.chained, regathered)


@dataclass(eq=False)
class StrategyNode:
    """An op, or a carry, that divides its tensors, operands first, by one strategy. A pinned node
    keeps it.

    `op` makes the outputs. If `op` is a loop or a branch, the node is that of its carry, or result,
    `carry`. `lost` are atoms that propagation put on factors that the op cannot divide.
    """

    number: int
    form: RuleForm
    op: ir.Operation | None
    inputs: list[ValueLink | None]
    outputs: list[ValueLink | None]
    times: int
    choice: StrategyChoice
    pinned: bool = False
    carry: int | None = None
    carried: ValueLink | None = None  # through a loop
    time: OpTime | None = None
    lost: dict[int, AtomList] = field(default_factory=dict[int, "AtomList"])
    # Values added to a total that it carries, or to a term that it makes.
    added: list[ValueLink] = field(default_factory=list["ValueLink"])
    # Values, with the numbers of its tensors, that only nodes that it stands for read or make.
    others: list[tuple[int, ValueLink]] = field(default_factory=list[tuple[int, "ValueLink"]])

    @property
    def tensors(self) -> list[tuple[int, ValueLink]]:
        """The values that it reads or makes, with the numbers of its tensors."""
        own = enumerate((*self.inputs, *self.outputs))
        return [(number, link) for number, link in own if link is not None] + self.others

    @cached_property
    def is_moving(self) -> bool:
        """True for an op whose parts may need elements of neighbouring parts."""
        return self.op is not None and self.op.name in MOVING

    @cached_property
    def links(self) -> list[ValueLink]:
        """The links whose prices depend on its choice."""
        return [link for _, link in self.tensors] + self.added

    def layout(self, tensor: int) -> Layout:
        """Returns a tensor's layout."""
        return self.form.atoms.layouts[self.choice.layouts[tensor]]


@dataclass(frozen=True, slots=True)
class _LinkedOperand:
    """An operand with its link, if it has one."""

    value: ir.Value
    link: ValueLink | None
    place: OperandPlace


class PartitionProblem:
    """The nodes and links of a function without calls.

    `left` has, for each of its results, the axes along which devices keep parts of a sum. With
    `ties`, the divisions of arguments and results are chosen, too, and all bytes at the memory peak
    have a price. A tied result and its argument, a state, are divided in the same way.
    """

    def __init__(
        self,
        main: ir.Operation,
        shardings: ValueShardings,
        left: Sequence[Axes],
        ties: Mapping[int, int] | None = None,
    ) -> None:
        self.main = main
        self.shardings = shardings
        self.is_border_free = ties is not None
        self.atoms = Atoms(shardings.axes, _axes_used(main, shardings), joined=self.is_border_free)
        self.nodes: list[StrategyNode] = []
        self.links: list[ValueLink] = []
        self._of_value: dict[ir.Value, ValueLink] = {}
        self._forms: dict[tuple[ShardingRule, frozenset[int], bool], RuleForm] = {}
        self._times: dict[OpTime, OpTime] = {}  # ops of equal layers share one
        self._order = 0
        self._loops: tuple[LoopExtent, ...] = ()
        block = Function(main).body
        listed = attributes_of_arguments(main)
        kept = set[ValueLink | None]()  # arguments whose memory no other value gets
        for number, argument in enumerate(block.arguments):
            link = self._link(argument, 1)
            if ties is None or number not in ties.values():
                self._add_border(None, [], [link], pinned=ties is None)
            if not is_donated(listed, number):
                kept.add(link)
        self._block(block, 1)
        for taken in self._linked_operands(terminator(block)):
            rank = rank_of(taken.value)
            dims = shardings.at_border(main, "res_attrs", taken.place.operand, rank)
            tied = (ties or {}).get(taken.place.operand)
            made = [] if tied is None else [self._of_value[block.arguments[tied]]]
            self._add_border(None, [taken], made, dims, pinned=ties is None)
            if taken.link is not None and len(taken.link.uses) == 1:
                (taken.link.left,) = self.atoms.layout((left[taken.place.operand],))
        self._find_chained()
        self._find_beside(main)
        for link in self.links:
            # Elementwise or layout ops make it, and such ops or reduces use it: in their kernels.
            made = None if link.maker is None else link.maker.op
            users = [use.node.op for use in link.uses]
            link.is_fused = (
                made is not None
                and made.name in _FUSED_INTO
                and all(op is not None and op.name in (*_FUSED_INTO, REDUCE) for op in users)
            )
            for use in link.uses:
                around = (loop for loop in use.place.loops if loop.start > link.born)
                use.until = next((loop.end for loop in around), use.place.order)
                if link in kept and use.node.carried is not None:
                    # The loop carries a copy in another layout; the argument stays, too.
                    use.until = max(use.until, use.node.carried.born)
                elif self.is_border_free and link not in kept and _is_overwritten(link, use):
                    # A limit is of all bytes. Without one, only more than now has a price.
                    use.until = max(link.born, use.until - 1)
        self.end = self._order
        self.peak = int(np.argmax(self.held()))
        for link in self.links:
            last = max((use.until for use in link.uses), default=link.born)
            link.at_peak = link.born <= self.peak <= last and not link.is_fused
        if ties is not None:
            least = self.atoms.number((tuple(range(len(self.atoms.sizes))),))
            for link in self.links:
                link.stated = least  # bytes beyond those of a part on each device have a price
            for node in self.nodes:
                node.carried = None

    def link_of(self, value: ir.Value) -> ValueLink:
        """Returns the link of a tensor of the function."""
        return self._of_value[value]

    def made_bytes(self, value: ir.Value) -> float:
        """Returns the bytes of a device's part of a tensor, as it is made."""
        link = self._of_value[value]
        assert link.maker is not None, "every device has it otherwise"
        return link.size / self.atoms.held_parts[link.maker.choice.layouts[link.made_as]]

    def held(self) -> np.ndarray:
        """Returns the live bytes per device at each place of the text."""
        held = np.zeros(self._order + 2)
        for link in self.links:
            if link.maker is None or not link.uses:
                continue
            made = link.maker.choice.layouts[link.made_as]
            held_from: dict[int, int] = {made: link.born}
            held_until: dict[int, int] = {made: max(use.until for use in link.uses)}
            for use in link.uses:
                wanted = use.node.choice.layouts[use.tensor]
                if wanted != made:
                    held_from[wanted] = min(held_from.get(wanted, use.until), use.place.order)
                    held_until[wanted] = max(held_until.get(wanted, 0), use.until)
            for number, first in held_from.items():
                if number != made or not link.is_fused:
                    size = link.size / self.atoms.held_parts[number]
                    held[first] += size
                    held[held_until[number] + 1] -= size
        return np.cumsum(held)

    def _block(self, block: ir.Block, times: int) -> None:
        for view in block.operations:
            op = view.operation
            self._order += 1
            if op.name in TERMINATORS:
                continue
            if op.name == RESHARD:
                # Propagation has already followed the constraint, and it causes no transfer by
                # itself. So users of its result become users of its operand.
                operand, result = op.operands[0], op.results[0]
                if (link := self._of_value.get(operand)) is not None:
                    self._of_value[result] = link
                continue
            outputs = [self._link(result, times) for result in op.results]
            if op.name == WHILE:
                self._loop(op, outputs, times)
            elif op.name in BRANCHES:
                returned: list[list[_LinkedOperand]] = []
                for region in op.regions:
                    self._block(region.blocks[0], times)
                    returned.append(self._linked_operands(terminator(region.blocks[0])))
                for number, made in enumerate(outputs):
                    self._add_carry(op, number, [each[number] for each in returned], [made], times)
            elif op.name == BARRIER:
                for number, taken in enumerate(self._linked_operands(op)):
                    self._add_carry(op, number, [taken], [outputs[number]], times)
            elif op.name == MANUAL_COMPUTATION:
                self._manual(op, outputs)
            elif not is_made_anywhere(op):
                self._op(op, outputs, times)
            if len(outputs) == 1 and outputs[0] is not None:
                outputs[0].is_remade = bool(made_anywhere(op.results[0]))

    def _find_chained(self) -> None:
        """Marks the values on chains of products. Weights and gradients are not: products only read
        them, or only make them."""
        after, before = set[ValueLink](), set[ValueLink]()
        # Twice, because the carries of a loop read values that are made later.
        for node in 2 * self.nodes:
            if _is_product(node) or not after.isdisjoint(node.inputs):
                after.update(link for link in node.outputs if link is not None)
        for node in 2 * self.nodes[::-1]:
            if _is_product(node) or not before.isdisjoint(node.outputs):
                before.update(link for link in node.inputs if link is not None)
        for link in after & before:
            link.chained = True

    def _find_beside(self, main: ir.Operation) -> None:
        """Notes the terms of sums whose parts may be added before they are reduced."""
        for terms in terms_of_sums(main):
            links = [self._of_value[term] for term in terms if term in self._of_value]
            for number, link in enumerate(links):
                link.beside = links[:number]
                for other in link.beside:
                    if other.maker is not None:
                        other.maker.added.append(link)

    def _linked_operands(self, op: ir.Operation) -> list[_LinkedOperand]:
        """Returns the operands of an op."""
        return [
            _LinkedOperand(
                value, self._of_value.get(value), OperandPlace(op, number, self._order, self._loops)
            )
            for number, value in enumerate(op.operands)
        ]

    def _op(self, op: ir.Operation, outputs: list[ValueLink | None], times: int) -> None:
        rule = None if is_whole_op(op) else rule_of(op)
        if rule is None:
            shapes = tuple(tuple(_shape(v)) for v in (*op.operands, *op.results))
            sizes = tuple(size for shape in shapes for size in shape)
            tensors: list[tuple[tuple[int, ...], ...]] = []
            for shape in shapes:
                first = sum(map(len, tensors))
                tensors.append(tuple((first + dim,) for dim in range(len(shape))))
            every = frozenset(range(len(sizes)))
            rule = ShardingRule(tuple(tensors), len(op.operands), sizes, frozenset(), frozenset())
            fixed, uncut = every, set(every)
        else:
            uncut = {f for tensor, dim in undividable(op) for f in rule.tensors[tensor][dim]}
            fixed = rule.whole | uncut
        form = self._form(rule, frozenset(fixed), pads=op.name != CUSTOM_CALL)
        taken = self._linked_operands(op)
        # Start from the propagated axes: those of the results first, then of the largest operands.
        operands = sorted(
            (-each.link.size, n, each.link) for n, each in enumerate(taken) if each.link is not None
        )
        order = [(len(taken) + n, link) for n, link in enumerate(outputs) if link is not None]
        order += [(n, link) for _, n, link in operands]
        choice = form.grant_wishes(
            [form.fit_layout(n, self.atoms.layouts[link.stated]) for n, link in order]
        )
        node = self._node(form, op, taken, outputs, times, choice)
        time = None if _is_read_in_place(op) else OpTime.from_op(op)
        node.time = None if time is None else self._times.setdefault(time, time)
        node.lost = self._lost(node, uncut)

    def _loop(self, op: ir.Operation, outputs: list[ValueLink | None], times: int) -> None:
        taken = self._linked_operands(op)
        inner = times * round(expected_trips(op, _UNKNOWN_TRIPS))
        condition, body = While(op).condition, While(op).body
        # The end is set after the body, when it is known; uses in the body share this object.
        around, extent = self._loops, LoopExtent(self._order, self._order)
        self._loops = (*around, extent)
        arguments = [[self._link(a, inner) for a in block.arguments] for block in (condition, body)]
        self._block(condition, inner)
        self._block(body, inner)
        ends = self._linked_operands(terminator(body))
        self._loops, extent.end = around, self._order
        for made in outputs:
            if made is not None:
                # The results of a loop exist only after its last iteration.
                made.born = self._order
        for number, made in enumerate(outputs):
            tensors = [made, *(listed[number] for listed in arguments)]
            self._add_carry(op, number, [taken[number], ends[number]], tensors, times)
        for argument, end in zip(body.arguments, ends, strict=True):
            self._add_up(argument, end.value, times)

    def _add_up(self, argument: ir.Value, end: ir.Value, times: int) -> None:
        """Notes the values that a loop adds to a carry."""
        op = producer(end)
        if op is None or op.name != ADD or not (is_used_once(argument) and is_used_once(end)):
            return
        added = next((value for value in op.operands if value != argument), None)
        carried = self._of_value.get(argument)
        if argument not in op.operands or carried is None or carried.maker is None:
            return
        while added is not None and is_used_once(added) and added in self._of_value:
            link, maker = self._of_value[added], producer(added)
            link.total = Total(carried.maker, times)
            carried.maker.added.append(link)
            added = maker.operands[0] if maker is not None and maker.name in _LINEAR else None

    def _manual(self, op: ir.Operation, outputs: list[ValueLink | None]) -> None:
        """Adds pinned nodes for the operands and results of a manual computation, which keep their
        shardings."""
        stated = sharding_per_value(op.attributes["in_shardings"])
        for number, taken in enumerate(self._linked_operands(op)):
            if isinstance(taken.value.type, ir.RankedTensorType):
                self._add_border(op, [taken], [], self.shardings.read(stated[number]))
        for link in outputs:
            self._add_border(op, [], [link])

    def _add_carry(
        self,
        op: ir.Operation,
        number: int,
        taken: Sequence[_LinkedOperand],
        outputs: Sequence[ValueLink | None],
        times: int,
    ) -> None:
        """Adds a node for a carry, whose operands and outputs are all divided the same way."""
        made = outputs[0]
        if made is None:
            return
        form = self._form(_same_rule(tuple(_shape(made.value)), len(taken), len(outputs)))
        choice = form.grant_wishes([form.fit_layout(0, self.atoms.layouts[made.stated])])
        node = self._node(form, op, taken, outputs, times, choice)
        node.carry = number
        node.carried = made if op.name == WHILE else None

    def _add_border(
        self,
        op: ir.Operation | None,
        taken: Sequence[_LinkedOperand],
        outputs: Sequence[ValueLink | None],
        dims: Dims | None = None,
        *,
        pinned: bool = True,
    ) -> None:
        """Adds a node that uses or makes one value; a pinned one keeps the stated sharding."""
        value = taken[0].value if taken else outputs[0].value if outputs[0] else None
        if value is None:
            return
        form = self._form(_same_rule(tuple(_shape(value)), len(taken), len(outputs)))
        if dims is None:
            assert outputs[0] is not None, "nodes without outputs pass `dims`"
            dims = self.shardings.axes_by_dim(outputs[0].value)
        choice = form.grant_wishes([form.fit_layout(0, self.atoms.layout(dims))])
        self._node(form, op, taken, outputs, 1, choice).pinned = pinned

    def _node(
        self,
        form: RuleForm,
        op: ir.Operation | None,
        taken: Sequence[_LinkedOperand],
        outputs: Sequence[ValueLink | None],
        times: int,
        choice: StrategyChoice,
    ) -> StrategyNode:
        inputs = [each.link for each in taken]
        node = StrategyNode(len(self.nodes), form, op, inputs, list(outputs), times, choice)
        self.nodes.append(node)
        for number, each in enumerate(taken):
            if each.link is not None:
                each.link.uses.append(NodeUse(node, number, each.place))
        for number, link in enumerate(outputs):
            if link is not None:
                link.maker, link.made_as = node, len(inputs) + number
        return node

    def _lost(self, node: StrategyNode, uncut: Set[int]) -> dict[int, AtomList]:
        """Returns the atoms that propagation put on the factors in `uncut`, and in results also on
        those that Shardy's rule leaves whole."""
        lost: dict[int, AtomList] = {}
        whole = node.form.rule.whole
        for number, link in enumerate((*node.inputs, *node.outputs) if uncut or whole else ()):
            fixed = uncut if number < len(node.inputs) else uncut | whole
            if link is not None:
                for atoms, factors in zip(
                    self.atoms.layouts[link.stated], node.form.rule.tensors[number], strict=True
                ):
                    if atoms and factors and factors[0] in fixed:
                        lost.setdefault(factors[0], atoms)
        return lost

    def _form(
        self, rule: ShardingRule, fixed: frozenset[int] = frozenset(), *, pads: bool = True
    ) -> RuleForm:
        key = (rule, fixed, pads)
        if key not in self._forms:
            self._forms[key] = RuleForm(rule, fixed, self.atoms, pads=pads)
        return self._forms[key]

    def _link(self, value: ir.Value, times: int) -> ValueLink | None:
        if not isinstance(value.type, ir.RankedTensorType):
            return None
        stated = self.atoms.number(self.atoms.layout(self.shardings.axes_by_dim(value)))
        number = len(self.links)
        around = self._loops[-1].start if self._loops else 0
        link = ValueLink(
            value, number, bytes_of(value), stated, times, born=self._order, around=around
        )
        self._of_value[value] = link
        self.links.append(link)
        return link


def _is_product(node: StrategyNode) -> bool:
    return node.op is not None and node.carry is None and node.op.name in _PRODUCTS


def _is_overwritten(link: ValueLink, use: NodeUse) -> bool:
    """Returns True if a use may write its result where the value lies: a carry, an update, or an
    elementwise op, which overwrites its first operand of that size."""
    node = use.node
    if node.carry is not None:
        return True
    if node.op is None or node.op.name not in _UPDATED_IN_PLACE:
        return False
    same = (n for n, each in enumerate(node.inputs) if each and each.size == link.size)
    return use.tensor == next(same) and any(e and e.size == link.size for e in node.outputs)


def _is_read_in_place(op: ir.Operation) -> bool:
    """Returns True for a slice, such as the weights of a layer, that only products read.

    Their kernels read it where it lies.
    """
    users = {use.owner.operation for result in op.results for use in result.uses}
    return op.name in _READ_IN_PLACE and all(
        user.name in _PRODUCTS or (user.name == RESHAPE and _is_read_in_place(user))
        for user in users
    )


@lru_cache(maxsize=4096)
def _same_rule(shape: tuple[int, ...], operands: int, results: int) -> ShardingRule:
    tensor = tuple((dim,) for dim in range(len(shape)))
    tensors = (tensor,) * (operands + results)
    return ShardingRule(tensors, operands, shape, frozenset(), frozenset())


def _axes_used(main: ir.Operation, shardings: ValueShardings) -> set[AxisRef]:
    """Returns the axes, and parts of them, in the shardings of a function."""
    arguments, yields = Function(main).body.arguments, Function(main).yields
    seen = {function_sharding(main, "arg_attrs", number) for number in range(len(arguments))}
    seen |= {function_sharding(main, "res_attrs", number) for number in range(len(yields))}

    def visit(op: ir.Operation) -> ir.WalkResult:
        seen.update(result_sharding(op, number) for number in range(len(op.results)))
        if op.name == MANUAL_COMPUTATION:
            seen.update(sharding_per_value(op.attributes["in_shardings"]))
        return ir.WalkResult.ADVANCE

    walk(main, visit)
    stated = [shardings.read(each) for each in seen if each is not None]
    return {axis for dims in stated for axes in dims for axis in axes}


def _shape(value: ir.Value) -> list[int]:
    return shape_of(value) if isinstance(value.type, ir.RankedTensorType) else []

"""Lets each microbatch sort its own tokens by expert, if each token is computed by itself.

Dropless experts sort all tokens by expert, multiply each group by the weights of its expert, and
bring them back into their order. jax writes the grouped product with a mask, or as one op:

    %order = sort(%expert, iota)                           // argsort
    %rows = gather(%x, %order)                             // sorted
    %sizes = scatter(zeros, %expert, ones) {add}           // the rows of each expert
    %mask = %starts <= iota and iota < %ends               // [experts, rows]: cumsums of sizes
    %y = dot_general(select(%mask, %rows, 0), %w)          // or custom_call @chlo.ragged_dot
    %out = scatter(zeros, %order, %y)                      // back
  ==>
    %sorted, %order = sort(%expert, places)                // on the rows of a microbatch, as are
    %rows = gather(%x, %order)                             // all ops from here on
    %mask = compare EQ, %sorted, iota                      // [experts, rows]
    %y = dot_general(select(%mask, %rows, 0), %w)
    %out = scatter(zeros, %order, %y)

The mask and the sizes follow from the sorted experts, so these replace the sizes: also in a stack
by which the backward reads them, and between manual computations.

If all ops between the gather and the scatter treat rows independently, or add them up, any order of
the rows gives the same result: also one in which the rows of a microbatch are together. `_Rows`
proves that, with one part for each row. Then the sort, the gathers and the scatters are marked
(`dialect/microbatch_marks.py`), and run on the rows of a microbatch.

Indices may be computed from the order, such as `%order / 2` with two experts for a token. They are
evaluated for three orders, and have to be those of the tokens for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.device_values import COMPUTED, Values, evaluate_op
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph, Propagation
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import read_layer_loop
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import called_target
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.microbatch_marks import PLACES, ROWS
from stablehlo_tools.dialect.names import (
    ADD,
    BROADCAST,
    CUSTOM_CALL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    MANUAL_COMPUTATION,
    REDUCE,
    RESHAPE,
    SCATTER,
    SORT,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import CARRIERS
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.grouped_products import GroupedProduct, write_products
from stablehlo_tools.ir.values import before_reshapes, has_uses, producer, splat_of
from stablehlo_tools.ir.views import Combining, ManualComputation, While
from stablehlo_tools.ir.walk import drop_attributes, enclosing, ops_named, terminator
from stablehlo_tools.ir.while_loop import before_loops, is_invariant
from stablehlo_tools.transforms.parts.scaling import untiled_operands, untiled_ops

_AND, _COMPARE, _REDUCE_WINDOW = "stablehlo.and", "stablehlo.compare", "stablehlo.reduce_window"
_SUBTRACT = "stablehlo.subtract"
# The fields of the dimension numbers that rows with a window have.
_SCATTER_FIELDS = (
    "update_window_dims",
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "index_vector_dim",
)
_GATHER_FIELDS = ("offset_dims", "collapsed_slice_dims", "start_index_map", "index_vector_dim")
_ORDERS = 3  # that indices are evaluated for


def mark_routing(block: ir.Block) -> None:
    """Marks each sorting of tokens by expert, and the ops that depend on the order, in place. The
    block has to treat tokens independently, whatever their order."""
    for sort in ops_named(block.owner.operation, {SORT}):
        routing = _Routing.from_sort(sort)
        if routing is None or not routing.replace_sizes(block):
            continue
        for value, number in routing.constants:
            maker = producer(value)
            if maker is not None:
                point = ir.InsertionPoint.after(maker)
            else:
                point = ir.InsertionPoint.at_block_begin(ir.BlockArgument(value).owner)
            build = Builder(point, value.location)
            value.replace_all_uses_with(build.splat_like(number, value))
        if _are_rows_independent(block, routing):
            routing.mark()


def write_routing(module: ir.Module) -> None:
    """Replaces what `mark_routing` and `hide_products` wrote by ops of StableHLO, in place."""
    write_products(module)
    for op in ops_named(module.operation, {CUSTOM_CALL}):
        if called_target(op) == PLACES:
            build = Builder(ir.InsertionPoint(op), op.location)
            op.results[0].replace_all_uses_with(build.iota(op.results[0].type, 0))
            op.erase()
    drop_attributes(module.operation, {ROWS})


@dataclass
class _Channel:
    """The way of a vector to other blocks: in stacks of loops, and between manual computations.

    `entries` are the uses of the vector that begin it. `inner` are the values that ops outside the
    channel read, `passed` all values after the vector, `slices` those that read a row of a stack.
    `starts` are stacks before the first row is written, as an operand of a loop.
    """

    entries: list[tuple[ir.Operation, int]] = field(default_factory=list[tuple[ir.Operation, int]])
    inner: list[ir.Value] = field(default_factory=list[ir.Value])
    passed: list[ir.Value] = field(default_factory=list[ir.Value])
    slices: list[ir.Operation] = field(default_factory=list[ir.Operation])
    starts: list[tuple[ir.Operation, int]] = field(default_factory=list[tuple[ir.Operation, int]])

    @staticmethod
    def from_vector(vector: ir.Value) -> _Channel | None:
        """Follows a value; returns None if it enters a stack that is used in another way."""
        channel, pending = _Channel(), [vector]
        while pending:
            value = pending.pop()
            for use in list(value.uses):
                op, place = use.owner.operation, use.operand_number
                if op.name in (RESHAPE, BROADCAST) and _count(op.results[0]) == _count(value):
                    following = [op.results[0]]
                elif op.name == DYNAMIC_UPDATE_SLICE and place == 1:
                    reads = channel._follow_stack(op)
                    if reads is None:
                        return None
                    following = [read.results[0] for read in reads]
                elif op.name == MANUAL_COMPUTATION:
                    following = [ManualComputation(op).body.arguments[place]]
                elif op.name == "sdy.return" and (around := op.parent) is not None:
                    following = [around.operation.results[place]]
                else:
                    if value not in channel.inner:
                        channel.inner.append(value)
                    continue
                if value == vector:
                    channel.entries.append((op, place))
                channel.passed += following
                pending += following
        return channel

    def _follow_stack(self, writer: ir.Operation) -> list[ir.Operation] | None:
        """Returns the slices by which other loops read the rows that an op writes to a stack; None
        if the stack is used in another way."""
        loop = enclosing(writer, WHILE)
        ends = [] if loop is None else list(terminator(While(loop).body).operands)
        if loop is None or ends.count(writer.results[0]) != 1:
            return None
        # Each row has to be written, so that none of the stack's start is read.
        layers, carry = (
            read_layer_loop(loop, Effects({}), weights=False),
            ends.index(writer.results[0]),
        )
        if layers is None or carry not in layers.writes:
            return None
        reads: list[ir.Operation] = []
        stacks = [(loop, carry)]
        for use in loop.results[carry].uses:
            reader, place = use.owner.operation, use.operand_number
            if reader.name != WHILE or not is_invariant(reader, place):
                return None
            stacks.append((reader, place))
            for inner in While(reader).carries[place].uses:
                if inner.owner.operation.name == DYNAMIC_SLICE:
                    reads.append(inner.owner.operation)
                elif inner.owner.operation != terminator(While(reader).body):
                    return None
        self.passed.append(writer.results[0])
        for op, place in stacks:
            blocks = (While(op).condition, While(op).body)
            self.passed += [op.results[place], *(block.arguments[place] for block in blocks)]
        self.starts.append((loop, carry))
        self.slices += reads
        return reads

    def carry_instead(self, vector: ir.Value, size: int) -> None:
        """Passes another vector; each value has its elements instead of `size` others."""
        (length,), element = shape_of(vector), element_of(vector)

        def with_length(shape: Sequence[int]) -> list[int]:
            return [*shape[:-1], shape[-1] // size * length]

        for op, place in self.entries:
            op.operands[place] = vector
        for value in self.passed:
            value.set_type(ir.RankedTensorType.get(with_length(shape_of(value)), element))
        for op in self.slices:
            sizes = with_length(integers(op, "slice_sizes"))
            op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes, op.context)
        for loop, place in self.starts:
            build = Builder(ir.InsertionPoint(loop), loop.location)
            loop.operands[place] = build.splat(
                0, with_length(shape_of(loop.operands[place])), element
            )


def _count(value: ir.Value) -> int:
    return int(np.prod(shape_of(value)))


@dataclass(frozen=True)
class _Mask:
    """A mask of groups: the dimensions of the rows and of the experts, and their sizes."""

    op: ir.Operation
    row_dim: int
    expert_dim: int
    sizes: ir.Value


@dataclass
class _Routing:
    """A sorting of `rows` tokens by their experts.

    `starts` are gathers of tokens in sorted order, `ends` the scatters that bring them back. By the
    inverse order, a scatter is a start and a gather is an end. `inverses` are the sorts that find
    it. `constants` are values that are the same for any order. The proof fills `pieces`, with
    dimensions along which values have to be constant, and `is_refused`.
    """

    sort: ir.Operation
    rows: int
    starts: list[ir.Operation] = field(default_factory=list[ir.Operation])
    ends: list[ir.Operation] = field(default_factory=list[ir.Operation])
    inverses: list[ir.Operation] = field(default_factory=list[ir.Operation])
    constants: list[tuple[ir.Value, int]] = field(default_factory=list[tuple[ir.Value, int]])
    pieces: list[tuple[ir.Value, int]] = field(default_factory=list[tuple[ir.Value, int]])
    is_refused: bool = False

    @staticmethod
    def from_sort(sort: ir.Operation) -> _Routing | None:
        """Returns the routing that begins with an argsort; None for other sorts, or other uses."""
        if not _is_argsort(sort):
            return None
        order = sort.results[1]
        routing = _Routing(sort, shape_of(order)[0])
        if not routing._follow({order: routing._orders[False]}):
            return None
        labels = routing._drop_labels()
        return routing if routing.starts and routing._follow(labels) else None

    @cached_property
    def _orders(self) -> Mapping[bool, Values]:
        """Orders to evaluate indices for, that of the tokens and random ones; for True, their
        inverses."""
        random = np.random.default_rng(0)
        first = np.arange(self.rows, dtype=np.int32)
        orders = np.stack([first, *(random.permutation(first) for _ in range(_ORDERS - 1))])
        return {False: orders, True: np.argsort(orders, axis=1).astype(np.int32)}

    def _follow(self, known: dict[ir.Value, Values]) -> bool:
        """Follows integers that depend on the order to all of their uses; returns False for one
        that is not understood. `known` has values for each of `_orders`; those that are the same
        for any order are constants."""
        pending, inverse = list(known), set[ir.Value]()
        while pending:
            value = pending.pop()
            is_constant = known[value].size > 0 and bool(
                np.all(known[value] == known[value].flat[0])
            )
            if is_constant:
                self.constants.append((value, int(known[value].flat[0])))
            channel = _Channel.from_vector(value)
            if channel is None and not is_constant:
                return False
            is_inverse = value in inverse
            made = [(inner, known[value]) for inner in channel.inner] if channel else []
            entries = channel.entries if channel else []
            for use in list(value.uses):
                op, place = use.owner.operation, use.operand_number
                if (op, place) in entries:
                    continue
                if op.name in (GATHER, SCATTER) and not is_constant:
                    if place != 1 or not self._is_of_rows(op, known[value], is_inverse):
                        return False
                    # The inverse order brings rows back in a gather, and sorts them in a scatter.
                    (self.starts if (op.name == GATHER) != is_inverse else self.ends).append(op)
                elif op.name == SORT and not place and _is_argsort(op):
                    if not np.array_equal(known[value], self._orders[is_inverse]):
                        return False
                    # The inverse of the inverse is the order again.
                    self.inverses.append(op)
                    known[op.results[1]] = self._orders[not is_inverse]
                    pending.append(op.results[1])
                    if not is_inverse:
                        inverse.add(op.results[1])
                elif len(op.results) == 1 and (
                    (numbers := _demand(op.results[0], dict(known))) is not None
                ):
                    made.append((op.results[0], numbers))
                elif not is_constant:
                    return False
            for result, numbers in made:
                if numbers[0].size != _count(result):
                    return False  # the values of several devices
                if is_inverse:
                    inverse.add(result)
                if result not in known:
                    known[result] = numbers.reshape(-1, *shape_of(result))
                    pending.append(result)
        return True

    def _is_of_rows(self, op: ir.Operation, numbers: Values, is_inverse: bool) -> bool:
        """Returns True for a gather or a scatter of whole rows, one for each index."""
        dims = gather_numbers(op) if op.name == GATHER else scatter_numbers(op)
        operand, result = shape_of(op.operands[0]), shape_of(op.results[0])
        rows = result if op.name == GATHER else shape_of(op.operands[2])
        if len(op.results) > 1 or not operand or not operand[0] or self.rows % operand[0]:
            return False
        times = self.rows // operand[0]
        is_order = np.array_equal(
            np.broadcast_to(numbers.reshape(len(numbers), -1), (_ORDERS, self.rows)),
            self._orders[is_inverse] // times,
        )
        first = (dims.omitted, dims.index_map, dims.operand_batching) == ((0,), (0,), ())
        windows = dims.windows == tuple(range(1, len(operand))) and rows[1:] == operand[1:]
        combines = op.name == GATHER or reducer_kind(Combining(op).combiner) == "add"
        return is_order and first and windows and (combines or (times == 1 and _sets(op)))

    def _drop_labels(self) -> dict[ir.Value, Values]:
        """Drops scatters of labels, by which jax finds out which update of a row was the last: each
        row has one. Read back by the same order, they are the labels. Returns the comparisons of
        labels, which are the same for any order."""
        known: dict[ir.Value, Values] = {}
        for op in list(self.ends):
            if op.name != SCATTER or not _sets(op) or not _is_positive(op.operands[2]):
                continue
            labels = op.operands[2]
            for use in list(op.results[0].uses):
                user = use.owner.operation
                if user in self.starts and user.operands[1] == op.operands[1]:
                    user.results[0].replace_all_uses_with(labels)
                    self.starts.remove(user)
                    user.erase()
            # A label is never 0, and equal to itself.
            asked = [(use.owner.operation, use.operand_number) for use in op.results[0].uses]
            zeros = [
                user.name == _COMPARE and splat_of(before_loops(user.operands[1 - place])) == 0
                for user, place in asked
            ]
            for use in labels.uses:
                user = use.owner.operation
                if user.name == _COMPARE and user.operands[0] == user.operands[1]:
                    zeros.append(True)
                    asked.append((user, 0))
            if not all(zeros):
                continue
            for user, _ in asked:
                direction = str(user.attributes["comparison_direction"])
                is_true = "EQ" in direction and user.operands[0] == user.operands[1]
                if "EQ" in direction:
                    shape = shape_of(user.results[0])
                    known[user.results[0]] = np.full((1, *shape), int(is_true))
            self.ends.remove(op)
        return known

    def replace_sizes(self, block: ir.Block) -> bool:
        """Replaces the sizes of groups, and masks made from them, by the sorted experts. Returns
        False, and changes nothing, if there are none, or one is used in another way."""
        masks = [
            mask
            for op in ops_named(block.owner.operation, {_AND})
            if (mask := _read_mask(op, self.rows)) is not None
        ]
        found: list[tuple[ir.Value, _Channel]] = []
        for op in ops_named(block.owner.operation, {SCATTER}):
            if self._counts_keys(op):
                channel = _Channel.from_vector(op.results[0])
                if channel is None:
                    return False
                found.append((op.results[0], channel))
        replaced: list[_Mask | ir.Operation] = []
        unused: list[ir.Operation] = []
        for sizes, channel in found:
            for value in dict.fromkeys([sizes, *channel.inner]):
                made = [mask for mask in masks if mask.sizes == value]
                products = [
                    use.owner.operation
                    for use in value.uses
                    if use.operand_number == 2 and GroupedProduct.from_op(use.owner.operation)
                ]
                known = {*(mask.op for mask in made), *products}
                is_local = value == sizes
                if is_local:
                    at = [*known, *(op for op, _ in channel.entries)]
                    here = self.sort.block
                    if any(op.block != here or op.is_before_in_block(self.sort) for op in at):
                        return False
                elif len(shape_of(value)) > 1 or not _is_only_for(value, known, unused):
                    return False
                replaced += [*made, *products]
        if not replaced:
            return False
        build = Builder(ir.InsertionPoint.after(self.sort), self.sort.location)
        # Tokens of negative experts count for the first, because they are sorted first.
        keys = self.sort.results[0]
        keys = build.same("maximum", keys, build.splat_like(0, keys))
        for sizes, channel in found:
            channel.carry_instead(keys, shape_of(sizes)[0])
        local = {sizes for sizes, _ in found}
        for each in replaced:
            if isinstance(each, _Mask):
                _write_mask(each, keys if each.sizes in local else each.sizes)
            else:
                product = GroupedProduct.from_op(each)
                assert product is not None
                if each.operands[2] in local:
                    each.operands[2] = keys
                _mark(each, (0, 0, 0, -1) if product.is_gradient else (0, -1, 0, 0))
        for op in unused:
            op.erase()
        return True

    def _counts_keys(self, op: ir.Operation) -> bool:
        """Returns True for a scatter that adds 1 for the expert of each token.

        Tokens of negative experts have to count for the first, because they are sorted first.
        """
        if len(op.results) > 1 or reducer_kind(Combining(op).combiner) != "add":
            return False
        dims, index = scatter_numbers(op), op.operands[1]
        is_histogram = (dims.omitted, dims.index_map, dims.windows) == ((0,), (0,), ())
        if not is_histogram or shape_of(index) != [self.rows, 1]:
            return False
        zeros, ones = (splat_of(before_loops(op.operands[place])) for place in (0, 2))
        experts = shape_of(op.operands[0])[0]
        tried = np.arange(-experts - 2, 2 * experts + 2, dtype=np.int32)
        sample = np.resize(tried, self.rows)[None]
        found = _demand(index, {self.sort.operands[0]: sample})
        return (
            (zeros, ones) == (0, 1)
            and found is not None
            and np.array_equal(found.reshape(-1), np.maximum(sample, 0).reshape(-1))
        )

    def check(self, dims: BatchDims) -> None:
        """Notes the ops that do not treat rows by themselves, and whole values that they meet, also
        in manual computations."""
        self.is_refused |= any(node.op not in self.ends for node in untiled_ops(dims))
        self.pieces += [
            (dims.graph.values[number], tiling.dim) for number, tiling in untiled_operands(dims)
        ]
        for node in dims.graph.nodes:
            if node.name == MANUAL_COMPUTATION:
                self.check(dims.inside(node))

    def mark(self) -> None:
        """Marks the sorts, and the ops that depend on the order."""
        for sort in (self.sort, *self.inverses):
            keys, counted = sort.operands
            build = Builder(ir.InsertionPoint(sort), sort.location)
            attributes = {
                "call_target_name": ir.StringAttr.get(PLACES, sort.context),
                "has_side_effect": ir.BoolAttr.get(False, sort.context),
            }
            places = build.create(CUSTOM_CALL, [keys], [counted.type], attributes)
            _mark(places, (0, 0))
            sort.operands[1] = places.results[0]
            _mark(sort, (0, 0, 0, 0))
        for op in (*self.starts, *self.ends):
            self._mark_move(op)

    def _mark_move(self, op: ir.Operation) -> None:
        """Marks a gather or a scatter. A token may have several rows, one for each expert; they are
        then a dimension of their own."""
        tokens, *window = shape_of(op.operands[0])
        times, rank = self.rows // tokens, len(shape_of(op.operands[1]))
        vector = (gather_numbers(op) if op.name == GATHER else scatter_numbers(op)).index_vector
        along = int(rank > 1 and not vector)  # the dimension of the rows in the indices
        if times == 1:
            _mark(op, (0, along, 0) if op.name == GATHER else (0, along, 0, 0))
            return
        build = Builder(ir.InsertionPoint(op), op.location)
        apart, windows = [tokens, times], [*range(2, 2 + len(window))]
        operands = [op.operands[0], build.reshape(op.operands[1], [*apart, 1])]
        if op.name == SCATTER:
            name, fields = "scatter_dimension_numbers", _SCATTER_FIELDS
            operands.append(build.reshape(op.operands[2], [*apart, *window]))
        else:
            name, fields = "dimension_numbers", _GATHER_FIELDS
        listed = zip(fields, (windows, [0], [0], 2), strict=True)
        text = ", ".join(f"{field} = {numbers}" for field, numbers in listed)
        copy = op.clone(ip=ir.InsertionPoint(op))
        for place, operand in enumerate(operands):
            copy.operands[place] = operand
        copy.attributes[name] = ir.Attribute.parse(f"#{op.name}<{text}>", op.context)
        _mark(copy, (0,) * (len(operands) + 1))
        result = copy.results[0]
        if op.name == GATHER:
            result.set_type(build.tensor([*apart, *window], element_of(result)))
            result = build.reshape(result, [self.rows, *window])
        op.results[0].replace_all_uses_with(result)
        op.erase()


def _mark(op: ir.Operation, dims: Sequence[int]) -> None:
    op.attributes[ROWS] = ir.DenseI64ArrayAttr.get(list(dims), op.context)


def _write_mask(mask: _Mask, keys: ir.Value) -> None:
    """Replaces a mask by a comparison with the expert of each row."""
    build, shape = (
        Builder(ir.InsertionPoint(mask.op), mask.op.location),
        shape_of(mask.op.results[0]),
    )
    spread = build.broadcast(keys, shape, [mask.row_dim])
    experts = build.iota(build.tensor(shape, element_of(keys)), mask.expert_dim)
    mask.op.results[0].replace_all_uses_with(build.compare("EQ", spread, experts))


# Values and their sources.


def _is_only_for(value: ir.Value, known: set[ir.Operation], unused: list[ir.Operation]) -> bool:
    """Returns True if a value is only used by `known` ops, and by ops on the way to them. Appends
    these ops, each after those that use it, and masks."""
    for use in value.uses:
        op = use.owner.operation
        if op in unused or (op in known and op.name != _AND):
            continue
        if op not in known:
            if op.name in CARRIERS or not len(op.results):
                return False
            if not all(_is_only_for(each, known, unused) for each in op.results):
                return False
        unused.append(op)
    return True


def _is_argsort(sort: ir.Operation) -> bool:
    """Returns True if a sort returns the places of the elements of a vector, smaller ones first."""
    if len(sort.operands) != 2 or has_uses(sort.results[0]) or len(shape_of(sort.operands[0])) > 1:
        return False
    block, counted = sort.regions[0].blocks[0], producer(before_loops(sort.operands[1]))
    first = block.operations[0].operation
    return (
        counted is not None
        and counted.name == IOTA
        and len(block.operations) == 2
        and first.name == _COMPARE
        and "LT" in str(first.attributes["comparison_direction"])
        and list(first.operands) == list(block.arguments)[:2]
    )


def _sets(scatter: ir.Operation) -> bool:
    """Returns True if a scatter replaces elements by its updates."""
    block = Combining(scatter).combiner
    return list(terminator(block).operands) == [block.arguments[1]]


def _is_positive(value: ir.Value) -> bool:
    """Returns True for a positive number added to an iota."""
    op = producer(before_loops(value))
    if op is None or op.name != ADD:
        return False
    added = [splat_of(operand) for operand in op.operands]
    sources = [producer(before_reshapes(operand)) for operand in op.operands]
    while any(source is not None and source.name in (BROADCAST, RESHAPE) for source in sources):
        sources = [
            producer(source.operands[0])
            if source is not None and source.name in (BROADCAST, RESHAPE)
            else source
            for source in sources
        ]
    counts = [source is not None and source.name == IOTA for source in sources]
    return any(
        counts[place] and isinstance(number := added[1 - place], int) and number > 0
        for place in range(2)
    )


def _evaluate(op: ir.Operation, known: Mapping[ir.Value, Values]) -> Values | None:
    """Returns the result of an op on known integers; None if it is not known."""

    def numbers(value: ir.Value) -> Values | None:
        if value in known:
            return known[value]
        splat = splat_of(before_loops(value))
        return np.full((1, *shape_of(value)), splat) if isinstance(splat, int) else None

    operands = [numbers(value) for value in op.operands]
    if op.name == REDUCE and operands[0] is not None:  # of dimensions of size 1
        is_same = operands[0][0].size == _count(op.results[0])
        shape = (-1, *shape_of(op.results[0]))
        return operands[0].reshape(shape) if is_same and len(op.results) == 1 else None
    return evaluate_op(op, operands) if op.name in COMPUTED else None


def _demand(value: ir.Value, known: dict[ir.Value, Values]) -> Values | None:
    """Returns a value computed from known ones; None if it needs others."""
    op = producer(before_loops(value))
    if value not in known and op is not None:
        for operand in op.operands:
            _demand(operand, known)
        found = _evaluate(op, known)
        if found is not None:
            known[value] = found
    return known.get(value)


def _read_mask(op: ir.Operation, rows: int) -> _Mask | None:
    """Returns the mask of the rows from the start of each group to its end; None for other ops."""
    above, below = (producer(value) for value in op.operands)
    if above is None or below is None or {above.name, below.name} != {_COMPARE}:
        return None
    said = [str(each.attributes["comparison_direction"]) for each in (above, below)]
    if "LE" not in said[0] or "LT" not in said[1]:
        return None
    low, place, again, high = (producer(value) for value in (*above.operands, *below.operands))
    if low is None or place is None or again is None or high is None:
        return None
    if {place.name, again.name} != {IOTA} or {low.name, high.name} != {BROADCAST}:
        return None
    row_dim = integer(place, "iota_dimension")
    shape = shape_of(op.results[0])
    dims = [integers(each, "broadcast_dimensions") for each in (low, high)]
    if integer(again, "iota_dimension") != row_dim or shape[row_dim] != rows:
        return None
    starts, ends = producer(low.operands[0]), producer(high.operands[0])
    if starts is None or ends is None or dims[0] != dims[1] or len(dims[0]) != 1:
        return None
    if starts.name != _SUBTRACT or not _is_cumsum(ends):
        return None
    total = producer(starts.operands[0])
    counted = ends.operands[0]
    if total is None or not _is_cumsum(total):
        return None
    if starts.operands[1] != counted or total.operands[0] != counted:
        return None
    return _Mask(op, row_dim, dims[0][0], counted)


def _is_cumsum(op: ir.Operation) -> bool:
    """Returns True for the sums of all elements of a vector up to each one."""
    if op.name != _REDUCE_WINDOW or len(op.results) > 1:
        return False
    shape = shape_of(op.operands[0])
    return (
        len(shape) == 1
        and integers(op, "window_dimensions") == (shape[0],)
        and integers(op, "padding") == (shape[0] - 1, 0)
        and reducer_kind(Combining(op).combiner) == "add"
        and splat_of(op.operands[1]) == 0
    )


# The proof.


def _are_rows_independent(block: ir.Block, routing: _Routing) -> bool:
    """Returns True if all ops between the starts and the ends of a routing treat rows by
    themselves, or add them up."""
    graph = _RowGraph.from_block(block)
    graph.routing = routing
    dims = graph.walk(routing.rows).run({})
    routing.check(dims)
    return (
        not routing.is_refused
        and dims.tilings.keys().isdisjoint(graph.root.returned)
        and all(_is_constant_along(value, dim) for value, dim in routing.pieces)
    )


class _RowGraph(Graph):
    """A graph whose walks follow the rows of a routing."""

    routing: _Routing

    def walk(self, parts: int, *, regroups: bool = False) -> Propagation:
        """Returns a walk in which each row is a part of its own."""
        return _Rows(self, self.routing, regroups=regroups)

    def inside(self, block: ir.Block) -> Graph:
        """Returns the graph of the body of a manual computation."""
        graph = _RowGraph.from_block(block)
        graph.routing = self.routing
        return graph


class _Rows(Propagation):
    """Follows rows in sorted order from the starts of a routing, and from the experts, to its ends.
    Each row is a part."""

    def __init__(self, graph: Graph, routing: _Routing, *, regroups: bool) -> None:
        super().__init__(graph, routing.rows, regroups=regroups)
        self._routing = routing

    def visit(self, node: Node) -> None:
        """Follows rows through one op."""
        routing = self._routing
        if node.op in (routing.sort, *routing.starts):
            # Tokens enter in their own order.
            routing.is_refused |= any(number in self.tilings for number in node.operands)
            self._put(node.results[0], DimTiling(0), None)
        elif node.op in routing.ends:
            update = node.operands[-1 if node.name == SCATTER else 0]
            tiling = self.tilings.get(update)
            into = node.name == SCATTER and node.operands[0] in self.tilings
            routing.is_refused |= into or tiling not in (None, DimTiling(0))
            if tiling is None:
                routing.pieces.append((self.graph.values[update], 0))
            self._set(node, [None], None)
        elif node.name == MANUAL_COMPUTATION:
            self._manual(node, tuple(map(self.tilings.get, node.operands)))
        else:
            super().visit(node)


def _is_constant_along(value: ir.Value, dim: int) -> bool:
    """Returns True if a value is constant along a dimension: a splat, a broadcast or an iota."""
    source = before_loops(value)
    if splat_of(source) is not None:
        return True
    op = producer(source)
    if op is not None and op.name == IOTA:
        return integer(op, "iota_dimension") != dim
    if op is None or op.name != BROADCAST:
        return False
    operand, dims = op.operands[0], integers(op, "broadcast_dimensions")
    if dim not in dims or shape_of(operand)[dims.index(dim)] == 1:
        return True
    return _is_constant_along(operand, dims.index(dim))

"""Undoes the sorting of tokens by expert, if each token is computed by itself.

Dropless experts sort all tokens by expert, multiply each group by the weights of its expert, and
bring them back into their order. jax writes the grouped product with a mask:

    %order = sort(%expert, iota)                           // argsort
    %rows = gather(%x, %order)                             // sorted
    %mask = %starts <= iota and iota < %ends               // [experts, rows]: cumsums of counts
    %y = dot_general(select(%mask, %rows, 0), %w)
    %out = scatter(zeros, %order, %y)                      // back
  ==>
    %mask = compare EQ, %expert, iota                      // [experts, tokens]
    %out = dot_general(select(%mask, %x, 0), %w)

A row of the mask says which expert the token of that row has. So if all ops between the gather and
the scatter treat rows independently, or add them up, any order of the rows gives the same result:
also that of the tokens. Then no op mixes samples. `_Rows` proves that, with one part for each row.

The backward reads the order and the counts of the forward. It gets the experts in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.device_values import COMPUTED, Values, evaluate_op
from stablehlo_tools.analysis.dimension_propagation.propagation import (
    Graph,
    Propagation,
    TiledValue,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import read_layer_loop
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimension_numbers import gather_numbers, scatter_numbers
from stablehlo_tools.dialect.dimensions import integer, integers
from stablehlo_tools.dialect.names import (
    ADD,
    BROADCAST,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    IOTA,
    REDUCE,
    RESHAPE,
    SCATTER,
    SORT,
    WHILE,
)
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.carriers import append_to_terminator
from stablehlo_tools.ir.values import before_reshapes, has_uses, maker_of, producer, splat_of
from stablehlo_tools.ir.views import Combining, While
from stablehlo_tools.ir.walk import enclosing, ops_named, terminator
from stablehlo_tools.ir.while_loop import before_loops, is_invariant
from stablehlo_tools.transforms.parts.per_microbatch import add_carry
from stablehlo_tools.transforms.parts.scaling import untiled_operands, untiled_ops

_AND, _COMPARE, _REDUCE_WINDOW = "stablehlo.and", "stablehlo.compare", "stablehlo.reduce_window"
_SUBTRACT = "stablehlo.subtract"


def undo_routing(block: ir.Block) -> None:
    """Undoes each sorting of tokens by expert in a block that is proved to treat tokens
    independently, in place."""
    for sort in ops_named(block.owner.operation, {SORT}):
        routing = _Routing.from_sort(sort)
        if routing is None or not routing.read_masks(block):
            continue
        for value, number in routing.constants:
            build = Builder(ir.InsertionPoint.after(maker_of(value)), value.location)
            value.replace_all_uses_with(build.splat_like(number, value))
        if _are_rows_independent(block, routing):
            routing.undo()
            # No op that is needed reads the order now.
            build = Builder(ir.InsertionPoint(sort), sort.location)
            order = sort.results[1]
            order.replace_all_uses_with(build.iota(order.type, 0))


@dataclass
class _Mask:
    """A mask of groups: the dimensions of the rows and of the experts. `counts` counts the tokens
    of each expert; `read` is the row of a stack by which another loop reads the counts."""

    op: ir.Operation
    row_dim: int
    expert_dim: int
    counts: ir.Operation
    read: ir.Operation | None


@dataclass
class _Routing:
    """A sorting of `rows` tokens by their experts, `keys`.

    `starts` are gathers of tokens in sorted order, `ends` the scatters that bring them back. By the
    inverse order, a scatter is a start and a gather is an end.
    `constants` are values that are the same for any order.
    """

    keys: ir.Value
    rows: int
    starts: list[ir.Operation] = field(default_factory=list[ir.Operation])
    ends: list[ir.Operation] = field(default_factory=list[ir.Operation])
    masks: list[_Mask] = field(default_factory=list[_Mask])
    constants: list[tuple[ir.Value, int]] = field(default_factory=list[tuple[ir.Value, int]])

    @staticmethod
    def from_sort(sort: ir.Operation) -> _Routing | None:
        """Returns the routing that begins with an argsort; None for other sorts, or other uses."""
        if not _is_argsort(sort):
            return None
        keys, order = sort.operands[0], sort.results[1]
        routing = _Routing(keys, shape_of(keys)[0])
        numbers = np.arange(routing.rows, dtype=np.int32)[None]
        known = {order: numbers}
        if not routing._follow(known):
            return None
        labels = routing._drop_labels()
        return routing if routing.starts and routing._follow(labels) else None

    def _follow(self, known: dict[ir.Value, Values]) -> bool:
        """Follows integers that depend on the order to all of their uses; returns False for one
        that is not understood.

        `known` has values as they are for tokens in their own order. Those that are the same for
        any order are constants.
        """
        pending, inverse = list(known), set[ir.Value]()
        while pending:
            value = pending.pop()
            is_constant = len(np.unique(known[value])) == 1
            if is_constant:
                self.constants.append((value, int(known[value].flat[0])))
            for use in list(value.uses):
                op, place = use.owner.operation, use.operand_number
                made: list[tuple[ir.Value, Values]] = []
                if op.name in (GATHER, SCATTER) and not is_constant:
                    if place != 1 or not self._is_of_rows(op, known[value]):
                        return False
                    # The inverse order brings rows back in a gather, and sorts them in a scatter.
                    is_start = (op.name == GATHER) != (value in inverse)
                    (self.starts if is_start else self.ends).append(op)
                elif (
                    op.name == SORT
                    and not place
                    and _is_argsort(op)
                    and np.array_equal(known[value].reshape(-1), np.arange(self.rows))
                ):
                    made = [(op.results[1], known[value])]  # the place of each token in the order
                    inverse.add(op.results[1])
                elif op.name == DYNAMIC_UPDATE_SLICE:
                    reads = _reads_of_stack(op) if place == 1 else None
                    made = [(read.results[0], known[value]) for read in reads or ()]
                    if reads is None and not is_constant:
                        return False
                elif len(op.results) == 1 and (
                    (numbers := _demand(op.results[0], dict(known))) is not None
                ):
                    made = [(op.results[0], numbers)]
                elif not is_constant:
                    return False
                for result, numbers in made:
                    if value in inverse:
                        inverse.add(result)
                    if result not in known:
                        known[result] = numbers.reshape(1, *shape_of(result))
                        pending.append(result)
        return True

    def _is_of_rows(self, op: ir.Operation, numbers: Values) -> bool:
        """Returns True for a gather or a scatter of whole rows, one for each index."""
        dims = gather_numbers(op) if op.name == GATHER else scatter_numbers(op)
        operand, result = shape_of(op.operands[0]), shape_of(op.results[0])
        rows = result if op.name == GATHER else shape_of(op.operands[2])
        if len(op.results) > 1 or not operand or self.rows % operand[0]:
            return False
        times = self.rows // operand[0]
        is_order = np.array_equal(numbers.reshape(-1), np.arange(self.rows) // times)
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

    def read_masks(self, block: ir.Block) -> bool:
        """Finds the masks of groups; returns False if there are none."""
        counts: dict[ir.Value, tuple[ir.Operation, ir.Operation | None]] = {}
        for op in ops_named(block.owner.operation, {SCATTER}):
            if self._counts_keys(op):
                counts[op.results[0]] = op, None
                for value in _through_reshapes(op.results[0]):
                    for use in value.uses:
                        writer = use.owner.operation
                        if writer.name == DYNAMIC_UPDATE_SLICE and use.operand_number == 1:
                            for read in _reads_of_stack(writer) or ():
                                for again in _through_reshapes(read.results[0]):
                                    counts[again] = op, read
        for op in ops_named(block.owner.operation, {_AND}):
            mask = _read_mask(op, self.rows, counts)
            if mask is not None:
                self.masks.append(mask)
        return bool(self.masks)

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
        found = _demand(index, {self.keys: sample})
        return (
            (zeros, ones) == (0, 1)
            and found is not None
            and np.array_equal(found.reshape(-1), np.maximum(sample, 0).reshape(-1))
        )

    def undo(self) -> None:
        """Rewrites the program with the tokens in their own order."""
        reads: dict[ir.Operation, ir.Value] = {}
        for mask in self.masks:
            if mask.read is not None and mask.read not in reads:
                reads.update(_keep_keys(mask.counts, mask.read))
        for mask in self.masks:
            build = Builder(ir.InsertionPoint(mask.op), mask.op.location)
            keys = reads[mask.read] if mask.read is not None else mask.counts.operands[1]
            shape = shape_of(mask.op.results[0])
            type_ = build.tensor(shape, element_of(keys))
            spread = build.broadcast(build.reshape(keys, [self.rows]), shape, [mask.row_dim])
            same = build.compare("EQ", spread, build.iota(type_, mask.expert_dim))
            mask.op.results[0].replace_all_uses_with(same)
        for op in (*self.starts, *self.ends):
            build = Builder(ir.InsertionPoint(op), op.location)
            op.results[0].replace_all_uses_with(_in_order(op, self.rows, build))


def _in_order(op: ir.Operation, rows: int, build: Builder) -> ir.Value:
    """Returns the result of a gather or a scatter of rows in the order of the tokens. A token may
    have several rows, one for each of its experts."""
    operand, shape = op.operands[0], shape_of(op.operands[0])
    times = rows // shape[0]
    apart = [shape[0], times, *shape[1:]]
    if op.name == GATHER:
        places = [0, *range(2, len(apart))]
        repeated = build.broadcast(operand, apart, places) if times > 1 else operand
        return build.reshape(repeated, [rows, *shape[1:]])
    update = op.operands[2]
    if _sets(op):
        return update
    if times > 1:
        zero = build.splat(0, [], element_of(update))
        update = build.reduce(build.reshape(update, apart), zero, [1], "add")
    return build.same("add", operand, update)


def _keep_keys(counts: ir.Operation, read: ir.Operation) -> Iterator[tuple[ir.Operation, ir.Value]]:
    """Adds a stack of the experts of all tokens beside a stack of their counts; yields the row that
    stands for each row of counts that is read."""
    keys = counts.operands[1]
    (writer,) = (
        use.owner.operation
        for value in _through_reshapes(counts.results[0])
        for use in value.uses
        if use.owner.operation.name == DYNAMIC_UPDATE_SLICE
        and read in (_reads_of_stack(use.owner.operation) or ())
    )
    reads = _reads_of_stack(writer) or []
    loop = enclosing(writer, WHILE)
    assert loop is not None
    before, inside = (Builder(ir.InsertionPoint(op), op.location) for op in (loop, writer))
    (rows, _), layers = shape_of(keys), shape_of(writer.operands[0])[0]
    start = before.splat(-1, [layers, rows], element_of(keys))
    loop, stack = add_carry(loop, start)
    zero = inside.splat_like(0, writer.operands[2])
    row = inside.reshape(keys, [1, rows])
    append_to_terminator(While(loop).body, [inside.update(stack, row, [writer.operands[2], zero])])
    result = loop.results[len(loop.results) - 1]
    for each in reads:
        reader = enclosing(each, WHILE)
        assert reader is not None
        place = ir.BlockArgument(each.operands[0]).arg_number
        reader, stack = add_carry(reader, result)
        append_to_terminator(While(reader).body, [stack])
        # No op that is needed reads the counts now; a pipeline would wait for all of them.
        outside = Builder(ir.InsertionPoint(reader), reader.location)
        reader.operands[place] = outside.splat_like(0, reader.operands[place])
        build = Builder(ir.InsertionPoint(each), each.location)
        at = [each.operands[1], build.splat_like(0, each.operands[1])]
        yield each, build.dynamic_slice(stack, at, [1, rows])
    writer.results[0].replace_all_uses_with(writer.operands[0])


# Values and their sources.


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
        is_same = operands[0].size == np.prod(shape_of(op.results[0]))
        shape = (1, *shape_of(op.results[0]))
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


def _through_reshapes(value: ir.Value) -> list[ir.Value]:
    """Returns a value, and its reshapes and broadcasts to as many elements."""
    found = [value]
    for each in found:
        for use in each.uses:
            op = use.owner.operation
            if op.name in (RESHAPE, BROADCAST) and np.prod(shape_of(op.results[0])) == np.prod(
                shape_of(value)
            ):
                found.append(op.results[0])
    return found


def _reads_of_stack(writer: ir.Operation) -> list[ir.Operation] | None:
    """Returns the slices by which other loops read the rows that an op writes to a stack; None if
    the stack is used in another way."""
    loop = enclosing(writer, WHILE)
    ends = [] if loop is None else list(terminator(While(loop).body).operands)
    if loop is None or ends.count(writer.results[0]) != 1:
        return None
    # Each row has to be written, so that none of the stack's start is read.
    layers = read_layer_loop(loop, Effects({}), weights=False)
    if layers is None or ends.index(writer.results[0]) not in layers.writes:
        return None
    reads: list[ir.Operation] = []
    for use in loop.results[ends.index(writer.results[0])].uses:
        reader, place = use.owner.operation, use.operand_number
        if reader.name != WHILE or not is_invariant(reader, place):
            return None
        for inner in While(reader).carries[place].uses:
            if inner.owner.operation.name == DYNAMIC_SLICE:
                reads.append(inner.owner.operation)
            elif inner.owner.operation != terminator(While(reader).body):
                return None
    return reads


def _read_mask(
    op: ir.Operation, rows: int, counts: Mapping[ir.Value, tuple[ir.Operation, ir.Operation | None]]
) -> _Mask | None:
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
    if total is None or not _is_cumsum(total) or counted not in counts:
        return None
    if starts.operands[1] != counted or total.operands[0] != counted:
        return None
    return _Mask(op, row_dim, dims[0][0], *counts[counted])


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
    graph = Graph.from_block(block)
    walk = _Rows(graph, routing)
    dims = walk.run({})
    if walk.is_refused or not dims.tilings.keys().isdisjoint(graph.root.returned):
        return False
    stopped = untiled_ops(dims) - {node for node in graph.nodes if node.op in routing.ends}
    pieces = [*untiled_operands(dims), *walk.pieces]
    return not stopped and all(
        _is_constant_along(graph.values[number], tiling.dim) for number, tiling in pieces
    )


class _Rows(Propagation):
    """Follows rows in sorted order, each as a part of its own, from the starts and masks of a
    routing to its ends."""

    def __init__(self, graph: Graph, routing: _Routing) -> None:
        super().__init__(graph, routing.rows)
        self._tiled = dict.fromkeys(routing.starts, DimTiling(0))
        self._tiled.update((mask.op, DimTiling(mask.row_dim)) for mask in routing.masks)
        self._ends = set(routing.ends)
        self.is_refused = False
        self.pieces: list[TiledValue] = []

    def visit(self, node: Node) -> None:
        """Follows rows through one op."""
        if node.op in self._tiled:
            # Tokens enter in their own order.
            self.is_refused |= any(number in self.tilings for number in node.operands)
            self._set(node, [self._tiled[node.op]], None)
        elif node.op in self._ends:
            update = node.operands[-1 if node.name == SCATTER else 0]
            tiling = self.tilings.get(update)
            into = node.name == SCATTER and node.operands[0] in self.tilings
            self.is_refused |= into or tiling not in (None, DimTiling(0))
            if tiling is None:
                self.pieces.append((update, DimTiling(0)))
            self._set(node, [None], None)
        else:
            super().visit(node)


def _is_constant_along(value: ir.Value, dim: int) -> bool:
    """Returns True if a value is constant along a dimension: a splat or a broadcast."""
    source = before_loops(value)
    if splat_of(source) is not None:
        return True
    op = producer(source)
    if op is None or op.name != BROADCAST:
        return False
    dims = integers(op, "broadcast_dimensions")
    return dim not in dims or shape_of(op.operands[0])[dims.index(dim)] == 1

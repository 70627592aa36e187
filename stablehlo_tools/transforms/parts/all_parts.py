"""Replaces ops of a block by copies for each part of the batch, side by side.

    %h = stablehlo.dot_general %x, %w : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  ==>                                                  // two pieces of the batch, a part each
    %h0 = stablehlo.dot_general %x0, %w : (tensor<4x64xf32>, …) -> tensor<4x64xf32>
    %h1 = stablehlo.dot_general %x1, %w : (tensor<4x64xf32>, …) -> tensor<4x64xf32>

A piece holds one part or several consecutive ones. Every op on values in parts is copied, with the
copies at its position. Ops on whole values are kept. Loops and branches carry the pieces as
separate values, after all others. Whole values are cut into pieces, and pieces are joined, only if
an op needs it. `one_part.py` instead adds copies for one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from stablehlo_tools.analysis.collectives import Channels
from stablehlo_tools.analysis.dataflow import Body, Node
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling, OpTiling, part_shape
from stablehlo_tools.analysis.partial_sums import PartialSums
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BARRIER, MANUAL_COMPUTATION
from stablehlo_tools.dialect.traits import ELEMENTWISE, full_names
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.clone import alike_clone
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.walk import is_inside, terminator
from stablehlo_tools.transforms.parts.block_rewriter import BlockRewriter, part_clone, part_type_of

Values = tuple[ir.Value, ...]

# Ops on whole values that are often unused once their users are copied: scalars and masks that were
# broadcast over the batch. They are erased if unused; other unused ops are left to the compiler.
_CHEAP = ELEMENTWISE | full_names("broadcast_in_dim concatenate constant iota reshape slice")


class AllPartsWriter(BlockRewriter):
    """Rewrites a block according to `dims`. `sizes` are the numbers of parts in each piece; by
    default each piece is one part."""

    def __init__(
        self, dims: BatchDims, channels: Channels, sizes: Sequence[int] | None = None
    ) -> None:
        super().__init__(dims)
        self._sizes = (1,) * dims.parts if sizes is None else tuple(sizes)
        self._pieces = Pieces(self._sizes)
        self._channels = channels
        self._dead: list[ir.Operation] = []
        self._carries: list[tuple[ir.Block, int]] = []  # arguments that were replaced by others
        self._kept: list[ir.Operation] = []  # pure ops that may be unused now

    def run(self) -> None:
        """Rewrites the block; its results are whole, as before."""
        self._write_whole(self.dims.graph.root)
        # Only at the end: a new value could otherwise be mistaken for an erased one.
        for op in reversed(self._dead):
            op.erase()
        # Last argument first, since erasing one renumbers those after it.
        for block, place in reversed(self._carries):
            block.erase_argument(place)
        for op in reversed(self._kept):
            if not any(has_uses(result) for result in op.results):
                op.erase()

    def _write_whole(self, body: Body) -> None:
        """Rewrites a block that returns whole values."""
        end = terminator(body.block)
        self.write(body.nodes, ir.InsertionPoint(end))
        self._take_whole(end)

    def write_op(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes an op once for each piece, before the op, if it runs on parts."""
        step = self.dims.op_tilings.get(node)
        if step is None or not self._runs_in_pieces(node):
            self._take_whole(node.op)
            self._capture_whole(node)
            if node.name in _CHEAP:
                self._kept.append(node.op)
            return
        if node.name == BARRIER:
            self._barriers(node, step)
        else:
            self._copies(node, step)
        self._dead.append(node.op)

    def write_control_flow(self, node: Node, point: ir.InsertionPoint) -> None:
        """Writes control flow around the rewritten bodies. Control flow without results in parts is
        kept."""
        if self.dims.tilings.keys().isdisjoint(node.results):
            self._take_whole(node.op)
            for body in node.bodies:
                self._write_whole(body)
        else:
            super().write_control_flow(node, ir.InsertionPoint(node.op))
            self._dead.append(node.op)

    def pass_on(
        self, numbers: Sequence[int], into: Sequence[int | None], build: Builder, user: ir.Operation
    ) -> list[ir.Value]:
        """Returns the whole values, followed by the parts of the others."""
        whole: list[ir.Value] = []
        parts: list[ir.Value] = []
        for value, result in zip(user.operands, into, strict=True):
            tiling = None if result is None else self.dims.tilings.get(result)
            if tiling is None:
                whole.append(self._pieces.whole(value, user))
            else:
                parts += self._pieces.parts_of(value, tiling, user)
        return whole + parts

    def result_types(self, node: Node) -> list[ir.Type]:
        """Returns the types of whole results, followed by those of the parts of the others."""
        whole, cut = self._separate(node.results)
        types = [part_type_of(self.dims, number) for number in whole]
        return types + [part_type_of(self.dims, n, size) for n in cut for size in self._sizes]

    def record(self, node: Node, copy: ir.Operation) -> None:
        """Replaces the results of control flow by those of its copy."""
        whole, cut = self._separate(node.results)
        results, values = iter(copy.results), self.dims.graph.values
        for number in whole:
            values[number].replace_all_uses_with(next(results))
        for number in cut:
            pieces = [next(results) for _ in self._sizes]
            self._pieces.put(values[number], self.dims.tilings[number], pieces)

    def open_body(
        self, body: Body, region: ir.Region, types: Sequence[ir.Type]
    ) -> ir.InsertionPoint:
        """Moves a body to a region, and adds an argument for each piece."""
        body.block.append_to(region)
        (block,) = region.blocks
        location = body.block.owner.location
        for place, number in enumerate(body.arguments):
            tiling = self.dims.tilings.get(number)
            if tiling is not None:
                types = [part_type_of(self.dims, number, size) for size in self._sizes]
                pieces = [block.add_argument(type_, location) for type_ in types]
                self._pieces.put(self.dims.graph.values[number], tiling, pieces)
                self._carries.append((block, place))
        return ir.InsertionPoint(terminator(block))

    def end_body(self, end: ir.Operation, values: Sequence[ir.Value], build: Builder) -> None:
        """Replaces a terminator by one with other operands."""
        super().end_body(end, values, build)
        end.erase()

    def _separate(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the whole values, and those in parts."""
        tilings = self.dims.tilings
        return [n for n in numbers if n not in tilings], [n for n in numbers if n in tilings]

    def _runs_in_pieces(self, node: Node) -> bool:
        """Returns False for a manual computation whose body needs a sum over all pieces."""
        if node.name != MANUAL_COMPUTATION:
            return True
        # A sum that the body uses in any other way than to return it is needed of all pieces.
        sums = PartialSums(self.dims)
        sums.visit([node])
        is_blocked = any(result in sums.blocked for result in node.results)
        is_met = bool(self.dims.inside(node).meetings)
        return not (is_blocked or is_met)

    def _copies(self, node: Node, step: OpTiling) -> None:
        """Writes an op once for each piece, and replaces its results."""
        op, operands = node.op, self._operands(node.op, step)
        made: list[Sequence[ir.Value]] = []
        for number, size in enumerate(self._sizes):
            taken = [values[number] for values in operands]
            # A chained op, such as a scatter that adds, continues the result of the piece before.
            if step.chained and made:
                taken[0] = made[-1][0]
            point = ir.InsertionPoint(op)
            if node.name == MANUAL_COMPUTATION:
                first = sum(self._sizes[:number])
                piece = _PieceWriter(self.dims, first, size, self._channels)
                copy = piece.write_manual(node, step, taken, point)
            else:
                copy = part_clone(op, step, taken, point, self.dims.parts, size)
                if number:
                    # No two collectives may have the same channel.
                    self._channels.renew(copy)
            made.append(list(copy.results))
        if step.chained:
            op.results[0].replace_all_uses_with(made[-1][0])
        elif node.name == MANUAL_COMPUTATION:
            self._join_results(node, step, made)
        elif step.combine is not None:
            build, total = Builder(ir.InsertionPoint(op), op.location), made[0][0]
            for (part,) in made[1:]:
                total = build.same(step.combine, total, part)
            op.results[0].replace_all_uses_with(total)
        else:
            self._replace_results(node, step.results, made)

    def _join_results(self, node: Node, step: OpTiling, made: Sequence[Sequence[ir.Value]]) -> None:
        """Replaces the results of a manual computation; terms of a sum over the batch become the
        sum."""
        sums = PartialSums(self.dims)
        sums.visit([node])
        build = Builder(ir.InsertionPoint(node.op), node.op.location)
        first = list(made[0])
        for place, number in enumerate(node.results):
            if number in sums.terms:
                for part in made[1:]:
                    first[place] = build.same(sums.terms[number], first[place], part[place])
        self._replace_results(node, step.results, [first, *made[1:]])

    def _operands(self, op: ir.Operation, step: OpTiling) -> list[Values]:
        """Returns the copies of each operand, one for each piece."""
        return [
            (self._pieces.whole(value, op),) * len(self._sizes)
            if layout is None
            else self._pieces.parts_of(value, layout, op)
            for value, layout in zip(op.operands, step.operands, strict=True)
        ]

    def _barriers(self, node: Node, step: OpTiling) -> None:
        """Writes a barrier for each part; whole operands are in the first."""
        op = node.op
        taken = self._operands(op, step)
        made: list[list[ir.Value]] = []
        for number in range(len(self._sizes)):
            places = [i for i, layout in enumerate(step.operands) if layout or not number]
            operands = [taken[place][number] for place in places]
            barrier = ir.Operation.create(
                op.name,
                results=[value.type for value in operands],
                operands=operands,
                loc=op.location,
                ip=ir.InsertionPoint(op),
            )
            results: list[ir.Value] = list(op.results)
            for place, value in zip(places, barrier.results, strict=True):
                results[place] = value
            made.append(results)
        self._replace_results(node, step.results, made)

    def _replace_results(
        self, node: Node, layouts: Sequence[DimTiling | None], made: Sequence[Sequence[ir.Value]]
    ) -> None:
        """Replaces the results of a node: by parts, or by the first of `made` for whole results."""
        for place, layout in enumerate(layouts):
            result = node.op.results[place]
            if layout is None:
                result.replace_all_uses_with(made[0][place])
            else:
                self._pieces.put(result, layout, [values[place] for values in made])

    def _take_whole(self, op: ir.Operation) -> None:
        for place, value in enumerate(op.operands):
            whole = self._pieces.whole(value, op)
            if whole != value:
                op.operands[place] = whole

    def _capture_whole(self, node: Node) -> None:
        """Makes values whole for the regions of an op that is not copied."""
        for number in node.captures:
            value = self.dims.graph.values[number]
            whole = self._pieces.whole(value, node.op)
            if whole == value:
                continue
            for use in list(value.uses):
                if is_inside(use.owner.operation, node.op):
                    use.owner.operation.operands[use.operand_number] = whole


class _PieceWriter(BlockRewriter):
    """Copies the body of a manual computation for `count` consecutive parts, from part `first`."""

    def __init__(self, dims: BatchDims, first: int, count: int, channels: Channels) -> None:
        super().__init__(dims, count)
        self._first = first
        self._channels = channels

    def inner_writer(self, dims: BatchDims, block: ir.Block) -> BlockRewriter:
        return _PieceWriter(dims, self._first, self.count, self._channels)

    def operand(
        self, number: int, tiling: DimTiling | None, build: Builder, user: ir.Operation
    ) -> ir.Value:
        """Returns the copy of a value; the parts of a whole value are cut from it."""
        value = self.values[number]
        if tiling is None or number in self.dims.tilings:
            return value
        shape = part_shape(tuple(shape_of(value)), tiling, self.dims.parts, self.count)
        type_ = build.tensor(shape, element_of(value))
        alike = alike_clone(value, tiling.dim, type_, build.point)
        if alike is not None:
            return alike
        return _piece(build, value, tiling, self.dims.parts, self._first, self.count)

    def record(self, node: Node, copy: ir.Operation) -> None:
        if self._first:
            # No two collectives may have the same channel.
            self._channels.renew(copy)
        super().record(node, copy)


class Pieces:
    """The pieces of values, and the conversions between whole values and pieces made so far.

    `sizes` are the numbers of consecutive parts in each piece. A conversion is written in the block
    of its value, before the first op that needs it. So later ops find it, those in loops too.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._parts: dict[ir.Value, tuple[DimTiling, Values]] = {}
        self._whole: dict[ir.Value, ir.Value] = {}
        self._cut: dict[tuple[ir.Value, DimTiling], Values] = {}

    def put(self, value: ir.Value, layout: DimTiling, parts: Sequence[ir.Value]) -> None:
        """Records the parts that replace a value."""
        self._parts[value] = layout, tuple(parts)

    def parts_of(self, value: ir.Value, layout: DimTiling, user: ir.Operation) -> Values:
        """Returns a value in parts, for an op that needs them."""
        known = self._parts.get(value)
        if known is not None and known[0] == layout:
            return known[1]
        key = value, layout
        if key not in self._cut:
            whole = self.whole(value, user)
            build = _builder(whole, user)
            self._cut[key] = _cut(build, whole, layout, self.sizes)
        return self._cut[key]

    def whole(self, value: ir.Value, user: ir.Operation) -> ir.Value:
        """Returns all of a value, for an op that needs it."""
        known = self._parts.get(value)
        if known is None:
            return value
        if value not in self._whole:
            layout, parts = known
            self._whole[value] = _join_pieces(_builder(parts[-1], user), parts, layout)
        return self._whole[value]


def _cut(build: Builder, value: ir.Value, layout: DimTiling, sizes: Sequence[int]) -> Values:
    """Returns the pieces of a whole value: smaller constants and broadcasts, or slices."""
    shape, parts = tuple(shape_of(value)), sum(sizes)
    smaller: dict[int, ir.Value | None] = {}
    for size in sizes:
        if size not in smaller:
            type_ = build.tensor(part_shape(shape, layout, parts, size), element_of(value))
            smaller[size] = alike_clone(value, layout.dim, type_, build.point)
    same = [smaller[size] for size in sizes]
    known = [piece for piece in same if piece is not None]
    if len(known) == len(same):
        return tuple(known)
    firsts = accumulate(sizes, initial=0)
    return tuple(
        _piece(build, value, layout, parts, first, size)
        for first, size in zip(firsts, sizes, strict=False)
    )


def _join_pieces(build: Builder, pieces: Sequence[ir.Value], layout: DimTiling) -> ir.Value:
    """Returns all pieces joined."""
    dim = layout.dim
    if layout.outer == 1:
        return build.concatenate(pieces, dim)
    whole = shape_of(pieces[0])
    whole[dim] = sum(shape_of(piece)[dim] for piece in pieces)
    rows = [_apart(build, piece, layout) for piece in pieces]
    return build.reshape(build.concatenate(rows, dim + 1), whole)


def _apart(build: Builder, value: ir.Value, layout: DimTiling) -> ir.Value:
    """Returns a value with the dimension outside of the parts split off."""
    shape, dim = shape_of(value), layout.dim
    rows = [*shape[:dim], layout.outer, shape[dim] // layout.outer, *shape[dim + 1 :]]
    return build.reshape(value, rows)


def _piece(
    build: Builder, value: ir.Value, layout: DimTiling, parts: int, first: int, count: int
) -> ir.Value:
    shape, dim = shape_of(value), layout.dim
    inner = shape[dim] // (layout.outer * parts)
    if layout.outer == 1:
        return build.slice_along(value, dim, first * inner, (first + count) * inner)
    rows = _apart(build, value, layout)
    taken = build.slice_along(rows, dim + 1, first * inner, (first + count) * inner)
    return build.reshape(taken, part_shape(tuple(shape), layout, parts, count))


def _builder(value: ir.Value, user: ir.Operation) -> Builder:
    """Returns a builder in the block of a value, before `user` or the op that contains it."""
    owner = value.owner
    block = owner if isinstance(owner, ir.Block) else owner.operation.block
    at = user
    while at.block != block:
        at = at.block.owner.operation
    maker = producer(value)
    return Builder(ir.InsertionPoint(at), (maker or user).location)

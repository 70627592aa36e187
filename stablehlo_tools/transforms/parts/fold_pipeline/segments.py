"""The computations of a tick between ops that move elements, each as a function.

A *segment* leads from values that were moved to values computed from them. Moved values are a
carry, a slice of the weights, a value received by a rank, or a select that the tick decides. The
segment is written into the module as a private function, to be analysed and copied. It is erased at
the end.

In one program, a dimension of the state may hold all stages. A segment then computes them side by
side. One row of it is the same ops on one stage's part of that dimension, as for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.analysis.dataflow import captured_values
from stablehlo_tools.analysis.device_values import COMPUTED
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims, Graph
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.loops import FORMATTING
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import (
    ADD,
    BROADCAST,
    CONCATENATE,
    GATHER,
    IOTA,
    PARTITION_ID,
    SELECT,
)
from stablehlo_tools.dialect.traits import BRANCHES, ELEMENTWISE
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import CONSTANTS, has_uses, is_float, key_of, maker_of, producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.block_rewriter import part_type_of
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import Box, UnresolvedError
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import (
    BETWEEN_RANKS,
    MOVING,
    RELAYOUTS,
    deciding_operands,
    is_reshaping_sum,
    numbers_along,
)
from stablehlo_tools.transforms.parts.scaling import NotScaledError, Scaling, follow_batch

# Ops to erase if unused: those that segments leave of the moves around them. `ir/dce` would also
# erase dots and other ops of the program around a pipeline, which are not this pass's to erase.
_ERASED = FORMATTING | ELEMENTWISE | CONSTANTS | {IOTA, GATHER, PARTITION_ID}


class Scratch:
    """Private functions of a module, to be erased when the pass is done."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._functions: list[ir.Operation] = []

    def function(
        self,
        types: Sequence[ir.Type],
        fill: Callable[[ir.Block, Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> ir.Operation:
        """Returns a new function with arguments of some types; `fill` writes its body and returns
        its results."""
        location = ir.Location.unknown(self._module.context)
        with location:
            function = ir.Operation.create(
                "func.func",
                attributes={
                    "sym_name": ir.StringAttr.get(f"fold_pipeline.{len(self._functions)}"),
                    "sym_visibility": ir.StringAttr.get("private"),
                    "function_type": ir.TypeAttr.get(ir.FunctionType.get(list(types), [])),
                },
                regions=1,
                ip=ir.InsertionPoint(self._module.body),
            )
            self._functions.append(function)
            block = function.regions[0].blocks.append(*types, arg_locs=[location] * len(types))
            results = list(fill(block, list(block.arguments)))
            ir.Operation.create("func.return", operands=results, ip=ir.InsertionPoint(block))
            erase_unused(block)
            whole = ir.FunctionType.get(list(types), [value.type for value in results])
            function.attributes["function_type"] = ir.TypeAttr.get(whole)
        return function

    def scaled_function(self, dims: BatchDims, count: int) -> ir.Operation:
        """Returns a function that computes the block of `dims` on `count` parts of the batch.
        Raises NotScaledError."""
        return self.function(
            [part_type_of(dims, number, count) for number in dims.graph.root.arguments],
            lambda block, given: Scaling(dims, count).write_all(given, ir.InsertionPoint(block)),
        )

    def clear(self) -> None:
        """Erases the functions."""
        for function in self._functions:
            function.erase()
        self._functions = []


def erase_unused(block: ir.Block, anchor: ir.Operation | None = None) -> None:
    """Erases unused ops of a block that `_ERASED` names, and the anchor if it is unused."""
    for view in reversed(list(block.operations)):
        op = view.operation
        is_anchor = anchor is not None and op == anchor
        if not is_anchor and op.name not in _ERASED:
            continue
        if len(op.results) and not any(map(has_uses, op.results)):
            op.erase()


@dataclass(frozen=True, eq=False)
class Segment:
    """A computation: `function` computes `outputs` from `inputs`."""

    outputs: tuple[ir.Value, ...]
    inputs: tuple[ir.Value, ...]
    function: ir.Operation

    @property
    def block(self) -> ir.Block:
        """The body of the function."""
        return Function(self.function).body


class Segments:
    """The segments of a region. `scratch` holds the functions. `merges` returns True for an
    addition that only moves elements, as at most one operand is nonzero."""

    def __init__(
        self,
        region: LoopRegion,
        scratch: Scratch,
        merges: Callable[[ir.Operation], bool] = lambda _: False,
    ) -> None:
        self._region = region
        self._scratch = scratch
        self._merges = merges
        self._classify = classify_communication(region.loop.context)
        self._moved: dict[ir.Value, bool] = {}
        self._made: dict[tuple[ir.Value, ...], Segment] = {}
        self._stops = set[ir.Value]()

    def stop_at(self, values: Iterable[ir.Value]) -> None:
        """Makes segments start from these values, too, although they are computed inside of one."""
        self._stops.update(values)
        self._made = {}

    def is_within(self, value: ir.Value, outputs: Sequence[ir.Value]) -> bool:
        """Returns True if a value is computed inside of a segment and is not one of its outputs."""
        op = producer(value)
        ops, _ = self._collect_ops(tuple(outputs))
        return value not in outputs and op is not None and key_of(op) in map(key_of, ops)

    def segment_of(self, outputs: Sequence[ir.Value]) -> Segment:
        """Returns the segment that computes some values of a block together."""
        key = tuple(outputs)
        if key not in self._made:
            ops, inputs = self._collect_ops(key)

            def fill(block: ir.Block, arguments: Sequence[ir.Value]) -> list[ir.Value]:
                values = dict(zip(inputs, arguments, strict=True))
                for op in ops:
                    copy = copy_with(op, values, ir.InsertionPoint(block))
                    values.update(zip(op.results, copy.results, strict=True))
                return [values[value] for value in key]

            function = self._scratch.function([value.type for value in inputs], fill)
            self._made[key] = Segment(key, tuple(inputs), function)
        return self._made[key]

    def _collect_ops(
        self, outputs: Sequence[ir.Value]
    ) -> tuple[list[ir.Operation], list[ir.Value]]:
        """Returns the ops that compute outputs, operands first, and the values that they start
        from."""
        ops: dict[ir.Value | ir.Operation, ir.Operation] = {}
        inputs: dict[ir.Value, None] = {}
        pending = [(op, False) for value in reversed(outputs) if (op := producer(value))]
        while pending:
            op, ready = pending.pop()
            if key_of(op) in ops:
                continue
            if ready:
                ops[key_of(op)] = op
                continue
            self._refuse_between_ranks(op)
            pending.append((op, True))
            taken = [*op.operands, *captured_values(op)] if len(op.regions) else list(op.operands)
            for value in reversed(taken):
                if self._is_input(value):
                    inputs[value] = None
                elif (maker := producer(value)) is not None:
                    pending.append((maker, False))
        return list(ops.values()), list(inputs)

    def _refuse_between_ranks(self, op: ir.Operation) -> None:
        """Raises UnresolvedError for a collective that joins ranks within a tick."""

        def visit(inner: ir.Operation) -> ir.WalkResult:
            collective = self._classify(inner)
            groups = None if collective is None else self._region.facts.groups(collective)
            if groups is not None and self._region.ranks.moves(groups):
                raise UnresolvedError(f"{inner.name} joins stages within a tick", inner, 3)
            return ir.WalkResult.ADVANCE

        walk(op, visit)

    def _is_input(self, value: ir.Value) -> bool:
        maker = producer(value)
        if maker is None:
            return True
        if maker.name in CONSTANTS:
            return False
        if self._region.has_known_integers(value):
            # An op may compute integers from values that are the same on all ranks in all ticks.
            values = (*maker.results, *maker.operands)
            known = all(self._region.steady_integers(value) is not None for value in values)
            return not (known and maker.name in COMPUTED)
        return value in self._stops or self._is_moved(value)

    def _is_moved(self, value: ir.Value) -> bool:
        """Returns True if known moves make a value of others, with no computation after one of
        them."""
        if value not in self._moved:
            self._moved[value] = self._follows_moves(value)
        return self._moved[value]

    def _follows_moves(self, value: ir.Value) -> bool:
        op, region = producer(value), self._region
        if op is None or op == region.loop or not region.is_inside(op):
            return op is None or op.name not in CONSTANTS
        # A collective along other axes than that of the stages computes within a stage.
        if op.name in BETWEEN_RANKS:
            groups = region.groups(op)
            return groups is not None and region.ranks.moves(groups)
        if op.name == ADD:
            return self._merges(op)
        if is_reshaping_sum(op):
            return self._is_moved(op.operands[0])
        if op.name not in MOVING:
            return False
        if op.name in RELAYOUTS:
            return self._is_moved(op.operands[ir.OpResult(value).result_number])
        if op.name == BROADCAST:
            dims = integers(op, "broadcast_dimensions")
            before, after = shape_of(op.operands[0]), shape_of(op.results[0])
            sizes = [1] * len(after)
            for dim, size in zip(dims, before, strict=True):
                sizes[dim] = size
            keeps_all = sizes == after and list(dims) == sorted(dims)
            return keeps_all and self._is_moved(op.operands[0])
        deciding, moved = deciding_operands(op)
        known = [index for index in deciding if region.has_known_integers(index)]
        if len(known) != len(deciding):  # a predicate may follow from the positions of its elements
            steady = region.steady_integers
            if op.name != SELECT or numbers_along(deciding[0], steady) is None:
                return False
        if any(region.steady_integers(index) is None for index in known):
            return True
        if op.name in BRANCHES:
            return True
        return all(map(self._is_plain, moved)) and any(map(self._is_moved, moved))

    def _is_plain(self, value: ir.Value) -> bool:
        """Returns True if a value is not computed: moved, constant, or one of these repeated."""
        op = producer(value)
        while op is not None and op.name in RELAYOUTS | {BROADCAST}:
            value = op.operands[ir.OpResult(value).result_number]
            op = producer(value)
        if op is not None and op.name in CONSTANTS:
            return True
        if op is not None and op.name == CONCATENATE and all(map(self._is_plain, op.operands)):
            return True
        return self._region.has_known_integers(value) or self._is_moved(value)


@dataclass(frozen=True)
class StageRows:
    """A segment for one of the `count` stages along a dimension.

    `function` computes one stage. `dims[i]` is the dimension of input i that the stages divide, or
    None if all stages read the same. `outputs` are those dimensions of the segment's outputs.
    """

    function: ir.Operation
    count: int
    dims: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @property
    def block(self) -> ir.Block:
        """The body of the function."""
        return Function(self.function).body

    def box(self, value: ir.Value, number: int, row: int) -> Box:
        """Returns the box of an input that stage `row` reads."""
        return Box.whole(shape_of(value)).share(self.dims[number], row, self.count)

    def output_box(self, value: ir.Value, output: int, row: int) -> Box:
        """Returns the box of output `output`, whose value is `value`, that stage `row` computes."""
        return Box.whole(shape_of(value)).share(self.outputs[output], row, self.count)


def all_stages(segment: Segment) -> StageRows:
    """Returns a segment with all of it as one row."""
    one = (None,) * len(segment.inputs)
    return StageRows(segment.function, 1, one, (None,) * len(segment.outputs))


def row_of_stages(segment: Segment, dim: int, count: int, scratch: Scratch) -> StageRows:
    """Returns one of several stages of a segment that are along a dimension of its outputs.

    The stages' dimension of the inputs is not known. It is the one from which that dimension of the
    outputs follows. Raises UnresolvedError if a stage depends on another one within a tick.
    """
    graph, failed = Graph.from_block(segment.block), maker_of(segment.outputs[0])
    mixing: ir.Operation | None = None
    for number, value in enumerate(segment.inputs):
        if not is_float(value.type) or not isinstance(value.type, ir.RankedTensorType):
            continue
        for seed, size in enumerate(shape_of(value)):
            if size % count:
                continue
            try:
                rows = rows_along(graph, number, seed, count, scratch)
                if all(output == dim for output in rows.outputs):
                    return rows
            except NotScaledError as error:
                mixing = mixing or error.op
    raise mixed_stages_error(mixing or failed)


def mixed_stages_error(op: ir.Operation) -> UnresolvedError:
    """Returns the refusal of an op that computes with several stages at once."""
    return UnresolvedError(
        f"{op.name} combines the states of several stages; each stage of a pipeline must compute "
        "with its own state only, as under jax.vmap",
        op,
        3,
    )


def rows_along(graph: Graph, number: int, dim: int, count: int, scratch: Scratch) -> StageRows:
    """Returns one of `count` stages of a segment, which divide a dimension of one of its inputs.

    Raises NotScaledError if stages depend on each other.
    """
    dims = follow_batch(graph, {number: DimTiling(dim)}, count)
    ends = [dims.tilings.get(n) for n in (*graph.root.arguments, *graph.root.returned)]
    if any(tiling is not None and tiling.outer != 1 for tiling in ends):
        raise NotScaledError(maker_of(graph.values[graph.root.returned[0]]))
    inputs, outputs = _dims_of(graph.root.arguments, dims), _dims_of(graph.root.returned, dims)
    return StageRows(scratch.scaled_function(dims, 1), count, inputs, outputs)


def _dims_of(numbers: Sequence[int], dims: BatchDims) -> tuple[int | None, ...]:
    """Returns the dimension of each value that the stages divide; None if there is none."""
    tilings = map(dims.tilings.get, numbers)
    return tuple(None if tiling is None else tiling.dim for tiling in tilings)

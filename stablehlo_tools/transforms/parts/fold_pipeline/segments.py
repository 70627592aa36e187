"""What a tick computes between the ops that move elements: as functions of their own.

A *segment* leads from values that were moved (a carry, a slice of the weights, what a rank
received, a select that the tick decides) to values that were computed from them. It is written into
the module as a private function, to be analysed and copied, and erased in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.analysis.device_arithmetic import COMPUTED
from stablehlo_tools.analysis.dimension_propagation.graph import captured
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import BROADCAST
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.constants import CONSTANTS
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.moves import (
    BETWEEN_RANKS,
    BRANCHES,
    MOVING,
    RELAYOUTS,
    deciding_operands,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tidying import erase_unused
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import UnresolvedError


@dataclass(frozen=True, eq=False)
class Segment:
    """A computation: `function` takes what `inputs` are and returns what `outputs` are."""

    outputs: tuple[ir.Value, ...]
    inputs: tuple[ir.Value, ...]
    function: ir.Operation

    @property
    def block(self) -> ir.Block:
        """The body of the function."""
        return self.function.regions[0].blocks[0]


class Segments:
    """The segments of a region. `scratch` holds the functions."""

    def __init__(self, region: LoopRegion, scratch: Scratch) -> None:
        self._region = region
        self._scratch = scratch
        self._classify = classify_communication(region.loop.context)
        self._moved: dict[ir.Value, bool] = {}
        self._made: dict[tuple[ir.Value, ...], Segment] = {}
        self._stops = set[ir.Value]()

    def stop_at(self, values: Iterable[ir.Value]) -> None:
        """Lets segments start from computed values too, where they are in the midst of one."""
        self._stops.update(values)
        self._made = {}

    def is_within(self, value: ir.Value, outputs: Sequence[ir.Value]) -> bool:
        """Whether a value is computed in the midst of a segment."""
        op = producer(value)
        ops, _ = self._collected(tuple(outputs))
        return value not in outputs and op is not None and key_of(op) in map(key_of, ops)

    def of(self, outputs: Sequence[ir.Value]) -> Segment:
        """The segment that computes some values of a block together."""
        key = tuple(outputs)
        if key not in self._made:
            ops, inputs = self._collected(key)
            function = self._scratch.function(inputs, key, lambda put: _copy(ops, put))
            self._made[key] = Segment(key, tuple(inputs), function)
        return self._made[key]

    def _collected(self, outputs: Sequence[ir.Value]) -> tuple[list[ir.Operation], list[ir.Value]]:
        """The ops that outputs are computed by, operands first, and the values they start from."""
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
            for value in reversed(used_by(op)):
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
                raise UnresolvedError(f"{inner.name} joins stages in the midst of a tick", inner, 3)
            return ir.WalkResult.ADVANCE

        walk(op, visit)

    def _is_input(self, value: ir.Value) -> bool:
        maker = producer(value)
        if maker is None:
            return True
        if maker.name in CONSTANTS:
            return False
        if self._region.is_control(value):
            return not self._is_steady(maker)
        return value in self._stops or self._is_moved(value)

    def _is_steady(self, op: ir.Operation) -> bool:
        """Whether an op computes control out of what is the same on all ranks in all ticks."""
        values = (*op.results, *op.operands)
        known = all(self._region.steady(value) is not None for value in values)
        return known and op.name in COMPUTED

    def _is_moved(self, value: ir.Value) -> bool:
        """Whether a value is made of others by known moves, and no computation follows on one."""
        if value not in self._moved:
            self._moved[value] = self._found_moved(value)
        return self._moved[value]

    def _found_moved(self, value: ir.Value) -> bool:
        op, region = producer(value), self._region
        if op is None or op == region.loop or not region.is_inside(op):
            return op is None or op.name not in CONSTANTS
        if op.name in BETWEEN_RANKS:
            groups = region.groups(op)
            return groups is not None and region.ranks.moves(groups)
        if op.name not in MOVING:
            return False
        if op.name in RELAYOUTS:
            return self._is_moved(op.operands[ir.OpResult(value).result_number])
        if op.name == BROADCAST:
            return not _repeats(op) and self._is_moved(op.operands[0])
        indices, data = deciding_operands(op)
        if not all(region.is_control(index) for index in indices):
            return False
        if any(region.steady(index) is None for index in indices):
            return True
        if op.name in BRANCHES:
            return True
        return all(map(self._is_plain, data)) and any(map(self._is_moved, data))

    def _is_plain(self, value: ir.Value) -> bool:
        """Whether nothing was computed: moved, constant, or one of them repeated."""
        op = producer(value)
        while op is not None and op.name in RELAYOUTS | {BROADCAST}:
            value = op.operands[ir.OpResult(value).result_number]
            op = producer(value)
        if op is not None and op.name in CONSTANTS:
            return True
        return self._region.is_control(value) or self._is_moved(value)


class Scratch:
    """Private functions of a module that do not stay in it."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._functions: list[ir.Operation] = []

    def function(
        self,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        fill: Callable[[_Filling], None],
    ) -> ir.Operation:
        """A function of values like `inputs`, filled so that `outputs` stand for something."""
        types = [value.type for value in inputs]
        return self.typed(
            types,
            lambda block, arguments: self._filled(
                block, dict(zip(inputs, arguments, strict=True)), outputs, fill
            ),
        )

    def typed(
        self,
        types: Sequence[ir.Type],
        fill: Callable[[ir.Block, Sequence[ir.Value]], Sequence[ir.Value]],
    ) -> ir.Operation:
        """A function of arguments of some types; `fill` writes it and says what it returns."""
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
            kinds = [value.type for value in results]
            whole = ir.FunctionType.get(list(types), kinds)
            function.attributes["function_type"] = ir.TypeAttr.get(whole)
        return function

    def clear(self) -> None:
        """Erases the functions."""
        for function in self._functions:
            function.erase()
        self._functions = []

    def _filled(
        self,
        block: ir.Block,
        values: dict[ir.Value, ir.Value],
        outputs: Sequence[ir.Value],
        fill: Callable[[_Filling], None],
    ) -> list[ir.Value]:
        fill(_Filling(values, ir.InsertionPoint(block)))
        return [values[value] for value in outputs]


@dataclass(frozen=True)
class _Filling:
    """What stands for values so far, and where the next op goes."""

    values: dict[ir.Value, ir.Value]
    point: ir.InsertionPoint


def _copy(ops: Iterable[ir.Operation], put: _Filling) -> None:
    for op in ops:
        copy = copy_with(op, put.values, put.point)
        put.values.update(zip(op.results, copy.results, strict=True))


def used_by(op: ir.Operation) -> list[ir.Value]:
    """The operands of an op, and the values from outside that its regions use."""
    return [*op.operands, *captured(op)] if len(op.regions) else list(op.operands)


def _repeats(broadcast: ir.Operation) -> bool:
    """Whether elements of the operand are several times in the result."""
    dims = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    before, after = shape_of(broadcast.operands[0]), shape_of(broadcast.results[0])
    sizes = [1] * len(after)
    for dim, size in zip(dims, before, strict=True):
        sizes[dim] = size
    return sizes != after or dims != sorted(dims)

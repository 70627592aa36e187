"""The body of the scan that a stage is, where it leaves something for each of its layers.

A stage of a pipeline that is differentiated keeps, in a stack, what the backward takes of each of
its layers; the backward's stage goes through them in reverse, and stacks their gradients. The loop
over the stages and the one in each of them are then one loop over all layers:

    while stages { while layers of a stage { layer } }  ==>  while all layers { layer }

Before that, a loop whose rows one other loop takes becomes part of that one:

    %kept = while layers { %kept[%layer] = recomputed(%given[%layer]) }
    %sum = while layers, in reverse { ... %kept[%layer] ... }
  ==>
    %sum = while layers, in reverse { ... recomputed(%given[%layer]) ... }

So a backward that computes anew what it needs of its layers, which jax does for all of them first,
does that for one layer at a time, and keeps nothing of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from stablehlo_tools.analysis.loops import constant_integer, counted, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    SUBTRACT,
    WHILE,
)
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import drop_unused_carries
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import terminator, values_used
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Handoff
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch


class RowLoop(WhileLoop):
    """A loop of which the counter, from 0 in steps of 1, says nothing but which rows it takes and
    writes; `rows` are the values that are the number of the row. In reverse, that is the trips
    minus the counter minus 1."""

    def __init__(self, loop: ir.Operation, trips: int, counter: int) -> None:
        super().__init__(loop)
        self.trips = trips
        self.counter = counter
        self.rows: list[ir.Value] = []

    @classmethod
    def of(cls, loop: ir.Operation, *, reverse: bool) -> Self | None:
        """A loop, if it is one."""
        count = counted(loop, known_integer)
        if isinstance(count, str) or count.starts != (0,) or count.counter.step != 1:
            return None
        known = cls(loop, count.trips[0], count.counter.position)
        return known if known._read_rows(reverse=reverse) else None

    def _read_rows(self, *, reverse: bool) -> bool:
        """Notes the values that are the number of the layer; whether the counter serves no other
        end. In reverse, that is the trips minus the counter minus 1."""
        argument = self.arguments[self.counter]
        self.rows = [argument]
        users = self.users(argument)
        if reverse:
            left = [op for op in users if op.name == SUBTRACT and op.operands[1] == argument]
            rows = [row for op in left if (row := self._left(op)) is not None]
            if not rows or len(rows) < len(left):
                return False
            self.rows = rows
            users = [op for op in users if op not in left]
        end = self.ends[self.counter]
        steps = [op for op in users if op.name == ADD and op.results[0] == end]
        if len(steps) != 1 or len(self.users(end)) != 1:
            return False
        others = [op for op in users if op not in steps]
        if reverse:
            others += [op for row in self.rows for op in self.users(row)]
        return all(
            op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE) and self.layer_dim(op) is not None
            for op in others
        )

    def _left(self, op: ir.Operation) -> ir.Value | None:
        """The number of the layer, from what the counter is subtracted from, if it is that."""
        if constant_integer(op.operands[0]) == self.trips - 1:
            return op.results[0]
        users = self.users(op.results[0])
        if constant_integer(op.operands[0]) != self.trips or len(users) != 1:
            return None
        (user,) = users
        is_row = user.name == SUBTRACT and constant_integer(user.operands[1]) == 1
        return user.results[0] if is_row else None

    def users(self, value: ir.Value) -> list[ir.Operation]:
        """The ops that take a value."""
        return [use.owner.operation for use in value.uses]

    def layer_dim(self, op: ir.Operation) -> int | None:
        """The dimension along which an op takes or puts one element, at the number of the layer;
        all of the others."""
        lead = 1 if op.name == DYNAMIC_SLICE else 2
        sizes = shape_of(op.results[0] if lead == 1 else op.operands[1])
        shape = shape_of(op.operands[0])
        starts = list(op.operands)[lead:]
        moving = [d for d, start in enumerate(starts) if start in self.rows]
        if len(moving) != 1 or sizes[moving[0]] != 1 or shape[moving[0]] != self.trips:
            return None
        whole = all(sizes[d] == shape[d] for d in range(len(sizes)) if d != moving[0])
        return moving[0] if whole else None

    def update_of(self, position: int) -> ir.Operation | None:
        """The update of a carry that every iteration writes its row of; None for any other."""
        argument, update = self.arguments[position], producer(self.ends[position])
        if update is None or update.name != DYNAMIC_UPDATE_SLICE:
            return None
        if update.operands[0] != argument or len(self.users(argument)) != 1:
            return None
        if len(self.users(update.results[0])) != 1 or self.layer_dim(update) is None:
            return None
        return update


def fuse_loops(block: ir.Block, *, reverse: bool) -> None:
    """Lets each loop of a block that only computes rows, all of which one loop behind it takes, be
    part of that, which goes through them in reverse if so said.

    Handles of loops in the block must not be used afterwards.
    """
    while any(_fuse(loop, reverse=reverse) for loop in _loops(block)):
        drop_unused_carries(block)
        for loop in _loops(block):
            if not any(map(has_uses, loop.results)):
                loop.erase()


def _loops(block: ir.Block) -> list[ir.Operation]:
    return [view.operation for view in block.operations if view.operation.name == WHILE]


def _fuse(loop: ir.Operation, *, reverse: bool) -> bool:
    """Lets the loop that takes the rows that a loop computes compute them; whether there is one."""
    made = RowLoop.of(loop, reverse=False)
    if made is None:
        return False
    for position in made.invariant:
        loop.results[position].replace_all_uses_with(loop.operands[position])
    updates = {p: op for p in range(len(made.ends)) if (op := made.update_of(p)) is not None}
    users = {use.owner.operation for result in loop.results for use in result.uses}
    taken = {p for p, result in enumerate(loop.results) if has_uses(result)}
    if len(users) != 1 or not taken or not taken <= updates.keys():
        return False
    user = users.pop()
    if user.name != WHILE or user.block != loop.block:
        return False
    taking = RowLoop.of(user, reverse=reverse)
    if taking is None or taking.trips != made.trips:
        return False
    slices = _slices(made, taking, updates)
    if slices is None:
        return False
    values = _computed(made, taking, updates.values(), reverse=reverse)
    for taken_row, row in slices.items():
        taken_row.replace_all_uses_with(values.get(row, row))
    return True


def _slices(
    made: RowLoop, taking: RowLoop, updates: Mapping[int, ir.Operation]
) -> dict[ir.Value, ir.Value] | None:
    """The slices of rows that a loop takes, with what the other one makes them; None where it takes
    anything else of that."""
    slices: dict[ir.Value, ir.Value] = {}
    end = terminator(taking.block)
    for position, operand in enumerate(taking.loop.operands):
        maker = producer(operand)
        if maker is None or maker != made.loop:
            continue
        update = updates[ir.OpResult(operand).result_number]
        users = [op for op in taking.users(taking.arguments[position]) if op != end]
        if position not in taking.invariant or has_uses(taking.loop.results[position]):
            return None
        dim = made.layer_dim(update)
        if any(op.name != DYNAMIC_SLICE or taking.layer_dim(op) != dim for op in users):
            return None
        slices.update((op.results[0], update.operands[1]) for op in users)
    return slices


def _computed(
    made: RowLoop, taking: RowLoop, updates: Collection[ir.Operation], *, reverse: bool
) -> dict[ir.Value, ir.Value]:
    """Copies what a loop computes to where the iteration of another one begins, for its row."""
    build = Builder(ir.InsertionPoint.at_block_begin(taking.block), made.loop.location)
    row: ir.Value = taking.arguments[taking.counter]
    if reverse:
        last = build.splat(taking.trips - 1, [], element_of(row))
        row = build.same("subtract", last, row)
    own = {
        taking.loop.operands[carry]: taking.arguments[carry] for carry in sorted(taking.invariant)
    }
    values: dict[ir.Value, ir.Value] = {
        argument: own.get(operand, operand)
        for argument, operand in zip(made.arguments, made.loop.operands, strict=True)
    }
    values[made.arguments[made.counter]] = row
    skipped = {made.ends[made.counter], *(update.results[0] for update in updates)}
    for view in list(made.block.operations)[:-1]:
        op = view.operation
        if skipped.isdisjoint(op.results):
            copy = copy_with(op, values, build.point)
            values.update(zip(op.results, copy.results, strict=True))
    return values


@dataclass(frozen=True)
class LayerBlock:
    """A block that computes one layer of a stage, of which there are `each`.

    `inputs[i]` is the dimension along which input i of the stage holds what its layers take, and
    `outputs` likewise; the block has these with that dimension of size 1.
    """

    block: ir.Block
    each: int = 1
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    outputs: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def returned(self) -> list[ir.Value]:
        """What the block returns."""
        return list(terminator(self.block).operands)


def layer_of(
    block: ir.Block,
    handoffs: Sequence[Handoff],
    stacked: Collection[int],
    scratch: Scratch,
    *,
    reverse: bool,
) -> LayerBlock | None:
    """The block of one layer of a stage that is one scan over its layers, in reverse if so asked,
    of which each takes its part of just the inputs `stacked`; None for any other stage.

    Loops of the stage that compute a row for each layer become part of the one that takes it.
    """
    if any(handoff.ops for handoff in handoffs):
        return None
    fuse_loops(block, reverse=reverse)
    each = {*stacked, *(handoff.input for handoff in handoffs)}
    scan = _Scan.of_stage(block, each, reverse=reverse)
    if scan is None or not scan.read(handoffs) or scan.inputs.keys() != set(stacked):
        return None
    arguments = list(block.arguments)
    types = [argument.type for argument in arguments]
    for number, dim in scan.inputs.items():
        shape = shape_of(arguments[number])
        shape[dim] = 1
        element = element_of(arguments[number])
        types[number] = ir.RankedTensorType.get(shape, element, loc=scan.loop.location)
    function = scratch.function(types, scan.write)
    return LayerBlock(Function(function).body, scan.trips, scan.inputs, scan.outputs)


class _Scan(RowLoop):
    """A stage that is one loop over its layers.

    `inputs` and `outputs` are those that are stacked, with the dimension of the layers. `slices`
    are the ops that take a layer's part of an input, by the number of that.
    """

    def __init__(self, loop: ir.Operation, trips: int, counter: int) -> None:
        super().__init__(loop, trips, counter)
        self._stage: ir.Block = loop.block
        self._returned = list(terminator(self._stage).operands)
        self._numbers: dict[ir.Value, int] = {a: i for i, a in enumerate(self._stage.arguments)}
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.slices: dict[ir.Value, int] = {}
        self.updates: dict[int, ir.Operation] = {}

    @staticmethod
    def of_stage(block: ir.Block, each: Collection[int], *, reverse: bool) -> _Scan | None:
        """The only loop of a block, where nothing else takes its inputs `each`, which differ for
        layers: what does not, is computed for each layer."""
        ops = [view.operation for view in block.operations][:-1]
        loops = [op for op in ops if op.name == WHILE]
        if len(loops) != 1:
            return None
        own = {argument for number, argument in enumerate(block.arguments) if number in each}
        if any(op != loops[0] and not own.isdisjoint(values_used(op)) for op in ops):
            return None
        return _Scan.of(loops[0], reverse=reverse)

    def read(self, handoffs: Sequence[Handoff]) -> bool:
        """Notes what each carry is; whether all are states, stacks, or the same for all layers."""
        handed = {handoff.input: handoff.output for handoff in handoffs}
        states: set[int] = set()
        for position, operand in enumerate(self.loop.operands):
            number, result = self._numbers.get(operand), self.loop.results[position]
            if position == self.counter:
                continue
            if number in handed:
                if self._returned[handed[number]] != result:
                    return False
                states.add(number)
            elif position in self.invariant:
                if not self._read_input(self.arguments[position], number):
                    return False
            else:  # every layer writes its part
                update = self.update_of(position)
                if update is None:
                    return False
                self.updates[position] = update
        for value, number in self._numbers.items():  # also where the body takes it as it is
            if number in handed and any(op.block != self._stage for op in self.users(value)):
                return False
            if not self._read_input(value, number):
                return False
        return states == set(handed) and self._read_outputs(set(handed.values()))

    def _read_input(self, value: ir.Value, number: int | None) -> bool:
        """Notes the slices of what is the same for all layers; whether nothing else takes it then,
        and it is an input."""
        users = [op for op in self.users(value) if op.name not in ("stablehlo.return", WHILE)]
        slicing = [op for op in users if any(row in self.rows for row in list(op.operands)[1:])]
        if not slicing:
            return True
        dims = {self.layer_dim(op) for op in users if op.name == DYNAMIC_SLICE}
        if number is None or len(slicing) != len(users) or len(dims) != 1:
            return False
        dim = dims.pop()
        if dim is None or self.inputs.setdefault(number, dim) != dim:
            return False
        if any(op.operands[0] != value for op in users):
            return False
        self.slices.update((op.results[0], number) for op in users)
        return True

    def _read_outputs(self, handed: set[int]) -> bool:
        """Notes the outputs that are stacks; whether all others are handed on."""
        places: dict[ir.Value, int] = {r: i for i, r in enumerate(self.loop.results)}
        for output, value in enumerate(self._returned):
            position = places.get(value)
            if position is not None and position in self.updates:
                dim = self.layer_dim(self.updates[position])
                assert dim is not None
                self.outputs[output] = dim
            elif output not in handed:
                return False
        return True

    def write(self, block: ir.Block, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Copies what the loop does for one layer into an empty block."""
        point = ir.InsertionPoint(block)
        values: dict[ir.Value, ir.Value] = dict(zip(self._stage.arguments, arguments, strict=True))
        for view in self._stage.operations:
            op = view.operation
            if op == self.loop:
                break
            copy = copy_with(op, values, point)
            values.update(zip(op.results, copy.results, strict=True))
        for argument, operand in zip(self.arguments, self.loop.operands, strict=True):
            values[argument] = values[operand]
        skipped = {op.results[0] for op in self.updates.values()}
        for view in list(self.block.operations)[:-1]:
            op = view.operation
            if len(op.results) and op.results[0] in self.slices:
                values[op.results[0]] = arguments[self.slices[op.results[0]]]
            elif not len(op.results) or op.results[0] not in skipped:
                copy = copy_with(op, values, point)
                values.update(zip(op.results, copy.results, strict=True))
        places: dict[ir.Value, int] = {r: i for i, r in enumerate(self.loop.results)}
        return [
            values[self.updates[p].operands[1] if p in self.updates else self.ends[p]]
            for p in map(places.__getitem__, self._returned)
        ]

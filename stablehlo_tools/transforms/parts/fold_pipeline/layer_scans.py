"""The body of the scan in a stage, for stages that stack something for each of their layers.

A stage of a differentiated pipeline stacks the residuals of its layers. The backward's stage runs
through them in reverse, and stacks their gradients. The loop over the stages and the loop in each
of them are then one loop over all layers:

    while stages { while layers of a stage { layer } }  ==>  while all layers { layer }

First, a loop whose rows are read by only one other loop is fused into that one:

    %kept = while layers { %kept[%layer] = recomputed(%given[%layer]) }
    %sum = while layers, in reverse { ... %kept[%layer] ... }
  ==>
    %sum = while layers, in reverse { ... recomputed(%given[%layer]) ... }

jax writes a backward with recomputation so: it first recomputes the residuals of all layers. Fused,
the backward recomputes those of one layer at a time, and keeps none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from stablehlo_tools.analysis.loops import constant_integer, count_trips, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE, SUBTRACT, WHILE
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import drop_unused_carries
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.values import has_uses, producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import terminator, values_used
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import Handoff


class RowLoop(WhileLoop):
    """A loop whose counter, from 0 in steps of 1, only selects the rows that the loop reads and
    writes. `rows` are the values that are the number of the row. In reverse, that is the trips
    minus the counter minus 1."""

    def __init__(self, loop: ir.Operation, trips: int, counter: int) -> None:
        super().__init__(loop)
        self.trips = trips
        self.counter = counter
        self.rows: list[ir.Value] = []

    @classmethod
    def from_loop(cls, loop: ir.Operation, *, reverse: bool) -> Self | None:
        """Returns the loop; None if it is of another form."""
        count = count_trips(loop, known_integer)
        if isinstance(count, str) or count.starts != (0,) or count.counter.step != 1:
            return None
        known = cls(loop, count.trips[0], count.counter.position)
        return known if known._read_rows(reverse=reverse) else None

    def _read_rows(self, *, reverse: bool) -> bool:
        """Notes the values that are the number of the row. Returns True if the counter has no other
        use. In reverse, the number is the trips minus the counter minus 1."""
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
        """Returns the row number that a subtraction of the counter leads to; None for any other
        subtraction."""
        if constant_integer(op.operands[0]) == self.trips - 1:
            return op.results[0]
        users = self.users(op.results[0])
        if constant_integer(op.operands[0]) != self.trips or len(users) != 1:
            return None
        (user,) = users
        is_row = user.name == SUBTRACT and constant_integer(user.operands[1]) == 1
        return user.results[0] if is_row else None

    def users(self, value: ir.Value) -> list[ir.Operation]:
        """Returns the ops that use a value."""
        return [use.owner.operation for use in value.uses]

    def layer_dim(self, op: ir.Operation) -> int | None:
        """Returns the dimension along which an op reads or writes one element, at the number of the
        row. Returns None unless the op covers all other dimensions."""
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
        """Returns the update by which every iteration writes its row of a carry; None for other
        carries."""
        argument, update = self.arguments[position], producer(self.ends[position])
        if update is None or update.name != DYNAMIC_UPDATE_SLICE:
            return None
        if update.operands[0] != argument or len(self.users(argument)) != 1:
            return None
        if len(self.users(update.results[0])) != 1 or self.layer_dim(update) is None:
            return None
        return update


def fuse_loops(block: ir.Block, *, reverse: bool) -> None:
    """Fuses each loop of a block that only computes rows into the one later loop that reads them.
    With `reverse`, that loop runs through the rows in reverse.

    Do not use handles of loops in the block afterwards.
    """
    while any(_fuse(loop, reverse=reverse) for loop in _loops(block)):
        drop_unused_carries(block)
        for loop in _loops(block):
            if not any(map(has_uses, loop.results)):
                loop.erase()


def _loops(block: ir.Block) -> list[ir.Operation]:
    return [view.operation for view in block.operations if view.operation.name == WHILE]


def _fuse(loop: ir.Operation, *, reverse: bool) -> bool:
    """Fuses a loop into the loop that reads its rows. Returns True if there is one."""
    made = RowLoop.from_loop(loop, reverse=False)
    if made is None:
        return False
    for position in made.invariant:
        # An invariant carry returns its operand, so such a result is not a row.
        loop.results[position].replace_all_uses_with(loop.operands[position])
    updates = {p: op for p in range(len(made.ends)) if (op := made.update_of(p)) is not None}
    users = {use.owner.operation for result in loop.results for use in result.uses}
    taken = {p for p, result in enumerate(loop.results) if has_uses(result)}
    if len(users) != 1 or not taken or not taken <= updates.keys():
        return False
    user = users.pop()
    if user.name != WHILE or user.block != loop.block:
        return False
    taking = RowLoop.from_loop(user, reverse=reverse)
    if taking is None or taking.trips != made.trips:
        return False
    slices = _slices(made, taking, updates)
    if slices is None:
        return False
    values = _copy_iteration(made, taking, updates.values(), reverse=reverse)
    for taken_row, row in slices.items():
        taken_row.replace_all_uses_with(values.get(row, row))
    return True


def _slices(
    made: RowLoop, taking: RowLoop, updates: Mapping[int, ir.Operation]
) -> dict[ir.Value, ir.Value] | None:
    """Returns the slices of rows that a loop reads, each with the value written to that row.
    Returns None if it uses the other loop's results in any other way."""
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


def _copy_iteration(
    made: RowLoop, taking: RowLoop, updates: Collection[ir.Operation], *, reverse: bool
) -> dict[ir.Value, ir.Value]:
    """Copies the ops of a loop to the start of another one's iteration, for its row. Returns the
    copies."""
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
    """A block that computes one layer of a stage with `each` layers.

    `inputs[i]` is the dimension of input i of the stage along which its layers' inputs are stacked;
    `outputs` likewise. The block's arguments and results have that dimension with size 1.
    """

    block: ir.Block
    each: int = 1
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    outputs: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def returned(self) -> list[ir.Value]:
        """The values that the block returns."""
        return list(terminator(self.block).operands)


def layer_of(
    block: ir.Block,
    handoffs: Sequence[Handoff],
    stacked: Collection[int],
    scratch: Scratch,
    *,
    reverse: bool,
) -> LayerBlock | None:
    """Returns the block of one layer of a stage that is one scan over its layers. With `reverse`,
    the scan runs in reverse. Just the inputs `stacked` must be sliced by layer. Returns None for
    any other stage.

    Loops of the stage that compute a row for each layer are first fused into the loop that reads
    them.
    """
    if any(handoff.ops for handoff in handoffs):
        return None
    fuse_loops(block, reverse=reverse)
    each = {*stacked, *(handoff.input for handoff in handoffs)}
    scan = _StageScan.of_stage(block, each, reverse=reverse)
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


class _StageScan(RowLoop):
    """A stage that is one loop over its layers.

    `inputs` and `outputs` map the number of each stacked input or output to the dimension of its
    layers. `slices` maps the slice of a layer to the number of the input.
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
    def of_stage(block: ir.Block, each: Collection[int], *, reverse: bool) -> _StageScan | None:
        """Returns the only loop of a block as a scan; None if other ops use the inputs `each`,
        which differ between layers. The other ops are copied into each layer."""
        ops = [view.operation for view in block.operations][:-1]
        loops = [op for op in ops if op.name == WHILE]
        if len(loops) != 1:
            return None
        own = {argument for number, argument in enumerate(block.arguments) if number in each}
        if any(op != loops[0] and not own.isdisjoint(values_used(op)) for op in ops):
            return None
        return _StageScan.from_loop(loops[0], reverse=reverse)

    def read(self, handoffs: Sequence[Handoff]) -> bool:
        """Notes the role of each carry. Returns True if each is a state, a stack, or the same for
        all layers."""
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
        for value, number in self._numbers.items():  # a body may also capture them
            if number in handed and any(op.block != self._stage for op in self.users(value)):
                return False
            if not self._read_input(value, number):
                return False
        return states == set(handed) and self._read_outputs(set(handed.values()))

    def _read_input(self, value: ir.Value, number: int | None) -> bool:
        """Notes the slices of a value that is the same for all layers. Returns True if it is not
        sliced, or if it is an input that has no other use."""
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
        """Notes the outputs that are stacks. Returns True if all others are passed on."""
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
        """Copies the ops of one layer into an empty block; returns its outputs."""
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

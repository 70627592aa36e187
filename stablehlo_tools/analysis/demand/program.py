"""A program as the demand analysis reads it: calls written out, every value with a number;
and which devices share a value.

A function that is called twice is read twice, so that each call has its own values. Arguments of
callees are the operands themselves. Regions of control flow are kept as nested code.

Where some axes of the mesh are left to the partitioner, it moves data along them as it likes: what
one device needs, all that differ from it along free axes only must have. Outside of every manual
computation that holds for all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.replica_groups import AxisRef, mesh_axes_groups
from stablehlo_tools.analysis.shardings import manual_axes, sharding_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, COMPUTATIONS
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.symbols import callee_name, functions_by_name

ENTER = "enter"  # a manual computation: global values become shards
LEAVE = "leave"
_DEEPEST = 60  # calls and regions in each other


@dataclass(eq=False, slots=True)
class OpInstance:
    """One op as one call of its function runs it, or an edge of a manual computation, with the
    numbers of its values.

    `computation` is the manual computation that it belongs to, `above` for an edge the one around
    that. `captured` are the values that its regions
    read from outside, where it is taken as a whole.
    """

    number: int
    op: ir.Operation
    name: str
    operands: list[int]
    results: list[int]
    computation: ir.Operation | None
    regions: list[Code] = field(default_factory=list["Code"])
    captured: list[int] = field(default_factory=list[int])
    above: ir.Operation | None = None


@dataclass(eq=False, slots=True)
class Code:
    """A block: its arguments, its steps in order, and what it ends with."""

    arguments: list[int]
    steps: list[OpInstance] = field(default_factory=list[OpInstance])
    ends: list[int] = field(default_factory=list[int])

    def reads(self) -> set[int]:
        """The values from outside that the block needs."""
        inside: set[int] = set(self.arguments)
        read: set[int] = set(self.ends)
        for step in self.steps:
            read.update(step.operands, step.captured)
            for region in step.regions:
                read |= region.reads()
            inside.update(step.results)
        return read - inside


@dataclass(eq=False, slots=True)
class Program:
    """The code of an entry function; `types[n]` and `values[n]` are those of value n.

    `types` are a shard's for values that leave the outermost manual computation.
    """

    main: Code
    types: list[ir.Type]
    values: list[ir.Value]
    steps: list[OpInstance]

    @property
    def is_global(self) -> bool:
        """Whether what stands outside of manual computations is about all devices at once."""
        return any(step.name == ENTER for step in self.steps)


def read_program(module: ir.Module, entry: ir.Operation) -> Program:
    """Reads an entry function and all it calls.

    A call that cannot be followed (recursive, declared only) stays a step of its own.
    """
    reader = _Reader(module)
    block = entry.regions[0].blocks[0]
    main = reader.block(block, _Around({}, None, 0))
    return Program(main, reader.types, reader.values, reader.steps)


@dataclass(frozen=True, slots=True)
class _Around:
    """Where an op stands: the numbers of the values in sight, the manual computation, how deep."""

    scope: dict[ir.Value, int]
    computation: ir.Operation | None
    depth: int

    def deeper(self) -> _Around:
        """One level further in, with the same values in sight."""
        return replace(self, depth=self.depth + 1)


class _Reader:
    def __init__(self, module: ir.Module) -> None:
        self.functions = functions_by_name(module)
        self.types: list[ir.Type] = []
        self.values: list[ir.Value] = []
        self.steps: list[OpInstance] = []

    def block(self, block: ir.Block, around: _Around) -> Code:
        """Reads a block; the scope around it gets its values, too."""
        code = Code([self._new(argument, around.scope) for argument in block.arguments])
        self._fill(code, block, around)
        return code

    def _fill(self, code: Code, block: ir.Block, around: _Around) -> None:
        end = terminator(block)
        for view in block.operations:
            op = view.operation
            if op != end:
                self._op(code, op, around)
        code.ends = [around.scope[value] for value in end.operands]

    def _op(self, code: Code, op: ir.Operation, around: _Around) -> None:
        name, scope = op.name, around.scope
        if name in CALLS and self._followed(code, op, around):
            return
        if name in COMPUTATIONS:
            self._computation(code, op, around)
            return
        step = self._step(op, name, [scope[v] for v in op.operands], around.computation)
        if name in BRANCHES or name == WHILE:
            step.regions = [self.block(region.blocks[0], around.deeper()) for region in op.regions]
        elif len(op.regions):
            step.captured = _captured(op, scope)
        step.results = [self._new(result, scope) for result in op.results]
        code.steps.append(step)

    def _followed(self, code: Code, call: ir.Operation, around: _Around) -> bool:
        """Writes a call out; whether that is possible."""
        callee = self.functions.get(callee_name(call))
        if callee is None or len(callee.regions[0].blocks) != 1 or around.depth >= _DEEPEST:
            return False
        body, scope = callee.regions[0].blocks[0], around.scope
        inner = dict(zip(body.arguments, (scope[value] for value in call.operands), strict=True))
        self._fill(code, body, replace(around.deeper(), scope=inner))
        ends, code.ends = code.ends, []
        scope.update(zip(call.results, ends, strict=True))
        return True

    def _computation(self, code: Code, op: ir.Operation, around: _Around) -> None:
        """Writes a manual or named computation out, with steps at the edges of a manual one."""
        body, scope = op.regions[0].blocks[0], around.scope
        if op.name != MANUAL_COMPUTATION:
            scope.update(zip(body.arguments, (scope[v] for v in op.operands), strict=True))
            self._fill(code, body, around.deeper())
            scope.update(zip(op.results, code.ends, strict=True))
            return
        enter = self._step(op, ENTER, [scope[value] for value in op.operands], op)
        enter.results = [self._new(argument, scope) for argument in body.arguments]
        enter.above = around.computation
        code.steps.append(enter)
        self._fill(code, body, replace(around.deeper(), computation=op))
        leave = self._step(op, LEAVE, code.ends, op)
        leave.results = [self._new(result, scope) for result in op.results]
        if around.computation is None:
            for number, end in zip(leave.results, leave.operands, strict=True):
                self.types[number] = self.types[end]
        leave.above = around.computation
        code.steps.append(leave)

    def _step(
        self, op: ir.Operation, name: str, operands: list[int], around: ir.Operation | None
    ) -> OpInstance:
        step = OpInstance(len(self.steps), op, name, operands, [], around)
        self.steps.append(step)
        return step

    def _new(self, value: ir.Value, scope: dict[ir.Value, int]) -> int:
        scope[value] = len(self.types)
        self.types.append(value.type)
        self.values.append(value)
        return scope[value]


def _captured(op: ir.Operation, scope: dict[ir.Value, int]) -> list[int]:
    """What the regions of a reduction or a sort read from around it."""
    captured: dict[int, None] = {}
    blocks: list[ir.Block] = [block for region in op.regions for block in region.blocks]
    while blocks:
        for view in blocks.pop().operations:
            inner = view.operation
            captured.update((scope[v], None) for v in inner.operands if v in scope)
            blocks += [block for region in inner.regions for block in region.blocks]
    return list(captured)


def walked_loops(
    code: Code, communicates: Callable[[OpInstance], bool], inside: bool = False
) -> set[int]:
    """The numbers of the loops that are worth following iteration by iteration: the outermost, and
    those in them that communicate.
    """
    numbers: set[int] = set()
    for step in code.steps:
        is_loop = step.name == WHILE
        if is_loop and (not inside or any(map(communicates, nested(step.regions[1])))):
            numbers.add(step.number)
        for region in step.regions:
            numbers |= walked_loops(region, communicates, inside or is_loop)
    return numbers


def nested(code: Code) -> Sequence[OpInstance]:
    """Every step of a code and of its regions, in order."""
    steps: list[OpInstance] = []
    for step in code.steps:
        steps.append(step)
        for region in step.regions:
            steps += nested(region)
    return steps


Groups = NDArray[Any]
Need = NDArray[np.bool_]  # by device and place; one column where places are not told apart


class Levels:
    """The groups of devices that share values, for each manual computation and outside of all."""

    def __init__(self, program: Program, facts: ModuleFacts) -> None:
        self._facts = facts
        self._everyone: Groups = np.arange(facts.grid.size).reshape(1, -1)
        self._outside = self._everyone if program.is_global else None
        self._known: dict[ir.Operation, Groups | None] = {}

    def groups(self, computation: ir.Operation | None) -> Groups | None:
        """Rows of devices that share what one of them needs; None where each is on its own."""
        if computation is None:
            return self._outside
        if computation not in self._known:
            self._known[computation] = self._groups(computation)
        return self._known[computation]

    def _groups(self, computation: ir.Operation) -> Groups | None:
        names = {*_meshes(computation, "in_shardings"), *_meshes(computation, "out_shardings")}
        mesh = self._facts.meshes.get(next(iter(names))) if len(names) == 1 else None
        manual: set[str] = set()
        around: ir.Operation | None = computation
        while around is not None:
            if around.name == MANUAL_COMPUTATION:
                manual |= manual_axes(around)
            around = around.parent
        if mesh is None or mesh.size != self._facts.grid.size:
            return self._everyone
        free = [AxisRef(name) for name, size in mesh.axes if name not in manual and size > 1]
        return np.array(mesh_axes_groups(mesh, free)) if free else None


def shared(need: Need, groups: Groups | None) -> Need:
    """What each device needs, once all of a group need what one of it does."""
    if groups is None:
        return need
    spread = need.copy()
    spread[groups] = need[groups].any(axis=1, keepdims=True)
    return spread


def crossing_values(program: Program, facts: ModuleFacts) -> dict[int, int]:
    """The shards that one manual computation takes as another left them: inside to outside.

    A training step has one computation for each direction, and what the first saves for the second
    goes through global values that nothing else is done with.
    """
    made: dict[int, tuple[OpInstance, int]] = {}
    same: dict[int, int] = {}
    for step in program.steps:
        if step.above is not None or step.name not in (ENTER, LEAVE):
            continue
        if step.name == LEAVE:
            made.update((number, (step, i)) for i, number in enumerate(step.results))
            continue
        for position, (outside, inside) in enumerate(zip(step.operands, step.results, strict=True)):
            if outside not in made:
                continue
            left, index = made[outside]
            if _form(left, "out_shardings", index, facts) == _form(
                step, "in_shardings", position, facts
            ) and (program.types[outside] == program.types[inside]):
                same[inside] = outside
    return same


def _form(step: OpInstance, name: str, position: int, facts: ModuleFacts) -> tuple[object, ...]:
    """How a value is divided among the devices."""
    sharding = sharding_per_value(step.op.attributes[name])[position]
    mesh = sharding_axes(sharding)[0]
    dimensions = tuple(str(d) for d in bindings.TensorShardingAttr(sharding).dimension_shardings)
    return facts.meshes.get(mesh, mesh), dimensions, manual_axes(step.op)


def _meshes(computation: ir.Operation, name: str) -> list[str]:
    return [sharding_axes(s)[0] for s in sharding_per_value(computation.attributes[name])]

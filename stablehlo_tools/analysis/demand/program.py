"""A program as the demand analysis reads it: calls written out, every value with a number.

A function that is called twice is read twice, so that each call has its own values. Arguments of
callees are the operands themselves. Regions of control flow are kept as nested code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION, WHILE
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, COMPUTATIONS
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.symbols import callee_name, functions_by_name

ENTER = "enter"  # a manual computation: global values become shards
LEAVE = "leave"
_DEEPEST = 60  # calls and regions in each other


@dataclass(eq=False, slots=True)
class Step:
    """One op, or an edge of a manual computation, with the numbers of its values.

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
    steps: list[Step] = field(default_factory=list[Step])
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
    steps: list[Step]

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
        self.steps: list[Step] = []

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
    ) -> Step:
        step = Step(len(self.steps), op, name, operands, [], around)
        self.steps.append(step)
        return step

    def _new(self, value: ir.Value, scope: dict[ir.Value, int]) -> int:
        scope[value] = len(self.types)
        self.types.append(value.type)
        self.values.append(value)
        return scope[value]


def _captured(op: ir.Operation, scope: dict[ir.Value, int]) -> list[int]:
    """What the regions of a reduction or a sort read from around it."""
    found: dict[int, None] = {}
    blocks: list[ir.Block] = [block for region in op.regions for block in region.blocks]
    while blocks:
        for view in blocks.pop().operations:
            inner = view.operation
            found.update((scope[v], None) for v in inner.operands if v in scope)
            blocks += [block for region in inner.regions for block in region.blocks]
    return list(found)


def walked_loops(
    code: Code, communicates: Callable[[Step], bool], inside: bool = False
) -> set[int]:
    """The numbers of the loops that are worth following iteration by iteration: the outermost, and
    those in them that communicate.
    """
    found: set[int] = set()
    for step in code.steps:
        is_loop = step.name == WHILE
        if is_loop and (not inside or any(map(communicates, nested(step.regions[1])))):
            found.add(step.number)
        for region in step.regions:
            found |= walked_loops(region, communicates, inside or is_loop)
    return found


def nested(code: Code) -> Sequence[Step]:
    """Every step of a code and of its regions, in order."""
    found: list[Step] = []
    for step in code.steps:
        found.append(step)
        for region in step.regions:
            found += nested(region)
    return found

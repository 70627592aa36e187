"""Reads the program of one device as nodes: calls and manual computations inlined, loops kept.

A program for all devices must be partitioned first. Of a `case` or an `if`, the branch with the
most work is kept. A loop with an unknown trip count is kept without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.analysis.dataflow import captured_values
from stablehlo_tools.analysis.entry import attributes_of_arguments, is_donated
from stablehlo_tools.analysis.loops import known_integer, trip_count
from stablehlo_tools.analysis.tasks.memory_layouts import Layouts
from stablehlo_tools.analysis.tasks.nodes import KernelRole, NodeBody, Ref, TaskNode
from stablehlo_tools.analysis.tasks.op_work import (
    TINY,
    OpWork,
    bytes_of,
    is_one_hot,
    is_own_kernel,
    op_work,
    selection,
    short_name,
    written_over,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.kernels import TILED_REDUCTION, WorkKind
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.dialect.custom_calls import is_async_done
from stablehlo_tools.dialect.device_placement import lies_in_host, placement, puts_in_host
from stablehlo_tools.dialect.frontend_attributes import mean_runs
from stablehlo_tools.dialect.names import (
    BARRIER,
    BROADCAST,
    CALL,
    COMPOSITE,
    CONVERT,
    DYNAMIC_UPDATE_SLICE,
    MANUAL_COMPUTATION,
    NAMED_COMPUTATION,
    RESHAPE,
    WHILE,
)
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.inline import check_unfolding
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function, WithBody
from stablehlo_tools.ir.walk import callee_name, entry_function, functions_by_name
from stablehlo_tools.ir.while_loop import is_invariant
from stablehlo_tools.overlap.task_graph import COLLECTIVES

_DELETABLE = COLLECTIVES - {"send", "recv"}  # if their results are unused


def live_nodes(nodes: Sequence[TaskNode]) -> set[int]:
    """Returns the nodes that inputs, outputs and ops with an effect depend on, and these nodes."""
    return _behind(nodes, (node.index for node in nodes if has_effect(node)))


def has_effect(node: TaskNode) -> bool:
    """Returns True if a node stays even if its results are unused."""
    if node.body is not None:
        return any(map(has_effect, _inner(node.body)))
    sends = node.role is KernelRole.COLLECTIVE and node.name not in _DELETABLE
    return sends or node.role in (KernelRole.INPUT, KernelRole.OUTPUT, KernelRole.DECISION)


def drop_dead_carries(body: NodeBody, wanted: Set[int]) -> None:
    """Makes the carries of a loop invariant that only they themselves depend on.

    `wanted` are the results that are read after the loop.
    """
    kept = [node.index for node in _inner(body) if has_effect(node)]
    needed: set[int] = set()
    reached = set(wanted)
    while reached != needed:
        needed = reached
        ends = [body.carries[i][1][0] for i in needed]
        live = _behind(body.nodes[:-1], [*kept, *ends])
        reached = needed | {i for i, (argument, _) in enumerate(body.carries) if argument in live}
    # A carry that yields its own argument is invariant.
    body.carries = [
        carry if i in needed else (carry[0], (carry[0], 0)) for i, carry in enumerate(body.carries)
    ]
    body.nodes[-1].sources = tuple(result for _, result in body.carries)


def _inner(body: NodeBody) -> Iterable[TaskNode]:
    """Yields the nodes of a loop's body except its inputs and outputs."""
    return (n for n in body.nodes if n.role not in (KernelRole.INPUT, KernelRole.OUTPUT))


def _behind(nodes: Sequence[TaskNode], kept: Iterable[int]) -> set[int]:
    live = set(kept)
    for node in reversed(nodes):
        if node.index in live:
            live.update(index for index, _ in node.sources)
    return live


_WEIGHTLESS = frozenset(
    {
        KernelRole.INPUT,
        KernelRole.OUTPUT,
        KernelRole.NOTHING,
        KernelRole.CHEAP,
        KernelRole.VIEW,
        KernelRole.RESHAPE,
        KernelRole.DONE,
    }
)
_FOLLOWED = frozenset(
    {
        KernelRole.FUSIBLE,
        KernelRole.RESHAPE,
        KernelRole.REDUCTION,
        KernelRole.UPDATE,
        KernelRole.CHEAP,
    }
)
_OF_CONSTANTS = frozenset({BROADCAST, CONVERT, RESHAPE})
_NETWORK = 30.0  # cost of a byte, in bytes of memory
_FLOPS_A_BYTE = 100.0
_MADE_ANEW = frozenset({KernelRole.FUSIBLE, KernelRole.RESHAPE})
_MADE_OF_FEW = 16  # values

type _Values = dict[ir.Value, Ref]


def read_program(module: ir.Module, input_name: str, *, tiled: bool = False) -> NodeBody:
    """Returns the nodes of a module's entry function, as one device runs it.

    If `tiled`, arrays are in tiles, as in XLA:TPU. Otherwise copies are added where XLA:GPU makes
    them, because it keeps the dimensions of values in different orders. Raises a located ToolError
    for a call without a body, for calls that multiply the text, and for communication that is not
    understood.
    """
    function = entry_function(module)
    if not len(function.regions[0].blocks):
        raise ToolError("the entry function has no body to time", function.location)
    check_unfolding(module)
    block = Function(function).body
    reader = _TaskReader(module, input_name, tiled=tiled)
    values: _Values = {}
    listed = attributes_of_arguments(function)
    for number, argument in enumerate(block.arguments):
        donated = is_donated(listed, number)
        values[argument] = reader.add_input(argument, number, persistent=not donated)
        if lies_in_host(function, "arg_attrs", number):
            reader.put_in_host(values[argument])
    returned = reader.read_block(block, values)
    reader.add(KernelRole.OUTPUT, "return", returned)
    return reader.body


class _TaskReader:
    """Appends the nodes of one straight run of ops."""

    def __init__(
        self, module: ir.Module, name: str, outer: _TaskReader | None = None, *, tiled: bool
    ) -> None:
        self._module = module
        self._name = name
        self._outer = outer
        self._tiled = tiled
        self.body = NodeBody()
        self.layouts: Layouts | None = None if tiled else Layouts()
        self._in_host: set[Ref] = set()
        self._functions: dict[str, ir.Operation] = (
            outer._functions if outer else functions_by_name(module)
        )
        self._classify: Callable[[ir.Operation], Collective | None] = (
            outer._classify if outer else classify_communication(module.context)
        )
        self._notes: list[str] = outer._notes if outer else self.body.notes
        self._entered: set[str] = outer._entered if outer else set()
        self._numbers: dict[ir.Value, ir.Value] = outer._numbers if outer else {}

    def add(
        self, role: KernelRole, name: str, sources: Sequence[Ref], op: ir.Operation | None = None
    ) -> TaskNode:
        """Appends a node."""
        nodes = self.body.nodes
        node = TaskNode(len(nodes), role, name, tuple(sources))
        if op is not None:
            node.result_bytes = tuple(bytes_of(value) for value in op.results)
            node.location = op.location
            node.op = op
        nodes.append(node)
        return node

    def add_input(self, value: ir.Value, number: int, *, persistent: bool = False) -> Ref:
        """Adds a value that comes from outside."""
        node = self.add(KernelRole.INPUT, f"argument {number}", ())
        node.result_bytes = (bytes_of(value),)
        node.persistent = persistent
        node.location = value.location
        if self.layouts is not None:
            self.layouts.begin((node.index, 0), value.type, fixed=self._outer is None)
        return node.index, 0

    def put_in_host(self, ref: Ref) -> None:
        """Moves a value to the host's memory, so that it has no bytes on the device."""
        self._in_host.add(ref)
        sizes = list(self.body.nodes[ref[0]].result_bytes)
        sizes[ref[1]] = 0.0
        self.body.nodes[ref[0]].result_bytes = tuple(sizes)

    def _copy(self, ref: Ref, in_place: bool) -> Ref:
        """Returns a value in another order of its dimensions, by a copy or by its own node."""
        made = self.body.nodes[ref[0]]
        if not in_place:
            kind, dtype, place = WorkKind.COPY, made.dtype, made.location
            size = made.result_bytes[ref[1]]
            made = self.add(KernelRole.FUSIBLE, "copy", [ref])
            made.kind, made.dtype, made.location = kind, dtype, place
            made.result_bytes = (size,)
        made.reordered = True
        return made.index, 0

    def read_block(self, block: ir.Block, values: _Values) -> list[Ref]:
        """Reads the ops of a block, and returns the refs of its terminator's operands."""
        for view in block.operations:
            op = view.operation
            if op.name in ("func.return", "stablehlo.return", "sdy.return"):
                return [values[operand] for operand in op.operands]
            self._read(op, values)
        return []

    def _read(self, op: ir.Operation, values: _Values) -> None:
        name = op.name
        if name == BARRIER:
            self._barrier(op, values)
        elif name == COMPOSITE and is_own_kernel(op):
            self._plain(op, values)
        elif name in (CALL, COMPOSITE):
            self._call(op, values)
        elif name == MANUAL_COMPUTATION:
            self._manual(op, values)
        elif name == NAMED_COMPUTATION:
            self._enter(op, WithBody(op).body, values, values)
        elif name == WHILE:
            self._loop(op, values)
        elif name in BRANCHES:
            self._choice(op, values)
        elif is_async_done(op):
            start = values[op.operands[0]]
            node = self.add(KernelRole.DONE, "async_done", [start], op)
            node.start = start
            node.passes = (start,)
            values.update({result: (node.index, i) for i, result in enumerate(op.results)})
        elif placement(op) is not None:
            self._place(op, values)
        elif self._in_host and any(values.get(o) in self._in_host for o in op.operands):
            # An op on a value in the host's memory: it reads rows, or updates rows that have
            # already been copied there. It costs the device nothing.
            sources = [values[operand] for operand in op.operands]
            if op.name == DYNAMIC_UPDATE_SLICE:
                self.put_in_host(sources[0])
            node = self.add(KernelRole.VIEW, short_name(op), sources, op)
            for number, result in enumerate(op.results):
                values[result] = (node.index, number)
                self.put_in_host(values[result])
        else:
            self._plain(op, values)

    def _place(self, op: ir.Operation, values: _Values) -> None:
        """Reads a copy to or from the host's memory; a value that is already there is a view."""
        source = values[op.operands[0]]
        to_host = puts_in_host(op)
        moves = to_host != (source in self._in_host)
        name = "copy to the host" if to_host else "copy from the host"
        node = self.add(KernelRole.HOST_COPY if moves else KernelRole.VIEW, name, [source], op)
        node.moved = node.result_bytes[0]
        node.passes = () if moves else (source,)
        values[op.results[0]] = (node.index, 0)
        if to_host:
            self.put_in_host((node.index, 0))

    def _plain(self, op: ir.Operation, values: _Values) -> None:
        collective = self._classify(op)
        if collective is not None:
            sources = [values[operand] for operand in op.operands]
            node = self.add(KernelRole.COLLECTIVE, collective.kind, sources, op)
            node.collective = collective
            if self.layouts is not None:
                self.layouts.result(op, collective.kind, sources, (node.index, 0))
            if collective.is_async:
                node.result_bytes = (float(collective.bytes_out or 0),)
        else:
            name, work, sources = self._work_of(op, values)
            followed = self.layouts is not None and (
                work.role in _FOLLOWED or name == "dot_general"
            )
            if self.layouts is not None and followed:
                sources = self.layouts.operands(op, name, sources, self._copy)
            node = self.add(work.role, name, sources, op)
            if self.layouts is not None and followed:
                self.layouts.result(op, name, sources, (node.index, 0))
            node.kind, node.vector_flops = work.kind, work.vector_flops
            if self._tiled and name == "reduce":
                node.vector_flops *= TILED_REDUCTION
            node.matmul, node.dtype, node.reads = work.matmul, work.dtype, work.reads
            node.known = work.known
            node.persistent = work.role is KernelRole.INPUT
            self._settle(node)
            if work.role in (KernelRole.VIEW, KernelRole.RESHAPE):
                node.passes = tuple(sources[:1])
            elif work.role is KernelRole.UPDATE or name == "scatter":
                node.passes = tuple(sources[: len(op.results)])
        for number, result in enumerate(op.results):
            values[result] = (node.index, number)

    def _work_of(self, op: ir.Operation, values: _Values) -> tuple[str, OpWork, list[Ref]]:
        """Returns an op as compilers run it: its name, its work, and the refs that it reads."""
        name, operands, made = short_name(op), list(op.operands), op
        if self._tiled and is_one_hot(op):
            return "select", selection(op), [values[operand] for operand in operands[1:]]
        into = written_over(op)
        if (
            into is not None
            and not (self._tiled and is_one_hot(into[1]))
            and all(operand in values for operand in into[1].operands)
        ):
            made = into[1]
            name, operands = short_name(made), [into[0], *list(made.operands)[1:]]
        return name, op_work(made, name), [values[operand] for operand in operands]

    def _settle(self, node: TaskNode) -> None:
        """Marks a tiny value to be recomputed where it is read, unless it has too many operands."""
        cheap = node.role is KernelRole.CHEAP
        # Recomputing index arithmetic costs no more than reading it.
        read = (self.body.nodes[index].result_bytes[number] for index, number in node.sources)
        if not cheap and (
            node.role not in _MADE_ANEW or any(size > TINY for size in (*node.result_bytes, *read))
        ):
            return
        made_of: dict[Ref, None] = {}
        for source in node.sources:
            inner = self.body.nodes[source[0]]
            if inner.role is KernelRole.CHEAP:
                made_of.update(dict.fromkeys(inner.made_of))
            elif inner.role is not KernelRole.NOTHING:
                made_of[source] = None
        if cheap or len(made_of) <= _MADE_OF_FEW:
            node.role = KernelRole.CHEAP
            node.made_of = tuple(made_of)

    def _barrier(self, op: ir.Operation, values: _Values) -> None:
        sources = [values[operand] for operand in op.operands]
        node = self.add(KernelRole.VIEW, "optimization_barrier", sources, op)
        node.passes = tuple(sources)
        for number, source in enumerate(sources):
            values[op.results[number]] = (node.index, number)
            if source in self._in_host:
                self.put_in_host((node.index, number))
            if self.layouts is not None:
                self.layouts.follow_barrier(source, (node.index, number))

    def _call(self, op: ir.Operation, values: _Values) -> None:
        function = self._functions.get(callee_name(op))
        if function is None or not len(function.regions[0].blocks):
            raise ToolError(
                f"{op.name} @{callee_name(op)}: its body is missing, so it cannot be timed",
                op.location,
            )
        if callee_name(op) in self._entered:
            raise ToolError(f"@{callee_name(op)} calls itself: it cannot be timed", op.location)
        self._entered.add(callee_name(op))
        self._enter(op, Function(function).body, values, {})
        self._entered.remove(callee_name(op))

    def _manual(self, op: ir.Operation, values: _Values) -> None:
        block = WithBody(op).body
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            index, number = values[operand]
            node = self.body.nodes[index]
            if node.role is KernelRole.INPUT and values[operand] not in self._in_host:
                # The share that one device holds.
                sizes = list(node.result_bytes)
                sizes[number] = bytes_of(argument)
                node.result_bytes = tuple(sizes)
        self._enter(op, block, values, values)

    def _enter(self, op: ir.Operation, block: ir.Block, values: _Values, inside: _Values) -> None:
        """Reads a region in place of the op that runs it once."""
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            inside[argument] = values[operand]
            self._numbers[argument] = operand
        returned = self.read_block(block, inside)
        values.update(zip(op.results, returned, strict=True))

    def _choice(self, op: ir.Operation, values: _Values) -> None:
        """Keeps the branch with the most work, by operations and bytes.

        All branches are read at the same place of the node list.
        """
        nodes = self.body.nodes
        begin = len(nodes)
        best: tuple[float, list[TaskNode], list[Ref]] | None = None
        collectives: list[int] = []
        for region in op.regions:
            returned = self.read_block(region.blocks[0], values)
            taken = nodes[begin:]
            del nodes[begin:]
            weight = sum(map(_weight, taken))
            collectives.append(sum(map(_collectives_in, taken)))
            if best is None or weight > best[0]:
                best = weight, taken, returned
        assert best is not None, "a choice has branches"
        nodes += best[1]
        share = mean_runs(op)
        if share is not None:
            for node in best[1]:
                node.share *= share
        left_out = sum(collectives) - sum(map(_collectives_in, best[1]))
        if left_out:
            place = to_place(op.location).render(self._name)
            self._notes.append(
                f"{place}: of {len(op.regions)} branches the one with the most work is timed; the "
                f"others hold {left_out} collectives"
            )
        values.update(zip(op.results, best[2], strict=True))
        self._in_host = {ref for ref in self._in_host if ref[0] < begin}
        if self.layouts is not None:
            self.layouts.forget(begin)

    def _loop(self, op: ir.Operation, values: _Values) -> None:
        sources = [values[operand] for operand in op.operands]
        # Carries that are constants: the body can recompute them where it needs them.
        sunk = [
            is_invariant(op, number) and _is_constant(operand)
            for number, operand in enumerate(op.operands)
        ]
        inner = _LoopReader(self._module, self._name, self, values)
        initial: list[tuple[int, ...] | None] = []
        for operand in op.operands:
            value = operand
            while value in self._numbers:
                value = self._numbers[value]
            initial.append(known_integer(value))
        counts = trip_count(op, initial)
        body = inner.read(op, None if counts is None else counts[0], sunk)
        if self.layouts is not None and inner.layouts is not None:
            given = (*body.captured, *sources)
            laid = [
                self.layouts.into(source, inner.layouts, inside, self._copy)
                for source, inside in zip(given, inner.inputs, strict=True)
            ]
            body.captured, sources = laid[: len(body.captured)], laid[len(body.captured) :]
        hosted = [ref in inner._in_host for ref in inner.inputs[len(body.captured) :]]
        held = list(sources)
        for number, (index, _) in enumerate(sources):
            is_cheap = self.body.nodes[index].role is KernelRole.CHEAP
            if sunk[number] or (hosted[number] and is_cheap):
                held[number] = self.add(KernelRole.NOTHING, "constant", ()).index, 0
        node = self.add(KernelRole.LOOP, "while", [*held, *body.captured], op)
        node.body = body
        node.passes = tuple(held)  # all values of a carry share one buffer
        sizes = zip(node.result_bytes, sunk, strict=True)
        node.result_bytes = tuple(0.0 if is_sunk else size for size, is_sunk in sizes)
        for number, result in enumerate(op.results):
            ref = (node.index, number)
            values[result] = sources[number] if sunk[number] else ref
            if hosted[number]:
                self.put_in_host(ref)
            if self.layouts is not None and inner.layouts is not None:
                argument = (body.carries[number][0], 0)
                self.layouts.follow_loop_result(ref, inner.layouts, argument, sources[number])


class _LoopReader(_TaskReader):
    """Reads the body of a loop; values that it captures become its inputs."""

    def __init__(self, module: ir.Module, name: str, outer: _TaskReader, values: _Values) -> None:
        super().__init__(module, name, outer, tiled=outer._tiled)
        self._around = values
        self._outside_host = outer._in_host
        self.inputs: list[Ref] = []  # first the captured values, then the arguments

    def read(self, op: ir.Operation, trips: int | None, sunk: Sequence[bool]) -> NodeBody:
        """Reads the condition and the body, as one iteration runs them.

        Carries that are `sunk` are recomputed in the body.
        """
        condition, block = (region.blocks[0] for region in op.regions)
        inside: _Values = {}
        self.body.trips = trips
        self.body.mean_runs = mean_runs(op)
        needed: list[ir.Value] = []
        for number, value in enumerate(captured_values(op)):
            if _is_constant(value):
                self._make(value, inside)
                continue
            needed.append(value)
            inside[value] = self.add_input(value, number, persistent=True)
            self.body.captured.append(self._around[value])
        arguments = [self.add_input(argument, i) for i, argument in enumerate(block.arguments)]
        self.inputs = [*(inside[value] for value in needed), *arguments]
        around = [*self.body.captured, *(self._around[operand] for operand in op.operands)]
        for ref, outside in zip(self.inputs, around, strict=True):
            if outside in self._outside_host:
                self.put_in_host(ref)
        inside.update(zip(condition.arguments, arguments, strict=True))
        inside.update(zip(block.arguments, arguments, strict=True))
        for number, argument in enumerate(block.arguments):
            if sunk[number]:
                inside[argument] = self._make(op.operands[number], inside)
        decided = self.read_block(condition, inside)
        if trips is None:  # comparing a counter with a constant takes no time
            self.add(KernelRole.DECISION, "condition", decided).kind = WorkKind.COPY
        returned = self.read_block(block, inside)
        returned = [a if s else r for a, r, s in zip(arguments, returned, sunk, strict=True)]
        if self.layouts is not None:
            returned = [
                self.layouts.into(result, self.layouts, argument, self._copy)
                for argument, result in zip(arguments, returned, strict=True)
            ]
        self.body.carries = [
            (argument[0], result) for argument, result in zip(arguments, returned, strict=True)
        ]
        self.add(KernelRole.OUTPUT, "return", returned)
        return self.body

    def _make(self, value: ir.Value, inside: _Values) -> Ref:
        """Adds a constant to the body, and returns its ref."""
        maker = producer(value)
        if value not in inside and maker is not None:
            for operand in maker.operands:
                self._make(operand, inside)
            self._plain(maker, inside)
        return inside[value]


def _is_constant(value: ir.Value) -> bool:
    """Returns True if XLA sinks a value into a loop that reads it (WhileLoopConstantSinking)."""
    maker = producer(value)
    if maker is not None and maker.name in _OF_CONSTANTS:
        return _is_constant(maker.operands[0])
    return maker is not None and maker.name == "stablehlo.constant"


def _collectives_in(node: TaskNode) -> int:
    if node.body is not None:
        return sum(map(_collectives_in, node.body.nodes))
    return int(node.role is KernelRole.COLLECTIVE)


def _weight(node: TaskNode) -> float:
    """Returns a rough cost to compare branches by, in bytes of memory."""
    if node.body is not None:
        trips = 1.0 if node.body.mean_runs is None else node.body.mean_runs
        trips = trips if node.body.trips is None else node.body.trips
        return trips * sum(map(_weight, node.body.nodes))
    if node.role in _WEIGHTLESS:
        return 0.0
    if node.role is KernelRole.COLLECTIVE:
        return _NETWORK * (1.0 + sum(node.result_bytes))
    flops = node.vector_flops + (node.matmul.flops if node.matmul else 0.0)
    flops += node.known.flops if node.known else 0.0
    return sum(node.result_bytes) + flops / _FLOPS_A_BYTE

"""Which loops over layers are backwards: they read rows that another such loop has written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.reading import LayerLoop, layer_loops
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.analysis.trip_counts import Counted, constant_integer, counted
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.walk import is_inside, walk
from stablehlo_tools.transforms.layer_ranges.division import Backward, Division, has_chain, is_write
from stablehlo_tools.transforms.layer_ranges.marks import range_of

_WHILE = "stablehlo.while"


def layer_chains(block: ir.Block, effects: Effects) -> list[Backward]:
    """The outermost loops over layers of a block and of blocks in it whose iterations need what
    those before have computed, in the order of the text."""
    known = {key_of(loop.op): loop for loop in layer_loops(block, effects)}
    ops = [
        op
        for op in _whiles(block.owner.operation)
        if key_of(op) in known or range_of(op) is not None
    ]
    outer = [op for op in ops if not any(is_inside(op, other) for other in ops)]
    found = [_backward(op, known.get(key_of(op)), effects) for op in outer]
    return [loop for loop in found if loop is not None and has_chain(loop.body)]


def backward_loops(chains: Sequence[Backward], block: ir.Block, effects: Effects) -> list[Backward]:
    """Those that read rows which another loop with a chain has written."""
    inside = [loop.op for loop in chains]
    bodies = {key_of(loop.op): loop.body for loop in chains}
    for op in _whiles(block.owner.operation):
        if key_of(op) not in bodies and not any(is_inside(op, outer) for outer in inside):
            body = LoopBody(op, effects)
            if has_chain(body):
                bodies[key_of(op)] = body
    return [loop for loop in chains if _reads_rows(loop, bodies)]


def awaited_carries(
    loop: Backward, chains: Sequence[Backward], divisions: Sequence[Division]
) -> list[int]:
    """The carries of a loop whose results another one takes in its chain."""
    keys = {key_of(each.op) for each in chains}
    late = {(key_of(each.loop.op), carry) for each in divisions for carry in each.moved}
    found: list[int] = []
    for carry, result in enumerate(loop.op.results):
        taken = [(key_of(op), place) for op, place in _loops_behind(result)]
        if any(each[0] in keys and each not in late for each in taken):
            found.append(carry)
    return found


def _backward(op: ir.Operation, loop: LayerLoop | None, effects: Effects) -> Backward | None:
    count = counted(op, _constant)
    if isinstance(count, str) or len(set(count.trips)) != 1 or not count.trips[0]:
        return None
    assert isinstance(count, Counted)
    return Backward(LoopBody(op, effects), count, loop is not None and loop.reverse)


def _whiles(root: ir.Operation) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == _WHILE:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(root, visit)
    return found


def _reads_rows(loop: Backward, bodies: Mapping[ir.Value | ir.Operation, LoopBody]) -> bool:
    """Whether the loop takes a stack whose rows another loop with a chain has written."""
    operands = [loop.op.operands[carry] for carry in sorted(loop.body.invariant)]
    return any(
        key_of(op) in bodies and is_write(bodies[key_of(op)], carry)
        for op, carry in _loops_ahead(operands)
    )


def _loops_ahead(values: Iterable[ir.Value]) -> Iterator[tuple[ir.Operation, int]]:
    """The results of loops that values are computed from, without a loop in between."""
    pending, seen = list(values), set[ir.Value]()
    while pending:
        value = pending.pop()
        maker = producer(value)
        if maker is None or value in seen:
            continue
        seen.add(value)
        if maker.name == _WHILE:
            yield maker, ir.OpResult(value).result_number
        else:
            pending += maker.operands


def _loops_behind(value: ir.Value) -> Iterator[tuple[ir.Operation, int]]:
    """The operands of loops that are computed from a value, without a loop in between."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        for use in pending.pop().uses:
            op = use.owner.operation
            if op.name == _WHILE:
                yield op, use.operand_number
                continue
            for result in op.results:
                if result not in seen:
                    seen.add(result)
                    pending.append(result)


def _constant(value: ir.Value) -> tuple[int, ...] | None:
    number = constant_integer(value)
    return None if number is None else (number,)

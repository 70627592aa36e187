"""Detects arguments that a program returns updated: weights, optimizer state, a cache.

An update is a result computed from an argument of its type by ops that keep the shape. ZeRO-1
divides updates that are identical on all devices of an axis (Rajbhandari et al., arXiv 1910.02054).
An argument that is not donated needs memory for its old and its new value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from stablehlo_tools.advice.advised_program import AdvisedProgram, CollectiveCost
from stablehlo_tools.advice.compiler_effects import Place
from stablehlo_tools.analysis.entry import (
    aliased_results,
    attributes_of_arguments,
    counted_name,
    is_donated,
    path_of,
)
from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.shardings import sharding_axes, sharding_per_value
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.diagnostics import Place as SourcePlace
from stablehlo_tools.diagnostics import duration, size, to_place
from stablehlo_tools.dialect.names import (
    BARRIER,
    CONVERT,
    DYNAMIC_UPDATE_SLICE,
    MANUAL_COMPUTATION,
    RESHAPE,
    SCATTER,
    SHARDING_CONSTRAINT,
    TRANSPOSE,
    WHILE,
)
from stablehlo_tools.dialect.traits import ELEMENTWISE
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.platform_index import argument_number, own_arguments
from stablehlo_tools.ir.values import key_of, producer
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import FUNCTION, entry_function, ops_named, terminator
from stablehlo_tools.ir.while_loop import is_invariant
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.report.document import Advice

_KEEPING = ELEMENTWISE | {CONVERT, RESHAPE, TRANSPOSE, SHARDING_CONSTRAINT}
_INTO_FIRST = frozenset({DYNAMIC_UPDATE_SLICE, SCATTER})
_BY_NUMBER = frozenset({BARRIER, WHILE})  # result i corresponds to operand i

type _Ops = dict[ir.Value | ir.Operation, ir.Operation]


@dataclass
class Update:
    """A result of `main`, the argument that it updates, and the ops between.

    `made_of` are all arguments that it depends on through such ops, `leaves` the other values.
    """

    result: int
    value: ir.Value
    made_of: dict[int, None] = field(default_factory=dict[int, None])
    ops: _Ops = field(default_factory=dict)
    leaves: list[ir.Value] = field(default_factory=list[ir.Value])
    axes: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    argument: int = -1


def updates_of(program: AdvisedProgram) -> list[Update]:
    """Returns the results that are updates, each of a different argument."""
    main = entry_function(program.explicit.module)
    block = Function(main).body
    found = [
        _trace_update(i, value)
        for i, value in enumerate(terminator(block).operands)
        if isinstance(value.type, ir.RankedTensorType)
    ]
    taken: set[int] = set()
    updates: list[Update] = []
    # A new weight depends on the old one and on the state, new state on the old state only.
    for update in sorted(found, key=lambda each: len(each.made_of)):
        of_type = [
            n
            for n in update.made_of
            if n not in taken and block.arguments[n].type == update.value.type
        ]
        if of_type:
            update.argument = of_type[0]
            taken.add(update.argument)
            updates.append(update)
    return sorted(updates, key=lambda each: each.argument)


def _trace_update(result: int, value: ir.Value) -> Update:
    """Returns a result with the arguments, ops and leaves that it is computed from."""
    update = Update(result, value)
    pending, seen = [(value, False)], set[ir.Value]()
    while pending:
        at, changed = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        op = producer(at)
        if op is None:
            argument = ir.BlockArgument(at)
            owner, number = argument.owner.owner.operation, argument.arg_number
            if owner.name == MANUAL_COMPUTATION:
                outside = owner.operands[number]
                if isinstance(outside.owner, ir.Block):
                    sharding = sharding_per_value(owner.attributes["in_shardings"])[number]
                    update.axes[ir.BlockArgument(outside).arg_number] = sharding_axes(sharding)[1]
                pending.append((outside, changed))
            elif changed:
                update.made_of[number] = None
        elif op.name == MANUAL_COMPUTATION:
            inside = ManualComputation(op).yield_of(ir.OpResult(at).result_number)
            pending.append((inside, changed))
        else:
            _through(update, op, at, pending)
    return update


def _through(
    update: Update, op: ir.Operation, at: ir.Value, pending: list[tuple[ir.Value, bool]]
) -> None:
    if op.name in _KEEPING:
        alike = [v for v in op.operands if prod(shape_of(v)) == prod(shape_of(at))]
    elif op.name in _INTO_FIRST:
        alike = [op.operands[0]]
    elif op.name in _BY_NUMBER:
        alike = [op.operands[ir.OpResult(at).result_number]]
    else:
        update.leaves.append(at)
        return
    update.ops[key_of(op)] = op
    pending += [(value, op.name != BARRIER) for value in alike]


def missing_donations(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects arguments that the program returns updated and that are not donated."""
    main = entry_function(program.explicit.module)
    listed = attributes_of_arguments(main)
    aliased = set(aliased_results(main).values())
    kept = [
        update
        for update in updates_of(program)
        if update.result not in aliased and not is_donated(listed, update.argument)
    ]
    if not kept:
        return
    after = program.donating([update.argument for update in kept])
    gained_bytes = program.peak_bytes - min(after.peak_bytes, _peak_aliased(program, kept))
    gain = max(0.0, program.total_ns - after.total_ns)
    if not program.is_worth(gain) and gained_bytes < program.least * program.capacity:
        return
    arguments = Function(main).body.arguments
    largest = max(kept, key=lambda each: bytes_of(arguments[each.argument]))
    paths = [path_of(arguments[update.argument]) for update in kept]
    named = ", ".join(filter(None, dict.fromkeys(paths[:3]))) or counted_name(
        arguments[largest.argument]
    )
    numbers = ", ".join(str(argument_number(arguments[u.argument])) for u in kept[:6])
    numbers += ", …" if len(kept) > 6 else ""
    yield program.advice(
        "not-donated",
        gain,
        f"the step updates {len(kept)} of {len(own_arguments(main))} arguments "
        f"({named}{', …' if len(paths) > 3 else ''}) that are not donated: the old values stay in "
        "memory beside the new",
        program.place(_made_by(largest)) if largest.ops else "",
        f"jax.jit(…, donate_argnums=…) for these: flat arguments {numbers}",
        gain_bytes=max(0.0, gained_bytes),
    )


def _peak_aliased(program: AdvisedProgram, kept: Sequence[Update]) -> float:
    """Returns the memory peak if each new value reuses the storage of the old one."""
    sizes = list(program.graph.storages)
    made = {key_of(op): t.id for t in program.graph.tasks for op in program.traced.ops[t.id]}
    for update in kept:
        task = next((made[op] for op in list(update.ops)[:1] if op in made), None)
        allocated = () if task is None else program.graph.tasks[task].allocs
        wanted = _local_bytes(update)
        for storage in allocated:
            if sizes[storage] == wanted:
                sizes[storage] = 0.0
                break
    return memory_profile(TaskGraph(program.graph.tasks, sizes)).peak_bytes


def _made_by(update: Update) -> ir.Operation:
    """Returns the last op of an update with a line of the user's, else the last one."""
    ops = list(update.ops.values())
    return next((op for op in ops if to_place(op.location) != SourcePlace()), ops[0])


def replicated_optimizer(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects updates, from gradients reduced over an axis, that its devices repeat."""
    reduced = {
        each.op.results[0]: each for each in program.collectives if len(each.op.results) == 1
    }
    by_axes: dict[tuple[str, ...], list[tuple[Update, CollectiveCost]]] = defaultdict(list)
    for update in updates_of(program):
        sums = [reduced[v] for v in update.leaves if v in reduced]
        gradient = next((each for each in sums if each.sent.kind == "all_reduce"), None)
        if gradient is None or not gradient.sent.axes:
            continue
        if not set(gradient.sent.axes) & set(update.axes.get(update.argument, ())):
            by_axes[gradient.sent.axes].append((update, gradient))
    for axes, alike in by_axes.items():
        yield from _zero(program, axes, alike)


def _zero(
    program: AdvisedProgram, axes: tuple[str, ...], alike: Sequence[tuple[Update, CollectiveCost]]
) -> Iterator[Advice]:
    """Yields the gain of dividing updates along axes: their time, less the gather of weights."""
    devices = len(alike[0][1].sent.groups[0])
    ops = set[ir.Value | ir.Operation]().union(*(update.ops for update, _ in alike))
    # The kernels outside of loops whose last op is one of these, with their ns.
    times: dict[int, float] = {}
    for task in program.traced.graph.tasks:
        mine = program.traced.ops[task.id]
        if task.kind is TaskKind.COMPUTE and mine and key_of(mine[-1]) in ops:
            times[task.id] = task.ns
    state: list[Update] = []  # those whose arguments only updates read
    for update, _ in alike:
        readers = [use.owner.operation for use in _argument_of(update).uses]
        if readers and all(key_of(op) in ops for op in readers):
            state.append(update)
    saved = sum(_local_bytes(update) for update in state) * (1 - 1 / devices)
    if not times or saved < program.least * program.capacity:
        return  # memory decides: the gather of the weights usually costs the time
    gradients = {(each.path, each.task): each for _, each in alike}
    retimed: dict[Place, float] = {((), task): ns / devices for task, ns in times.items()}
    for place, each in gradients.items():
        scattered = DeviceTransfer("reduce_scatter", each.sent.bytes, each.sent.groups)
        retimed[place] = program.clock.collective(scattered, ()).ns
    weights = sum(_local_bytes(update) for update, _ in alike) - sum(map(_local_bytes, state))
    gathered = DeviceTransfer("all_gather", weights, alike[0][1].sent.groups)
    gather_ns = program.clock.collective(gathered, ()).ns
    gain = program.total_ns - program.retimed_ns(retimed) - gather_ns
    first = max(alike, key=lambda pair: _local_bytes(pair[0]))[0]
    axis = ",".join(axes)
    divided = f'P("{axes[0]}")' if len(axes) == 1 else f"P({axes})"
    is_whole = left_to_the_partitioner(program.given.module) is not None and len(axes) == 1
    yield program.advice(
        "replicated-optimizer",
        max(0.0, gain),
        f"all {devices} devices of {axis} hold the same optimizer state, "
        f"{size(sum(map(_local_bytes, state)))}, and compute the same update of {len(alike)} "
        f"arguments, {duration(sum(times.values()))}",
        program.place(_made_by(first)),
        f"ZeRO-1: divide the state ({divided} in its in_shardings and out_shardings); the new "
        f"weights are then gathered in {duration(gather_ns)}, "
        + ("which the gain includes" if gain > 0 else f"and the step takes {duration(-gain)} more"),
        pipeline=program.pipeline(f"shard-optimizer{{axis={axis}}}", before_partition=True)
        if is_whole
        else None,
        gain_bytes=saved,
    )


def _argument_of(update: Update) -> ir.Value:
    """Returns the argument that the ops of the update read: that of the manual computation, if
    any."""
    owner = update.value.owner
    main = owner if isinstance(owner, ir.Block) else owner.operation.block
    outside = main.arguments[update.argument]
    for use in outside.uses:
        user = use.owner.operation
        if user.name == MANUAL_COMPUTATION:
            return ManualComputation(user).body.arguments[use.operand_number]
    return outside


def _local_bytes(update: Update) -> float:
    return bytes_of(_argument_of(update))


def copied_for_loops(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects arguments that a loop starts from and overwrites.

    If they are not donated, the loop has to start from copies.
    """
    main = entry_function(program.explicit.module)
    listed = attributes_of_arguments(main)
    returned = {update.argument for update in updates_of(program)}
    arguments = Function(main).body.arguments
    for loop in ops_named(main, {WHILE}):
        copied: dict[int, float] = {}
        for carry, operand in enumerate(loop.operands):
            number = _argument_behind(operand)
            if number is None or number in returned or is_invariant(loop, carry):
                continue
            if not is_donated(listed, number):
                copied[number] = bytes_of(operand)
        moved = sum(copied.values())
        gain = 2.0 * moved / program.clock.hardware.memory_rate
        if not program.is_worth(gain) and moved < program.least * program.capacity:
            continue
        given = [arguments[number] for number in copied]
        names = ", ".join(path_of(each) or counted_name(each) for each in given)
        yield program.advice(
            "copied-for-loop",
            gain,
            f"the loop overwrites {size(moved)} of arguments that are not donated, {names}: it "
            "starts with copies of them",
            program.place(loop),
            "jax.jit(…, donate_argnums=…) for these: flat arguments "
            + ", ".join(str(argument_number(each)) for each in given),
            gain_bytes=moved,
        )


def _argument_behind(value: ir.Value) -> int | None:
    """Returns the number of the argument of `main` that a value is; None for other values."""
    while isinstance(value.owner, ir.Block):
        owner, number = value.owner.owner.operation, ir.BlockArgument(value).arg_number
        if owner.name != MANUAL_COMPUTATION:
            return number if owner.name == FUNCTION else None
        value = owner.operands[number]
    return None

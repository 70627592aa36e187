"""Keeps an optimizer's state in the host's memory, and copies it to the device for its update.

    func @main(%w, %m) -> (%w1, %m1) {
      %g = …                                                     // the gradient
      %m1 = add %m, %g
    }
  ==>
    func @main(%w, %m {mhlo.memory_kind = "pinned_host"})
        -> (%w1, %m1 {mhlo.memory_kind = "pinned_host"}) {
      %g = …
      %t:3 = optimization_barrier %m, %g, %k1                    // %k1: of two groups before
      %md = custom_call @annotate_device_placement(%t#0)  "device"
      %m1 = add %md, %t#1
      %kh = custom_call @annotate_device_placement(%t#2)  "pinned_host"
    }

A group is the state that the same gradients update. XLA:GPU begins all copies of arguments at the
start of the program, so the whole state would be on the device all the time. The barrier holds a
group back until its gradients are computed and the group two before it is updated. So there are two
groups on the device at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.entry import aliased_results, argument_name
from stablehlo_tools.analysis.optimizer_state import ON_THE_WAY, OptimizerState
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.device_placement import (
    DEVICE,
    HOST,
    MEMORY_KIND,
    annotate_memory,
    lies_in_host,
)
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.builder import barrier, shape_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.shardy_round_trip import set_entry
from stablehlo_tools.ir.values import key_of, maker_of, producer
from stablehlo_tools.ir.views import Function, ManualComputation
from stablehlo_tools.ir.walk import entry_function, terminator, values_used_outside

_AT_ONCE = 2  # groups on the device


@dataclass(frozen=True)
class StateGroup:
    """State that the same gradients update.

    `states`: pairs of an argument of the body and the result that returns it. `bytes`: of all of it
    on a device. `path`: the name of the largest argument in the call.
    """

    gradients: tuple[ir.Value, ...]
    states: tuple[tuple[int, int], ...]
    bytes: float
    path: str


@dataclass(frozen=True)
class _DeviceBody:
    """The block with a device's ops: of `main`, or of the one manual computation in it.

    `arguments` and `results`: numbers in `main` by numbers in the block. Values that `main` uses in
    another way have none.
    """

    main: ir.Operation
    block: ir.Block
    arguments: Mapping[int, int]
    results: Mapping[int, int]

    @staticmethod
    def from_module(module: ir.Module) -> _DeviceBody:
        """Returns the body of a program without calls."""
        main = entry_function(module)
        block = Function(main).body
        ops = [view.operation for view in block.operations]
        manual = [op for op in ops if op.name == MANUAL_COMPUTATION]
        if len(manual) != 1 or len(ops) > 2 + sum(not len(op.operands) for op in ops):
            every = range(len(block.arguments)), range(len(terminator(block).operands))
            return _DeviceBody(
                main, block, *({number: number for number in side} for side in every)
            )
        arguments = {
            number: ir.BlockArgument(value).arg_number
            for number, value in enumerate(manual[0].operands)
            if isinstance(value.owner, ir.Block) and len(list(value.uses)) == 1
        }
        results = {
            ir.OpResult(value).result_number: number
            for number, value in enumerate(terminator(block).operands)
            if producer(value) == manual[0] and len(list(value.uses)) == 1
        }
        return _DeviceBody(main, ManualComputation(manual[0]).body, arguments, results)


def state_groups(module: ir.Module) -> list[StateGroup]:
    """Returns the state on the device of a program without calls, the largest group first."""
    body = _DeviceBody.from_module(module)
    outer = aliased_results(body.main)
    inner = {result: number for number, result in body.results.items()}
    found = OptimizerState(
        body.block, {n: inner[outer[o]] for n, o in body.arguments.items() if outer.get(o) in inner}
    )
    places = _places(body.block)
    groups: dict[tuple[ir.Value, ...], list[tuple[int, int]]] = {}
    for argument, result in found.states.items():
        outside = body.arguments.get(argument)
        if outside is None or result not in body.results:
            continue
        gradients = found.gradients(argument)
        is_there = lies_in_host(body.main, "arg_attrs", outside)
        if gradients and not is_there:
            key = tuple(sorted(gradients, key=lambda value: places[value]))
            groups.setdefault(key, []).append((argument, result))
    outside = Function(body.main).body.arguments
    made: list[StateGroup] = []
    for gradients, states in groups.items():
        sizes = {argument: bytes_of(found.arguments[argument]) for argument, _ in states}
        largest = body.arguments[max(sizes, key=lambda argument: sizes[argument])]
        path = argument_name(outside[largest])
        made.append(StateGroup(gradients, tuple(states), sum(sizes.values()), path))
    return sorted(made, key=lambda group: -group.bytes)


def move_state(module: ir.Module, groups: Iterable[StateGroup]) -> None:
    """Moves groups of a program's state to the host's memory."""
    body = _DeviceBody.from_module(module)
    arguments, end = list(body.block.arguments), terminator(body.block)
    order = _in_order(body.block, groups)
    for place, group in enumerate(order):
        behind = order[place - _AT_ONCE].states if place >= _AT_ONCE else ()
        _hold(body.block, group, [arguments[n] for n, _ in group.states], behind)
    for argument, result in (state for group in order for state in group.states):
        value = end.operands[result]
        point = ir.InsertionPoint(end)
        end.operands[result] = annotate_memory(value, HOST, value.location, point)
        kind = ir.StringAttr.get(HOST, module.context)
        set_entry(body.main, "arg_attrs", body.arguments[argument], MEMORY_KIND, kind)
        set_entry(body.main, "res_attrs", body.results[result], MEMORY_KIND, kind)
    # The barriers read values of other groups that are computed later in the text.
    restore_order(body.block)
    erase_unused(body.block)


def _places(block: ir.Block) -> dict[ir.Value, tuple[int, int]]:
    """Returns the position of each value: its op's index, and the result's number."""
    return {
        result: (place, number)
        for place, view in enumerate(block.operations)
        for number, result in enumerate(view.operation.results)
    }


def _in_order(block: ir.Block, groups: Iterable[StateGroup]) -> list[StateGroup]:
    """Sorts groups by when their gradients are computed, each after the groups that it depends on.

    Groups whose states depend on each other are left out.
    """
    places = _places(block)
    left = sorted(groups, key=lambda group: places[group.gradients[-1]])
    owners = {
        block.arguments[argument]: number
        for number, group in enumerate(left)
        for argument, _ in group.states
    }
    end = terminator(block)
    # For each value, the groups whose state it depends on.
    found = {value: frozenset({number}) for value, number in owners.items()}
    for view in block.operations:
        op = view.operation
        sets = {found[value] for value in values_used_outside(op) if value in found}
        if sets:
            together = frozenset[int]().union(*sets)
            found.update((result, together) for result in op.results)
    depends = found
    needed = [
        {
            number
            for value in (*group.gradients, *(end.operands[result] for _, result in group.states))
            for number in depends.get(value, ())
        }
        - {own}
        for own, group in enumerate(left)
    ]
    order: list[int] = []
    while ready := [n for n in range(len(left)) if n not in order and needed[n] <= set(order)]:
        order.append(ready[0])
    return [left[number] for number in order]


def _hold(
    block: ir.Block,
    group: StateGroup,
    arguments: Sequence[ir.Value],
    behind: Sequence[tuple[int, int]],
) -> None:
    """Delays a group's copy to the device until its gradients and another group's new state exist.

    `behind`: that group's pairs of argument and result.
    """
    end = terminator(block)
    held = [*arguments, *group.gradients, *(end.operands[result] for _, result in behind)]
    last = maker_of(group.gradients[-1])
    behind_all = barrier(held, ir.InsertionPoint.after(last), last.location)
    results: list[ir.Value] = list(behind_all.results)
    images = dict(zip(group.gradients, results[len(arguments) :], strict=False))
    for argument, result in zip(arguments, results, strict=False):
        point = ir.InsertionPoint.after(behind_all)
        argument.replace_all_uses_except(
            annotate_memory(result, DEVICE, argument.location, point), [behind_all]
        )
    for (_, result), value in zip(behind, results[len(arguments) + len(images) :], strict=True):
        end.operands[result] = value
    _read_images(behind_all, images)


def _read_images(behind: ir.Operation, images: dict[ir.Value, ir.Value]) -> None:
    """Makes the op that first combines a state with its gradients read these from the barrier.

    Otherwise a compiler would see that the barrier's gradients are unused. Other users of the
    gradients, like their norm, run earlier.
    """
    of_state = {behind.results[0]}
    pending = [behind.results[0]]
    for value in pending:
        for use in value.uses:
            op = use.owner.operation
            for number, operand in enumerate(op.operands):
                if operand not in of_state and _is_made_of(operand, images, of_state):
                    op.operands[number] = _recompute_value(operand, images)
                    return
            if len(op.results) == 1 and op.results[0] not in of_state:
                of_state.add(op.results[0])
                pending.append(op.results[0])


def _is_made_of(
    value: ir.Value, images: Collection[ir.Value], without: Collection[ir.Value]
) -> bool:
    """Returns True if elementwise ops compute a value from `images`.

    False if it also depends on `without`.
    """
    found = False
    pending, seen = [value], {value}
    while pending:
        at = pending.pop()
        if at in without:
            return False
        op = producer(at)
        if at in images:
            found = True
        elif op is not None and op.name in ON_THE_WAY and shape_of(at) == shape_of(value):
            pending += [each for each in op.operands if each not in seen]
            seen.update(op.operands)
    return found


def _recompute_value(value: ir.Value, images: dict[ir.Value, ir.Value]) -> ir.Value:
    """Recomputes a value from the images of the values that it depends on."""
    op = producer(value)
    if value in images or op is None:
        return images.get(value, value)
    if op.name not in ON_THE_WAY or not _is_made_of(value, images, ()):
        return value
    operands = [_recompute_value(each, images) for each in op.operands]
    copy = op.clone(ip=ir.InsertionPoint.after(op))
    for number, operand in enumerate(operands):
        copy.operands[number] = operand
    images[value] = copy.results[0]
    return copy.results[0]


def restore_order(block: ir.Block) -> None:
    """Moves each op that is before its operands' producers after them; the others keep their order.

    No op may depend on itself.
    """
    ops = [view.operation for view in block.operations]
    maker: dict[ir.Value, ir.Operation] = {result: op for op in ops for result in op.results}
    order: list[ir.Operation] = []
    done: set[ir.Value | ir.Operation] = set()
    for op in ops:
        pending = [(op, False)]
        while pending:
            at, is_ready = pending.pop()
            if is_ready:
                order.append(at)
            elif key_of(at) not in done:
                done.add(key_of(at))
                pending.append((at, True))
                needed = [maker[value] for value in values_used_outside(at) if value in maker]
                pending += [(each, False) for each in reversed(needed)]
    for op in order[:-1]:
        op.move_before(order[-1])

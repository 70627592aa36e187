"""Leaves out layers that are written out one after the other.

The result computes other values. Its layers are those of the program, so a compiler schedules them
in the same way, but in a fraction of the time. Figures of two such twins give those of all layers,
because a further layer adds the same.

    %h0 = layer(%x, %w0)                       %h0 = layer(%x, %w0)
    %h1 = layer(%h0, %w1)              ==>     %h3 = layer(%h0, %w3)
    %h2 = layer(%h1, %w2)
    %h3 = layer(%h2, %w3)

A value of a layer that is left out becomes the same value of the layer before. Arguments that only
such layers use are left out with the results that depend on them, such as their updated weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product

from stablehlo_tools.analysis.dataflow import Dataflow
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import drop_entry_argument, drop_entry_results
from stablehlo_tools.ir.cleanup import erase_unused, share_all
from stablehlo_tools.ir.clone import copy_module, counterparts
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, functions_by_name
from stablehlo_tools.transforms.parts.roll_layers.iterations import Iterations
from stablehlo_tools.transforms.parts.roll_layers.stack_plan import plan_block


class LayeredProgram:
    """A program with layers that are written out; `count` is their number, 0 if none repeat."""

    def __init__(self, module: ir.Module) -> None:
        self._module = copy_module(module)
        inline_all_calls(self._module)
        effects = Effects(functions_by_name(self._module))
        with ir.Location.unknown(module.context):
            plan = plan_block(_body(self._module), effects, [])
        self._flow, self._loops = plan.flow, [loop.iterations for loop in plan.loops]
        self.count = max((loop.count for loop in self._loops), default=0)

    def keep(self, kept: int) -> ir.Module | None:
        """Returns a copy with so many of the layers, forward and backward.

        Returns None if the layers of a backward do not correspond to those of its forward, or if
        all results depend on the weights of each layer.
        """
        left_out = _iterations_to_leave_out(self._loops, self.count - kept)
        if not left_out:
            return None
        arguments, results = _border_of(self._flow, self._loops, left_out)
        if len(results) == len(self._flow.root.returned):
            return None
        copy = copy_module(self._module)
        twin = counterparts(_body(self._module), _body(copy))
        values = self._flow.values
        for index, iterations in left_out.items():
            made = self._loops[index].made
            for iteration, position in product(iterations, range(len(made[0]))):
                before, own = made[iterations.start - 1][position], made[iteration][position]
                for number, other in zip(own or (), before or (), strict=False):
                    twin[values[number]].replace_all_uses_with(twin[values[other]])
        main = entry_function(copy)
        drop_entry_results(main, results)
        erase_unused(Function(main).body)
        for position in sorted(arguments, reverse=True):
            if not has_uses(Function(main).body.arguments[position]):
                drop_entry_argument(main, position)
        share_all(copy)
        return copy


def _body(module: ir.Module) -> ir.Block:
    return Function(entry_function(module)).body


def _iterations_to_leave_out(loops: Sequence[Iterations], number: int) -> dict[int, range] | None:
    """Returns `number` iterations of each loop by its index, never the first one; of a backward,
    those of the same layers. Shorter loops are not among them."""
    left_out: dict[int, range] = {}
    place: dict[int, tuple[int, int]] = {}
    for index, loop in enumerate(loops):
        if loop.count < number + 2:
            continue
        partners = Counter(place[n][0] for rows in loop.rows for n in rows.numbers if n in place)
        chosen = range(1, 1 + number)
        if partners:
            ((forward, _),) = partners.most_common(1)
            chosen = []
            for iteration in range(loop.count):
                numbers = (rows.numbers[iteration] for rows in loop.rows)
                # The input of a layer is made by the layer before.
                layers = [place[n][1] for n in numbers if n in place and place[n][0] == forward]
                if layers and max(layers) in left_out[forward]:
                    chosen.append(iteration)
            if len(chosen) != number or chosen[0] == 0 or chosen[-1] - chosen[0] != number - 1:
                return None
            chosen = range(chosen[0], chosen[-1] + 1)
        left_out[index] = chosen
        for iteration, row in enumerate(loop.made):
            for numbers in row:
                place.update((n, (index, iteration)) for n in numbers or ())
    return left_out


def _border_of(
    flow: Dataflow, loops: Sequence[Iterations], left_out: Mapping[int, range]
) -> tuple[set[int], set[int]]:
    """Returns the positions of arguments and results of the entry that belong to layers that are
    left out: their weights, the state of an optimizer for these, and both when updated."""
    inside = {node.index for loop in loops for node in loop.nodes}
    makers = {n: node for n, node in flow.maker.items() if node.index not in inside}
    users = {
        n: [node.results for node in nodes if node.index not in inside]
        for n, nodes in flow.users.items()
    }
    returned: dict[int, list[int]] = {}
    for position, number in enumerate(flow.root.returned):
        returned.setdefault(number, []).append(position)

    def results(argument: int) -> set[int]:
        """Returns the results that an argument reaches without passing through a layer."""
        below = _closure([argument], lambda number: chain(*users.get(number, ())))
        return {position for number in below for position in returned.get(number, ())}

    def weights(numbers: Iterable[int | None]) -> set[int]:
        """Returns the arguments that these values are converted or cut from."""
        present = [number for number in numbers if number is not None]
        above = _closure(present, lambda n: makers[n].inputs if n in makers else ())
        return above.intersection(flow.root.arguments)

    removed, kept = set[int](), set[int]()
    for index, loop in enumerate(loops):
        out = left_out.get(index, range(0))
        for rows in loop.rows:
            removed |= weights(rows.numbers[i] for i in out)
            kept |= weights(n for i, n in enumerate(rows.numbers) if i not in out)
    reached = {argument: results(argument) for argument in flow.root.arguments}
    removed -= kept
    dropped = set[int]().union(*(reached[argument] for argument in removed))
    # Ops of the first layer may be outside of the loops: through them, its weights reach all.
    most = max((len(reached[argument]) for argument in removed), default=0)
    kept = {argument for argument in kept if len(reached[argument]) <= most}
    of_kept = set[int]().union(*(reached[argument] for argument in kept))
    state = {
        argument
        for argument, own in reached.items()
        if of_kept.isdisjoint(own) and not dropped.isdisjoint(own)
    }
    dropped.update(*(reached[argument] for argument in state))
    position = {number: i for i, number in enumerate(flow.root.arguments)}
    return {position[argument] for argument in removed | state}, dropped


def _closure(numbers: Iterable[int], after: Callable[[int], Iterable[int]]) -> set[int]:
    """Returns the values that are reached from these by `after`, with them."""
    found, pending = set(numbers), list(numbers)
    while pending:
        fresh = set(after(pending.pop())) - found
        found |= fresh
        pending += fresh
    return found

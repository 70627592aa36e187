"""Exchanges that are made everywhere alike, so that the ranks still agree with each other: only the
values of the original tell them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from rank_units import Change, exchange_operands

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, BARRIER
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import RankCall, RankMessage, RankReading
from stablehlo_tools.schedules.forms import step_of
from stablehlo_tools.schedules.table import Action

Mutation = Callable[[RankReading], Iterator[tuple[str, Change]]]


def messages_exchanged(manifest: Manifest) -> Mutation:
    """Two tensors of every message of one kind and stage: activations, or gradients."""

    def mutation(reading: RankReading) -> Iterator[tuple[str, Change]]:
        sends: defaultdict[str, dict[str, dict[int, RankMessage]]] = defaultdict(dict)
        for send in reading.messages:
            transfer = manifest.of_channel()[send.channel]
            action = step_of(transfer.action) if transfer.is_scheduled else None
            if send.is_send and isinstance(action, Action):
                kind = f"{action.stage}{action.kind}"
                sends[kind].setdefault(transfer.action, {})[transfer.tensor] = send
        for kind, by_action in sends.items():
            tensors = next(iter(by_action.values()))
            for one, other in combinations(sorted(tensors), 2):
                if tensors[one].type != tensors[other].type:
                    continue
                pairs = [(each[one].index, each[other].index) for each in by_action.values()]

                def change(copy: RankReading, pairs: Sequence[tuple[int, int]] = pairs) -> bool:
                    for first, second in pairs:
                        exchange_operands(copy.events[first].op, copy.events[second].op)
                    return True

                yield f"tensors {one} and {other} of every {kind}", change

    return mutation


def operands_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two operands of one type in all calls of a function: residuals, weights, sums."""
    for name, calls in _by_function(reading).items():
        types = [operand.type for operand in calls[0].op.operands]
        for at, to in combinations(range(len(types)), 2):
            if types[at] != types[to] or calls[0].operands[at] == calls[0].operands[to]:
                continue

            def change(copy: RankReading, name: str = name, at: int = at, to: int = to) -> bool:
                for call in _by_function(copy)[name]:
                    exchange_operands(call.op, call.op, at, to)
                return True

            yield f"operands {at} and {to} of every @{name}", change


def results_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two results of one type in all calls of a function: residuals, gradients, sums."""
    functions = functions_by_name(reading.module)
    for name in _by_function(reading):
        returned = Function(functions[name]).yields
        for at, to in combinations(range(len(returned)), 2):
            if returned[at].type != returned[to].type or returned[at] == returned[to]:
                continue

            def change(copy: RankReading, name: str = name, at: int = at, to: int = to) -> bool:
                for call in _by_function(copy)[name]:
                    _exchange_uses(call.op.results[at], call.op.results[to])
                return True

            yield f"results {at} and {to} of every @{name}", change


def arguments_exchanged(reading: RankReading) -> Iterator[tuple[str, Change]]:
    """Two arguments of one type inside of a function that `main` calls."""
    functions = functions_by_name(reading.module)
    for name in _by_function(reading):
        arguments = list(Function(functions[name]).body.arguments)
        for at, to in combinations(range(len(arguments)), 2):
            if arguments[at].type != arguments[to].type:
                continue

            def change(copy: RankReading, name: str = name, at: int = at, to: int = to) -> bool:
                block = Function(functions_by_name(copy.module)[name]).body
                _exchange_uses(block.arguments[at], block.arguments[to])
                return True

            yield f"arguments {at} and {to} in @{name}", change


def _by_function(reading: RankReading) -> dict[str, list[RankCall]]:
    calls: defaultdict[str, list[RankCall]] = defaultdict(list)
    for event in reading.events:
        if isinstance(event, RankCall):
            calls[event.function].append(event)
    return calls


def _exchange_uses(one: ir.Value, other: ir.Value) -> None:
    """Lets what takes either value take the other one; barriers behind a call keep their places."""
    uses = [
        (use.owner.operation, use.operand_number, new)
        for value, new in ((one, other), (other, one))
        for use in value.uses
    ]
    for user, number, new in uses:
        user.operands[number] = new


def is_neutral(ranks: RankSet, said: str) -> bool:
    """Whether a mutation of these, by its description, exchanges two terms of one sum."""
    found = re.fullmatch(r"rank (\d+): (?:operands|arguments) (\d+) and (\d+) .*@(\w+)", said)
    if found is None:
        return False
    function = functions_by_name(ranks.programs[int(found[1])].module)[found[4]]
    arguments = Function(function).body.arguments
    one, other = (_sums_with(arguments[int(found[k])]) for k in (2, 3))
    return bool(one & other)


def _sums_with(value: ir.Value) -> set[ir.Value]:
    """The sums that a value is a term of, and of nothing else."""
    sums: set[ir.Value] = set()
    while len(uses := list(value.uses)) == 1 and uses[0].owner.name in (ADD, BARRIER):
        user = uses[0].owner.operation
        value = user.results[uses[0].operand_number if user.name == BARRIER else 0]
        sums |= {value} if user.name == ADD else set()
    return sums

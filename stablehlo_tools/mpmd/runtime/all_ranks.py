"""Runs all ranks on the devices of one process.

The functions that ranks call are compiled for the devices of their rank. They run in one order that
respects the order of every rank. A transfer is a copy between devices. Independent calls overlap,
because jax dispatches asynchronously.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import channel_number
from stablehlo_tools.artifacts.artifact import to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import AFTER_ALL, BARRIER, CALL, CONSTANT, RECV, SEND
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import callee_name, entry_function, terminator
from stablehlo_tools.mpmd.running.functions import Parts, any_values, as_module, module_of, run_on
from stablehlo_tools.mpmd.runtime.engine import Engine, PreparedSet, Values, devices_for


@dataclass(frozen=True)
class _RankFunctionCall:
    """A call of a function on a rank. `taken`, `given` and `dying` are the slots of values."""

    rank: int
    executable: Any
    taken: tuple[int, ...]
    given: tuple[int, ...]
    dying: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Copy:
    """A copy of a value to the devices of another rank, with its slot on both ranks."""

    source: int
    taken: int
    target: int
    given: int
    dying: tuple[int, ...] = ()


type _Instruction = _RankFunctionCall | _Copy


class AllRanks(Engine):
    """Runs all ranks, on the devices of this process."""

    def __init__(self, prepared: PreparedSet) -> None:
        super().__init__(prepared)
        self._all = devices_for(prepared.ranks)
        self.ranks = tuple(range(prepared.ranks.ranks))
        self._whole = [any_values([d for _, d in self.devices(rank)]) for rank in self.ranks]
        readers = [_RankReader(prepared, rank) for rank in self.ranks]
        compiled = self._compile_functions(readers)
        self._instructions = list(_in_one_order(readers, compiled))
        self._arguments = {reader.rank: reader.arguments for reader in readers}
        self._returned = {reader.rank: reader.returned for reader in readers}
        self._constants: dict[tuple[int, int], Parts] = {}
        for reader in readers:
            for place, key in reader.constants.items():
                (made,) = run_on(compiled[reader.rank, key], [], self._whole[reader.rank])
                self._constants[reader.rank, place] = made

    def devices(self, rank: int) -> list[tuple[int, Any]]:
        first = rank * self.devices_of_rank
        return list(enumerate(self._all[first : first + self.devices_of_rank]))

    def process_of(self, rank: int, place: int) -> int:
        return 0

    def run(self, arguments: Values) -> Values:
        values: dict[tuple[int, int], Parts] = dict(self._constants)
        for rank, given in arguments.items():
            values.update(
                ((rank, place), parts)
                for place, parts in zip(self._arguments[rank], given, strict=True)
            )
        # So that an argument dies with its last use.
        del arguments
        for step in self._instructions:
            if isinstance(step, _RankFunctionCall):
                taken = [values[step.rank, place] for place in step.taken]
                results = run_on(step.executable, taken, self._whole[step.rank])
                for place, parts in zip(step.given, results, strict=True):
                    values[step.rank, place] = parts
                for place in step.dying:
                    del values[step.rank, place]
            else:
                sent = values[step.source, step.taken]
                devices = [device for _, device in self.devices(step.target)]
                values[step.target, step.given] = jax.device_put(sent, devices)
                for place in step.dying:
                    del values[step.source, place]
        results = {
            rank: [values[rank, place] for place in places]
            for rank, places in self._returned.items()
        }
        self.signs.append([part for listed in results.values() for part in listed[0]])
        return results

    def _compile_functions(self, readers: Sequence[_RankReader]) -> dict[tuple[int, str], Any]:
        """Compiles the functions of all ranks, several at a time."""
        wanted = {
            (reader.rank, key): bindings.write_bytecode(module)
            for reader in readers
            for key, module in reader.modules.items()
        }
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {
                name: pool.submit(
                    bindings.compile_kept, code, [device for _, device in self.devices(name[0])]
                )
                for name, code in wanted.items()
            }
        return {name: future.result() for name, future in futures.items()}


class _RankReader:
    """The program of a rank as calls, sends and receives of values in numbered slots."""

    def __init__(self, prepared: PreparedSet, rank: int) -> None:
        self.rank = rank
        program = prepared.ranks.programs[rank]
        block = Function(entry_function(program.module)).body
        self._places: dict[ir.Value, int] = {}
        self._count = 0
        self.modules: dict[str, ir.Module] = {}  # functions and constants, by a name
        self.constants: dict[int, str] = {}
        self.steps: list[tuple[str, Any, tuple[int, ...], tuple[int, ...]]] = []
        self._devices = prepared.ranks.manifest.devices
        self.arguments = [self._place(argument) for argument in block.arguments]
        for view in list(block.operations)[:-1]:
            self._read(program.module, view.operation)
        self.returned = [self._places[value] for value in terminator(block).operands]
        self.last: dict[int, int] = {}
        for number, (_, _, taken, given) in enumerate(self.steps):
            self.last.update(dict.fromkeys((*taken, *given), number))
        # Results live after the step, and constants through all steps.
        for place in (*self.returned, *self.constants):
            self.last.pop(place, None)

    def dying(self, number: int) -> tuple[int, ...]:
        """Returns the slots whose last use is a step."""
        _, _, taken, given = self.steps[number]
        places = dict.fromkeys((*taken, *given))
        return tuple(place for place in places if self.last.get(place) == number)

    def _place(self, value: ir.Value) -> int:
        self._places[value] = self._count
        self._count += 1
        return self._count - 1

    def _register_module(self, module: ir.Module) -> str:
        """Registers a module of a single op. Returns its text as its name."""
        name = to_text(module)
        self.modules.setdefault(name, module)
        return name

    def _read(self, module: ir.Module, op: ir.Operation) -> None:
        if op.name == BARRIER:
            for result, operand in zip(op.results, op.operands, strict=True):
                # A barrier returns its operands, so its results share their slots.
                if operand in self._places:  # not a token
                    self._places[result] = self._places[operand]
        elif op.name == CALL:
            name = callee_name(op)
            if name not in self.modules:
                self.modules[name] = as_module(module, name, self.rank, self._devices)
            taken = tuple(self._places[operand] for operand in op.operands)
            self.steps.append(("call", name, taken, tuple(map(self._place, op.results))))
        elif op.name == CONSTANT:
            self.constants[self._place(op.results[0])] = self._register_module(module_of(op))
        elif op.name == SEND:
            self.steps.append(("send", channel_number(op), (self._places[op.operands[0]],), ()))
        elif op.name == RECV:
            self.steps.append(("receive", channel_number(op), (), (self._place(op.results[0]),)))
        elif op.name != AFTER_ALL:
            taken = tuple(self._places[operand] for operand in op.operands)
            given = tuple(map(self._place, op.results))
            self.steps.append(("call", self._register_module(module_of(op)), taken, given))


def _in_one_order(
    readers: Sequence[_RankReader], compiled: Mapping[tuple[int, str], Any]
) -> Iterator[_Instruction]:
    """Yields the steps of all ranks in an order in which each send precedes its receive.

    Raises ToolError if there is none.
    """
    at = [0] * len(readers)
    ends = {
        named: (reader.rank, given[0])
        for reader in readers
        for what, named, _, given in reader.steps
        if what == "receive"
    }
    sent: set[int] = set()
    while True:
        before = list(at)
        for reader in readers:
            while at[reader.rank] < len(reader.steps):
                number = at[reader.rank]
                what, named, taken, given = reader.steps[number]
                dying = reader.dying(number)
                if what == "call":
                    yield _RankFunctionCall(
                        reader.rank, compiled[reader.rank, named], taken, given, dying
                    )
                elif what == "send":
                    sent.add(named)  # the copy precedes the receive
                    yield _Copy(reader.rank, taken[0], *ends[named], dying)
                elif named not in sent:
                    break
                at[reader.rank] += 1
        if at == before:
            break
    if any(at[reader.rank] < len(reader.steps) for reader in readers):
        raise ToolError("the ranks wait for each other forever; check-mpmd shows where")

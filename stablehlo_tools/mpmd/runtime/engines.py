"""What runs the ranks of a set on devices: one rank of many processes, or all ranks in one.

A process of a job has one rank: the program of that rank is compiled whole, for all devices of the
job, in the form in which its runtime takes transfers. A process that has all ranks runs the
functions that they call, each compiled for the devices of its rank, in one order that all ranks
agree with; a transfer is a copy from devices to devices, and what does not depend on each other
runs at the same time, for jax dispatches without waiting.

Values are `Parts`: what each device of a rank has of an argument or a result, of those devices that
are this process's.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import AFTER_ALL, BARRIER, CALL, CONSTANT, RECV, SEND
from stablehlo_tools.ir.walk import callee_name, entry_function, terminator
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.localisation import Index, LocalProgram
from stablehlo_tools.mpmd.running.player import as_module, module_of
from stablehlo_tools.mpmd.transfers import SHARDED_AUTOTUNING, with_both_ends, with_permutes

type Parts = list[jax.Array]
type Values = dict[int, list[Parts]]  # by rank, in order


@dataclass(frozen=True)
class Prepared:
    """A set whose programs are those of a device, in the form `pairs`, and what each device has of
    what they take and give; `following[r][n]`: the result that argument n is in the next step."""

    ranks: RankSet
    local: tuple[LocalProgram, ...]
    following: Mapping[int, Mapping[int, int]]


class Engine(ABC):
    """Runs steps. `ranks`: those of this process."""

    ranks: tuple[int, ...]

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.devices_of_rank = prepared.ranks.manifest.devices
        self._signs: deque[Parts] = deque()  # of each step that may not be done yet

    @abstractmethod
    def devices(self, rank: int) -> list[tuple[int, Any]]:
        """The devices of a rank that are this process's, with their places in it."""

    @abstractmethod
    def run(self, arguments: Values) -> Values:
        """The results of a step; what is donated of the arguments is gone."""

    def wait(self) -> None:
        """Until no more than one step is on its way."""
        while len(self._signs) > 1:
            jax.block_until_ready(self._signs.popleft())

    def _sign(self, parts: Parts) -> None:
        """`parts` are there when the present step is done."""
        self._signs.append(parts)

    @abstractmethod
    def process_of(self, rank: int, place: int) -> int:
        """The process that has a device of a rank."""

    def placed(self, rank: int, array: Any, indices: Sequence[Index]) -> Parts:
        """What the devices of a rank have of a value, each what its index says. Copies, for a step
        may take their memory, and whoever gave the value may write it over."""
        return [
            jax.device_put(array[indices[place]], device, may_alias=False)
            for place, device in self.devices(rank)
        ]


class OneRank(Engine):
    """The rank of this process, in a job of a process or several for each rank."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._all = _devices_for(prepared.ranks)
        self.ranks = (_rank_of(prepared.ranks, self._all),)
        (rank,) = self.ranks
        module = _in_form(prepared.ranks, self._all[0].platform).programs[rank].module
        before = entry_function(prepared.ranks.programs[rank].module)
        self._results = len(terminator(before.regions[0].blocks[0]).operands)
        after = len(terminator(entry_function(module).regions[0].blocks[0]).operands)
        state = set(prepared.following[rank].values())
        # A result that no step takes and may have the memory of: what keeps permutes, or a loss.
        self._signal = next((n for n in reversed(range(after)) if n not in state), None)
        _donate(module, prepared.following[rank])
        if self._all[0].platform == "cpu":
            _keep_calls(module)
        self._executable = bindings.compile_kept(bindings.write_bytecode(module), self._all)
        self._whole = _any_values(self._all)

    def devices(self, rank: int) -> list[tuple[int, Any]]:
        first = rank * self.devices_of_rank
        devices = enumerate(self._all[first : first + self.devices_of_rank])
        mine = jax.process_index()
        return [(place, device) for place, device in devices if device.process_index == mine]

    def process_of(self, rank: int, place: int) -> int:
        return self._all[rank * self.devices_of_rank + place].process_index

    def run(self, arguments: Values) -> Values:
        (rank,) = self.ranks
        results = _run(self._executable, arguments.pop(rank), self._whole)
        self._sign(results[self._signal] if self._signal is not None else [])
        return {rank: results[: self._results]}


def _any_values(devices: Sequence[Any]) -> NamedSharding:
    """ "Replicated" with other contents on each device: the only form that holds any values."""
    return NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())


def _run(executable: Any, taken: Sequence[Parts], whole: NamedSharding) -> list[Parts]:
    """Runs a program of one device on those of this process; `whole` is over all of it."""
    if whole.num_devices == 1:
        results = executable.execute_sharded([part for (part,) in taken])
    else:
        make = jax.make_array_from_single_device_arrays
        results = executable.execute_sharded([make(p[0].shape, whole, p) for p in taken])
    return [list(parts) for parts in results.disassemble_into_single_device_arrays()]


def _devices_for(ranks: RankSet) -> list[Any]:
    """The devices of a set: all of a job's, the first ones of a process by itself. Raises ToolError
    where there are others."""
    everything, size = jax.devices(), ranks.manifest.devices
    count, alone = ranks.ranks * size, jax.process_count() == 1
    if len(everything) < count or (len(everything) > count and not alone):
        raise ToolError(
            f"this {'process' if alone else 'job'} has {len(everything)} devices, and the set is "
            f"for {count}: {ranks.ranks} ranks of {size}"
        )
    return everything[:count]


def _rank_of(ranks: RankSet, devices: Sequence[Any]) -> int:
    """The rank of this process, of its devices. Raises ToolError where they are of several."""
    size, mine = ranks.manifest.devices, jax.process_index()
    found = {place // size for place, device in enumerate(devices) if device.process_index == mine}
    if len(found) > 1:
        raise ToolError(
            f"this process has devices of ranks {', '.join(map(str, sorted(found)))}: start one "
            "for each rank (local_device_ids of jax.distributed.initialize), or a single one"
        )
    return found.pop()


def _in_form(ranks: RankSet, platform: str) -> RankSet:
    """The set with transfers as a platform takes them. Raises ToolError where none are known."""
    if ranks.ranks == 1:
        return ranks
    if platform == "cpu":
        return with_permutes(ranks)
    if platform in ("gpu", "cuda", "rocm"):
        if f"--{SHARDED_AUTOTUNING}=false" not in os.environ.get("XLA_FLAGS", ""):
            raise ToolError(
                "XLA:GPU divides autotuning among processes that compile the same program, and "
                "ranks compile different ones: they would wait for each other for ever; start with "
                f"XLA_FLAGS=--{SHARDED_AUTOTUNING}=false"
            )
        return with_both_ends(ranks)
    raise ToolError(
        f"programs that differ do not run on several processes of {platform}; gpu and cpu do"
    )


def _keep_calls(module: ir.Module) -> None:
    """Has XLA:CPU run what `main` calls as functions.

    Inlined, what all microbatches have in common, zeros for rows to be written, is made once and
    copied for each at the start: ten times the memory, and a third more time.
    """
    with module.context:
        kept = ir.Attribute.parse('{inlineable = "false"}')
        for view in entry_function(module).regions[0].blocks[0].operations:
            if view.operation.name == CALL:
                view.operation.attributes["mhlo.frontend_attributes"] = kept


def _donate(module: ir.Module, following: Mapping[int, int]) -> None:
    """Says of each argument which result may take its memory: the one that it is next."""
    main = entry_function(module)
    block = main.regions[0].blocks[0]
    taken: set[int] = set()
    number = ir.IntegerType.get_signless(32, module.context)
    given = main.attributes.get("arg_attrs")
    listed: list[dict[str, ir.Attribute]] = [{} for _ in block.arguments]
    for own, entry in zip(listed, ir.ArrayAttr(given) if given is not None else (), strict=False):
        own.update((named.name, named.attr) for named in ir.DictAttr(entry))
    for argument, result in following.items():
        if result not in taken:
            taken.add(result)
            listed[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(number, result)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get(each, module.context) for each in listed], module.context
    )


@dataclass(frozen=True)
class _Call:
    """A function on a rank: values in and out, by their places."""

    rank: int
    executable: Any
    taken: tuple[int, ...]
    given: tuple[int, ...]
    dying: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Copy:
    """A value that goes to the devices of another rank, by its places there and here."""

    source: int
    taken: int
    target: int
    given: int
    dying: tuple[int, ...] = ()


type _Instruction = _Call | _Copy


class AllRanks(Engine):
    """All ranks, on the devices of this process."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._all = _devices_for(prepared.ranks)
        self.ranks = tuple(range(prepared.ranks.ranks))
        self._whole = [_any_values([d for _, d in self.devices(rank)]) for rank in self.ranks]
        readers = [_Reader(prepared, rank) for rank in self.ranks]
        compiled = self._compiled(readers)
        self._instructions = _in_one_order(readers, compiled)
        self._arguments = {reader.rank: reader.arguments for reader in readers}
        self._returned = {reader.rank: reader.returned for reader in readers}
        self._constants = {
            (reader.rank, place): _run(compiled[reader.rank, key], [], self._whole[reader.rank])[0]
            for reader in readers
            for place, key in reader.constants.items()
        }

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
        del arguments
        for step in self._instructions:
            if isinstance(step, _Call):
                taken = [values[step.rank, place] for place in step.taken]
                results = _run(step.executable, taken, self._whole[step.rank])
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
        self._sign([part for listed in results.values() for part in listed[0]])
        return results

    def _compiled(self, readers: Sequence[_Reader]) -> dict[tuple[int, str], Any]:
        """The functions of all ranks, several at a time."""
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


class _Reader:
    """The program of a rank as calls, sends and receives of values in numbered places."""

    def __init__(self, prepared: Prepared, rank: int) -> None:
        self.rank = rank
        program = prepared.ranks.programs[rank]
        block = entry_function(program.module).regions[0].blocks[0]
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
        for place in (*self.returned, *self.constants):
            self.last.pop(place, None)

    def dying(self, number: int) -> tuple[int, ...]:
        """The places that nothing reads behind a step."""
        _, _, taken, given = self.steps[number]
        places = dict.fromkeys((*taken, *given))
        return tuple(place for place in places if self.last.get(place) == number)

    def _place(self, value: ir.Value) -> int:
        self._places[value] = self._count
        self._count += 1
        return self._count - 1

    def _named(self, module: ir.Module) -> str:
        """A module that no function is, by what it says."""
        name = to_text(module)
        self.modules.setdefault(name, module)
        return name

    def _read(self, module: ir.Module, op: ir.Operation) -> None:
        if op.name == BARRIER:
            for result, operand in zip(op.results, op.operands, strict=True):
                if operand in self._places:  # no token
                    self._places[result] = self._places[operand]
        elif op.name == CALL:
            name = callee_name(op)
            if name not in self.modules:
                self.modules[name] = as_module(module, name, self.rank, self._devices)
            taken = tuple(self._places[operand] for operand in op.operands)
            self.steps.append(("call", name, taken, tuple(map(self._place, op.results))))
        elif op.name == CONSTANT:
            self.constants[self._place(op.results[0])] = self._named(module_of(op))
        elif op.name == SEND:
            self.steps.append(("send", _channel(op), (self._places[op.operands[0]],), ()))
        elif op.name == RECV:
            self.steps.append(("receive", _channel(op), (), (self._place(op.results[0]),)))
        elif op.name != AFTER_ALL:
            taken = tuple(self._places[operand] for operand in op.operands)
            given = tuple(map(self._place, op.results))
            self.steps.append(("call", self._named(module_of(op)), taken, given))


def _channel(op: ir.Operation) -> int:
    return bindings.ChannelHandle(op.attributes["channel_handle"]).handle


def _in_one_order(
    readers: Sequence[_Reader], compiled: Mapping[tuple[int, str], Any]
) -> list[_Instruction]:
    """The steps of all ranks in an order in which what is received has been sent."""
    return list(_merged(readers, compiled))


def _merged(
    readers: Sequence[_Reader], compiled: Mapping[tuple[int, str], Any]
) -> Iterator[_Instruction]:
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
                    yield _Call(reader.rank, compiled[reader.rank, named], taken, given, dying)
                elif what == "send":
                    sent.add(named)  # it is there before it is received
                    yield _Copy(reader.rank, taken[0], *ends[named], dying)
                elif named not in sent:
                    break
                at[reader.rank] += 1
        if at == before:
            break
    if any(at[reader.rank] < len(reader.steps) for reader in readers):
        raise ToolError("the ranks wait for each other for ever; check-mpmd says where")

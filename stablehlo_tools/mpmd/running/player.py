"""Runs the ranks of a set together in one process: a send ends with its receive.

A player runs the `main` of its rank op by op and stops at each op that needs another rank. XLA:CPU
compiles the functions that `main` calls, equal ones once (`functions`), for virtual devices. A
`SetPlayer` has a player for each rank, and can run them on any number of inputs.

Only child processes import this module: its import starts JAX's devices, which hold the values.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.loops import constant_integer
from stablehlo_tools.artifacts.artifact import to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostic, ToolError, note
from stablehlo_tools.dialect.names import (
    AFTER_ALL,
    BARRIER,
    CALL,
    COLLECTIVE_PERMUTE,
    CONSTANT,
    RECV,
    SEND,
)
from stablehlo_tools.ir.walk import callee_name, terminator
from stablehlo_tools.mpmd.manifest import FINISH, PREPARE, Manifest, ManifestTransfer, phase_of
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.functions import Parts, any_values, as_module, module_of, run_on
from stablehlo_tools.mpmd.running.localisation import LocalProgram, localise_rank
from stablehlo_tools.mpmd.running.rank_child import element_of, value_of
from stablehlo_tools.mpmd.running.sequential import Played
from stablehlo_tools.schedules.forms import step_of
from stablehlo_tools.schedules.table import Action
from stablehlo_tools.schedules.validator import other_end
from stablehlo_tools.verify.element_types import Array

Pairs = tuple[tuple[int, int], ...]


class SetPlayer:
    """The ranks of a set in this process. XLA skips the passes `skipped`."""

    def __init__(self, ranks: RankSet, skipped: Sequence[str] = bindings.REROUNDING_PASSES) -> None:
        self.manifest = ranks.manifest
        self.machine = Executables(ranks.manifest.devices, skipped)
        self.programs = [localise_rank(ranks, rank) for rank in range(ranks.ranks)]
        self.players = [
            RankPlayer(ranks.manifest, rank, program, self.machine)
            for rank, program in enumerate(self.programs)
        ]
        self.machine.compile_ahead([m for player in self.players for m in player.functions()])

    def run(self, inputs: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Returns the results of each rank's `main` for its arguments. Raises ToolError like
        `play`."""
        for player, program, arrays in zip(self.players, self.programs, inputs, strict=True):
            player.start(program.split_arguments(arrays))
        play(self.manifest, self.players)
        return [
            program.assemble_results(player.results)
            for player, program in zip(self.players, self.programs, strict=True)
        ]


def play(manifest: Manifest, players: Sequence[RankPlayer]) -> None:
    """Runs every rank to its end.

    Raises ToolError if the ranks deadlock, or if a transfer of the manifest did not take place.
    """
    done: set[int] = set()
    while True:
        for player in players:
            player.advance()
        met = _transfers(players)
        done.update(met)
        if not met and not _permute(manifest, players):
            break
    if not all(player.is_done for player in players):
        raise _stuck(players)
    for transfer in manifest.transfers:
        if manifest.form != "permutes" and transfer.channel not in done:
            raise ToolError(
                f"no value was sent on channel {transfer.channel}, which the manifest has for "
                f"{transfer.action} from rank {transfer.source} to rank {transfer.target}"
            )


def _transfers(players: Sequence[RankPlayer]) -> list[int]:
    """Runs each transfer whose two ranks have both reached it. Returns the channels."""
    met: list[int] = []
    for sender in players:
        sent = sender.waiting
        if sent is None or sent.transfer is None or not sent.is_send:
            continue
        receiver = players[sent.transfer.target]
        received = receiver.waiting
        if received is None or received.is_send or received.transfer != sent.transfer:
            continue
        parts = sender.parts(sent.op.operands[0])
        sender.pass_by()
        receiver.pass_by(parts)
        met.append(sent.transfer.channel)
    return met


def _permute(manifest: Manifest, players: Sequence[RankPlayer]) -> bool:
    """Runs the permute that all ranks have reached. Returns False if there is none."""
    waiting = [player.waiting for player in players]
    first = waiting[0]
    if first is None or any(w is None or w.transfer or w.pairs != first.pairs for w in waiting):
        return False
    size = manifest.devices
    sent = [player.parts(w.op.operands[0]) for player, w in zip(players, waiting, strict=True) if w]
    types = {str(w.op.operands[0].type) for w in waiting if w}
    if len(types) > 1:
        raise ToolError(f"a permute of {' and '.join(sorted(types))}", first.op.location)
    for rank, player in enumerate(players):
        assert player.waiting is not None
        parts = player.zeros(player.waiting.op.results[0])
        for source, target in first.pairs:
            if target // size == rank:
                parts[target % size] = sent[source // size][source % size]
        player.pass_by(parts)
    return True


def _stuck(players: Sequence[RankPlayer]) -> ToolError:
    """Returns the error of a deadlock, with the op and the peer that each rank waits for."""
    notes: list[Diagnostic] = []
    for player in players:
        waiting = player.waiting
        if waiting is not None:
            for_whom = "all others"
            if (transfer := waiting.transfer) is not None:
                for_whom = f"rank {transfer.target if waiting.is_send else transfer.source}"
            said = f"rank {player.rank} waits in {waiting} for {for_whom}"
            notes.append(note(said, waiting.op.location))
    done = [str(player.rank) for player in players if player.is_done]
    if done:
        notes.append(note(f"rank{'s' * (len(done) > 1)} {', '.join(done)} finished"))
    return ToolError("the ranks wait for each other forever", notes=tuple(notes))


@dataclass(frozen=True)
class WaitingOp:
    """The op at which a rank needs others: an end of a transfer, or a permute (no transfer)."""

    op: ir.Operation
    pairs: Pairs
    transfer: ManifestTransfer | None = None

    @property
    def is_send(self) -> bool:
        """True if it is the sending end of a transfer."""
        return self.op.name == SEND

    @property
    def end(self) -> str:
        """The name of this end in a schedule, such as `1RECV_F5`; `finish` after the schedule."""
        assert self.transfer is not None, "a permute has no end"
        if self.is_send or not self.transfer.is_scheduled:
            return self.transfer.action
        sent = step_of(self.transfer.action)
        assert isinstance(sent, Action), "a manifest has no transfer of anything else"
        return str(other_end(sent))

    def __str__(self) -> str:
        if self.transfer is None:
            return f"a permute {[list(pair) for pair in self.pairs]}"
        what = "send" if self.is_send else "receive"
        return f"the {what} on channel {self.transfer.channel} ({self.end})"


class RankPlayer:
    """A rank and its position in its program."""

    def __init__(
        self, manifest: Manifest, rank: int, program: LocalProgram, machine: Executables
    ) -> None:
        self.manifest, self.rank, self.program, self.machine = manifest, rank, program, machine
        block = program.block
        self._ops = [view.operation for view in block.operations][:-1]
        self._returned = list(terminator(block).operands)
        # The values whose last use is an op, by its position.
        last: dict[ir.Value, int] = {}
        for position, op in enumerate(self._ops):
            for value in (*op.results, *op.operands):
                last[value] = position
        # Arguments are the caller's, and results are read at the end.
        for value in (*block.arguments, *self._returned):
            last.pop(value, None)
        dying: defaultdict[int, list[ir.Value]] = defaultdict(list)
        for value, position in last.items():
            dying[position].append(value)
        self._last = dying
        self._channels = manifest.of_channel()
        self._modules: dict[str, ir.Module] = {}  # of functions
        self._functions: dict[str, object] = {}  # compiled

    def start(self, inputs: Sequence[Sequence[Array]]) -> None:
        """Returns to the beginning, with these arguments `[argument][device]`."""
        self._position = 0
        self._values: dict[ir.Value, Parts | None] = {
            argument: self.machine.copy_to_devices(parts)
            for argument, parts in zip(self.program.block.arguments, inputs, strict=True)
        }
        self._actions: list[str] = []
        self._peak, self._peak_at = 0, ""
        self.waiting: WaitingOp | None = None

    @property
    def is_done(self) -> bool:
        """True if the program has ended."""
        return self._position == len(self._ops)

    @property
    def results(self) -> list[list[Array]]:
        """The results of the program, `[result][device]`."""
        return [[np.asarray(part) for part in self.parts(value)] for value in self._returned]

    @property
    def played(self) -> Played:
        """The actions so far, and the peak memory."""
        return Played(tuple(self._actions), self._peak, self._peak_at)

    def parts(self, value: ir.Value) -> Parts:
        """Returns the part of a tensor on each device."""
        parts = self._values[value]
        assert parts is not None, "a token has no parts"
        return parts

    def advance(self) -> None:
        """Runs up to the next op that needs another rank, or to the end."""
        while not self.is_done and self.waiting is None:
            op = self._ops[self._position]
            if op.name in (SEND, RECV):
                self._meet(op)
            elif op.name == COLLECTIVE_PERMUTE:
                self.waiting = WaitingOp(op, _pairs(op))
            elif op.name == CALL:
                name = callee_name(op)
                operands = [self.parts(operand) for operand in op.operands]
                phase = phase_of(name)
                if phase is not None:
                    self._actions.append(str(Action(*phase, int(np.asarray(operands[0][0])))))
                elif name == PREPARE or name.startswith(f"{FINISH}_"):
                    self._actions.append(name)
                if name not in self._functions:
                    self._functions[name] = self._compile_function(self._modules[name], op)
                self._give(op, self.machine.run(self._functions[name], operands))
            elif op.name == BARRIER:
                self._give(op, [self._values[operand] for operand in op.operands])
            elif op.name == AFTER_ALL:
                self._give(op, [])
            elif op.name == CONSTANT:
                number = constant_integer(op.results[0])
                # Most are numbers of microbatches, which need no compilation.
                if number is not None and str(op.results[0].type) == "tensor<i32>":
                    parts = [np.array(number, np.int32)] * self.manifest.devices
                    self._give(op, [self.machine.copy_to_devices(parts)])
                else:
                    constant = self._compile_function(module_of(op), op)
                    self._give(op, self.machine.run(constant, []))
            else:
                raise ToolError(f"@main of a rank must not contain {op.name}", op.location)

    def pass_by(self, received: Parts | None = None) -> None:
        """Leaves the op at which the rank waits, with the value received there."""
        assert self.waiting is not None
        waiting, self.waiting = self.waiting, None
        if waiting.transfer is not None and waiting.transfer.tensor == 0:
            self._actions.append(waiting.end)
        self._give(waiting.op, [] if waiting.is_send else [received])

    def zeros(self, value: ir.Value) -> Parts:
        """Returns zeros of a tensor's type on every device, as a permute yields without a
        source."""
        tensor = value_of(str(value.type))
        zeros = np.zeros(tensor.shape, element_of(tensor).dtype)
        return self.machine.copy_to_devices([zeros] * len(self.machine.devices))

    def functions(self) -> list[ir.Module]:
        """Returns the functions that `main` calls as separate modules, and keeps them for the
        calls."""
        for name in dict.fromkeys(callee_name(op) for op in self._ops if op.name == CALL):
            self._modules[name] = as_module(
                self.program.module, name, self.rank, self.manifest.devices
            )
        return list(self._modules.values())

    def _compile_function(self, module: ir.Module, op: ir.Operation) -> object:
        try:
            return self.machine.executable_of(module)
        except Exception as error:  # XLA's own types
            what = f"@{callee_name(op)}" if op.name == CALL else op.name
            raise ToolError(f"XLA:CPU cannot compile {what}: {error}", op.location) from None

    def _meet(self, op: ir.Operation) -> None:
        """Stops at an end of a transfer of this rank. An end that belongs to the other rank (form
        `both-ends`) yields zeros."""
        channel = bindings.ChannelHandle(op.attributes["channel_handle"]).handle
        transfer = self._channels.get(channel)
        if transfer is None:
            raise ToolError(f"{op.name}: the manifest has no channel {channel}", op.location)
        waiting = WaitingOp(op, _pairs(op), transfer)
        self._check(waiting, transfer)
        if self.rank == (transfer.source if waiting.is_send else transfer.target):
            self.waiting = waiting
            return
        if self.manifest.form == "pairs":
            raise ToolError(
                f"{op.name} on channel {channel} is on rank {self.rank}, but the channel goes "
                f"from rank {transfer.source} to rank {transfer.target}",
                op.location,
            )
        self._give(op, [] if waiting.is_send else [self.zeros(op.results[0])])

    def _check(self, waiting: WaitingOp, transfer: ManifestTransfer) -> None:
        op = waiting.op
        carried = op.operands[0] if waiting.is_send else op.results[0]
        if str(carried.type) != transfer.type:
            raise ToolError(
                f"{op.name} on channel {transfer.channel} carries {carried.type}, but the "
                f"manifest has {transfer.type}",
                op.location,
            )
        expected = transfer.pairs(self.manifest.devices)
        if waiting.pairs != expected:
            raise ToolError(
                f"{op.name} on channel {transfer.channel} has pairs "
                f"{[list(pair) for pair in waiting.pairs]}, but the manifest requires "
                f"{[list(pair) for pair in expected]}",
                op.location,
            )

    def _give(self, op: ir.Operation, results: Iterable[Parts | None]) -> None:
        """Completes an op: stores its results, with None for tokens, and frees dead values."""
        given = list(results)
        given += [None] * (len(op.results) - len(given))
        self._values.update(zip(op.results, given, strict=True))
        # Results of a barrier are its operands, so they are counted once.
        held = {
            id(parts[0]): int(parts[0].nbytes)
            for parts in self._values.values()
            if parts is not None
        }
        total = sum(held.values())
        if total > self._peak:
            self._peak = total
            self._peak_at = self._actions[-1] if self._actions else ""
        for value in self._last.get(self._position, ()):
            del self._values[value]
        self._position += 1


def _pairs(op: ir.Operation) -> Pairs:
    numbers = [int(n) for n in ir.DenseIntElementsAttr(op.attributes["source_target_pairs"])]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


class Executables:
    """Compiles modules for `count` devices and caches the executables."""

    def __init__(self, count: int, skipped: Sequence[str]) -> None:
        self.devices = jax.devices()[:count]
        self._skipped = skipped
        self._whole = any_values(self.devices)
        self._compiled: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def executable_of(self, module: ir.Module) -> Any:
        """Returns the executable of a module. Raises the errors of XLA.

        It keeps the program's rounding if possible: see `verify.execution_process`.
        """
        text = to_text(module)
        if text not in self._compiled:
            self._compiled[text] = self._keeping_rounding(bindings.write_bytecode(module))
        return self._compiled[text]

    def compile_ahead(self, modules: Sequence[ir.Module]) -> None:
        """Compiles several modules in parallel. `compiled` raises the errors."""
        codes = {to_text(module): bindings.write_bytecode(module) for module in modules}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {t: pool.submit(self._keeping_rounding, code) for t, code in codes.items()}
        done = {t: future.result() for t, future in futures.items() if not future.exception()}
        self._compiled.update(done)

    def run(self, executable: Any, operands: Sequence[Parts]) -> list[Parts]:
        """Runs an executable of `compiled`. Returns the results; the operands are not changed."""
        made = run_on(executable, operands, self._whole)
        return jax.block_until_ready(made)  # a host function exists only while its program runs

    def copy_to_devices(self, parts: Sequence[Array]) -> Parts:
        """Copies arrays to the devices, one to each."""
        pairs = zip(parts, self.devices, strict=True)
        return [jax.device_put(np.array(part), device) for part, device in pairs]

    def _keeping_rounding(self, code: bytes) -> Any:
        try:
            return self._compile(code, self._skipped)
        except Exception:  # XLA's own types; if the second attempt fails, its error counts
            kept = [name for name in self._skipped if name not in bindings.INDISPENSABLE_PASSES]
            return self._compile(code, kept)

    def _compile(self, code: bytes, skipped: Sequence[str]) -> Any:
        return bindings.compile_for_devices(
            code, 1, len(self.devices), self.devices, partitioned=False, skipped_passes=skipped
        )

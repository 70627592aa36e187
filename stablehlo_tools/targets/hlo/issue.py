"""The asynchronous forms of HLO: issues transfers to streams, as starts and waits of a graph."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf

from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.contention import NONE
from stablehlo_tools.cost.hardware import HostLink
from stablehlo_tools.cost.kernels import WorkKind
from stablehlo_tools.hlo_input.async_forms import (
    ISSUED,
    TRANSFERS,
    AsyncPhase,
    is_issued,
    result_path,
    result_shape,
    wraps_collective,
)
from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.hlo_input.shapes import DEVICE_MEMORY, HOST_MEMORY, Shape, arrays
from stablehlo_tools.overlap.task_graph import Communication, TaskKind, host_copy
from stablehlo_tools.targets.hlo.hlo_collectives import Fused, IssuedCollective, issued_transfer
from stablehlo_tools.targets.hlo.hlo_task_graph import (
    ArrayLeaf,
    Given,
    GraphBuilder,
    Path,
    Value,
    element,
    in_flight,
    leaves,
    paths,
    starts_of,
    tasks_of,
    value_of_shape,
)
from stablehlo_tools.targets.hlo.module import HloComputation, HloModule
from stablehlo_tools.targets.hlo.work import work

ASYNC_COPIES = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice"})
ASYNC_KERNELS = frozenset({"async", "fusion", "call", "custom-call"})
HOST = frozenset({"infeed", "outfeed"})
_WRAPPERS = frozenset({"call", *(f"{kernel}-start" for kernel in ASYNC_KERNELS)})

_COPY_STREAM = "dma"
_KERNEL_STREAM = "async"
_HOST_STREAM = "host"
_MEASURED = HostLink(inf, inf)  # for copies with a measured time
_RECEIVING = "recv"
_DOMAIN = re.compile(r'"communication_domain":"COLLECTIVE_COMMUNICATION_DOMAIN_(\w+)"')


@dataclass
class Issuer:
    """Issues the starts of one computation, and waits for them.

    `unpaired` are the waits of a loop's body for starts of the previous iteration: the task, and
    the path of the awaited value in the loop's tuple.
    """

    module: HloModule
    clock: Clock
    builder: GraphBuilder
    computation: HloComputation
    unpaired: list[tuple[int, Path]] = field(default_factory=list[tuple[int, Path]])
    _chains: dict[str, list[Value]] = field(default_factory=dict[str, list[Value]])  # in flight

    def names(self, *instructions: HloInstruction) -> list[str]:
        """Returns the names for a look-up of measured times: names, op_names, source lines."""
        names = [instruction.name for instruction in instructions]
        names += [name for i in instructions if (name := i.op_name)]
        return names + [place for i in instructions if (place := self.module.place(i))]

    def _measured_ns(self, instruction: HloInstruction) -> float | None:
        """Returns the measured ns of an instruction; None if there are none."""
        measured = self.clock.measured
        return None if measured is None else measured.ns(self.names(instruction))

    def _time_copy(self, start: HloInstruction) -> tuple[Communication, float]:
        """A copy by the copy engines: bytes over the memory's bandwidth, those on chip for free.

        Raises ToolError for a copy to or from the host's memory that was not measured, and that the
        hardware has no figure for.
        """
        results = arrays(result_shape(start))
        operand = self.computation.by_name[start.operands[0]].results
        size = sum(array.padded_bytes for array in results)
        if self.touches_host(start):
            return self.between_memories(start)
        known = self._measured_ns(start)
        moved = size * sum(
            any(array.space == DEVICE_MEMORY for array in side) for side in (results, operand)
        )
        sent = Communication(kind="copy", stream=_COPY_STREAM, bytes=float(size))
        return sent, moved / self.clock.hardware.memory_rate if known is None else known

    def touches_host(self, instruction: HloInstruction) -> bool:
        """Returns True if an instruction reads or writes the host's memory."""
        read = (a for name in instruction.operands for a in self.computation.by_name[name].results)
        return any(a.space == HOST_MEMORY for a in (*read, *arrays(result_shape(instruction))))

    def between_memories(self, instruction: HloInstruction) -> tuple[Communication, float]:
        """Returns a copy between host and device memory, and its ns.

        Its bytes are those that the device reads or writes. Raises ToolError if it was not measured
        and the hardware has no figures for the link.
        """
        known, link = self._measured_ns(instruction), self.clock.hardware.host
        if link is None and known is None:
            raise instruction.error("the time of a copy to or from the host is unknown")
        results = arrays(result_shape(instruction))
        to_host = any(array.space == HOST_MEMORY for array in results)
        read = [a for name in instruction.operands for a in self.computation.by_name[name].results]
        moved = [a for a in (read if to_host else results) if a.space == DEVICE_MEMORY]
        size = float(sum(array.padded_bytes for array in moved))
        sent, ns = host_copy(size, link or _MEASURED, to_host=to_host)
        return sent, ns if known is None else known

    def time_host_transfer(self, instruction: HloInstruction) -> tuple[Communication, float]:
        """Returns a send to or a recv from the host, and its ns. Raises ToolError if unmeasured."""
        known = self._measured_ns(instruction)
        if known is None:
            raise instruction.error("the time of a transfer to or from the host is unknown")
        size = sum(array.bytes for array in arrays(result_shape(instruction)))
        sent = Communication(kind=instruction.opcode, stream=_HOST_STREAM, bytes=float(size))
        return sent, known

    def _asynchronous(self, start: HloInstruction) -> tuple[Communication, float]:
        """Returns an asynchronous kernel or host copy, and its ns."""
        if self.touches_host(start):
            return self.between_memories(start)
        if start.opcode == "fusion-start":
            parts = [work(start, self.computation, self.module)]
        else:
            parts = [
                work(inner, called, self.module)
                for inner, called in self.module.expand(start, lambda i: i.opcode in _WRAPPERS)
                if not inner.opcode.endswith("-done")
            ]
        moved = sum(part.bytes for part in parts)
        known = self._measured_ns(start)
        ns = sum(self.clock.kernel(part, ()) for part in parts) if known is None else known
        only_copies = all(part.kind in (WorkKind.COPY, WorkKind.FREE) for part in parts)
        stream = _COPY_STREAM if only_copies else _KERNEL_STREAM
        dearest = max(parts, key=lambda part: (part.flops, part.bytes), default=None)
        kind = WorkKind.OTHER if dearest is None else dearest.kind
        return Communication(kind=kind.value, stream=stream, bytes=moved), ns

    def issue(
        self,
        instruction: HloInstruction,
        sent: Communication,
        ns: float,
        shape: Shape,
        operands: list[Value],
        given: Given,
    ) -> Value:
        """Adds a start; returns its value, in flight."""
        value = self.builder.produce(
            TaskKind.COLLECTIVE_START,
            instruction,
            shape,
            given,
            views=False,
            ns=ns,
            deps=tasks_of(*operands),
            communication=sent,
            place=self.module.origin(instruction),
        )
        return in_flight(value, (len(self.builder.tasks) - 1,))

    def wait(self, instruction: HloInstruction, flying: Value, shape: Shape) -> Value:
        """Adds a wait for each start of a value in flight. Raises ToolError if there is none."""
        starts = starts_of(flying)
        given = {path: leaf.storages for path, leaf in paths(flying)}
        if not starts:
            carried = next((leaf.carried for leaf in leaves(flying)), None)
            if carried is None:
                raise instruction.error("it waits for an op that was not started")
            self.unpaired.append((len(self.builder.tasks), carried))
        for start in starts[:-1]:
            self.builder.add(TaskKind.WAIT, instruction, deps=(start,), start=start)
        last = starts[-1] if starts else None
        deps = tasks_of(flying) if last is None else (last,)
        return self.builder.produce(TaskKind.WAIT, instruction, shape, given, deps=deps, start=last)

    def collective(self, instruction: HloInstruction, operands: list[Value], given: Given) -> Value:
        """Adds the start of a collective, a send or a recv; returns its results, in flight."""
        shape = result_shape(instruction)
        if "is_host_transfer=true" in instruction.line:  # the host is the other end
            passed, ns = self.time_host_transfer(instruction)
            return _whole(instruction, self.issue(instruction, passed, ns, shape, operands, given))
        sent = issued_transfer(instruction, self.computation, self.module)
        return _whole(instruction, self._sent(instruction, sent, shape, operands, given))

    def done(self, instruction: HloInstruction, flying: Value) -> Value:
        """Adds the wait of any `xxx-done` instruction. Raises ToolError if it has no start."""
        opcode = instruction.opcode.removesuffix("-done")
        opcode += "" if opcode in TRANSFERS else "-start"
        started = self.computation.by_name[instruction.operands[0]].result
        result = element(flying, result_path(opcode, started))
        return self.wait(instruction, flying if result is None else result, instruction.result)

    def start(self, instruction: HloInstruction, operands: list[Value], given: Given) -> Value:
        """Adds any `xxx-start` instruction. Raises ToolError if its form is not known."""
        base = instruction.opcode.removesuffix("-start")
        if base in ISSUED:
            return self.collective(instruction, operands, given)
        shape = result_shape(instruction)
        if base in ASYNC_COPIES:
            sent, ns = self._time_copy(instruction)
            return _whole(instruction, self.issue(instruction, sent, ns, shape, operands, given))
        if base not in ASYNC_KERNELS:
            raise instruction.error("an unknown asynchronous form")
        expanded = self.module.expand(instruction, wraps_collective)
        wrapped = [pair for pair in expanded if is_issued(pair[0])]
        if not wrapped:
            sent, ns = self._asynchronous(instruction)
            return _whole(instruction, self.issue(instruction, sent, ns, shape, operands, given))
        started: list[Value] = []
        for inner, computation in wrapped:
            inner_sent = issued_transfer(inner, computation, self.module)
            held = result_shape(inner) if started else shape  # the first start holds it all
            started.append(self._sent(instruction, inner_sent, held, operands, given))
        return _whole(instruction, in_flight(started[0], starts_of(tuple(started))))

    def issue_fusion(
        self, fusion: HloInstruction, part: Fused, operands: list[Value], shape: Shape
    ) -> Value:
        """Adds a fusion's phase of a collective. Raises ToolError for a done without a start."""
        if part.phase is AsyncPhase.DONE:
            opened = self._chains.get(part.chain)
            if not opened:
                raise fusion.error(f"it finishes {part.collective.name}, which was not started")
            return self.wait(fusion, opened.pop(0), shape)
        sent = issued_transfer(part.collective, part.computation, self.module)
        if part.phase is AsyncPhase.SYNC:
            return self.wait(fusion, self._sent(fusion, sent, shape, operands, {}), shape)
        flying = self._sent(fusion, sent, part.collective.result, operands, {})
        self._chains.setdefault(part.chain, []).append(flying)
        return flying

    def _sent(
        self,
        instruction: HloInstruction,
        sent: IssuedCollective,
        shape: Shape,
        operands: list[Value],
        given: Given,
    ) -> Value:
        """Issues a collective on the stream of its links.

        A recv is the other end of a send and lasts as long. It has its own stream and no link,
        because a link carries both directions.
        """
        time = self.clock.collective(sent.transfer, self.names(instruction, sent.instruction))
        receives = sent.instruction.opcode == _RECEIVING
        links = () if receives else time.links
        domain = _DOMAIN.search(sent.instruction.line)  # assigned by XLA:GPU
        communication = Communication(
            kind=sent.transfer.kind,
            stream="+".join(links) or (_RECEIVING if receives else sent.transfer.kind),
            bytes=sent.transfer.bytes,
            latency_ns=time.latency_ns,
            links=links,
            groups=sent.transfer.groups,
            axes=sent.axes,
            dtype=sent.dtype,
            reduction=sent.reduction,
            algorithm=time.algorithm,
            domain=domain[1].lower() if domain and domain[1] != "UNSPECIFIED" else "",
            contention=NONE if receives else self.clock.contention(sent.transfer, time),
        )
        return self.issue(instruction, communication, time.ns, shape, operands, given)


def _whole(start: HloInstruction, result: Value) -> Value:
    """Returns the whole value of a start; only the result part has storages."""
    at = result_path(start.opcode, start.result)
    starts = starts_of(result)
    whole = value_of_shape(start.result, lambda _array, _path: ArrayLeaf(starts[0], (), starts))
    if not at or isinstance(whole, ArrayLeaf):
        return result
    return tuple(result if index == at[0] else part for index, part in enumerate(whole))

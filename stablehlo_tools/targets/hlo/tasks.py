"""Scheduled HLO text as a task graph: what one device runs, in the order in which it is issued.

A fusion is one kernel; a `while` is a loop task with its body; of a `conditional` the dearest
branch stands there, and a `call` is opened. A collective in any form that `scheduled_hlo` lists is
a start and a wait; copies that XLA:TPU prefetches are starts and waits on a stream "dma", kernels
that XLA:GPU runs asynchronously on a stream "async".

Storages follow XLA's buffers: tuples, bitcasts and loops pass them on, updates write in place, and
what a computation returns is written where the caller wants it (donated inputs, a loop's tuple).
They count in device memory only: arrays in XLA:TPU's vector memory have no bytes. What is returned
and not donated has its memory from the start, as the runtimes set it aside: inputs "result".
"""

from __future__ import annotations

from stablehlo_tools.cost.clock import Clock, Measured
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.targets.hlo.aliases import homes, written_by
from stablehlo_tools.targets.hlo.graph import GraphBuilder
from stablehlo_tools.targets.hlo.module import HloModule, parse_module
from stablehlo_tools.targets.hlo.schedule import ScheduleReader
from stablehlo_tools.targets.hlo.shapes import Array
from stablehlo_tools.targets.hlo.values import Given, Leaf, Path, Value, element, shaped, tasks_of

# What is written within these is not traced to where they return it; constants have no task.
_OPENED = frozenset({"call", "conditional", "constant"})


def hlo_task_graph(
    text: str, hardware: Hardware, devices: int, measured: Measured | None = None
) -> TaskGraph:
    """The task graph of a scheduled module on one of `devices` devices.

    `measured` times go before the model's; it is asked for an instruction's name and its op_name.
    Raises ToolError, naming the instruction, for text that is no scheduled module and for what no
    time is known for.
    """
    module = parse_module(text)
    clock = Clock(hardware, devices, measured)
    builder = GraphBuilder(module)
    arguments = _arguments(module, builder)
    entry = module.entry
    places = _results(module, builder, _donated(module, arguments))
    placed = homes(entry, places, module)
    result = ScheduleReader(module, clock, builder, entry, arguments, placed).read()
    builder.add(TaskKind.OUTPUT, None, deps=tasks_of(result), name="output", op="output")
    return builder.graph()


def _arguments(module: HloModule, builder: GraphBuilder) -> list[Value]:
    """The inputs; those that are donated do not persist."""
    donated: dict[int, list[Path]] = {}
    for number, path in module.donated.values():
        donated.setdefault(number, []).append(path)
    return [
        builder.inputs(parameter, persistent=True, returned=donated.get(number, []))
        for number, parameter in enumerate(module.entry.parameters)
    ]


def _donated(module: HloModule, arguments: list[Value]) -> Given:
    """The parts of the result that are written into the memory of an input."""
    places: dict[Path, tuple[int, ...]] = {}
    for output, (number, path) in module.donated.items():
        given = element(arguments[number], path) if number < len(arguments) else None
        if isinstance(given, Leaf):
            places[output] = given.storages
    return places


def _results(module: HloModule, builder: GraphBuilder, donated: Given) -> Given:
    """Where the parts of the result are written: into donated inputs, else into their own memory.

    The runtime sets the latter aside before the program begins.
    """
    places = dict(donated)

    def place(array: Array, path: Path) -> Value:
        source = written_by(module.entry, path, module)
        if path not in donated and source is not None and source[0].opcode not in _OPENED:
            places[path] = builder.result(array, path)
        return Leaf()

    shaped(module.entry.root.result, place)
    return places

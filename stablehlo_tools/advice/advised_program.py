"""Times a program to advise on, as compiled and after changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stablehlo_tools.advice.collective_uses import (
    AddedUp,
    added_up,
    narrower_after,
    narrower_before,
)
from stablehlo_tools.advice.compiler_effects import (
    BY_GPU,
    BY_TPU,
    Path,
    Place,
    exposed_of,
    replace_task_times,
    simulate_as_compiled,
)
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.partitioner_work import EXPLICIT, left_to_the_partitioner
from stablehlo_tools.analysis.tasks.graph import TracedGraph, traced_task_graph
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.overlap.bounds import iterations
from stablehlo_tools.overlap.task_graph import Communication, TaskGraph
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import Simulation
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.report.document import Advice
from stablehlo_tools.report.exposure import explicit_collectives

LEAST_SHARE = 0.01  # of the total time, or of the device's memory


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective of the program: number of runs, ns of one, and exposed ns of all."""

    path: Path
    task: int
    op: ir.Operation
    sent: Communication
    times: int
    each_ns: float
    exposed_ns: float

    @property
    def ns(self) -> float:
        """The time of all runs."""
        return self.times * self.each_ns


class AdvisedProgram:
    """A program to advise on: `given` as exported, `explicit` with explicit collectives."""

    def __init__(
        self, given: Artifact, explicit: Artifact, clock: Clock, least: float = LEAST_SHARE
    ) -> None:
        self.given = given
        self.clock = clock
        self.least = least
        self._compiler = BY_TPU if clock.hardware.is_torus else BY_GPU
        self.explicit = explicit.copy()
        inline_all_calls(self.explicit.module)
        self.facts = ModuleFacts.from_module(self.explicit.module)
        self.traced: TracedGraph = traced_task_graph(self.explicit.module, clock, given.name, [])
        spared = {
            (c.path, c.task): ns
            for c in _collectives(self.traced, self.traced.graph, (), 1, {})
            if (ns := self._narrowed_or_sunk_ns(c)) is not None
        }
        self.graph: TaskGraph = replace_task_times(self.traced.graph, spared)
        self._after: dict[str, AdvisedProgram | None] = {}

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated run of the program as compiled."""
        return self._simulate_graph(self.graph)

    @property
    def total_ns(self) -> float:
        """The time of that run."""
        return self.simulation.total_ns

    @cached_property
    def peak_bytes(self) -> float:
        """The most memory alive at once, in the order of the text."""
        return memory_profile(self.graph).peak_bytes

    @property
    def capacity(self) -> float:
        """The device's memory, in bytes."""
        return self.clock.hardware.memory_bytes

    def is_worth(self, ns: float) -> bool:
        """Returns True if a time is at least the share `least` of the total."""
        return ns > 0 and ns >= self.least * self.total_ns

    def retimed_ns(self, ns: Mapping[Place, float], *, in_flight: int = 1) -> float:
        """Returns the total with other times of some tasks and `in_flight` collectives at once."""
        return self._simulate_graph(replace_task_times(self.graph, ns), in_flight).total_ns

    def _simulate_graph(self, graph: TaskGraph, in_flight: int = 1) -> Simulation:
        return simulate_as_compiled(graph, in_flight, is_torus=self.clock.hardware.is_torus)

    def transfer_ns(self, collective: CollectiveCost, share: float) -> float:
        """Returns the time of one run of a collective with this share of its bytes."""
        sent = collective.sent
        transfer = DeviceTransfer(sent.kind, sent.bytes * share, sent.groups)
        return self.clock.collective(transfer, ()).ns

    @cached_property
    def collectives(self) -> list[CollectiveCost]:
        """Every collective of the program, in the order of the graph."""
        exposed = exposed_of(self.simulation.run)
        return list(_collectives(self.traced, self.graph, (), 1, exposed))

    def place(self, op: ir.Operation) -> str:
        """Returns the source line of an op, as text."""
        return to_place(op.location).render(self.given.name)

    @cached_property
    def _partitioning(self) -> str:
        """The passes that make the collectives explicit; "" if they are."""
        return "" if left_to_the_partitioner(self.given.module) is None else EXPLICIT

    def pipeline(self, steps: str, *, before_partition: bool = False) -> str:
        """Returns a pass pipeline for the given artifact that ends or begins with these steps."""
        ordered = (steps, self._partitioning) if before_partition else (self._partitioning, steps)
        return ",".join(filter(None, ordered))

    def after(self, steps: str) -> AdvisedProgram | None:
        """Returns the explicit program after these passes; None if they refuse it. Cached."""
        if steps not in self._after:
            copy = self.explicit.copy()
            try:
                run_pipeline(copy, Pipeline.parse(steps))
                self._after[steps] = AdvisedProgram(self.given, copy, self.clock, self.least)
            except ToolError:
                self._after[steps] = None
        return self._after[steps]

    def takes(self, pipeline: str) -> bool:
        """Returns True if an advised pipeline accepts the given artifact.

        Advice is for the program as a compiler partitions it. `partition` may divide it
        differently, and a pass after it may then refuse it.
        """
        steps = pipeline.removeprefix(f"{self._partitioning},")
        if not self._partitioning or steps == pipeline:
            return True
        try:
            return self.as_advised.after(steps) is not None
        except ToolError:
            return False

    @cached_property
    def as_advised(self) -> AdvisedProgram:
        """The program that the steps of an advised pipeline begin with: as `partition` divides
        it, if its collectives are not explicit. Raises ToolError if `partition` refuses it."""
        if not self._partitioning:
            return self
        copy = self.given.copy()
        run_pipeline(copy, Pipeline.parse(self._partitioning))
        return AdvisedProgram(self.given, copy, self.clock, self.least)

    def donating(self, arguments: Sequence[int]) -> AdvisedProgram:
        """Returns the program with these arguments donated."""
        copy = self.explicit.copy()
        main = entry_function(copy.module)
        context = copy.module.context
        count = len(Function(main).body.arguments)
        given = main.attributes.get("arg_attrs")
        listed = list(ir.ArrayAttr(given)) if given is not None else []
        attributes = list(map(ir.DictAttr, listed)) or [ir.DictAttr.get({}, context)] * count
        for number in arguments:
            entries = {entry.name: entry.attr for entry in attributes[number]}
            donor = {**entries, "jax.buffer_donor": ir.BoolAttr.get(True, context)}
            attributes[number] = ir.DictAttr.get(donor, context)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes, context)
        return AdvisedProgram(self.given, copy, self.clock, self.least)

    def partitioned_after(self, edit: Callable[[ir.Module], object]) -> AdvisedProgram | None:
        """Returns the program that is edited before it is partitioned.

        None if the edit or the partitioner refuses it.
        """
        copy = self.given.copy()
        try:
            edit(copy.module)
            explicit, _ = explicit_collectives(copy)
            if left_to_the_partitioner(explicit.module) is not None:
                return None
            return AdvisedProgram(self.given, explicit, self.clock, self.least)
        except ToolError:
            return None

    def advice(
        self,
        cause_id: str,
        gain_ns: float,
        cause: str,
        place: str,
        remedy: str,
        *,
        pipeline: str | None = None,
        gain_bytes: float = 0.0,
    ) -> Advice:
        """Creates an item; its share is of the total time or of the device's memory, the larger."""
        of_time = gain_ns / self.total_ns if self.total_ns else 0.0
        share = max(of_time, gain_bytes / self.capacity, 0.0)
        return Advice(cause_id, gain_ns, gain_bytes, share, cause, place, remedy, pipeline)

    def is_sunk(self, collective: CollectiveCost) -> bool:
        """Returns True if the compiler sinks a reduction out of the loop that accumulates it."""
        kind = collective.sent.kind
        if kind == "reduce_scatter" and self._partitioning:
            return False  # the compiler's partitioner creates it after the pass that would sink it
        return kind in self._compiler.sunk and added_up(collective.op) is AddedUp.DIRECTLY

    def is_narrowed(self, collective: CollectiveCost) -> bool:
        """Returns True if the compiler sends the narrower type that values have before or after."""
        kind, op = collective.sent.kind, collective.op
        before, after = self._compiler.narrowed_before, self._compiler.narrowed_after
        return (kind in before and narrower_before(op) is not None) or (
            kind in after and narrower_after(op) is not None
        )

    def _narrowed_or_sunk_ns(self, collective: CollectiveCost) -> float | None:
        """Returns the mean time of a run if the compiler narrows or sinks it; else None."""
        if self.is_narrowed(collective):
            return self.transfer_ns(collective, 0.5)
        graph, trips = self.traced.graph, 1
        for task in collective.path:
            loop = graph.tasks[task].loop
            assert loop is not None, "a path leads through loops"
            graph, trips = loop.body, iterations(loop)
        return collective.each_ns / trips if trips > 1 and self.is_sunk(collective) else None


def _collectives(
    traced: TracedGraph, graph: TaskGraph, path: Path, times: int, exposed: Mapping[Place, float]
) -> Iterator[CollectiveCost]:
    """Yields a graph's collectives. Those not in `exposed` are synchronous, so fully exposed."""
    for task in graph.tasks:
        if task.loop is not None:
            runs, inside = times * iterations(task.loop), (*path, task.id)
            body = traced.bodies[task.id]
            yield from _collectives(body, task.loop.body, inside, runs, exposed)
        elif task.communication is not None and task.communication.is_collective:
            op, sent = traced.ops[task.id][-1], task.communication
            late = exposed.get((path, task.id), times * task.ns)
            yield CollectiveCost(path, task.id, op, sent, times, task.ns, late)

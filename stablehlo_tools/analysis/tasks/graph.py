"""Builds the task graph of a module, in program order.

A collective starts at its place in the program. The wait comes before the first kernel or
collective that needs its result. Views, including barriers, need no wait. An async pair waits at
its `async_done`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.rendezvous import is_host_transfer
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.in_place import body_in_place, program_in_place, read_in_step
from stablehlo_tools.analysis.tasks.kernel_groups import (
    XLA_GPU,
    XLA_TPU,
    from_memory,
    fuse,
    kernel_work,
    members_of,
    size_of,
    users_of,
)
from stablehlo_tools.analysis.tasks.mesh_axes import axes_of
from stablehlo_tools.analysis.tasks.nodes import KernelRole, NodeBody, Ref, TaskNode
from stablehlo_tools.analysis.tasks.op_work import transfer_of
from stablehlo_tools.analysis.tasks.reader import drop_dead_carries, live_nodes, read_program
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.clock import Clock
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.kernels import KernelWork, WorkKind
from stablehlo_tools.diagnostics import Place, ToolError, to_place
from stablehlo_tools.dialect.custom_calls import kernel_name, target_of
from stablehlo_tools.dialect.frontend_attributes import communication_domain
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.overlap.compilers.expected import Expected, predict_run
from stablehlo_tools.overlap.task_graph import (
    COLLECTIVES,
    Communication,
    Task,
    TaskGraph,
    TaskKind,
    TaskLoop,
    host_copy,
)

_WRITERS = frozenset({KernelRole.UPDATE, KernelRole.LOOP, KernelRole.KERNEL})


def settle_overwriting(nodes: Mapping[int, TaskNode], users: Sequence[Sequence[int]]) -> None:
    """Gives updates and changed carries their own storages if the old value is still needed.

    It is needed if it is an argument that was not donated, if the program returns it, or if a later
    op reads it. An update that cannot be in place reads and writes the whole array.
    """
    for node in nodes.values():
        if node.role not in _WRITERS or not node.passes:
            continue
        # Several results may write into one value, for example carries that start from the same
        # zeros. Only the first of them gets its storage.
        kept: list[Ref | None] = []
        written: set[Ref] = set()
        for number, ref in enumerate(node.passes):
            # An invariant operand of a loop does not change.
            is_kept = node.body is not None and (
                node.body.carries[number][1] == (node.body.carries[number][0], 0)
            )
            if ref is None or is_kept:
                kept.append(ref)
            elif ref in written or not _is_last(node, ref, nodes, users):
                kept.append(None)
            else:
                written.add(ref)
                kept.append(ref)
        if node.role is KernelRole.LOOP:
            node.copied = sum(
                size / 2 if nodes[before[0]].role is KernelRole.CHEAP else size  # written, not read
                for size, before, after in zip(node.result_bytes, node.passes, kept, strict=False)
                if before is not None and after is None
            )
        if None in kept and node.role is not KernelRole.LOOP:
            node.passes, node.reads = (), ()
        else:
            node.passes = tuple(kept)


def _is_last(
    node: TaskNode, ref: Ref, nodes: Mapping[int, TaskNode], users: Sequence[Sequence[int]]
) -> bool:
    """Returns True if no later node reads a value, or a value that it is a view of."""
    step: Ref | None = ref
    while step is not None:
        source = nodes[step[0]]
        if source.role is KernelRole.CHEAP and not source.made_of:
            return True  # each reader has its own
        if source.role is KernelRole.INPUT and source.persistent:
            return False
        if any((user > node.index and step in nodes[user].sources) for user in users[step[0]]):
            return False
        step = source.passes[step[1]] if step[1] < len(source.passes) else None
    return True


_TOGETHER = 2  # results of a barrier that share a view


def module_task_graph(module: ir.Module, clock: Clock, input_name: str) -> TaskGraph:
    """Returns the task graph of one device, for a module with explicit collectives.

    Raises ToolError if the module cannot be timed.
    """
    return traced_task_graph(module, clock, input_name).graph


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A task graph and the ops of each task, in program order.

    A wait has no ops. `bodies` are the graphs of its loops, by task.
    """

    graph: TaskGraph
    ops: Sequence[Sequence[ir.Operation]]
    bodies: Mapping[int, TracedGraph]


def traced_task_graph(
    module: ir.Module, clock: Clock, input_name: str, notes: list[str] | None = None
) -> TracedGraph:
    """Returns the graph of `module_task_graph`, with the ops of the module that it came from.

    Adds a line to `notes` for everything that was left out.
    """
    facts = ModuleFacts.from_module(module, find_collectives(module))
    body = read_program(module, input_name, tiled=clock.hardware.is_torus)
    if notes is not None:
        notes += body.notes
    return _BodyTasks(_TaskGraphBuilder(facts, clock, input_name), body).build_graph(in_loop=False)


class _TaskGraphBuilder:
    """Builds the graphs of a program's bodies, with one cost model."""

    def __init__(self, facts: ModuleFacts, clock: Clock, input_name: str) -> None:
        self.facts = facts
        self.clock = clock
        self.input_name = input_name
        self._places: dict[ir.Location, Place] = {}
        self._axes: dict[ProcessGroups, tuple[str, ...]] = {}

    def axes(self, groups: ProcessGroups) -> tuple[str, ...]:
        """Returns the mesh axes that groups run along."""
        if groups not in self._axes:
            self._axes[groups] = axes_of(groups, self.facts.meshes)
        return self._axes[groups]

    def place(self, node: TaskNode) -> Place:
        """Returns the source location of a node."""
        location = node.location
        if location is None:
            return Place()
        if location not in self._places:
            self._places[location] = to_place(location)
        return self._places[location]


class _BodyTasks:
    """Emits the tasks of one body, kernel by kernel."""

    def __init__(self, builder: _TaskGraphBuilder, body: NodeBody) -> None:
        self._builder = builder
        self._clock = builder.clock
        self._body = body
        self._nodes = body.nodes
        kept = live_nodes(body.nodes)
        self._live = [node for node in body.nodes if node.index in kept]
        self._by_index = {node.index: node for node in self._live}
        self._users = users_of(self._live, len(body.nodes))
        self._tasks: list[Task] = []
        self._sizes: list[float] = []
        self._anew: frozenset[int] = frozenset()
        self._decision: int | None = None  # the task that computes a loop's condition
        self._task_of: dict[int, int] = {}  # by node
        self._view_of: dict[Ref, int] = {}  # of results that have a task of their own
        self._storages: dict[Ref, tuple[int, ...]] = {}
        self._pending: dict[int, frozenset[int]] = {}  # starts that a start or view depends on
        self._waits: dict[int, int] = {}  # by start
        self._over: dict[int, tuple[int, ...]] = {}  # storages that a storage may be written over
        self._ops: dict[int, list[ir.Operation]] = {}
        self._loops: dict[int, TracedGraph] = {}

    def build_graph(self, *, in_loop: bool) -> TracedGraph:
        """Returns the graph; results of a loop's body use storages of the loop."""
        settle_overwriting(self._by_index, self._users)
        fusing = XLA_TPU if self._clock.hardware.is_torus else XLA_GPU
        fusion = fuse(self._by_index, self._users, fusing)
        self._anew = fusion.anew
        for kernel in fusion.kernels:
            self._emit(kernel)
        if in_loop:
            self._copy_what_comes_early()
            carried = {  # from carries' storages in the next iteration to those in this one
                after: before
                for argument, result in self._body.carries
                for before in self._storages.get((argument, 0), ())
                for after in self._storages.get(result, ())
                if after != before
            }
            graph = body_in_place(TaskGraph(self._tasks, self._sizes), self._over, carried)
        else:
            whole, is_torus = TaskGraph(self._tasks, self._sizes), self._clock.hardware.is_torus
            graph = program_in_place(whole, self._over, set_aside=not is_torus)
        ops = [self._ops.get(task.id, []) for task in graph.tasks]
        return TracedGraph(graph, ops, self._loops)

    def _emit(self, kernel: Sequence[TaskNode]) -> None:
        root = kernel[-1]
        is_sent = root.collective is not None and root.name in COLLECTIVES
        if root.collective is not None and is_sent and not is_host_transfer(root.collective):
            self._collective(root, root.collective)
        elif root.role is KernelRole.HOST_COPY:
            self._host_copy(root)
        elif root.role is KernelRole.LOOP:
            self._loop(root)
        elif root.role is KernelRole.INPUT:
            self._own_storages(root)
            self._add(TaskKind.INPUT, kernel, (), persistent=root.persistent)
        elif root.role is KernelRole.OUTPUT:
            returned = [s for source in root.sources for s in self._storages.get(source, ())]
            deps = self._ready(self._deps(kernel))
            self._add(TaskKind.OUTPUT, kernel, deps, storages=returned)
        elif root.role is KernelRole.DONE:
            assert root.start is not None, "a done has its start"
            self._storages[root.index, 0] = self._storages.get(root.start, ())
            self._task_of[root.index] = self._ready([self._task_at(root.start)])[-1]
        elif root.role is KernelRole.CHEAP:
            return  # emitted when first read from memory, if at all
        else:
            members = members_of(kernel, self._by_index, self._anew)
            if self._is_view(members):
                self._view(members)
            else:
                self._compute(kernel, members)

    def _is_view(self, members: Sequence[TaskNode]) -> bool:
        root = members[-1]
        if root.role in (KernelRole.VIEW, KernelRole.NOTHING):
            return True
        if all(node.role is KernelRole.RESHAPE for node in members):
            return True
        moved = all(node.role is KernelRole.RESHAPE or node.name == "transpose" for node in members)
        read_by = [self._nodes[u] for u in self._users[root.index]]
        return moved and bool(read_by) and all(u.kind is WorkKind.MATMUL for u in read_by)

    def _view(self, members: Sequence[TaskNode]) -> None:
        root = members[-1]
        if root.role is KernelRole.NOTHING:
            self._add(TaskKind.VIEW, members, (), storages=())
            return
        deps = self._ready(self._deps(members), waits=False)
        inside = {node.index for node in members}
        outside = [s for node in members for s in node.sources if s[0] not in inside]
        for number in range(len(root.result_bytes)):
            passed = root.passes[number] if len(members) == 1 and root.passes else None
            self._storages[root.index, number] = self._storages.get(passed or outside[0], ())
        split = len(root.result_bytes) > _TOGETHER
        self._add(TaskKind.VIEW, members, deps, storages=() if split else None)
        if split:
            self._split(root, [self._task_at(source) for source in root.sources])

    def _split(self, root: TaskNode, sources: Sequence[int]) -> None:
        """Gives each result its own view, so that none keeps the others' storages alive."""
        whole = self._task_of[root.index]
        for number in range(len(root.result_bytes)):
            deps = self._ready([whole, *sources[number : number + 1]], waits=False)
            storages = self._storages.get((root.index, number), ())
            self._view_of[root.index, number] = self._add(
                TaskKind.VIEW, [root], sorted(set(deps)), storages=storages, places=False
            )

    def _compute(self, kernel: Sequence[TaskNode], members: Sequence[TaskNode]) -> None:
        inside = {node.index for node in kernel}
        written = [  # nodes that another kernel reads from memory
            node
            for node in kernel
            if node is kernel[-1]
            or any(u not in inside and u not in self._anew for u in self._users[node.index])
        ]
        deps = self._ready(self._deps(members))
        work = kernel_work(members, written, self._by_index)
        for node in written:
            self._own_storages(node)
        for index, refs in read_in_step(members, written, self._by_index).items():
            self._may_overwrite((index, 0), refs)
        ns = self._clock.kernel(work, self._names(kernel))
        label = _label(members, self._builder.place(kernel[-1]))
        shares = self._clock.shares(work)
        self._add(TaskKind.COMPUTE, kernel, deps, ns=ns, shares=shares, label=label)

    def _collective(self, root: TaskNode, collective: Collective) -> None:
        groups = self._builder.facts.groups(collective) or ()
        transfer = transfer_of(collective, groups)
        time = self._clock.collective(transfer, self._names([root]))
        deps = self._ready(self._deps([root]))
        self._own_storages(root)
        if root.name == "all_reduce":
            for number, operand in enumerate(root.sources[: len(root.result_bytes)]):
                self._may_overwrite((root.index, number), [operand])
        task = self._add(
            TaskKind.COLLECTIVE_START,
            [root],
            deps,
            ns=time.ns,
            communication=Communication(
                kind=root.name,
                stream="+".join(time.links) or root.name,
                bytes=transfer.bytes,
                latency_ns=time.latency_ns,
                links=time.links,
                groups=groups,
                axes=self._builder.axes(groups),
                dtype=", ".join(collective.element_types),
                reduction=collective.reduction,
                algorithm=time.algorithm,
                domain=communication_domain(collective.op),
                contention=self._clock.contention(transfer, time),
            ),
        )
        self._pending[task] = frozenset({task})

    def _host_copy(self, root: TaskNode) -> None:
        """Emits a copy between device and host; storages in host memory have no bytes."""
        link = self._clock.hardware.host
        if link is None:
            name = self._clock.hardware.name
            raise ToolError(
                f"the profile {name!r} has no [host], which states how fast a value is copied to "
                "the host's memory and back",
                root.location,
            )
        sent, ns = host_copy(root.moved, link, to_host=not any(root.result_bytes))
        deps = self._ready(self._deps([root]))
        self._own_storages(root)
        task = self._add(TaskKind.COLLECTIVE_START, [root], deps, ns=ns, communication=sent)
        self._pending[task] = frozenset({task})

    def _loop(self, root: TaskNode) -> None:
        body = root.body
        assert body is not None, "a loop has a body"
        deps = self._ready(self._deps([root]))
        if root.copied:  # values that it writes into and that others still read
            deps = [*deps, self._copy(root, root.copied, deps, "copy for while")]
        users = (self._nodes[user] for user in self._users[root.index])
        used = {n for user in users for index, n in user.sources if index == root.index}
        drop_dead_carries(body, used)
        inner = _BodyTasks(self._builder, body)
        traced = inner.build_graph(in_loop=True)
        self._own_storages(root)
        # The tasks of each carry: its input, and the one that makes the next value.
        carries = [(inner._task_of[n], inner._task_at(result)) for n, result in body.carries]
        loop = TaskLoop.from_trips(traced.graph, body.trips, body.mean_runs, carries=tuple(carries))
        self._loops[self._add(TaskKind.LOOP, [root], deps, loop=loop)] = traced
        self._split(root, ())

    def _copy(self, root: TaskNode, size: float, deps: Sequence[int], label: str) -> int:
        """Emits a copy of so many bytes, into memory that no storage counts."""
        # Each byte is read and written.
        work = KernelWork(WorkKind.COPY, bytes=2 * size)
        return self._add(
            TaskKind.COMPUTE,
            [root],
            deps,
            ns=self._clock.kernel(work, ()),
            shares=self._clock.shares(work),
            storages=(),
            places=False,
            label=label,
        )

    def _copy_what_comes_early(self) -> None:
        """Copies results of collectives that become carries while the old values are still read.

        Both values are live then, and the carry has storage for one.
        """
        for argument, ref in self._body.carries:
            index, result = ref
            source = self._nodes[index]
            while source.role in (KernelRole.VIEW, KernelRole.RESHAPE):  # find the viewed value
                passed = source.passes[result] if result < len(source.passes) else None
                index, result = passed or source.sources[0]
                source = self._nodes[index]
            if source.role in (KernelRole.COLLECTIVE, KernelRole.DONE) and self._users[argument]:
                deps = self._ready([self._task_at(ref)])
                size = size_of(ref, self._by_index)
                self._copy(source, size, deps, "copy for the next iteration")

    def _own_storages(self, node: TaskNode) -> None:
        """Gives each result a storage, unless it shares that of an operand."""
        passes = () if node.role is KernelRole.RESHAPE else node.passes
        for number, size in enumerate(node.result_bytes):
            source = passes[number] if number < len(passes) else None
            if source is not None and source in self._storages:
                self._storages[node.index, number] = self._storages[source]
            else:
                self._storages[node.index, number] = (len(self._sizes),)
                self._sizes.append(size)

    def _may_overwrite(self, result: Ref, operands: Sequence[Ref]) -> None:
        """Notes the operands whose storages a result may be written over, if they end there."""
        for storage in self._storages.get(result, ()):
            held = (self._storages.get(operand, ()) for operand in operands)
            self._over[storage] = tuple(of[0] for of in held if len(of) == 1)

    def _task_at(self, ref: Ref) -> int:
        """Returns the task that a result is read from."""
        return self._view_of.get(ref, self._task_of[ref[0]])

    def _deps(self, members: Sequence[TaskNode]) -> list[int]:
        """Returns the tasks that the members of a kernel read from, each once, in order."""
        inside = {node.index for node in members}
        read = dict.fromkeys(  # in operand order, because this emits constants
            ref
            for node in members
            for source in node.sources
            for ref in from_memory(node, source, self._by_index)
        )
        for ref in read:
            node = self._nodes[ref[0]]
            if node.role is KernelRole.CHEAP and not (node.made_of and node.index in self._task_of):
                # Each reader has its own constant, because it may be overwritten.
                self._compute([node], members_of([node], self._by_index, self._anew))
        return list(dict.fromkeys(self._task_at(ref) for ref in read if ref[0] not in inside))

    def _ready(self, deps: Sequence[int], *, waits: bool = True) -> list[int]:
        """Returns these tasks, with waits for all collectives that they depend on.

        Unless it `waits`, only with those that exist.
        """
        ready: dict[int, None] = {}
        for dep in deps:
            starts = [s for s in sorted(self._pending.get(dep, ())) if waits or s in self._waits]
            ready.update((self._wait(start), None) for start in starts)
            is_start = self._tasks[dep].kind is TaskKind.COLLECTIVE_START
            if not is_start or not (waits or dep in self._waits):
                ready[dep] = None
        return list(ready)

    def _wait(self, start: int) -> int:
        """Returns the wait for a start, and emits it here if there is none."""
        if start not in self._waits:
            task = self._tasks[start]
            self._waits[start] = len(self._tasks)
            self._tasks.append(
                Task(
                    id=len(self._tasks),
                    kind=TaskKind.WAIT,
                    deps=(start,),
                    storages=task.storages,
                    start=start,
                    name=f"wait for {task.name}",
                    op=task.op,
                    place=task.place,
                )
            )
        return self._waits[start]

    def _add(
        self,
        kind: TaskKind,
        kernel: Sequence[TaskNode],
        deps: Sequence[int],
        *,
        ns: float = 0.0,
        shares: tuple[float, float] = (0.0, 0.0),
        storages: Sequence[int] | None = None,
        places: bool = True,
        label: str = "",
        persistent: bool = False,
        communication: Communication | None = None,
        loop: TaskLoop | None = None,
    ) -> int:
        number = len(self._tasks)
        if self._decision is not None and kind is not TaskKind.INPUT:
            deps = sorted({*deps, self._decision})  # nothing starts before it is known
        if storages is None:  # the storages of the kernel's results
            storages = sorted(
                {
                    storage
                    for node in kernel
                    for result in range(len(node.result_bytes))
                    for storage in self._storages.get((node.index, result), ())
                }
            )
        held = tuple(storages)
        before = {s for dep in deps for s in self._tasks[dep].storages}
        if kind is TaskKind.VIEW:
            starts = {start for dep in deps for start in self._pending.get(dep, ())}
            pending = frozenset(start for start in starts if start not in self._waits)
            if pending:
                self._pending[number] = pending
        place = self._builder.place(kernel[-1])
        task = Task(
            id=number,
            kind=kind,
            ns=ns,
            shares=shares,
            deps=tuple(deps),
            storages=held,
            allocs=tuple(
                s for s in held if kind not in (TaskKind.VIEW, TaskKind.OUTPUT) and s not in before
            ),
            persistent=persistent,
            communication=communication,
            loop=loop,
            name=label or _label(kernel, place),
            op=kernel[-1].name,
            by_bytes=_bytes_label(kernel[-1]),
            place=place.render(self._builder.input_name) if kernel[-1].location else "",
        )
        self._tasks.append(task.scale_ns(kernel[-1].share))
        if kernel[-1].role is KernelRole.DECISION:
            self._decision = number
        if places:
            self._task_of.update((node.index, number) for node in kernel)
            self._ops[number] = [node.op for node in kernel if node.op is not None]
        return number

    def _names(self, kernel: Sequence[TaskNode]) -> list[str]:
        """Returns the keys of a kernel in a measured profile: its path in the program, its line."""
        place = self._builder.place(kernel[-1])
        if not place.file:
            return [place.name] if place.name else []
        lines = [f"{path}:{place.line}" for path in (place.file, PurePath(place.file).name)]
        return [name for name in (place.name, *lines) if name]


def _bytes_label(node: TaskNode) -> str:
    """Returns the name of a kernel that is timed only by its bytes; empty for others."""
    if node.role is not KernelRole.KERNEL or node.kind is not WorkKind.OTHER or node.op is None:
        return ""
    if node.op.name != CUSTOM_CALL:
        return node.name
    kernel = kernel_name(node.op)
    return f"{node.name} @{target_of(node.op)}" + (f" {kernel}" if kernel else "")


def _label(kernel: Sequence[TaskNode], place: Place) -> str:
    """Returns the label of a task: its op, or for a fusion the last op and the number of ops.

    The function is appended.
    """
    if kernel[-1].role is KernelRole.INPUT and place.name:
        return place.name
    counted = [node for node in kernel if node.role is not KernelRole.RESHAPE] or kernel
    label = counted[-1].name
    if len(counted) > 1:
        label += f" fusion of {len(counted)}"
    return f"{label} in {place.function}" if place.function else label


def expected_run(module: ir.Module, hardware: Hardware) -> Expected:
    """Returns the expected run on a device of a module with explicit collectives.

    Raises ToolError for a program that cannot be timed.
    """
    devices = ModuleFacts.from_module(module).grid.size
    graph = module_task_graph(module, Clock(hardware, devices), "")
    return predict_run(graph, hardware, devices)


def is_faster(draft: ir.Module, module: ir.Module, hardware: Hardware) -> bool:
    """Returns True if XLA is expected to be faster with a draft of a module than with the module.

    Both times include the slowdown of compute beside collectives. Raises ToolError for a program
    that cannot be timed.
    """
    own = expected_run(module, hardware).contended_ns
    return expected_run(draft, hardware).contended_ns < own

"""Tasks and storages of a graph under construction, from HLO values and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.hlo_input.shapes import DEVICE_MEMORY, Array, Shape, TupleShape
from stablehlo_tools.overlap.task_graph import Task, TaskGraph, TaskKind
from stablehlo_tools.targets.hlo.module import HloModule, Path

type Value = ArrayLeaf | tuple[Value, ...]
type Given = Mapping[Path, tuple[int, ...]]  # storages, by the part of a value that they hold


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array: the task that produces it, and its storages.

    `starts` are the starts in flight that write it. `carried` is its path in the loop's tuple if it
    comes from the previous iteration.
    """

    task: int | None = None
    storages: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    carried: Path | None = None


def leaves(value: Value) -> Iterator[ArrayLeaf]:
    """Yields the arrays of a value, with tuples flattened."""
    if isinstance(value, ArrayLeaf):
        yield value
    else:
        for element in value:
            yield from leaves(element)


def tasks_of(*values: Value) -> tuple[int, ...]:
    """The tasks that make these values."""
    makers = (leaf.task for value in values for leaf in leaves(value))
    return tuple(dict.fromkeys(task for task in makers if task is not None))


def storages_of(*values: Value) -> tuple[int, ...]:
    """Returns the storages of these values."""
    return tuple(
        dict.fromkeys(s for value in values for leaf in leaves(value) for s in leaf.storages)
    )


def starts_of(value: Value) -> tuple[int, ...]:
    """Returns the starts in flight of a value."""
    return tuple(dict.fromkeys(start for leaf in leaves(value) for start in leaf.starts))


def element(value: Value, path: Path) -> Value | None:
    """Returns a part of a value; None if it has no such part."""
    for index in path:
        if isinstance(value, ArrayLeaf) or index >= len(value):
            return None
        value = value[index]
    return value


def value_of_shape(shape: Shape, make: Callable[[Array, Path], Value], path: Path = ()) -> Value:
    """Returns a value of a shape; a function makes the leaf of each array."""
    if isinstance(shape, TupleShape):
        return tuple(value_of_shape(s, make, (*path, i)) for i, s in enumerate(shape.elements))
    return make(shape, path)


def paths(value: Value, path: Path = ()) -> Iterator[tuple[Path, ArrayLeaf]]:
    """Yields the arrays of a value, each with its path."""
    if isinstance(value, ArrayLeaf):
        yield path, value
    else:
        for index, part in enumerate(value):
            yield from paths(part, (*path, index))


def rebuilt(value: Value, make: Callable[[Path, ArrayLeaf], ArrayLeaf], path: Path = ()) -> Value:
    """Returns a value of the same structure; a function makes each leaf."""
    if isinstance(value, ArrayLeaf):
        return make(path, value)
    return tuple(rebuilt(part, make, (*path, i)) for i, part in enumerate(value))


def in_flight(value: Value, starts: tuple[int, ...]) -> Value:
    """Returns the value as written by these starts in flight."""
    return rebuilt(value, lambda _, leaf: replace(leaf, starts=starts))


@dataclass
class GraphBuilder:
    """A task graph under construction; tasks are appended in issue order."""

    module: HloModule
    tasks: list[Task] = field(default_factory=list[Task])
    sizes: list[float] = field(default_factory=list[float])
    _share: float = 1.0

    def graph(self) -> TaskGraph:
        """Returns the task graph built so far."""
        return TaskGraph(tuple(self.tasks), tuple(self.sizes))

    def allocate(self, array: Array) -> int:
        """Returns a new storage. It has 0 bytes if the array is not in device memory."""
        self.sizes.append(float(array.padded_bytes) if array.space == DEVICE_MEMORY else 0.0)
        return len(self.sizes) - 1

    def add(self, kind: TaskKind, instruction: HloInstruction | None, **fields: Any) -> int:
        """Adds a task with the names of an instruction; returns its id."""
        task = len(self.tasks)
        if instruction is not None:
            tail = instruction.op_name.rpartition("/")
            fields.setdefault("name", instruction.name)
            fields.setdefault("op", tail[2] if tail[1] and tail[2] else instruction.opcode)
            place = self.module.place(instruction)
            if place and tail[1]:
                place += f" ({instruction.op_name})"  # as places of MLIR have it
            fields.setdefault("place", place)
        self.tasks.append(Task(task, kind, **fields).scale_ns(self._share))
        return task

    @contextmanager
    def at_times(self, share: float) -> Generator[None]:
        """Scales the times of the tasks added in this context by `share`, their mean runs."""
        outer, self._share = self._share, self._share * share
        yield
        self._share = outer

    def produce(
        self,
        kind: TaskKind,
        instruction: HloInstruction,
        shape: Shape,
        given: Given,
        *,
        views: bool = True,
        **fields: Any,
    ) -> Value:
        """Adds a task and returns its result.

        Parts without a `given` storage get a new one. With `views`, each of several arrays gets its
        own view task, so that a reader of one array does not keep the others live.
        """
        allocs: list[int] = []
        storages: dict[Path, tuple[int, ...]] = {}

        def place(array: Array, path: Path) -> Value:
            if path not in given:
                allocs.append(self.allocate(array))
            storages[path] = given.get(path, tuple(allocs[-1:]))
            return ArrayLeaf()

        empty = value_of_shape(shape, place)
        together = tuple(dict.fromkeys(s for held in storages.values() for s in held))
        task = self.add(kind, instruction, storages=together, allocs=tuple(allocs), **fields)
        several = views and len(storages) > 1

        def view_part(path: Path) -> ArrayLeaf:
            if not several:
                return ArrayLeaf(task, storages[path])
            named = f"{instruction.name}{{{','.join(map(str, path))}}}"
            view = self.add(
                TaskKind.VIEW, instruction, deps=(task,), storages=storages[path], name=named
            )
            return ArrayLeaf(view, storages[path])

        return rebuilt(empty, lambda path, _: view_part(path))

    def inputs(
        self, instruction: HloInstruction, persistent: bool, returned: Sequence[Path] = ()
    ) -> Value:
        """Adds an input task for each array of a parameter; those in `returned` do not persist."""

        def make(array: Array, path: Path) -> Value:
            storage = self.allocate(array)
            task = self.add(
                TaskKind.INPUT,
                instruction,
                storages=(storage,),
                allocs=(storage,),
                persistent=persistent and path not in returned,
                op="parameter",
            )
            return ArrayLeaf(task, (storage,))

        return value_of_shape(instruction.result, make)

    def result(self, array: Array, path: Path) -> tuple[int, ...]:
        """Adds an input task for the buffer of a part of the result, allocated from the start."""
        storage = (self.allocate(array),)
        named = f"result{{{','.join(map(str, path))}}}"
        self.add(
            TaskKind.INPUT,
            None,
            storages=storage,
            allocs=storage,
            persistent=True,
            name=named,
            op="result",
        )
        return storage

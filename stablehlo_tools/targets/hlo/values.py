"""What an HLO value is to a task graph: the task that makes it, and the storages it lies in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from stablehlo_tools.targets.hlo.shapes import Array, Shape, TupleShape

type Path = tuple[int, ...]
type Value = Leaf | tuple[Value, ...]
type Given = Mapping[Path, tuple[int, ...]]  # storages, by the part of a value that lies in them


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array. `starts` are the starts still in flight that write it; `carried` is its place in
    the loop's tuple where it comes from the iteration before."""

    task: int | None = None
    storages: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    carried: Path | None = None


def leaves(value: Value) -> Iterator[Leaf]:
    """The arrays of a value, tuples flattened."""
    if isinstance(value, Leaf):
        yield value
    else:
        for element in value:
            yield from leaves(element)


def tasks_of(*values: Value) -> tuple[int, ...]:
    """The tasks that make these values."""
    found = (leaf.task for value in values for leaf in leaves(value))
    return tuple(dict.fromkeys(task for task in found if task is not None))


def storages_of(*values: Value) -> tuple[int, ...]:
    """The storages that these values lie in."""
    return tuple(
        dict.fromkeys(s for value in values for leaf in leaves(value) for s in leaf.storages)
    )


def starts_of(value: Value) -> tuple[int, ...]:
    """The starts that are still in flight."""
    return tuple(dict.fromkeys(start for leaf in leaves(value) for start in leaf.starts))


def element(value: Value, path: Path) -> Value | None:
    """A part of a value; None where it has no such part."""
    for index in path:
        if isinstance(value, Leaf) or index >= len(value):
            return None
        value = value[index]
    return value


def shaped(shape: Shape, make: Callable[[Array, Path], Value], path: Path = ()) -> Value:
    """A value of a shape, made array by array."""
    if isinstance(shape, TupleShape):
        return tuple(shaped(s, make, (*path, i)) for i, s in enumerate(shape.elements))
    return make(shape, path)


def paths(value: Value, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """The arrays of a value, each with its place."""
    if isinstance(value, Leaf):
        yield path, value
    else:
        for index, part in enumerate(value):
            yield from paths(part, (*path, index))


def rebuilt(value: Value, make: Callable[[Path, Leaf], Leaf], path: Path = ()) -> Value:
    """A value of the same form, made leaf by leaf."""
    if isinstance(value, Leaf):
        return make(path, value)
    return tuple(rebuilt(part, make, (*path, i)) for i, part in enumerate(value))


def in_flight(value: Value, starts: tuple[int, ...]) -> Value:
    """The value while these starts write it."""
    return rebuilt(value, lambda _, leaf: replace(leaf, starts=starts))

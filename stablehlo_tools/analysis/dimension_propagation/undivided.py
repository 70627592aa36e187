"""What to say where the batch is known, but has another size than the parts asked for divide.

The batch is found by how a program works on it when it is cut, so with a number of parts that does
not divide it something else is taken for the batch: a weight, whose refusal says nothing of use. A
smaller number of parts finds the batch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stablehlo_tools.analysis.dimension_propagation.graph import Graph
from stablehlo_tools.analysis.dimension_propagation.layout import Shape
from stablehlo_tools.analysis.dimension_propagation.seeds import Seeds
from stablehlo_tools.analysis.entry import argument_name, outside_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.values import is_float

# The shape, for all devices together, of an argument of the block; its number is the place.
WholeShape = Callable[[int], Shape]
_TRIED = (2, 3, 5, 7)  # parts; a batch of a larger prime is rare
_MOST_NAMED = 3
_MOST_NUMBERS = 6


def fewer_parts(graph: Graph, parts: int) -> Iterator[int]:
    """Numbers of parts that divide the outermost dimension of arguments that `parts` does not."""
    shapes = [graph.shape(number) or () for number in graph.root.arguments]
    sizes = {shape[0] for shape in shapes if shape and shape[0] % parts}
    for fewer in _TRIED:
        if fewer != parts and any(size and size % fewer == 0 for size in sizes):
            yield fewer


def has_integers(graph: Graph, seeds: Seeds) -> bool:
    """Whether one of them is of integers: tokens and labels are samples, and weights are not."""
    return any(not is_float(graph.values[number].type) for number in seeds)


def undivided(
    graph: Graph, seeds: Seeds, parts: int, what: str, whole: WholeShape | None = None
) -> str:
    """Why so many parts (`what`: `microbatches`) cannot be made of the batch that `seeds` are, and
    what could: in the numbers of all devices. Empty where they divide it."""
    sizes = {number: (graph.shape(number) or ())[layout.dim] for number, layout in seeds.items()}
    size = next((sizes[number] for number in sorted(sizes) if sizes[number] % parts), None)
    if size is None:
        return ""
    alike = [number for number in sorted(sizes) if sizes[number] == size]
    first, dim = alike[0], seeds[alike[0]].dim
    place = graph.root.arguments.index(first)
    rows = (whole or _outside(graph))(place)[dim]
    devices = rows // size if size else 1
    spread = f", {size} on each of {devices} devices" if devices > 1 else ""
    along = "rows" if not dim else f"elements in dimension {dim}"
    has = "has" if len(alike) == 1 else "have"
    dividing = [str(n) for n in range(2, size + 1) if size % n == 0][:_MOST_NUMBERS]
    others = f"take {' or '.join(dividing)} {what}, or " if dividing else "take "
    return (
        f"{parts} {what} do not divide the batch: {_named(graph, alike)} {has} {rows} {along}"
        f"{spread}; {others}a batch of a multiple of {parts * devices}"
    )


def sizes_undivided(graph: Graph, parts: int) -> list[str]:
    """The arguments that could be the batch but for their outermost sizes, the last ones first:
    integers, then floats of at least two dimensions."""
    integers, floats = list[str](), list[str]()
    for number in reversed(graph.root.arguments):
        shape = graph.shape(number) or ()
        of_floats = is_float(graph.values[number].type)
        if not shape or shape[0] % parts == 0 or (of_floats and len(shape) < 2):
            continue
        rows = "1 row" if shape[0] == 1 else f"{shape[0]} rows"
        name = argument_name(graph.values[number])
        said = f"{name} has {rows}, which {parts} do not divide"
        (floats if of_floats else integers).append(said)
    return [*integers, *floats][:_MOST_NAMED]


def _named(graph: Graph, numbers: list[int]) -> str:
    names = [argument_name(graph.values[number]) for number in numbers[:_MOST_NAMED]]
    left = len(numbers) - len(names)
    if left:
        names.append(f"{left} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _outside(graph: Graph) -> WholeShape:
    """Shapes as they are outside of the block, where that is the body of a manual computation."""

    def whole(place: int) -> Shape:
        value = outside_of(graph.values[graph.root.arguments[place]])
        return tuple(shape_of(value)) if isinstance(value.type, ir.RankedTensorType) else ()

    return whole

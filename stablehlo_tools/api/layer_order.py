"""The place of each layer in a program with layout=pipeline, for checkpoints.

    order = stablehlo_tools.find_layer_order(exported, "expand-pipeline{repeats=2 …}")
    given = stablehlo_tools.to_pipeline_order(arguments, order)
    results = stablehlo_tools.to_layer_order(pipeline.call(*given), order, of="results")

The order depends on the ranks of the axis, the chunks on each, and the number of layers, and on
nothing else: a checkpoint in the order of the layers fits every layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves, result_leaves
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.files.json_text import JsonValue
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.passes.pipeline import Pipeline

if TYPE_CHECKING:
    from jax.export import Exported

Side = Literal["arguments", "results"]
_RESULT_NAME = "jax.result_info"


@dataclass(frozen=True)
class LayerStack:
    """An argument or a result that holds layers.

    `number` counts the leaves of the call's arguments or results from 0, or those of `main` for a
    program that is not an `Exported`; `path` is its jax path, empty if unknown. The layers are
    stacked along `dimension`, each in as many rows as any other.
    """

    number: int
    path: str
    dimension: int


@dataclass(frozen=True)
class LayerStacks:
    """All arguments and results with as many layers: place i holds layer `order[i]`."""

    layers: int
    order: tuple[int, ...]
    arguments: tuple[LayerStack, ...]
    results: tuple[LayerStack, ...]


@dataclass(frozen=True)
class LayerOrder:
    """The place of each layer: rank r of `ranks` on `axis` holds the r-th part of each order, in
    `repeats` chunks."""

    axis: str
    ranks: int
    repeats: int
    stacks: tuple[LayerStacks, ...]

    def to_json(self) -> str:
        """The map as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> LayerOrder:
        """The map from JSON text. Raises ToolError for other text."""
        try:
            read = JsonValue.from_text(text).fields(("axis", "ranks", "repeats", "stacks"))
            return LayerOrder(
                read["axis"].string(),
                read["ranks"].whole(1),
                read["repeats"].whole(1),
                tuple(map(_stacks, read["stacks"].items())),
            )
        except ToolError as error:
            said = f"not a layer map from layer-order: {error.diagnostic.message}"
            raise ToolError(said, error.diagnostic.place) from None


def _stacks(value: JsonValue) -> LayerStacks:
    read = value.fields(("layers", "order", "arguments", "results"))
    layers, order = read["layers"].whole(), [place.whole() for place in read["order"].items()]
    if len(order) != layers or set(order) != set(range(len(order))):
        read["order"].refuse(f"the order of {layers} layers must list each layer once")
    arguments, results = (
        tuple(map(_read_stack, read[side].items())) for side in ("arguments", "results")
    )
    return LayerStacks(layers, tuple(order), arguments, results)


def _read_stack(value: JsonValue) -> LayerStack:
    read = value.fields(("number", "path", "dimension"))
    return LayerStack(read["number"].whole(), read["path"].string(), read["dimension"].whole())


def find_layer_order(program: Exported | Artifact, pipeline: str | Pipeline) -> LayerOrder:
    """Finds where `expand-pipeline`, with these options and layout=pipeline, puts the layers.

    `pipeline` has that pass once; passes before it are run, those after it are not. The program
    does not change. Raises ToolError if the pass refuses it.
    """
    from stablehlo_tools.transforms.expand_pipeline import ExpandPipelinePass

    given = program.copy() if isinstance(program, Artifact) else artifacts.from_exported(program)
    steps = (pipeline if isinstance(pipeline, Pipeline) else Pipeline.parse(pipeline)).passes
    places = [i for i, step in enumerate(steps) if isinstance(step, ExpandPipelinePass)]
    if len(places) != 1:
        raise ToolError(f"layer-order needs a pipeline with one expand-pipeline, not {len(places)}")
    expand = steps[places[0]]
    assert isinstance(expand, ExpandPipelinePass)
    try:
        Pipeline(tuple(steps[: places[0]])).run(given.module, Diagnostics(), None)
        planned = expand.stack_orders(given.module)
    except ToolError as error:
        error.input_name = error.input_name or given.name
        raise
    named = _EntryNames(given)
    stacks = tuple(
        LayerStacks(
            each.chunks.trips,
            tuple(each.order),
            tuple(named.arguments(each.arguments)),
            tuple(named.results(each.results)),
        )
        for each in planned.orders
    )
    return LayerOrder(planned.axis.name, planned.axis.size, expand.repeats, stacks)


class _EntryNames:
    """The numbers and paths by which callers know the arguments and results of `main`."""

    def __init__(self, given: Artifact) -> None:
        self._main = entry_function(given.module)
        self._arguments = list(Function(self._main).body.arguments)
        count = len(Function(self._main).yields)
        self._taken = {i: i for i in range(len(self._arguments))}
        self._given = {i: i for i in range(count)}
        if given.exported is not None:
            self._taken = argument_leaves(given.exported, self._main)
            self._given = result_leaves(given.exported, count)

    def arguments(self, places: dict[int, int]) -> Iterator[LayerStack]:
        for number, dimension in sorted(places.items()):
            location = self._arguments[number].location
            path = location.name_str if isinstance(location, ir.NameLoc) else ""
            yield LayerStack(self._taken[number], path, dimension)

    def results(self, places: dict[int, int]) -> Iterator[LayerStack]:
        attributes = self._main.attributes
        entries = list(ir.ArrayAttr(attributes["res_attrs"])) if "res_attrs" in attributes else []
        for number, dimension in sorted(places.items()):
            entry = ir.DictAttr(entries[number]) if entries else {}
            path = ir.StringAttr(entry[_RESULT_NAME]).value if _RESULT_NAME in entry else ""
            yield LayerStack(self._given[number], path, dimension)


def to_pipeline_order(
    values: Any, order: LayerOrder, *, of: Side = "arguments", at: str | None = None
) -> Any:
    """Reorders arrays from the order of the layers to that of the ranks, for the pipeline.

    `values` is a pytree of NumPy or jax arrays: all arguments, or results, of the program in its
    order; or with `at` the part of it whose path begins so, such as `at="p"` for the argument `p`.
    Arrays without layers do not change. Raises ToolError if the tree does not fit.
    """
    return _reorder_layers(values, order, of, at, inverse=False)


def to_layer_order(
    values: Any, order: LayerOrder, *, of: Side = "arguments", at: str | None = None
) -> Any:
    """The reverse of `to_pipeline_order`, of arguments or of results."""
    return _reorder_layers(values, order, of, at, inverse=True)


def _reorder_layers(
    values: Any, order: LayerOrder, of: Side, at: str | None, *, inverse: bool
) -> Any:
    import jax
    import numpy as np

    paths, structure = jax.tree_util.tree_flatten_with_path(values)
    leaves = [leaf for _, leaf in paths]
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    reordered_count = 0
    for stacks in order.stacks:
        places = np.argsort(stacks.order) if inverse else np.array(stacks.order)
        for entry in stacks.arguments if of == "arguments" else stacks.results:
            place = _place(entry, names, at)
            if place is None:
                continue
            array = leaves[place]
            shape: tuple[int, ...] = tuple(getattr(array, "shape", ()))
            fits = entry.dimension < len(shape) and shape[entry.dimension] % len(places) == 0
            if not fits or not shape[entry.dimension]:
                raise ToolError(
                    f"array {entry.number}{f', {entry.path},' if entry.path else ''} should hold "
                    f"{len(places)} layers along dimension {entry.dimension}, but its shape is "
                    f"{list(shape)}"
                )
            inner = shape[entry.dimension] // len(places)
            rows = (places[:, None] * inner + np.arange(inner)).reshape(-1)
            leaves[place] = array[(slice(None),) * entry.dimension + (rows,)]
            reordered_count += 1
    if at is not None and not reordered_count:
        raise ToolError(
            f"none of the {of} with layers in these values has a path that begins with {at!r}"
        )
    return structure.unflatten(leaves)


def _place(entry: LayerStack, names: Sequence[str], at: str | None) -> int | None:
    """Returns the index of the leaf in `names`; None if `at` selects other leaves.

    Raises ToolError if there are too few leaves."""
    if at is None:
        if entry.number >= len(names):
            raise ToolError(
                f"array {entry.number}{f', {entry.path},' if entry.path else ''} holds layers, "
                f"but only {len(names)} arrays were given: give all of them, or say with `at` "
                "which part of the tree this is"
            )
        return entry.number
    matching = [place for place, name in enumerate(names) if at + name == entry.path]
    return matching[0] if matching else None

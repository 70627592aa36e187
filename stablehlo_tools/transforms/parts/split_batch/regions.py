"""The blocks that one device runs, and which of their values carry the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.propagation import Graph
from stablehlo_tools.analysis.dimension_propagation.seeds import (
    Seeds,
    Trial,
    extended,
    find_seeds,
    no_dimension,
    try_seeds,
)
from stablehlo_tools.analysis.dimension_propagation.tilings import DimTiling
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.platform_index import own_arguments
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import entry_function


@dataclass(frozen=True)
class Region:
    """A block that one device runs. `entries[i]` is what argument i of it is outside."""

    op: ir.Operation
    block: ir.Block
    entries: tuple[ir.Value, ...]


@dataclass(frozen=True)
class Chosen:
    """A region, and the batch in it."""

    region: Region
    trial: Trial


def find_regions(module: ir.Module) -> list[Region]:
    """The manual computations of `main`, or all of it where it is what one device runs.

    Raises ToolError where neither is so.
    """
    main = entry_function(module)
    block = main.regions[0].blocks[0]
    manual = [op.operation for op in block.operations if op.operation.name == MANUAL_COMPUTATION]
    if manual:
        return [Region(op, op.regions[0].blocks[0], tuple(op.operands)) for op in manual]
    if is_per_device(module):
        return [Region(main, block, tuple(block.arguments))]
    raise ToolError(
        "the program says nothing about what one device does: main itself has no manual "
        "computation and no collective; run partition first (P2)",
        main.location,
    )


def choose(
    module: ir.Module,
    regions: Sequence[Region],
    arguments: Sequence[int],
    dimension: int,
    parts: int,
) -> list[Chosen]:
    """The batch in each region: as the arguments say, as earlier regions hand it on, or as it is
    found. Regions without any are left out. Raises ToolError for arguments that cannot be cut."""
    given = _given(module, arguments)
    chosen: list[Chosen] = []
    for region in regions:
        graph = Graph.of(region.block)
        seeds = _handed_on(region, graph, chosen)
        for number, entry in zip(graph.root.arguments, region.entries, strict=True):
            if entry in given:
                seeds[number] = _checked(graph, number, given[entry], dimension, parts, region)
        if not seeds and not given:
            trial = find_seeds(graph, parts)
        elif not seeds:
            trial = None
        else:
            trial = try_seeds(graph, seeds, parts)
            trial = trial if given else extended(trial)
        if trial is not None:
            chosen.append(Chosen(region, trial))
    return chosen


def _given(module: ir.Module, arguments: Sequence[int]) -> dict[ir.Value, int]:
    main = entry_function(module)
    taken = own_arguments(main)
    for number in arguments:
        if not 0 <= number < len(taken):
            raise ToolError(
                f"there is no argument {number}: the program takes {len(taken)} (P4)",
                main.location,
            )
    return {taken[number]: number for number in arguments}


def _checked(
    graph: Graph, number: int, argument: int, dimension: int, parts: int, region: Region
) -> DimTiling:
    missing = no_dimension(graph, number, dimension)
    if missing:
        raise ToolError(f"on a device {missing} (P4)", region.op.location)
    shape = graph.shape(number) or ()
    if not DimTiling(dimension).fits(shape, parts):
        raise ToolError(
            f"dimension {dimension} of argument {argument} has {shape[dimension]} elements on a "
            f"device, which {parts} parts do not divide (P4)",
            region.op.location,
        )
    return DimTiling(dimension)


def _handed_on(region: Region, graph: Graph, earlier: Sequence[Chosen]) -> Seeds:
    """Arguments that are results, in parts, of an earlier region, sharded alike."""
    seeds: Seeds = {}
    for place, entry in enumerate(region.entries):
        maker = producer(entry)
        source = next((c for c in earlier if maker is not None and c.region.op == maker), None)
        if source is None:
            continue
        result = ir.OpResult(entry).result_number
        left = sharding_per_value(source.region.op.attributes["out_shardings"])[result]
        taken = sharding_per_value(region.op.attributes["in_shardings"])[place]
        dims = source.trial.dims
        layout = dims.tilings.get(dims.graph.root.returned[result])
        if layout is not None and left == taken:
            seeds[graph.root.arguments[place]] = layout
    return seeds

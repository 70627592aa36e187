"""Specializes exports with symbolic dimensions to sizes, like jax does at a call.

func @main(%x: tensor<?x4xf32>) -> tensor<?xf32>    batch = 8
==>
func @main(%x: tensor<8x4xf32>) -> tensor<8xf32>
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, first_line
from stablehlo_tools.dialect.names import CONVERT
from stablehlo_tools.ir.values import stand_in
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.processes import child

_MODULE = "stablehlo_tools.artifacts.symbolic"
_SECONDS = 60.0
_STEPS = (8, 4, 1)  # sizes are multiples of a step, so that they fit a mesh and other conditions


def symbolic_names(artifact: Artifact) -> list[str]:
    """Returns the names of the symbolic dimensions of an export's inputs, sorted."""
    exported = artifact.exported
    shapes = [] if exported is None else [aval.shape for aval in exported.in_avals]
    return sorted({name for shape in shapes for d in shape for name in bindings.size_names(d)})


def at_two_sizes(artifacts: Sequence[Artifact]) -> Iterator[tuple[str, list[Artifact]]]:
    """Yields artifacts with the same symbolic dimensions at two sets of sizes, with their names.

    Raises ToolError if fewer than two of the six sets meet the conditions of the export.
    """
    names = symbolic_names(artifacts[0])
    found = 0
    error: ToolError | None = None
    for step in _STEPS:
        for first in (1, 2):
            sizes = {name: step * (first + place) for place, name in enumerate(names)}
            try:
                made = [at_sizes(artifact, sizes) for artifact in artifacts]
            except ToolError as refusal:
                error = error or refusal
                continue
            found += 1
            yield ", ".join(f"{name}={size}" for name, size in sizes.items()), made
            if found == 2:
                return
    assert error is not None, "six sets of sizes were tried"
    raise error


def at_sizes(artifact: Artifact, sizes: Mapping[str, int]) -> Artifact:
    """An export whose symbolic dimensions have sizes.

    Raises ToolError if the export does not allow these sizes.
    """
    exported = artifact.to_exported()
    copy = artifact.copy()
    main = entry_function(copy.module)
    in_avals, out_avals = (
        tuple(
            aval.update(shape=tuple(bindings.size_of(d, sizes) for d in aval.shape))
            for aval in avals
        )
        for avals in (exported.in_avals, exported.out_avals)
    )
    block = Function(main).body
    with main.location:
        for place, leaf in argument_leaves(exported, main).items():
            shape = in_avals[leaf].shape
            argument = block.arguments[place]
            before = ir.RankedTensorType(argument.type)
            words = list(before.shape)[len(shape) :]  # of a key
            after = ir.RankedTensorType.get([*shape, *words], before.element_type, before.encoding)
            if after != before:
                # The body keeps the symbolic type: a convert connects both until XLA refines it.
                argument.set_type(after)
                point = ir.InsertionPoint.at_block_begin(block)
                widened = ir.Operation.create(
                    CONVERT, results=[before], operands=[argument], ip=point
                )
                stand_in(argument, widened.results[0])
        type_ = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        inputs = [argument.type for argument in block.arguments]
        of_sizes = ir.FunctionType.get(inputs, list(type_.results))
        main.attributes["function_type"] = ir.TypeAttr.get(of_sizes)
    refined = _refine(bindings.write_bytecode(copy.module), sizes, main.location)
    module = bindings.parse_module(refined, artifact.module.context)
    return replace(
        artifact, module=module, exported=replace(exported, in_avals=in_avals, out_avals=out_avals)
    )


def _refine(code: bytes, sizes: Mapping[str, int], location: ir.Location) -> bytes:
    """Refines all shapes to static ones, in a child: XLA ends its process on some modules."""
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as path:
        outcome = child.ask(_MODULE, Path(path), code, _SECONDS)
    if outcome.answer is not None and not outcome.error:
        return outcome.answer
    why = first_line(outcome.error) or "XLA's process ends when it refines the shapes"
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    raise ToolError(f"the export cannot be called at {at}: {why}", location)


def answer(_: Path, code: bytes) -> bytes:
    """Refines the shapes of a module, in the child."""
    return bindings.refine_shapes(code)


if __name__ == "__main__":
    child.answer_request(answer)

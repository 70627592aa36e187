"""Reduces two programs that are too large to run to smaller ones that can be compared.

Both programs are reduced together, and passes do not run again: the order, loops, buckets and
splits of the rewritten program are those chosen for the full size.

    before  tensor<4096x11008xf32> …      ==>  tensor<56x3xf32> …       compare these
    after   512x11008 on each of 8        ==>  7x3 on each of 8
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.argument_ranges import index_limits
from stablehlo_tools.analysis.collectives import stated_grid
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, from_mlir_error, note
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.async_calls import lower_async_calls
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import FUNCTION, enclosing, entry_function, ops_where
from stablehlo_tools.verify.device_grid import inferred_grid, is_partitioned
from stablehlo_tools.verify.run_plan import cpu_index, runnable_module
from stablehlo_tools.verify.twin.compared_constants import (
    ComparedConstant,
    compared_constants,
    mark_outcomes,
)
from stablehlo_tools.verify.twin.extents import TwinExtent
from stablehlo_tools.verify.twin.relations import TwinDimensions
from stablehlo_tools.verify.twin.resizing import resize
from stablehlo_tools.verify.verification_job import SIDES, Side

Shape = tuple[int, ...]
_SHOWN_KEPT = 4


@dataclass(frozen=True)
class Twin:
    """Two programs at a reduced size.

    `shapes` are the full and the reduced shapes of arguments and results, if they differ.
    `bytes` estimates the memory to run either twin, `full_bytes` either original. `limits` are the
    full program's limits of indices, for each argument. `constants` are compared with positions by
    each program; the outcomes of those in `counted` are counted at run time. `positional` are
    reduced sizes, each with an op or a constant that depends on positions in it.
    """

    before: Artifact
    after: Artifact
    shapes: tuple[tuple[Shape, Shape], ...]
    bytes: int
    full_bytes: int
    limits: tuple[int, ...]
    constants: Mapping[Side, tuple[ComparedConstant, ...]]
    counted: Mapping[Side, tuple[ComparedConstant, ...]]
    positional: tuple[tuple[int, str], ...]

    @property
    def is_uniform(self) -> bool:
        """True if no op depends on a position in a reduced dimension, so the result holds for any
        size."""
        return not self.positional

    @property
    def uniform(self) -> tuple[int, ...]:
        """The reduced sizes in which no op depends on a position."""
        others = dict(self.positional)
        return tuple(size for size in self.factors if size not in others)

    @property
    def factors(self) -> dict[int, tuple[int, ...]]:
        """Maps each reduced size to its sizes in the twin, the largest first."""
        found: dict[int, set[int]] = {}
        for full, reduced in self.shapes:
            for size, count in zip(full, reduced, strict=True):
                if size != count:
                    found.setdefault(size, set()).add(count)
        return {size: tuple(sorted(found[size])) for size in sorted(found, reverse=True)}


def twins(before: Artifact, after: Artifact, bytes_limit: int) -> Twin:
    """Reduces both programs together so that each runs in `bytes_limit` bytes.

    Raises ToolError if the shapes of arguments or results differ, or if dimensions that keep their
    size need more memory.
    """
    platform = cpu_index({"before": before, "after": after})
    small, dims, constants = _shrink_programs(before, after, platform)
    needed = max(estimated_bytes(artifact.module) for artifact in small.values())
    if needed > bytes_limit:
        kept = _kept(dims.ends) or _kept(dims.known)
        notes = [note(f"{size} is kept: {why}") for why, size in list(kept.items())[:_SHOWN_KEPT]]
        notes.append(note(_SMALLER))
        error = ToolError(
            f"no twin: the smallest needs about {needed / 2**30:.1f} GiB, over the limit of "
            f"{bytes_limit / 2**30:.1f} GiB"
        )
        error.diagnostic = replace(error.diagnostic, notes=tuple(notes))
        raise error
    counted: dict[Side, tuple[ComparedConstant, ...]] = {}
    for side in SIDES:
        counted[side] = tuple(
            c for c in constants[side] if c.is_open and not all(e.is_whole for e in c.extents)
        )
        for constant in counted[side]:
            for extent in constant.extents:
                extent.depend_on(str(constant))
    positional = {e.size: why for end in dims.ends for e in end if (why := e.positional_op)}
    larger, _, _ = _shrink_programs(before, after, platform, more=_MORE)
    for side in SIDES:
        if _structure(small[side].module) != _structure(larger[side].module):
            why = f"{side.upper()} has other ops at another reduced size"
            sizes = [e.size for end in dims.ends for e in end if not e.is_whole]
            positional = {size: positional.get(size, why) for size in sizes}
        mark_outcomes(counted[side])
    shapes = [(tuple(e.size for e in end), tuple(e.reduced for e in end)) for end in dims.ends]
    return Twin(
        small["before"],
        small["after"],
        tuple(pair for pair in dict.fromkeys(shapes) if pair[0] != pair[1]),
        needed,
        max(estimated_bytes(artifact.module) for artifact in (before, after)),
        tuple(index_limits(before.module)),
        constants,
        counted,
        tuple(sorted(positional.items(), reverse=True)),
    )


def _shrink_programs(
    before: Artifact, after: Artifact, platform: int, more: int = 0
) -> tuple[dict[Side, Artifact], TwinDimensions, dict[Side, tuple[ComparedConstant, ...]]]:
    """Returns both programs with few positions of each extent, their extents and constants.

    Each extent gets `more` additional positions. The constants are compared with positions."""
    small: dict[Side, Artifact] = {
        "before": _runnable(before, platform),
        "after": _runnable(after, platform),
    }
    dims = TwinDimensions()
    dims.tie_programs(small["before"].module, small["after"].module)
    constants: dict[Side, tuple[ComparedConstant, ...]] = {
        side: compared_constants(small[side].module, dims) for side in SIDES
    }
    wanted = [p for found in constants.values() for c in found for p in c.positions]
    dims.extents.settle([extent for end in dims.ends for extent in end], wanted, more)
    for artifact in small.values():
        resize(artifact.module, dims)
        try:
            artifact.module.operation.verify()
        except ir.MLIRError as error:
            raise from_mlir_error(error, "no twin: the reduced program is invalid: ") from None
    return small, dims, constants


def _structure(module: ir.Module) -> str:
    """Returns the text of a module without sizes and positions."""
    # Constants are elided, because the twins have different elements of them.
    return _INTEGERS.sub("?", str(module.operation.get_asm(large_elements_limit=0)))


def _kept(values: Iterable[Iterable[TwinExtent]]) -> dict[str, int]:
    """Maps each reason for keeping a dimension of more than a few positions to an example size."""
    leaves = (leaf for extents in values for extent in extents for leaf in extent.leaves)
    return {leaf.kept: leaf.size for leaf in leaves if leaf.kept and leaf.size > _FEW}


_FEW = 8
_HOLDERS = (FUNCTION, "builtin.module", MANUAL_COMPUTATION)
_SMALLER = (
    "instead, export the same step with fewer samples, shorter sequences and less width, and "
    "compare it in full"
)
_MORE = 2  # more positions of each extent, in a second twin whose text is compared
_INTEGERS = re.compile(r"\d+(?=x)|(?<![%@#\w.])\d+")


def estimated_bytes(module: ir.Module) -> int:
    """Estimates the bytes that a host needs to run a program on all of its virtual devices.

    Counts arguments, results and the op with the most bytes, once per device if it is local."""
    grid = stated_grid(module) or inferred_grid(module)
    divided = is_partitioned(module)
    largest = 0
    for op in ops_where(module.operation, lambda op: op.name not in _HOLDERS):
        is_whole = divided and enclosing(op, MANUAL_COMPUTATION) is None
        copies = 1 if is_whole else grid.size
        size = sum(map(bytes_of, [*op.operands, *op.results]))
        largest = max(largest, copies * int(size))
    main = Function(entry_function(module))
    ends = [*main.body.arguments, *main.yields]
    return int(sum(map(bytes_of, ends))) * (1 if divided else grid.size) + largest


def _runnable(artifact: Artifact, platform: int) -> Artifact:
    """Returns a bare module without asynchronous collectives and calls.

    Types of asynchronous collectives cannot be resized, and a function has one size for all calls.
    """
    module = runnable_module(artifact, platform)
    lower_async_calls(module)
    inline_all_calls(module, products=True)
    return Artifact(artifact.name, ArtifactForm.TEXT, module)

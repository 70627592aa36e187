"""Programs that are too large to run, as smaller ones that can be compared.

Both programs are made smaller together, the rewritten one as it is: its order, its loops, buckets
and splits are those that were chosen for the full size.

    before  tensor<4096x11008xf32> …      ==>  tensor<56x3xf32> …       compare these
    after   512x11008 on each of 8        ==>  7x3 on each of 8
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stablehlo_tools.analysis.argument_ranges import Range, argument_ranges
from stablehlo_tools.analysis.tasks.op_work import bytes_of
from stablehlo_tools.artifacts.artifact import Artifact, Form
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, from_mlir_error, note
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.async_calls import lower_async_calls
from stablehlo_tools.ir.walk import entry_function, terminator, walk
from stablehlo_tools.verify.device_grid import inferred_grid, is_partitioned, stated_grid
from stablehlo_tools.verify.plan import cpu_index, runnable_module
from stablehlo_tools.verify.twin.extents import Extent
from stablehlo_tools.verify.twin.relations import Dimensions
from stablehlo_tools.verify.twin.resizing import resize

Shape = tuple[int, ...]
_SHOWN_KEPT = 4


@dataclass(frozen=True)
class Twin:
    """Two programs at a reduced size.

    `shapes` are those of arguments and results that differ, full and reduced; `bytes` an estimate
    of what it takes to run either one, `full_bytes` of the originals. `ranges` are those in which
    the full program wants its arguments. `notes` say what equal values do not show.
    """

    before: Artifact
    after: Artifact
    shapes: tuple[tuple[Shape, Shape], ...]
    bytes: int
    full_bytes: int
    ranges: tuple[Range, ...]
    notes: tuple[str, ...]

    @property
    def factors(self) -> dict[int, tuple[int, ...]]:
        """The sizes of dimensions, and those that they became."""
        found: dict[int, set[int]] = {}
        for full, reduced in self.shapes:
            for size, count in zip(full, reduced, strict=True):
                if size != count:
                    found.setdefault(size, set()).add(count)
        return {size: tuple(sorted(found[size])) for size in sorted(found, reverse=True)}


def twins(before: Artifact, after: Artifact, bytes_limit: int) -> Twin:
    """Both programs, resized together so that each runs in so many bytes.

    Raises ToolError where the programs do not take and give the same shapes, or where what has to
    keep its size takes more.
    """
    platform = cpu_index({"before": before, "after": after})
    small = [_runnable(artifact, platform) for artifact in (before, after)]
    dims = Dimensions()
    dims.tie_programs(small[0].module, small[1].module)
    ends = [*_ends(small[0].module)]
    shapes = {
        (tuple(e.size for e in dims.of(value)), tuple(e.reduced for e in dims.of(value))): None
        for value in ends
    }
    of_ends = [dims.of(value) for value in ends]
    for artifact in small:
        resize(artifact.module, dims)
        try:
            artifact.module.operation.verify()
        except ir.MLIRError as error:
            raise from_mlir_error(error, "no twin: its ops do not fit: ") from None
    needed = max(estimated_bytes(artifact.module) for artifact in small)
    if needed > bytes_limit:
        kept = _kept(of_ends) or _kept(dims.known)
        notes = [note(f"{size} is kept: {why}") for why, size in list(kept.items())[:_SHOWN_KEPT]]
        notes.append(note(_SMALLER))
        error = ToolError(
            f"no twin: one takes about {needed / 2**30:.1f} GiB, over the limit of "
            f"{bytes_limit / 2**30:.1f} GiB"
        )
        error.diagnostic = replace(error.diagnostic, notes=tuple(notes))
        raise error
    return Twin(
        small[0],
        small[1],
        tuple(pair for pair in shapes if pair[0] != pair[1]),
        needed,
        max(estimated_bytes(artifact.module) for artifact in (before, after)),
        tuple(argument_ranges(before.module)),
        _NOTES,
    )


def _kept(values: Iterable[Iterable[Extent]]) -> dict[str, int]:
    """Why some values keep dimensions of more than a few positions, each with one that is kept."""
    leaves = (leaf for extents in values for extent in extents for leaf in extent.leaves)
    return {leaf.kept: leaf.size for leaf in leaves if leaf.kept and leaf.size > _FEW}


_FEW = 8
_SMALLER = (
    "the same step exported with fewer samples, shorter sequences and less width, through the same "
    "pipeline, can be run as it is"
)
_NOTES = (
    "rounding and overflow at the full sizes",
    "elements between the ends of a reduced dimension, and of each device's part of one",
    "which of them an index that is computed from data reaches",
)


def estimated_bytes(module: ir.Module) -> int:
    """About what a host needs to run a program on all of its devices: arguments and results, and
    the op with the most bytes, on each device where it works on a part."""
    grid = stated_grid(module) or inferred_grid(module)
    divided = is_partitioned(module)
    largest = 0

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal largest
        if op.name not in ("func.func", "builtin.module", MANUAL_COMPUTATION):
            copies = 1 if divided and not _is_manual(op) else grid.size
            size = sum(map(bytes_of, [*op.operands, *op.results]))
            largest = max(largest, copies * int(size))
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return int(sum(map(bytes_of, _ends(module)))) * (1 if divided else grid.size) + largest


def _is_manual(op: ir.Operation) -> bool:
    parent = op.parent
    while parent is not None:
        if parent.name == MANUAL_COMPUTATION:
            return True
        parent = parent.operation.parent
    return False


def _ends(module: ir.Module) -> list[ir.Value]:
    """The arguments and results of the program."""
    block = entry_function(module).regions[0].blocks[0]
    return [*block.arguments, *terminator(block).operands]


def _runnable(artifact: Artifact, platform: int) -> Artifact:
    """A bare module, without asynchronous collectives, whose types cannot be resized."""
    module = runnable_module(artifact, platform)
    lower_async_calls(module)
    return Artifact(artifact.name, Form.TEXT, module)

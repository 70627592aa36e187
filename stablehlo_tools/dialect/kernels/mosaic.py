"""Pallas kernels for TPU: which dimension each dimension of their grid moves along.

The configuration of a `tpu_custom_call` has the kernel as bytecode. Its function runs once for each
point of a grid, on a window of each operand and result. An index map gives the position of the
window, in units of its size:

    iteration_bounds = 8, 2, 4        dimension_semantics = parallel, parallel, arbitrary
    window 1 x 1 x 128 x 128          (%i, %j, %k) -> (%i, %j, %k, 0)

Here grid dimension 0 moves every window along dimension 0, and nothing else reads %i. If windows
have one element along it, and the kernel keeps nothing from one %i to the next, each sample is
computed by itself. Another number of samples is then another bound (seen: Pallas writes the same
kernel for it, but for the bound and the estimate of the cost).

Prefetched scalars, such as lengths of sequences or tables of pages, have no window. Kernels and
index maps load single ones. They belong to a sample if all loads have %i there: `%lengths[%i]`.

A kernel keeps nothing if the grid dimension is parallel, or without scratch memory: every
window of a result moves along, so no step reads what another one wrote.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.factors import Along, Factor, FactorRole, Shapes

TARGET = "tpu_custom_call"
_KERNEL = "custom_call_config"
_CAST, _LOAD, _RETURN = "arith.index_cast", "memref.load", "func.return"
_COSTS = ("flops", "transcendentals", "bytes_accessed")
# Ops whose state outlives a step of the grid, that read the bounds, or that reach other devices.
_STATEFUL = (
    "tpu.prng_",
    "tpu.sem_",
    "tpu.enqueue_",
    "tpu.wait_",
    "tpu.device_id",
    "tpu.iteration_bound",
)


@dataclass(frozen=True)
class GridDimension:
    """A dimension of a grid that moves windows along one dimension each, one element at a time.

    `moves` are the dimensions, as (place among operands and results, dimension), also those of
    prefetched scalars. `is_independent` is True if the kernel keeps nothing from one step to the
    next.
    """

    number: int
    bound: int
    moves: tuple[tuple[int, int], ...]
    is_independent: bool


@dataclass(frozen=True)
class MosaicKernel:
    """The grid of a kernel. `windows` is the number of operands and results."""

    dimensions: tuple[GridDimension, ...]
    dynamic: int  # operands that are bounds of the grid
    prefetched: int  # operands after them, of scalars
    windows: int

    @property
    def tensors(self) -> int:
        """The number of operands and results."""
        return self.dynamic + self.prefetched + self.windows


def mosaic_factors(
    config: str, operands: Shapes, results: Shapes, stated: Sequence[Factor]
) -> list[Factor]:
    """Returns the independent factors of a kernel, one for each such dimension of its grid. Those
    that a rule has `stated` need no proof."""
    kernel = read_kernel(config)
    shapes = [*operands, *results]
    if kernel is None or kernel.tensors != len(shapes):
        return []
    factors: list[Factor] = []
    for dimension in kernel.dimensions:
        # Windows of one element cover the dimension exactly if it is as long as the grid's.
        moved = dimension.moves
        fits = all(
            dim < len(shapes[place]) and shapes[place][dim] == dimension.bound
            for place, dim in moved
        )
        # A result that it does not move along is written by several samples.
        made = {place for place, _ in moved if place >= len(operands)}
        if fits and len(made) == len(results):
            taken = tuple(Along(place, dim) for place, dim in moved if place < len(operands))
            given = tuple(
                Along(place - len(operands), dim) for place, dim in moved if place >= len(operands)
            )
            factor = Factor(dimension.bound, FactorRole.KEPT, taken, given)
            if dimension.is_independent or factor in stated:
                factors.append(factor)
    return factors


def resized_mosaic(config: str, before: int, factor: Factor, size: int) -> str:
    """Returns the configuration of a kernel with another size of a factor; `before` is the number
    of its operands."""
    kernel = read_kernel(config)
    assert kernel is not None
    asked = {(along.tensor, along.dim) for along in factor.operands}
    asked |= {(before + along.tensor, along.dim) for along in factor.results}
    (dimension,) = (each for each in kernel.dimensions if set(each.moves) == asked)
    # The stored form of the same version, so that no newer reader is needed.
    read = json.loads(config)
    stored = read[_KERNEL]
    module, version = bindings.read_mosaic(base64.b64decode(stored["body"]))
    function = _main(module)
    bounds = list(ir.DenseI64ArrayAttr(function.attributes["iteration_bounds"]))
    bounds[dimension.number] = size
    function.attributes["iteration_bounds"] = ir.DenseI64ArrayAttr.get(bounds, module.context)
    for place, dim in dimension.moves:
        if place < kernel.dynamic + kernel.prefetched:
            for each in _functions(module).values():
                _resize_argument(each, len(bounds) + place - kernel.dynamic, dim, size)
    stored["body"] = base64.b64encode(bindings.write_mosaic(module, version)).decode()
    for name in _COSTS:
        if name in stored.get("cost_estimate", {}):
            cost = stored["cost_estimate"][name]
            stored["cost_estimate"][name] = cost * size // dimension.bound
    return json.dumps(read)


def why_dependent(config: str) -> str:
    """Says why a kernel is not known to treat the first dimension of its tensors independently."""
    kernel = read_kernel(config)
    if kernel is None:
        return "the kernel cannot be read, or reaches other devices"
    if kernel.dynamic:
        return (
            "the bounds of its grid are computed at run time, as in the grouped products of "
            "megablox; lax.ragged_dot is divided (in MaxText: megablox=False)"
        )
    for dimension in kernel.dimensions:
        if all(dim == 0 for _, dim in dimension.moves) and not dimension.is_independent:
            return (
                f"dimension {dimension.number} of its grid is not parallel, and its scratch memory "
                "may pass values from sample to sample"
            )
    return "no dimension of its grid moves each block along one dimension, one element at a time"


def without_cost(config: str) -> str:
    """Returns a configuration without the estimate of the cost; unchanged if it cannot be read."""
    try:
        read: Any = json.loads(config)
        read[_KERNEL].pop("cost_estimate", None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return config
    return json.dumps(read)


@lru_cache(maxsize=256)
def read_kernel(config: str) -> MosaicKernel | None:
    """Returns the grid of a kernel; None if it cannot be read, or reaches other devices."""
    try:
        stored: Any = json.loads(config)[_KERNEL]
        if stored.get("has_communication"):
            return None
        module, _ = bindings.read_mosaic(base64.b64decode(stored["body"]))
        return _read_grid(module)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None  # a damaged configuration, or a form of a later release
    except ir.MLIRError:
        return None


def _read_grid(module: ir.Module) -> MosaicKernel:
    function = _main(module)
    names = function.attributes
    bounds = list(ir.DenseI64ArrayAttr(names["iteration_bounds"]))
    # Without semantics, all dimensions of the grid are "arbitrary": they run in order.
    stated = names.get("dimension_semantics")
    semantics = [] if stated is None else [str(each) for each in ir.ArrayAttr(stated)]
    scratch, prefetched = (
        ir.IntegerAttr(names[name]).value if name in names else 0
        for name in ("scratch_operands", "scalar_prefetch")
    )
    # The functions after the kernel are the index maps of its windows.
    functions = _functions(module)
    windows = [
        _Window.from_attribute(each, functions) for each in ir.ArrayAttr(names["window_params"])
    ]
    # A bound that is an operand is negative here; these operands come first.
    dynamic = sum(bound < 0 for bound in bounds)
    is_stateful = any(word in str(module) for word in _STATEFUL)
    dimensions: list[GridDimension] = []
    for number, bound in enumerate(bounds):
        moves = [window.moved_by(number) for window in windows]
        loads = _loads_by(number, len(bounds), prefetched, functions)
        if bound < 0 or loads is None or None in moves or is_stateful:
            continue
        parallel = number < len(semantics) and "parallel" in semantics[number]
        listed = [(dynamic + place, dim) for place, dim in loads]
        for place, dims in enumerate(moves):
            listed += [(dynamic + prefetched + place, dim) for dim in dims or ()]
        dimensions.append(GridDimension(number, bound, tuple(listed), parallel or not scratch))
    return MosaicKernel(tuple(dimensions), dynamic, prefetched, len(windows))


def _functions(module: ir.Module) -> dict[str, ir.Operation]:
    return {
        ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
    }


def _loads_by(
    grid: int, rank: int, prefetched: int, functions: dict[str, ir.Operation]
) -> list[tuple[int, int]] | None:
    """Returns the prefetched operands whose scalars belong to an index of the grid, with the
    dimension that it indexes; None if the kernel reads the index in another way."""
    kernel, *maps = functions.values()
    found: set[tuple[int, int]] = set()
    for function in (kernel, *maps):
        block = function.regions[0].blocks[0]
        indices = [block.arguments[grid]]
        for index in indices:
            for use in index.uses:
                op, place = use.owner.operation, use.operand_number
                memory = op.operands[0]
                if op.name == _CAST:
                    indices.append(op.results[0])
                elif op.name == _LOAD and place and memory.owner == block:
                    found.add((ir.BlockArgument(memory).arg_number - rank, place - 1))
                elif function == kernel or op.name != _RETURN:
                    return None
    # The scalars of a sample are loaded by its index everywhere.
    for number, dim in found:
        for function in (kernel, *maps):
            block = function.regions[0].blocks[0]
            for use in block.arguments[rank + number].uses:
                op = use.owner.operation
                index = op.operands[dim + 1] if op.name == _LOAD else None
                while index is not None and index.owner != block and _maker(index).name == _CAST:
                    index = _maker(index).operands[0]
                if index != block.arguments[grid]:
                    return None
    return sorted(found) if all(number < prefetched for number, _ in found) else None


def _maker(value: ir.Value) -> ir.Operation:
    return ir.OpResult(value).owner.operation


def _resize_argument(function: ir.Operation, number: int, dim: int, size: int) -> None:
    """Writes another size of a dimension of an argument, a memref."""
    block = function.regions[0].blocks[0]
    type_ = ir.MemRefType(block.arguments[number].type)
    shape = [*type_.shape]
    shape[dim] = size
    resized = ir.MemRefType.get(shape, type_.element_type, type_.layout, type_.memory_space)
    block.arguments[number].set_type(resized)
    stated = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    types = [argument.type for argument in block.arguments]
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(types, stated.results, function.context)
    )


def _main(module: ir.Module) -> ir.Operation:
    return module.body.operations[0].operation


@dataclass(frozen=True)
class _Window:
    """The window of an operand or a result: its sizes and the values that are its position.
    `index` is None for a window over the whole tensor, or in memory that the kernel addresses."""

    sizes: Sequence[int]
    index: ir.Block | None

    @staticmethod
    def from_attribute(attribute: ir.Attribute, functions: dict[str, ir.Operation]) -> _Window:
        """Reads an entry of `window_params`."""
        entries = ir.DictAttr(attribute)
        if "window_kind" in entries:
            raise ValueError("its positions are elements, with padding")
        if "transform_indices" not in entries or "window_bounds" not in entries:
            return _Window((), None)
        name = ir.FlatSymbolRefAttr(entries["transform_indices"]).value
        sizes = list(ir.DenseI64ArrayAttr(entries["window_bounds"]))
        return _Window(sizes, functions[name].regions[0].blocks[0])

    def moved_by(self, grid: int) -> list[int] | None:
        """Returns the dimension along which a grid dimension moves the window by one element; []
        if it does not move it, None if it moves it in another way."""
        if self.index is None:
            # The kernel addresses the memory itself: not by this index, which it does not read.
            return []
        end = self.index.operations[len(self.index.operations) - 1].operation
        uses = [use for use in self.index.arguments[grid].uses if use.owner.operation == end]
        if not uses:
            return []
        # The index map has to return the index of the grid unchanged, at one place.
        if len(uses) > 1:
            return None
        dim = uses[0].operand_number
        return [dim] if self.sizes[dim] == 1 else None

"""Counts the work of each op of StableHLO and CHLO: its role, operations and matrix product.

Operations are counted for each element of the result, or of the operand for a reduction.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import Collective, tensor_bytes
from stablehlo_tools.analysis.replica_groups import ProcessGroups
from stablehlo_tools.analysis.tasks.nodes import KernelRole
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.element_operations import OPERATIONS, element_operations, sort_operations
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind
from stablehlo_tools.cost.library_calls import LibraryCall, Tensor, call_work
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import (
    backend_config,
    is_annotation,
    kernel_name,
    target_of,
)
from stablehlo_tools.dialect.dimension_numbers import scatter_numbers
from stablehlo_tools.dialect.dimensions import integers
from stablehlo_tools.dialect.names import ADD, COMPOSITE, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import Trait, ops_with, ops_with_any, short_names
from stablehlo_tools.ir.values import is_splat, producer, splat_of
from stablehlo_tools.ir.views import Combining

TINY = 256  # bytes: recomputing a value this small costs no more than reading it
_WINDOW = 16  # the longest that XLA reduces in one step (reduce_window_rewriter's base length)

_DIALECT = re.compile(r"^(stablehlo|chlo|mhlo)\.")
_MOVES = short_names(ops_with_any(Trait.BIJECTIVE | Trait.PIECE | Trait.JOIN)) - {
    "dynamic_update_slice",
    "gather",
    "reshape",
} | {"copy"}
_UNCOUNTED = _MOVES | short_names(ops_with_any(Trait.RETYPE | Trait.COMPLEX_PART))
_SLICES = short_names(ops_with(Trait.PIECE)) | {"dynamic_gather"}
_NOTHING = short_names(ops_with_any(Trait.DEVICE_ID | Trait.TOKEN)) | {"get_dimension_size"}
_BROADCASTS = frozenset({"broadcast_in_dim", "broadcast"})
_CHEAP = _BROADCASTS | {"iota", "dynamic_iota"}
_RESHAPES = frozenset(
    {"reshape", "dynamic_reshape", "sdy.sharding_constraint", "sdy.propagation_barrier"}
)
_VIEWS = frozenset({"optimization_barrier", "tuple", "get_tuple_element"})
_WITH_REGIONS = (
    short_names(  # with regions of a few operations for each element
        ops_with_any(Trait.REDUCTION | Trait.OPAQUE)
    )
    | {"map", "scatter", "select_and_scatter"}
    | {"sort"}
)
_OWN_KERNELS = {
    **dict.fromkeys(short_names(ops_with(Trait.CONTRACTION)), WorkKind.MATMUL),
    **dict.fromkeys(("gather", "dynamic_gather", "scatter"), WorkKind.GATHER),
    **dict.fromkeys(short_names(ops_with(Trait.RANDOM)), WorkKind.ELEMENTWISE),
    "convolution": WorkKind.CONVOLUTION,
    "sort": WorkKind.SORT,
    "select_and_scatter": WorkKind.REDUCTION,
}
_LIBRARY = short_names(ops_with(Trait.LIBRARY))


@dataclass(frozen=True, slots=True)
class OpWork:
    """An op's part in its kernel; `reads` are the bytes read of its operands, None for all.

    A kernel of kind OTHER is timed only by its bytes.
    """

    role: KernelRole
    kind: WorkKind = WorkKind.ELEMENTWISE
    vector_flops: float = 0.0
    matmul: Matmul | None = None
    dtype: str = "f32"
    reads: tuple[float | None, ...] = ()
    known: KernelWork | None = None  # all work of a library call


def short_name(op: ir.Operation) -> str:
    """Returns `dot_general` for `stablehlo.dot_general`, `erf` for a composite of that function."""
    name = op.name
    if name == COMPOSITE:
        name = ir.StringAttr(op.attributes["name"]).value
    return _DIALECT.sub("", name)


def is_own_kernel(composite: ir.Operation) -> bool:
    """Returns True if compilers know a composite, so that its decomposition does not run."""
    name = ir.StringAttr(composite.attributes["name"]).value
    return name.startswith("chlo.") and short_name(composite) in OPERATIONS.keys() | _LIBRARY


def bytes_of(value: ir.Value) -> float:
    """Returns the bytes of a value, 0 of a token.

    Raises a located ToolError for a symbolic dimension.
    """
    type_ = value.type
    if not isinstance(type_, ir.ShapedType):
        return 0.0
    size = tensor_bytes(type_)
    if size is None:
        raise ToolError(
            f"the size of {type_} is unknown, so the op cannot be timed: export the program with "
            "the shapes of the run",
            value.location,
        )
    return float(size)


def transfer_of(collective: Collective, groups: ProcessGroups) -> DeviceTransfer:
    """Returns the transfer of a collective, with the bytes of its larger side."""
    grows = collective.kind in ("all_gather", "recv")
    whole = collective.bytes_out if grows else collective.bytes_in
    return DeviceTransfer(collective.kind, float(whole or 0), groups)


def op_work(op: ir.Operation, name: str) -> OpWork:
    """Returns the work of an op without regions to enter.

    Raises a located ToolError for an op that runs its regions in a way that is not understood.
    """
    if len(op.regions) and name not in _WITH_REGIONS:
        raise ToolError(
            f"{op.name} cannot be timed: it is unknown how often its regions run; write it in "
            "StableHLO's control flow",
            op.location,
        )
    if name in _NOTHING:
        return OpWork(KernelRole.NOTHING)
    if name == "constant":
        # One number is written wherever it is read; a table is in memory like an argument.
        if bytes_of(op.results[0]) <= TINY:
            return OpWork(KernelRole.NOTHING)
        return OpWork(KernelRole.CHEAP if is_splat(op) else KernelRole.INPUT)
    if name in _VIEWS or is_annotation(op):
        return OpWork(KernelRole.VIEW)
    if name in _RESHAPES:
        return OpWork(KernelRole.RESHAPE, WorkKind.COPY)
    if name in _LIBRARY:
        known = call_work(library_call(op, name))
        kind = WorkKind.OTHER if known is None else known.kind
        return OpWork(KernelRole.KERNEL, kind, dtype=known.dtype if known else "f32", known=known)
    result = op.results[0].type if len(op.results) else None
    if not isinstance(result, ir.ShapedType):
        return OpWork(KernelRole.KERNEL, WorkKind.OTHER)
    dtype = str(result.element_type)
    if name in _BROADCASTS:
        operand, dims = ir.ShapedType(op.operands[0].type), integers(op, "broadcast_dimensions")
        # The elements of the operand, in their order: only dimensions of size 1 are added.
        same = operand.has_static_shape and math.prod(operand.shape) == math.prod(result.shape)
        if same and list(dims) == sorted(dims):
            return OpWork(KernelRole.RESHAPE, WorkKind.COPY)
    if name in _CHEAP:
        return OpWork(KernelRole.CHEAP, WorkKind.ELEMENTWISE, dtype=dtype)
    if name in ("dot_general", "dot", "convolution"):
        return _products(op, name)
    if name in ("reduce", "reduce_window"):
        operand = ir.ShapedType(op.operands[0].type)
        body = list(Combining(op).combiner.operations)
        each = sum(_per_element(short_name(inner.operation)) for inner in body[:-1])
        count = _elements(operand)
        if name == "reduce_window":
            # Compilers replace a long window by a tree of short ones.
            each_place = math.prod(
                size if size <= _WINDOW else _WINDOW * math.log(size, _WINDOW)
                for size in integers(op, "window_dimensions")
            )
            count = _elements(ir.ShapedType(op.results[0].type)) * each_place
        return OpWork(KernelRole.REDUCTION, WorkKind.REDUCTION, count * max(each, 1.0), None, dtype)
    if name == "dynamic_update_slice":
        return OpWork(KernelRole.UPDATE, WorkKind.COPY, dtype=dtype, reads=(0.0,))
    if name in _OWN_KERNELS:
        return _own_kernel(op, name, dtype)
    kind = WorkKind.COPY if name in _MOVES else WorkKind.ELEMENTWISE
    reads = (bytes_of(op.results[0]),) if name in _SLICES else ()
    return OpWork(
        KernelRole.FUSIBLE, kind, _per_element(name) * _elements(result), None, dtype, reads
    )


def selection(op: ir.Operation) -> OpWork:
    """Returns the work of an op that compilers replace by a compare and a select."""
    result = ir.ShapedType(op.results[0].type)
    flops = 2.0 * _elements(result)
    return OpWork(KernelRole.FUSIBLE, WorkKind.ELEMENTWISE, flops, None, str(result.element_type))


def library_call(op: ir.Operation, name: str) -> LibraryCall:
    """Returns an op that compilers call a library routine for, as `cost.library_calls` knows it."""
    return LibraryCall(
        target=target_of(op) if name == "custom_call" else name,
        operands=[_tensor(operand) for operand in op.operands],
        results=[_tensor(result) for result in op.results],
        config=backend_config(op),
        kernel=kernel_name(op),
        lengths=integers(op, "fft_length"),
    )


def _tensor(value: ir.Value) -> Tensor:
    type_ = value.type
    if not isinstance(type_, ir.ShapedType):
        return Tensor((), "", 0.0)
    size = bytes_of(value)
    return Tensor(tuple(type_.shape), str(type_.element_type), size)


def _per_element(name: str) -> float:
    return 0.0 if name in _UNCOUNTED else element_operations(name)


def _own_kernel(op: ir.Operation, name: str, dtype: str) -> OpWork:
    result = ir.ShapedType(op.results[0].type)
    flops, reads = 0.0, tuple[float | None, ...]()
    if name in _SLICES:
        reads = (bytes_of(op.results[0]),)
    elif name == "scatter":
        updates = op.operands[len(op.operands) - 1]
        reads = (bytes_of(updates),) * len(op.results)  # only the rows that it writes
        flops = _elements(ir.ShapedType(updates.type))
    elif name == "sort":
        flops = _elements(result) * sort_operations(max(result.shape, default=1))
    elif name.startswith("rng"):
        flops = _elements(result) * element_operations(name)
    elif name == "select_and_scatter":
        flops = 2.0 * _elements(ir.ShapedType(op.operands[0].type))
    return OpWork(KernelRole.KERNEL, _OWN_KERNELS[name], flops, None, dtype, reads)


def _products(op: ir.Operation, name: str) -> OpWork:
    left, right = (ir.RankedTensorType(v.type) for v in list(op.operands)[:2])
    if not (left.has_static_shape and right.has_static_shape):
        return OpWork(KernelRole.KERNEL, _OWN_KERNELS[name])
    if name == "dot_general":
        dims = bindings.dot_dimension_numbers(op.attributes["dot_dimension_numbers"])
        batch = math.prod(left.shape[d] for d in dims.lhs_batching_dimensions)
        k = math.prod(left.shape[d] for d in dims.lhs_contracting_dimensions)
        m, n = (math.prod(side.shape) // max(1, batch * k) for side in (left, right))
        product = Matmul(batch, m, n, k)
    elif name == "dot":
        m = left.shape[0] if left.rank == 2 else 1
        n = right.shape[1] if right.rank == 2 else 1
        product = Matmul(1, m, n, left.shape[-1])
    else:
        # As the product [batch and places, inputs x window] x [inputs x window, outputs].
        dims = bindings.conv_dimension_numbers(op.attributes["dimension_numbers"])
        groups = ir.IntegerAttr(op.attributes["feature_group_count"]).value
        outputs = right.shape[dims.kernel_output_feature_dimension]
        result = ir.ShapedType(op.results[0].type).shape
        places = math.prod(result) // max(1, outputs)
        depth = math.prod(right.shape) // max(1, outputs)
        if "lhs_dilation" in op.attributes:  # the zeros between elements are left out
            depth = -(-depth // math.prod(integers(op, "lhs_dilation")))
        product = Matmul(groups, places, outputs // max(1, groups), depth)
    dtype = str(left.element_type)
    # A product of f32 may request a higher precision than the device's default.
    asked = str(op.attributes.get("precision_config")) if dtype == "f32" else ""
    dtype += "_highest" if "HIGHEST" in asked else "_high" if "HIGH" in asked else ""
    return OpWork(KernelRole.KERNEL, _OWN_KERNELS[name], 0.0, product, dtype)


def _elements(type_: ir.ShapedType) -> float:
    return float(math.prod(type_.shape)) if type_.has_static_shape else 0.0


# The gradient of a gather adds into zeros, and the sum is added to another value. XLA writes it
# over that value, if the sum has no other use. If each row of the zeros gets at most one element,
# XLA:TPU selects instead.


def written_over(op: ir.Operation) -> tuple[ir.Value, ir.Operation] | None:
    """Returns x and the scatter of `x + scatter(0, …)`, if nothing else reads the scatter."""
    if op.name != ADD:
        return None
    for scattered, other in ((op.operands[1], op.operands[0]), (op.operands[0], op.operands[1])):
        scatter = producer(scattered)
        if scatter is not None and _adds_to_zeros(scatter) and len(list(scattered.uses)) == 1:
            return other, scatter
    return None


def is_one_hot(op: ir.Operation) -> bool:
    """Returns True if a scatter adds at most one element to each row of zeros."""
    if op.name != SCATTER or not _adds_to_zeros(op):
        return False
    numbers = scatter_numbers(op)
    rank = ir.RankedTensorType(op.operands[0].type).rank
    return (
        not numbers.windows
        and len(numbers.index_map) == 1
        and len(numbers.operand_batching) == rank - 1
        and ir.ShapedType(op.operands[2].type).shape[-1] == 1
    )


def _adds_to_zeros(op: ir.Operation) -> bool:
    if op.name != SCATTER or len(op.results) != 1 or splat_of(op.operands[0]) != 0:
        return False
    return reducer_kind(Combining(op).combiner) == "add"

"""Returns the dimension numbers of dots, convolutions, gathers and scatters as plain integers.

Use these instead of the bindings' classes, which build a new list at each access and do not compute
the remaining dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DotNumbers:
    """Numbers of a dot_general. `lhs_batching[i]` pairs with `rhs_batching[i]`; contracting too.

    The result has the batching dimensions, then the free ones of lhs, then those of rhs.
    """

    lhs_batching: Dims
    rhs_batching: Dims
    lhs_contracting: Dims
    rhs_contracting: Dims

    def lhs_free(self, rank: int) -> Dims:
        """Returns the dimensions of lhs that are neither batching nor contracting."""
        return _others(rank, (*self.lhs_batching, *self.lhs_contracting))

    def rhs_free(self, rank: int) -> Dims:
        """Returns the dimensions of rhs that are neither batching nor contracting."""
        return _others(rank, (*self.rhs_batching, *self.rhs_contracting))


@dataclass(frozen=True, slots=True)
class ConvNumbers:
    """Numbers of a convolution. Spatial dimensions i of input, kernel and output correspond."""

    input_batch: int
    input_feature: int
    input_spatial: Dims
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: Dims
    output_batch: int
    output_feature: int
    output_spatial: Dims


class IndexedNumbers(NamedTuple):
    """Numbers of a gather, a dynamic_gather or a scatter, in the order of their attributes.

    A gather reads windows of the operand into its result; a scatter writes its updates to them.
    `windows` are the dimensions of the result or the updates that are in windows: `offset_dims` or
    `update_window_dims`. `omitted` are the operand's dimensions that windows lack, as they have
    size 1: `collapsed_slice_dims` or `inserted_window_dims`. `operand_batching[i]` pairs with
    `indices_batching[i]`. Component k of an index addresses the operand's dimension `index_map[k]`.
    """

    windows: Dims
    omitted: Dims
    operand_batching: Dims
    indices_batching: Dims
    index_map: Dims
    index_vector: int

    def window_dims(self, operand_rank: int) -> Dims:
        """Returns the operand's dimensions in windows; `windows[i]` corresponds to the i-th."""
        return _others(operand_rank, (*self.omitted, *self.operand_batching))

    def batch_dims(self, rank: int) -> Dims:
        """Returns the dimensions of the result or the updates that number the windows.

        `batch_dims[i]` corresponds to `index_dims[i]` of the indices.
        """
        return _others(rank, self.windows)

    def index_dims(self, indices_rank: int) -> Dims:
        """Returns the dimensions of the indices without the index vector dimension."""
        return _others(indices_rank, (self.index_vector,))


def dot_numbers(op: ir.Operation) -> DotNumbers:
    """Returns the numbers of a `dot_general` of StableHLO or MHLO."""
    attribute = op.attributes["dot_dimension_numbers"]
    dims = bindings.dot_dimension_numbers(attribute)
    return DotNumbers(
        tuple(dims.lhs_batching_dimensions),
        tuple(dims.rhs_batching_dimensions),
        tuple(dims.lhs_contracting_dimensions),
        tuple(dims.rhs_contracting_dimensions),
    )


def conv_numbers(op: ir.Operation) -> ConvNumbers:
    """Returns the numbers of a `convolution` of StableHLO or MHLO."""
    dims = bindings.conv_dimension_numbers(op.attributes["dimension_numbers"])
    return ConvNumbers(
        dims.input_batch_dimension,
        dims.input_feature_dimension,
        tuple(dims.input_spatial_dimensions),
        dims.kernel_input_feature_dimension,
        dims.kernel_output_feature_dimension,
        tuple(dims.kernel_spatial_dimensions),
        dims.output_batch_dimension,
        dims.output_feature_dimension,
        tuple(dims.output_spatial_dimensions),
    )


def gather_numbers(op: ir.Operation) -> IndexedNumbers:
    """Returns the numbers of a `gather` or a `dynamic_gather`."""
    dims = bindings.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    return IndexedNumbers(
        tuple(dims.offset_dims),
        tuple(dims.collapsed_slice_dims),
        tuple(dims.operand_batching_dims),
        tuple(dims.start_indices_batching_dims),
        tuple(dims.start_index_map),
        int(dims.index_vector_dim),
    )


def scatter_numbers(op: ir.Operation) -> IndexedNumbers:
    """Returns the numbers of a `scatter`."""
    dims = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    return IndexedNumbers(
        tuple(dims.update_window_dims),
        tuple(dims.inserted_window_dims),
        tuple(dims.input_batching_dims),
        tuple(dims.scatter_indices_batching_dims),
        tuple(dims.scattered_dims_to_operand_dims),
        int(dims.index_vector_dim),
    )


def _others(rank: int, dims: Dims) -> Dims:
    return tuple(dim for dim in range(rank) if dim not in dims)

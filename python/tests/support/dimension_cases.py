"""Ops that the reference interpreter runs, each at the sizes that are asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """`op` of operands %0, %1, … of these types, as `3xNxf32`: N is a size, M twice as much."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    op: str

    def text(self, size: int) -> str:
        """A module that computes the op at a size."""
        operands, results = (_tensors(types, size) for types in (self.operands, self.results))
        arguments = ", ".join(f"%{i}: {type_}" for i, type_ in enumerate(operands))
        op = re.sub(r"\bN\b", str(size), self.op)
        made = ", ".join(f"%r#{i}" if len(results) > 1 else "%r" for i in range(len(results)))
        count = f":{len(results)}" if len(results) > 1 else ""
        types = ", ".join(results)
        return (
            f"func.func @main({arguments}) -> ({types}) {{\n"
            f"  %r{count} = {op} : ({', '.join(operands)}) -> ({types})\n"
            f"  return {made} : {types}\n}}"
        )

    def module(self, size: int, context: ir.Context) -> ir.Module:
        """The same, parsed."""
        return bindings.parse_module(self.text(size), context)

    def arguments(self, size: int) -> list[Array]:
        """Numbers for it: of integers, small ones."""
        random = np.random.default_rng(size)
        return [random_array(random, type_) for type_ in _tensors(self.operands, size)]


def _tensors(types: tuple[str, ...], size: int) -> list[str]:
    sized = (re.sub(r"M(?=x)", str(2 * size), type_) for type_ in types)
    return [f"tensor<{re.sub(r'N(?=x)', str(size), type_)}>" for type_ in sized]


def random_array(random: np.random.Generator, type_: str) -> Array:
    """An array of a tensor type's text."""
    *shape, element = type_.removeprefix("tensor<").removesuffix(">").split("x")
    sizes = [int(size) for size in shape]
    if element == "i1":
        return random.integers(0, 2, sizes).astype(np.bool_)
    if element.startswith(("i", "ui")):
        return random.integers(0, 3, sizes).astype(np.int32)
    return random.normal(size=sizes).astype(np.float32)


def run(module: ir.Module, arguments: list[Array]) -> list[Array]:
    """What the reference interpreter gives."""
    with module.context:
        attributes = [ir.DenseElementsAttr.get(np.ascontiguousarray(a), shape=a.shape,
                      type=_boolean(a)) for a in arguments]  # fmt: skip
        return [np.array(result) for result in bindings.eval_module(module, attributes)]


def _boolean(array: Array) -> ir.Type | None:
    return ir.IntegerType.get_signless(1) if array.dtype == np.bool_ else None


def op_of(module: ir.Module) -> ir.Operation:
    """The op of a case."""
    return module.body.operations[0].operation.regions[0].blocks[0].operations[0].operation


_FLOATS = "^bb0(%a: tensor<f32>, %b: tensor<f32>): "
ADD = f"({{ {_FLOATS} %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }})"
GE = (
    f"({{ {_FLOATS} %s = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1> "
    "stablehlo.return %s : tensor<i1> })"
)
_BY_ROWS = "offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0]"
_ROWS = "update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0]"


def _case(name: str, operands: str, results: str, op: str) -> Case:
    return Case(name, tuple(operands.split()), tuple(results.split()), op)


# The dimension of size N is passed through: of a part of it the op makes that part.
KEPT = (
    _case("add", "3xNxf32 3xNxf32", "3xNxf32", "stablehlo.add %0, %1"),
    _case("select_scalar", "i1 Nx3xf32 Nx3xf32", "Nx3xf32", "stablehlo.select %0, %1, %2"),
    _case("clamp_scalars", "f32 Nx3xf32 f32", "Nx3xf32", "stablehlo.clamp %0, %1, %2"),
    _case("compare", "Nxf32 Nxf32", "Nxi1", "stablehlo.compare GT, %0, %1"),
    _case("convert", "3xNxf32", "3xNxi32", "stablehlo.convert %0"),
    _case("complex_real", "Nxf32", "Nxf32", "stablehlo.real %0"),
    _case("barrier", "Nxf32 2xf32", "Nxf32 2xf32", '"stablehlo.optimization_barrier"(%0, %1)'),
    _case("map", "Nx3xf32 Nx3xf32", "Nx3xf32",
          f'"stablehlo.map"(%0, %1) <{{dimensions = array<i64: 0, 1>}}> {ADD}'),
    _case("transpose", "3xNx2xf32", "2x3xNxf32", "stablehlo.transpose %0, dims = [2, 0, 1]"),
    _case("broadcast_kept", "Nxf32", "3xNx2xf32", "stablehlo.broadcast_in_dim %0, dims = [1]"),
    _case("broadcast_grown", "1xNxf32", "5xNxf32", "stablehlo.broadcast_in_dim %0, dims = [0, 1]"),
    _case("broadcast_swapped", "2xNxf32", "Nx2xf32",
          "stablehlo.broadcast_in_dim %0, dims = [1, 0]"),
    _case("reshape_outer", "Nx2x3xf32", "Nx6xf32", "stablehlo.reshape %0"),
    _case("reshape_inner", "2x3xNxf32", "6xNxf32", "stablehlo.reshape %0"),
    _case("reshape_ones", "1xNx1xf32", "Nx1xf32", "stablehlo.reshape %0"),
    _case("bitcast", "Nxf32", "Nxi32", "stablehlo.bitcast_convert %0"),
    _case("bitcast_narrower", "Nxf32", "Nx2xi16", "stablehlo.bitcast_convert %0"),
    _case("slice_other", "Nx7xf32", "Nx2xf32", "stablehlo.slice %0 [0:N, 1:6:3]"),
    _case("pad_other", "Nx3xf32 f32", "Nx8xf32",
          "stablehlo.pad %0, %1, low = [0, 1], high = [0, 2], interior = [0, 1]"),
    _case("concatenate_other", "Nx3xf32 Nx2xf32", "Nx5xf32",
          "stablehlo.concatenate %0, %1, dim = 1"),
    _case("reverse_other", "Nx3xf32", "Nx3xf32", "stablehlo.reverse %0, dims = [1]"),
    _case("dynamic_slice_other", "Nx7xf32 i32 i32", "Nx2xf32",
          "stablehlo.dynamic_slice %0, %1, %2, sizes = [N, 2]"),
    _case("update_other", "Nx7xf32 Nx2xf32 i32 i32", "Nx7xf32",
          "stablehlo.dynamic_update_slice %0, %1, %2, %3"),
    _case("gather_window", "3xNxf32 4x1xi32", "4xNxf32",
          f'"stablehlo.gather"(%0, %1) <{{dimension_numbers = #stablehlo.gather<{_BY_ROWS}, '
          "index_vector_dim = 1>, slice_sizes = array<i64: 1, N>}>"),
    _case("gather_indices", "3x5xf32 Nx1xi32", "Nx5xf32",
          f'"stablehlo.gather"(%0, %1) <{{dimension_numbers = #stablehlo.gather<{_BY_ROWS}, '
          "index_vector_dim = 1>, slice_sizes = array<i64: 1, 5>}>"),
    _case("gather_batching", "Nx3xf32 2xNxi32", "2xNxf32",
          '"stablehlo.gather"(%0, %1) <{dimension_numbers = #stablehlo.gather<'
          "collapsed_slice_dims = [1], operand_batching_dims = [0], "
          "start_indices_batching_dims = [1], start_index_map = [1], index_vector_dim = 2>, "
          "slice_sizes = array<i64: 1, 1>}>"),
    _case("scatter_window", "3xNxf32 2x1xi32 2xNxf32", "3xNxf32",
          '"stablehlo.scatter"(%0, %1, %2) <{scatter_dimension_numbers = '
          f"#stablehlo.scatter<{_ROWS}, index_vector_dim = 1>}}> {ADD}"),
    _case("scatter_batching", "Nx3xf32 Nx2x1xi32 Nx2xf32", "Nx3xf32",
          '"stablehlo.scatter"(%0, %1, %2) <{scatter_dimension_numbers = #stablehlo.scatter<'
          "inserted_window_dims = [1], input_batching_dims = [0], "
          "scatter_indices_batching_dims = [0], scatter_dims_to_operand_dims = [1], "
          f"index_vector_dim = 2>}}> {ADD}"),
    _case("dot_batching", "Nx2x3xf32 Nx3x4xf32", "Nx2x4xf32",
          "stablehlo.dot_general %0, %1, batching_dims = [0] x [0], contracting_dims = [2] x [1]"),
    _case("dot_free_lhs", "3xNxf32 3x4xf32", "Nx4xf32",
          "stablehlo.dot_general %0, %1, contracting_dims = [0] x [0]"),
    _case("dot_free_rhs", "5x2x3xf32 5x3xNxf32", "5x2xNxf32",
          "stablehlo.dot_general %0, %1, batching_dims = [0] x [0], contracting_dims = [2] x [1]"),
    _case("convolution_batch", "Nx5x3xf32 2x3x4xf32", "Nx4x4xf32",
          "stablehlo.convolution(%0, %1) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
          "window = {} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}"),
    _case("convolution_features", "2x5x3xf32 2x3xNxf32", "2x4xNxf32",
          "stablehlo.convolution(%0, %1) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
          "window = {} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}"),
    _case("reduce_other", "Nx3xf32 f32", "Nxf32",
          "stablehlo.reduce(%0 init: %1) applies stablehlo.add across dimensions = [1]"),
    _case("reduce_window_other", "Nx6xf32 f32", "Nx3xf32",
          '"stablehlo.reduce_window"(%0, %1) <{window_dimensions = array<i64: 1, 2>, '
          f"window_strides = array<i64: 1, 2>}}> {ADD}"),
    _case("select_and_scatter_other", "Nx6xf32 Nx3xf32 f32", "Nx6xf32",
          '"stablehlo.select_and_scatter"(%0, %1, %2) <{window_dimensions = array<i64: 1, 2>, '
          f"window_strides = array<i64: 1, 2>}}> {GE[:-1]}, {ADD[1:]}"),
    _case("sort_other", "Nx3xf32 Nx3xf32", "Nx3xf32 Nx3xf32",
          '"stablehlo.sort"(%0, %1) <{dimension = 1 : i64}> ({ ^bb0(%a: tensor<f32>, '
          "%b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>): %s = stablehlo.compare GE, %a, %b "
          ": (tensor<f32>, tensor<f32>) -> tensor<i1> stablehlo.return %s : tensor<i1> })"),
)  # fmt: skip

# No dimension of N is passed through as it is.
OTHERS = (
    _case("reshape_merges", "2xNxf32", "Mxf32", "stablehlo.reshape %0"),
    _case("reshape_splits", "Mxf32", "2xNxf32", "stablehlo.reshape %0"),
    _case("reshape_regroups", "4x6xf32", "8x3xf32", "stablehlo.reshape %0"),
    _case("reshape_mixes", "2x3xf32", "3x2xf32", "stablehlo.reshape %0"),
    _case("reshape_mixes_inside", "4x6xf32", "2x4x3xf32", "stablehlo.reshape %0"),
    _case("slice_strided", "7x2xf32", "2x2xf32", "stablehlo.slice %0 [1:6:3, 0:2]"),
    _case("pad_all", "3xf32 f32", "9xf32",
          "stablehlo.pad %0, %1, low = [2], high = [2], interior = [1]"),
    _case("pad_negative", "7xf32 f32", "7xf32",
          "stablehlo.pad %0, %1, low = [-3], high = [-3], interior = [1]"),
    _case("pad_shifts", "4xf32 f32", "4xf32",
          "stablehlo.pad %0, %1, low = [1], high = [-1], interior = [0]"),
    _case("concatenate", "2x2xf32 3x2xf32", "5x2xf32", "stablehlo.concatenate %0, %1, dim = 0"),
    _case("reverse", "4x2xf32", "4x2xf32", "stablehlo.reverse %0, dims = [0]"),
    _case("dynamic_slice", "5xf32 i32", "2xf32", "stablehlo.dynamic_slice %0, %1, sizes = [2]"),
    _case("update", "5xf32 2xf32 i32", "5xf32", "stablehlo.dynamic_update_slice %0, %1, %2"),
    _case("gather_part", "5x4xf32 3x1xi32", "3x2xf32",
          f'"stablehlo.gather"(%0, %1) <{{dimension_numbers = #stablehlo.gather<{_BY_ROWS}, '
          "index_vector_dim = 1>, slice_sizes = array<i64: 1, 2>}>"),
    _case("scatter_part", "3x4xf32 2x1xi32 2x2xf32", "3x4xf32",
          '"stablehlo.scatter"(%0, %1, %2) <{scatter_dimension_numbers = '
          f"#stablehlo.scatter<{_ROWS}, index_vector_dim = 1>}}> {ADD}"),
    _case("scatter_indexed_window", "4xf32 2x1xi32 2x2xf32", "4xf32",
          '"stablehlo.scatter"(%0, %1, %2) <{scatter_dimension_numbers = #stablehlo.scatter<'
          "update_window_dims = [1], scatter_dims_to_operand_dims = [0], "
          f"index_vector_dim = 1>}}> {ADD}"),
    _case("convolution_windows", "2x7x3xf32 2x3x4xf32", "2x3x4xf32",
          "stablehlo.convolution(%0, %1) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
          "window = {stride = [3], pad = [[1, 1]], rhs_dilate = [2]} "
          "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}"),
    _case("convolution_feature_groups", "2x5x6xf32 2x3x4xf32", "2x4x4xf32",
          "stablehlo.convolution(%0, %1) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
          "window = {} {batch_group_count = 1 : i64, feature_group_count = 2 : i64}"),
    _case("convolution_batch_groups", "4x5x3xf32 2x3x4xf32", "2x4x4xf32",
          "stablehlo.convolution(%0, %1) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
          "window = {} {batch_group_count = 2 : i64, feature_group_count = 1 : i64}"),
    _case("reduce_window", "8x2xf32 f32", "3x2xf32",
          '"stablehlo.reduce_window"(%0, %1) <{window_dimensions = array<i64: 2, 1>, '
          "window_strides = array<i64: 3, 1>, window_dilations = array<i64: 2, 1>, "
          f"padding = dense<[[1, 0], [0, 0]]> : tensor<2x2xi64>}}> {ADD}"),
    _case("select_and_scatter", "6xf32 3xf32 f32", "6xf32",
          '"stablehlo.select_and_scatter"(%0, %1, %2) <{window_dimensions = array<i64: 2>, '
          f"window_strides = array<i64: 2>}}> {GE[:-1]}, {ADD[1:]}"),
    _case("iota", "", "3x4xi32", '"stablehlo.iota"() <{iota_dimension = 1 : i64}>'),
    _case("reduce", "4x3xf32 f32", "3xf32",
          "stablehlo.reduce(%0 init: %1) applies stablehlo.add across dimensions = [0]"),
)  # fmt: skip

# Ops that the interpreter does not run, or the bindings do not hand out the results of.
NOT_RUN = (
    _case("complex", "Nxf32 Nxf32", "Nxcomplex<f32>", "stablehlo.complex %0, %1"),
    _case("cholesky", "Nx3x3xf32", "Nx3x3xf32", "stablehlo.cholesky %0, lower = true"),
    _case("fft", "Nx3x8xcomplex<f32>", "Nx3x8xcomplex<f32>",
          "stablehlo.fft %0, type = FFT, length = [8]"),
    _case("fft_of_reals", "Nx3x8xf32", "Nx3x5xcomplex<f32>",
          "stablehlo.fft %0, type = RFFT, length = [8]"),
    _case("triangular_solve", "Nx3x3xf32 Nx3x2xf32", "Nx3x2xf32",
          '"stablehlo.triangular_solve"(%0, %1) <{left_side = true, lower = true, '
          "unit_diagonal = false, transpose_a = #stablehlo<transpose NO_TRANSPOSE>}>"),
    _case("top_k", "Nx8xf32", "Nx3xf32 Nx3xi32", '"chlo.top_k"(%0) <{k = 3 : i64}>'),
    _case("batch_norm", "Nx3x2xf32 3xf32 3xf32 3xf32 3xf32", "Nx3x2xf32",
          '"stablehlo.batch_norm_inference"(%0, %1, %2, %3, %4) '
          "<{epsilon = 0.1 : f32, feature_index = 1 : i64}>"),
)  # fmt: skip

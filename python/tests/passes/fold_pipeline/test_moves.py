"""What elements of a result are followed to, held against what NumPy computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    BoxQuery,
    BoxView,
    BroadcastScalar,
    Convert,
    TraceReshape,
    Transpose,
    ViewOp,
)
from stablehlo_tools.transforms.parts.fold_pipeline.traced_moves import (
    deciding_operands,
    follow_move,
)

Array = NDArray[Any]

# Ops of `%x : tensor<4x6xf32>` and others, the operands that are known, and the result in NumPy.
CASES: dict[str, tuple[str, dict[int, Any], Callable[..., Array]]] = {
    "slice": (
        "%y = stablehlo.slice %x [1:4, 2:5] : (tensor<4x6xf32>) -> tensor<3x3xf32>",
        {},
        lambda x: x[1:4, 2:5],
    ),
    "strided slice": (
        "%y = stablehlo.slice %x [0:4, 1:6:2] : (tensor<4x6xf32>) -> tensor<4x3xf32>",
        {},
        lambda x: x[:, 1:6:2],
    ),
    "reverse": (
        "%y = stablehlo.reverse %x, dims = [1] : tensor<4x6xf32>",
        {},
        lambda x: x[:, ::-1],
    ),
    "transpose": (
        "%y = stablehlo.transpose %x, dims = [1, 0] : (tensor<4x6xf32>) -> tensor<6x4xf32>",
        {},
        lambda x: x.T,
    ),
    "concatenate": (
        "%y = stablehlo.concatenate %x, %z, %x, dim = 0 : "
        "(tensor<4x6xf32>, tensor<2x6xf32>, tensor<4x6xf32>) -> tensor<10x6xf32>",
        {},
        lambda x, z, _: np.concatenate([x, z, x]),
    ),
    "pad": (
        "%y = stablehlo.pad %x, %s, low = [2, -1], high = [-1, 3], interior = [0, 0] : "
        "(tensor<4x6xf32>, tensor<f32>) -> tensor<5x8xf32>",
        {},
        lambda x, s: np.pad(x, ((2, 0), (0, 3)), constant_values=s)[:5, 1:],
    ),
    "broadcast of a scalar": (
        "%y = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<2x3xf32>",
        {},
        lambda s: np.full((2, 3), s),
    ),
    "broadcast to a longer shape": (
        "%y = stablehlo.broadcast_in_dim %x, dims = [0, 2] : "
        "(tensor<4x6xf32>) -> tensor<4x1x6xf32>",
        {},
        lambda x: x[:, None],
    ),
    "select": (
        "%y = stablehlo.select %p, %x, %x : tensor<4x6xi1>, tensor<4x6xf32>",
        {0: np.arange(4)[:, None].repeat(6, 1) > 1},
        lambda _, x, __: x,
    ),
    "dynamic_slice": (
        "%y = stablehlo.dynamic_slice %x, %i, %j, sizes = [2, 6] : "
        "(tensor<4x6xf32>, tensor<i32>, tensor<i32>) -> tensor<2x6xf32>",
        {1: np.array(9)},  # which is clamped, as is one that is not known where all is taken
        lambda x, _, __: x[2:4],
    ),
    "dynamic_update_slice": (
        "%y = stablehlo.dynamic_update_slice %x, %z, %i, %j : "
        "(tensor<4x6xf32>, tensor<2x6xf32>, tensor<i32>, tensor<i32>) -> tensor<4x6xf32>",
        {2: np.array(1), 3: np.array(0)},
        lambda x, z, _, __: np.concatenate([x[:1], z, x[3:]]),
    ),
    "gather": (
        '%y = "stablehlo.gather"(%x, %k) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],'
        " collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, "
        "slice_sizes = array<i64: 1, 6>}> : (tensor<4x6xf32>, tensor<3xi32>) -> tensor<3x6xf32>",
        {1: np.array([2, -5, 0])},
        lambda x, _: x[[2, 0, 0]],
    ),
    "scatter": (
        '%y = "stablehlo.scatter"(%x, %k, %u) <{scatter_dimension_numbers = #stablehlo.scatter<'
        "update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], "
        "index_vector_dim = 1>}> ({\n^bb0(%a: tensor<f32>, %b: tensor<f32>):\n"
        "stablehlo.return %b : tensor<f32>\n}) : "
        "(tensor<4x6xf32>, tensor<3xi32>, tensor<3x6xf32>) -> tensor<4x6xf32>",
        {1: np.array([3, 7, 1])},  # the second is outside, and left out
        lambda x, _, u: np.stack([x[0], u[2], x[2], u[0]]),
    ),
}
ARGUMENTS = (
    "%x: tensor<4x6xf32>, %z: tensor<2x6xf32>, %u: tensor<3x6xf32>, %s: tensor<f32>, "
    "%p: tensor<4x6xi1>, %i: tensor<i32>, %j: tensor<i32>, %k: tensor<3xi32>"
)


def op_of(text: str) -> tuple[ir.Module, ir.Operation]:
    context = bindings.new_context()
    module = bindings.parse_module(
        f"func.func private @f({ARGUMENTS}) {{\n{text}\nreturn\n}}", context
    )
    block = module.body.operations[0].operation.regions[0].blocks[0]
    return module, block.operations[0].operation


def asked(op: ir.Operation, box: Box) -> BoxQuery:
    return BoxQuery(op.results[0], 0, 0, box, BoxView(Box.whole(box.sizes)))


def applied(array: Array, ops: Sequence[ViewOp]) -> Array:
    for op in reversed(ops):
        match op:
            case TraceReshape(before, after):
                assert array.shape == before
                array = array.reshape(after)
            case Transpose(order):
                array = array.transpose(order)
            case BroadcastScalar(shape):
                array = np.broadcast_to(array, shape)
            case Convert(_):
                pass
    return array


def boxes_of(shape: Sequence[int]) -> list[Box]:
    """All of a tensor, single elements, and boxes at random."""
    rng = random.Random(str(shape))
    boxes = [Box.whole(shape)]
    for _ in range(20):
        starts = tuple(rng.randrange(size) for size in shape)
        left = [size - start for size, start in zip(shape, starts, strict=True)]
        boxes.append(Box(starts, tuple(rng.choice([1, n, rng.randint(1, n)]) for n in left)))
    return boxes


@pytest.mark.parametrize("name", CASES)
def test_elements_are_where_they_come_from(name: str):
    text, known, compute = CASES[name]
    _module, op = op_of(text)
    numbers = np.random.default_rng(0)
    arrays = {value: numbers.random(list(value.type.shape)) for value in op.operands}
    integers = {op.operands[number]: np.asarray(value) for number, value in known.items()}
    result = compute(*(arrays[value] for value in op.operands))
    for box in boxes_of(result.shape):
        pending, filled = [asked(op, box)], np.full(box.sizes, np.nan)
        while pending:
            query = pending.pop()
            if query.value != op.results[0]:
                part = applied(arrays[query.value][query.box.slices()], query.view.ops)
                filled[query.view.target.slices()] = part
                continue
            queries = follow_move(op, query, integers.get)
            if queries is None:  # a broadcast that repeats, or elements that fill no box
                assert len(box.sizes) > 2 or name == "select"
                filled = result[box.slices()]
                break
            pending += queries
        np.testing.assert_array_equal(filled, result[box.slices()])


def test_a_move_by_an_index_that_is_not_known_is_computed():
    for name in ("select", "dynamic_slice", "dynamic_update_slice", "gather", "scatter"):
        _module, op = op_of(CASES[name][0])
        box = Box.whole(ir.RankedTensorType(op.results[0].type).shape)
        assert follow_move(op, asked(op, box), lambda _: None) is None


def test_a_reshape_that_scatters_a_box_is_computed():
    _module, op = op_of("%y = stablehlo.reshape %x : (tensor<4x6xf32>) -> tensor<3x8xf32>")
    assert follow_move(op, asked(op, Box((0, 2), (2, 3))), lambda _: None) is None
    queries = follow_move(op, asked(op, Box((0, 0), (3, 8))), lambda _: None)
    assert queries is not None
    (query,) = queries
    assert (query.box, query.view.ops) == (Box.whole((4, 6)), (TraceReshape((4, 6), (3, 8)),))


@pytest.mark.parametrize(
    ("name", "deciding"),
    [
        ("slice", []),
        ("select", [0]),
        ("dynamic_slice", [1, 2]),
        ("dynamic_update_slice", [2, 3]),
        ("gather", [1]),
        ("scatter", [1]),
    ],
)
def test_some_operands_say_where_and_the_others_what(name: str, deciding: list[int]):
    _module, op = op_of(CASES[name][0])
    where, what = deciding_operands(op)
    assert where == [op.operands[number] for number in deciding]
    assert len(where) + len(what) == len(op.operands)

"""Kernels: the dimensions that they treat independently, and their configuration at other sizes."""

from __future__ import annotations

import base64
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from layer_styles import gate_kernel  # first: sets up the devices

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import backend_config
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.dialect.factors import FactorRole
from stablehlo_tools.dialect.kernels.rules import parse_rules
from stablehlo_tools.dialect.kernels.table import describe_unknown
from stablehlo_tools.ir.clone import reshaped_clone
from stablehlo_tools.ir.walk import ops_named


def _module(text: str) -> ir.Module:
    return bindings.parse_module(text, bindings.new_context())


def _exported(function: Any, *shapes: tuple[int, ...]) -> ir.Module:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    allowed = [export.DisabledSafetyCheck.custom_call("tpu_custom_call")]
    exported = export.export(jax.jit(function), platforms=["tpu"], disabled_checks=allowed)
    return _module(exported(*arguments).mlir_module())


def _call(module: ir.Module) -> ir.Operation:
    (call,) = ops_named(module.operation, {"stablehlo.custom_call"})
    return call


def _kept(module: ir.Module) -> list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]]:
    """Each independent factor of the call: its size, its dimensions of operands and results."""
    relation = dimensions_of(_call(module))
    return [
        (
            factor.size,
            [(along.tensor, along.dim) for along in factor.operands],
            [(along.tensor, along.dim) for along in factor.results],
        )
        for factor in (() if relation is None else relation.factors)
        if factor.role is FactorRole.KEPT
    ]


def _flash(batch: int) -> ir.Module:
    shape = (batch, 4, 256, 128)
    return _exported(lambda q, k, v: flash_attention(q, k, v, causal=True), shape, shape, shape)


def _with_batch(call: ir.Operation, size: int) -> ir.Operation:
    """The call with another size of dimension 0 of all tensors, and operands that do not fit."""
    with call.location:
        types = [
            value.type if ir.RankedTensorType(value.type).shape == [0] else _sized(value, size)
            for value in call.results
        ]
        return reshaped_clone(call, list(call.operands), types, ir.InsertionPoint(call))


def _sized(value: ir.Value, size: int) -> ir.Type:
    type_ = ir.RankedTensorType(value.type)
    return ir.RankedTensorType.get([size, *type_.shape[1:]], type_.element_type)


def test_flash_attention_treats_samples_and_heads_independently() -> None:
    tensors = [(0, 0), (1, 0), (2, 0)]
    heads = [(0, 1), (1, 1), (2, 1)]
    assert _kept(_flash(8)) == [(8, tensors, [(0, 0)]), (4, heads, [(0, 1)])]


def test_a_kernel_at_another_size_is_the_kernel_that_pallas_writes_for_it() -> None:
    larger, other = _flash(8), _flash(4)
    smaller = json.loads(backend_config(_with_batch(_call(larger), 4)))
    expected = json.loads(backend_config(_call(other)))
    assert smaller == expected
    body = base64.b64decode(smaller["custom_call_config"]["body"])
    module, _ = bindings.read_mosaic(body)
    assert "iteration_bounds = array<i64: 4, 4" in str(module)


@pytest.mark.parametrize(
    ("semantics", "scratch", "sizes"),
    [("parallel", False, [4]), ("arbitrary", False, [4]), ("arbitrary", True, [])],
)
def test_scratch_memory_makes_samples_depend_on_each_other(
    semantics: str, scratch: bool, sizes: list[int]
) -> None:
    module = _exported(gate_kernel(semantics, scratch=scratch), (4, 8, 128))
    assert [size for size, _, _ in _kept(module)] == sizes


def _blocked(index: Any, block: tuple[int | None, ...], *, reads: bool = False) -> ir.Module:
    """A kernel whose windows move as `index` says; with `reads`, it reads its place in the grid."""

    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...] + (pl.program_id(0).astype(jnp.float32) if reads else 1.0)

    shape = (8, 8, 128)
    steps = shape[0] // (block[0] or 1)

    def call(x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(steps,),
            in_specs=[pl.BlockSpec(block, index)],
            out_specs=pl.BlockSpec(block, lambda i: (i, 0, 0)),
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )(x)

    return _exported(call, shape)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(lambda: _blocked(lambda i: (7 - i, 0, 0), (None, 8, 128)), id="reversed"),
        pytest.param(lambda: _blocked(lambda i: (i, 0, 0), (2, 8, 128)), id="two samples at once"),
        pytest.param(
            lambda: _blocked(lambda i: (i, 0, 0), (None, 8, 128), reads=True), id="reads its index"
        ),
    ],
)
def test_other_movements_are_not_independent(module: Any) -> None:
    assert _kept(module()) == []


def test_a_prefetched_scalar_is_shared_by_all_samples() -> None:
    def kernel(scale: Any, x: Any, y: Any) -> None:
        y[...] = x[...] * scale[0].astype(jnp.float32)

    def call(scale: Any, x: Any) -> Any:
        block = pl.BlockSpec((None, 8, 128), lambda i, scale: (i, 0, 0))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4,), in_specs=[block], out_specs=block
        )
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        params = pltpu.CompilerParams(dimension_semantics=("parallel",))
        return pl.pallas_call(kernel, grid_spec=grid, out_shape=out, compiler_params=params)(
            scale.astype(jnp.int32), x
        )

    assert _kept(_exported(call, (2,), (4, 8, 128))) == [(4, [(1, 0)], [(0, 0)])]


def _prefetched(size: int, table: str, where: Any, *, reads: bool) -> ir.Module:
    """A kernel on samples with prefetched scalars, `table`: `where` is the position of the window
    of a third tensor. With `reads`, it loads a scalar itself."""

    def kernel(scalars: Any, pages: Any, x: Any, y: Any) -> None:
        length = scalars[pl.program_id(0), 0] if reads else 1
        y[...] = pages[...] * x[...] * length

    def call(pages: Any, x: Any) -> Any:
        scalars = jnp.zeros(tuple(size if n == "b" else int(n) for n in table.split()), jnp.int32)
        block = pl.BlockSpec((None, 8, 128), lambda i, scalars: (i, 0, 0))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(size,),
            in_specs=[pl.BlockSpec((None, 8, 128), where), block],
            out_specs=block,
        )
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        params = pltpu.CompilerParams(dimension_semantics=("parallel",))
        called = pl.pallas_call(kernel, grid_spec=grid, out_shape=out, compiler_params=params)
        return called(scalars, pages, x)

    return _exported(call, (16, 8, 128), (size, 8, 128))


@pytest.mark.parametrize(
    ("where", "reads"),
    [
        pytest.param(lambda i, scalars: (0, 0, 0), True, id="lengths"),
        pytest.param(lambda i, scalars: (scalars[i, 1], 0, 0), False, id="pages"),
    ],
)
def test_prefetched_scalars_of_each_sample_are_cut(where: Any, *, reads: bool) -> None:
    larger, smaller = (_prefetched(size, "b 2", where, reads=reads) for size in (8, 4))
    assert _kept(larger) == [(8, [(0, 0), (2, 0)], [(0, 0)])]
    written, expected = (
        json.loads(backend_config(call)) for call in (_with_batch(_call(larger), 4), _call(smaller))
    )
    assert written == expected


def test_a_grid_with_bounds_from_the_run_is_refused_with_another_way() -> None:
    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...] + 1

    def call(steps: Any, x: Any) -> Any:
        block = pl.BlockSpec((None, 8, 128), lambda i: (i, 0, 0))
        grid = (steps[0].astype(jnp.int32),)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        called = pl.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=out)
        return called(x)

    module = _exported(call, (1,), (8, 8, 128))
    assert _kept(module) == []
    assert "lax.ragged_dot is divided" in describe_unknown(_call(module))


@pytest.mark.parametrize(
    ("table", "where"),
    [
        pytest.param("16 2", lambda i, scalars: (scalars[i + 1, 0], 0, 0), id="of the next sample"),
        pytest.param("b 2", lambda i, scalars: (scalars[i, 0] + scalars[0, 1], 0, 0), id="of all"),
        pytest.param("b 8", lambda i, scalars: (scalars[0, i], 0, 0), id="along two dimensions"),
    ],
)
def test_scalars_of_other_samples_are_not_independent(table: str, where: Any) -> None:
    assert _kept(_prefetched(8, table, where, reads=True)) == []


_CUDNN = """
func.func @main(%q: tensor<4x128x8x64xbf16>, %k: tensor<4x128x{keys}x64xbf16>)
    -> tensor<4x8x128x64xbf16> {{
  %0:3 = stablehlo.custom_call @__cudnn$fmhaSoftmax(%q, %k, %k) {{backend_config = "{config}"}} :
    (tensor<4x128x8x64xbf16>, tensor<4x128x{keys}x64xbf16>, tensor<4x128x{keys}x64xbf16>)
    -> (tensor<4x8x128x64xbf16>, tensor<4x8x128xf32>, tensor<0xui8>)
  return %0#0 : tensor<4x8x128x64xbf16>
}}
"""


def _cudnn(keys: int = 8, dropout: float = 0.0) -> ir.Module:
    numbers = {"lhs_batch_dimensions": ["0", "2"]}
    attention = {
        "intermediate_tensor_shape": {"dimensions": ["4", "8", "128", "128"]},
        "bmm1_dot_dimension_numbers": numbers,
        "dropout_rate": dropout,
    }
    config = json.dumps({"cudnn_fmha_backend_config": attention}).replace('"', "\\22")
    return _module(_CUDNN.format(keys=keys, config=config))


def test_cudnn_treats_samples_and_heads_independently() -> None:
    batch = (4, [(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 0)])
    heads = (8, [(0, 2), (1, 2), (2, 2)], [(0, 1), (1, 1)])
    assert _kept(_cudnn()) == [batch, heads]
    assert _kept(_cudnn(keys=2)) == [batch]  # four heads share the keys of one
    assert _kept(_cudnn(dropout=0.1)) == []  # its bits depend on the place in the batch


def test_the_sizes_of_cudnn_follow() -> None:
    module = _cudnn()
    smaller = _with_batch(_call(module), 2)
    read = json.loads(backend_config(smaller))["cudnn_fmha_backend_config"]
    assert read["intermediate_tensor_shape"]["dimensions"] == ["2", "8", "128", "128"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kernel b -> b; b free", "line 1: a rule reads"),
        ("\nkernel: b s -> b s", "line 2: a rule reads"),
        ("kernel: b s -> b s; b", "it ends without the independent factors"),
        ("kernel: b s -> b s; c free", "no operand and no result has the factor c"),
        ("kernel: b s -> b s, s; b free", "a result does not have the factor b"),
        ("kernel: b b -> b; b free", "b b: a tensor has a factor twice"),
        ("kernel: b -> b; b free\nkernel: b -> b; b free", "line 2: a second rule for kernel"),
        ("kernel: b-s -> b; b free", "b-s is not a name of a factor"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_line(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rules(line)


_TRITON = """
func.func @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.custom_call @__gpu$xla.gpu.triton(%x) {
    mhlo.backend_config = {grid_x = 4 : i32},
    sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=4, j=8}, custom>
  } : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}
"""


def test_a_rule_does_not_cut_a_kernel_with_a_grid_that_is_not_read() -> None:
    ruled = _TRITON.replace("__gpu$xla.gpu.triton", "my_kernel")
    assert [size for size, _, _ in _kept(_module(ruled))] == [4, 8]
    assert _kept(_module(_TRITON)) == []

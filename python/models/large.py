"""Programs as large as one likes: many unrolled layers, many collectives side by side."""

from __future__ import annotations

from typing import Any

from models.devices import DEVICES, mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

UNROLLED_OPS_PER_LAYER = 67
FSDP, MODEL = "fsdp", "model"
WIDTH, INNER, BATCH = 1024, 4096, 4096


def unrolled_step(layers: int) -> export.Exported:
    """Loss and gradients of `layers` unrolled blocks, FSDP × tensor parallel on 4 × 2 devices.

    A block is RMSNorm and an MLP with a residual, of a real model's width. It comes to 67 ops with
    its backward pass and the bodies of its reductions, six of them collectives, so that 400 layers
    give about 27,000. Meant to be compiled: to run it takes 4 GB for every 100 layers.
    """
    on = mesh(fsdp=4, model=2)
    column, row = P(FSDP, MODEL), P(MODEL, FSDP)
    layer_specs = {"up": column, "down": row}
    layer_shapes = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}

    def gathered(weight: jax.Array, axis: int) -> jax.Array:
        return lax.all_gather(weight, FSDP, axis=axis, tiled=True)

    def block(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        normed = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        inner = normed @ gathered(weights["up"], 0)
        return x + lax.psum(jnp.tanh(inner) @ gathered(weights["down"], 1), MODEL)

    def loss(parameters: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for weights in parameters:
            x = block(x, weights)
        return lax.pmean(jnp.square(x).mean(), FSDP)

    specs = [layer_specs] * layers
    mapped = jax.shard_map(loss, mesh=on, in_specs=(specs, P(FSDP)), out_specs=P())
    shardings: Any = jax.tree.map(
        lambda spec: NamedSharding(on, spec),
        (specs, P(FSDP)),
        is_leaf=lambda node: isinstance(node, P),
    )
    step = jax.jit(
        jax.value_and_grad(mapped),
        in_shardings=shardings,
        out_shardings=(NamedSharding(on, P()), shardings[0]),
    )
    parameters = [
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in layer_shapes.items()}
        for _ in range(layers)
    ]
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return export.export(step, platforms=("cpu",))(parameters, batch)


def wide_program(collectives: int) -> str:
    """MLIR text of `collectives` ops with no data between them, on 8 partitions.

    They take turns: all_gather, all_reduce, collective_permute, reduce_scatter. Each works on a row
    of its own, and the results are added up: four ops a collective, and two in each reduction.
    """
    head = (
        f"module @wide attributes {{mhlo.num_partitions = {DEVICES} : i32, "
        "mhlo.num_replicas = 1 : i32} {\n"
        f"  func.func public @main(%rows: tensor<{collectives}x8xf32>) -> {_ROW} {{\n"
        f"    %t0 = stablehlo.constant dense<0.0> : {_ROW}\n"
    )
    body = (
        f"    %r{i} = stablehlo.slice %rows [{i}:{i + 1}, 0:8] : "
        f"(tensor<{collectives}x8xf32>) -> {_ROW}\n"
        + _WIDE_STEPS[i % len(_WIDE_STEPS)].replace("@", str(i))
        + f"    %t{i + 1} = stablehlo.add %t{i}, %s{i} : {_ROW}\n"
        for i in range(collectives)
    )
    return f"{head}{''.join(body)}    return %t{collectives} : {_ROW}\n  }}\n}}\n"


def stacked_program(layers: int) -> str:
    """MLIR text of `layers` written-out layers in a shard_map over 8 devices, as jax writes the
    gradients of a Python loop over the rows of one stack of weights.

    A layer slices its weights from the stack and gathers them. Its gradient is scattered, padded
    with zeros to a stack, and added to that of the later layers.
    """
    whole, stack = f"tensor<{layers}x64x64xf32>", f"tensor<{layers}x8x64xf32>"
    sharding = f'<@mesh, [{{}}, {{"{FSDP}"}}, {{}}]>'
    head = f"""module @stacked attributes {{
  mhlo.num_partitions = {DEVICES} : i32, mhlo.num_replicas = 1 : i32
}} {{
  sdy.mesh @mesh = <["{FSDP}"={DEVICES}]>
  func.func public @main(%weights: {whole}, %batch: {_WEIGHTS}) -> {whole} {{
    %0 = sdy.manual_computation(%weights, %batch)
        in_shardings=[{sharding}, <@mesh, [{{"{FSDP}"}}, {{}}]>] out_shardings=[{sharding}]
        manual_axes={{"{FSDP}"}} (%stack: {stack}, %x0: {_TILE}) {{
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %s{layers} = stablehlo.constant dense<0.0> : {stack}
      %d{layers} = stablehlo.negate %x0 : {_TILE}
"""
    forward = (
        f"""
      %p{i} = stablehlo.slice %stack [{i}:{i + 1}, 0:8, 0:64] : ({stack}) -> {_TILES}
      %r{i} = stablehlo.reshape %p{i} : ({_TILES}) -> {_TILE}
      %w{i} = "stablehlo.all_gather"(%r{i}) <{{all_gather_dim = 0 : i64, {_GROUPS}}}>
          : ({_TILE}) -> {_WEIGHTS}
      %y{i} = stablehlo.dot_general %x{i}, %w{i}, contracting_dims = [1] x [0]
          : ({_TILE}, {_WEIGHTS}) -> {_TILE}
      %x{i + 1} = stablehlo.tanh %y{i} : {_TILE}
"""
        for i in range(layers)
    )
    backward = (
        f"""
      %c{i} = stablehlo.multiply %d{i + 1}, %x{i + 1} : {_TILE}
      %g{i} = stablehlo.dot_general %x{i}, %c{i}, contracting_dims = [0] x [0]
          : ({_TILE}, {_TILE}) -> {_WEIGHTS}
      %d{i} = stablehlo.dot_general %c{i}, %w{i}, contracting_dims = [1] x [1]
          : ({_TILE}, {_WEIGHTS}) -> {_TILE}
      %h{i} = "stablehlo.reduce_scatter"(%g{i}) <{{scatter_dimension = 0 : i64, {_GROUPS}}}>
          {_SUM} : ({_WEIGHTS}) -> {_TILE}
      %b{i} = stablehlo.broadcast_in_dim %h{i}, dims = [1, 2] : ({_TILE}) -> {_TILES}
      %q{i} = stablehlo.pad %b{i}, %zero, low = [{i}, 0, 0], high = [{layers - 1 - i}, 0, 0],
          interior = [0, 0, 0] : ({_TILES}, tensor<f32>) -> {stack}
      %s{i} = stablehlo.add %s{i + 1}, %q{i} : {stack}
"""
        for i in reversed(range(layers))
    )
    return (
        f"{head}{''.join((*forward, *backward))}      sdy.return %s0 : {stack}\n"
        f"    }} : ({whole}, {_WEIGHTS}) -> {whole}\n    return %0 : {whole}\n  }}\n}}\n"
    )


_TILE, _TILES, _WEIGHTS = "tensor<8x64xf32>", "tensor<1x8x64xf32>", "tensor<64x64xf32>"
_ROW = "tensor<1x8xf32>"
_CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
_GROUPS = (
    f"replica_groups = dense<[{list(range(DEVICES))}]> : tensor<1x{DEVICES}xi64>, "
    f"{_CHANNEL}, use_global_device_ids"
)
_PAIRS = f"dense<{[[i, (i + 1) % DEVICES] for i in range(DEVICES)]}> : tensor<{DEVICES}x2xi64>"
_SUM = """({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %z = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %z : tensor<f32>
    })"""
# Each makes %s@, a row, of %r@, a row, where @ stands for the number of the collective.
_WIDE_STEPS = (
    f"""    %c@ = "stablehlo.all_gather"(%r@)
        <{{all_gather_dim = 1 : i64, {_GROUPS}}}> : ({_ROW}) -> tensor<1x64xf32>
    %s@ = stablehlo.slice %c@ [0:1, 0:8] : (tensor<1x64xf32>) -> {_ROW}
""",
    f"""    %c@ = "stablehlo.all_reduce"(%r@)
        <{{{_GROUPS}}}> {_SUM} : ({_ROW}) -> {_ROW}
    %s@ = stablehlo.negate %c@ : {_ROW}
""",
    f"""    %c@ = "stablehlo.collective_permute"(%r@)
        <{{source_target_pairs = {_PAIRS}, {_CHANNEL}}}> : ({_ROW}) -> {_ROW}
    %s@ = stablehlo.negate %c@ : {_ROW}
""",
    f"""    %c@ = "stablehlo.reduce_scatter"(%r@)
        <{{scatter_dimension = 1 : i64, {_GROUPS}}}> {_SUM} : ({_ROW}) -> tensor<1x1xf32>
    %s@ = stablehlo.broadcast_in_dim %c@, dims = [0, 1] : (tensor<1x1xf32>) -> {_ROW}
""",
)

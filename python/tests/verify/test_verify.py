"""`verify` on real exports and modules: each test that runs programs starts one child process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify import Options, Rule, Verification, verify_artifacts

TORCH_XLA_STYLE = """
func.func @main(%token: tensor<f32>, %a: tensor<4x2xf32>) -> (tensor<32x2xf32>, tensor<4x2xf32>) {
  %gathered = "stablehlo.all_gather"(%a) <{all_gather_dim = 0 : i64,
    replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>
  }> : (tensor<4x2xf32>) -> tensor<32x2xf32>
  %first = stablehlo.slice %gathered [0:1, 0:1] : (tensor<32x2xf32>) -> tensor<1x1xf32>
  %scalar = stablehlo.reshape %first : (tensor<1x1xf32>) -> tensor<f32>
  %next = stablehlo.multiply %token, %scalar : tensor<f32>
  %wide = stablehlo.broadcast_in_dim %next, dims = [] : (tensor<f32>) -> tensor<4x2xf32>
  %b = stablehlo.add %a, %wide : tensor<4x2xf32>
  %sum = "stablehlo.all_reduce"(%b) <{
    replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>
  }> ({
  ^bb0(%x: tensor<f32>, %y: tensor<f32>):
    %s = stablehlo.add %x, %y : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %gathered, %sum : tensor<32x2xf32>, tensor<4x2xf32>
}
"""
WITHOUT_TOKEN = TORCH_XLA_STYLE.replace("stablehlo.add %a, %wide", "stablehlo.add %a, %a")


def text(module: str, name: str = "module.mlir") -> Artifact:
    return artifacts.parse(module.encode(), name)


def function(body: str, inputs: str = "%a: tensor<4xf32>", outputs: str = "tensor<4xf32>") -> str:
    return f"func.func @main({inputs}) -> ({outputs}) {{\n{body}\n}}"


def exported(
    call: Callable[..., Any],
    *specs: jax.ShapeDtypeStruct,
    name: str = "export.jax_export",
    **kw: Any,
) -> Artifact:
    """A jax.export file of a function, written and read again."""
    data = export.export(jax.jit(call, **kw.pop("jit", {})), **kw)(*specs).serialize()
    return artifacts.parse(bytes(data), name)


def spec(*shape: int, dtype: Any = jnp.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sharded(*axes: str | None) -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec(*axes))


def layer(wrong: tuple[int, int] | None = None) -> Artifact:
    """Eight devices: a gather, a product and a sum whose result is replicated."""

    def local(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ jax.lax.all_gather(w, "data", tiled=True)
        return y, jax.lax.psum(jnp.sum(y * y), "data")

    def step(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        data = PartitionSpec("data")
        y, loss = jax.shard_map(
            local, mesh=mesh(), in_specs=(data, data), out_specs=(data, PartitionSpec())
        )(batch["x"], batch["w"])
        return {"loss": loss, "y": y if wrong is None else y.at[wrong].add(1.0)}

    batch: Any = {
        "x": spec(16, 8, sharding=sharded("data")),
        "w": spec(8, 12, sharding=sharded("data")),
    }
    return exported(step, batch)


def verified(before: Artifact, after: Artifact, **options: Any) -> Verification:
    chosen: dict[str, Any] = {"arithmetic": "floats", "timeout": 600.0, **options}
    return verify_artifacts(before, after, Options(**chosen))


def refusal(before: Artifact, after: Artifact, **options: Any) -> str:
    with pytest.raises(ToolError) as caught:
        verified(before, after, **options)
    return str(caught.value)


# What runs and agrees.


def test_an_export_agrees_with_itself():
    before = exported(
        lambda x, k: {"y": jax.lax.erf(x) @ x.T, "i": k + 1}, spec(3, 5), spec(dtype="i4")
    )
    verification = verified(before, before, trials=2, backend="both")  # erf is no op of StableHLO
    assert verification.same
    assert (verification.devices, verification.trials, verification.elements) == (1, 2, 10)
    assert [(o.name, o.dtype, o.shape) for o in verification.outputs] == [
        ("result['i']", "i32", ()),
        ("result['y']", "f32", (3, 3)),
    ]


def test_two_platforms_keys_and_unused_inputs():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))

    def draw(key: jax.Array, unused: jax.Array) -> tuple[jax.Array, jax.Array]:
        del unused
        return key[::-1], jax.vmap(lambda k: jax.random.normal(k, (2,)))(key)

    before = exported(draw, keys, spec(2), platforms=("cuda", "cpu"))
    verification = verified(before, before)
    assert verification.same
    assert [(o.dtype, o.shape) for o in verification.outputs] == [
        ("key<threefry2x32>", (3, 2)),
        ("f32", (3, 2)),
    ]


def test_a_program_for_another_platform_runs_on_the_cpu():
    before = exported(jnp.cumsum, spec(4), platforms=("tpu",))
    assert verified(before, before).same


def test_every_element_type_crosses_unharmed_with_special_values():
    names = [
        *("i1", "i2", "i4", "i8", "i16", "i32", "i64", "ui2", "ui4", "ui8", "ui16", "ui32"),
        *("ui64", "f64", "f32", "f16", "bf16", "f8E3M4", "f8E4M3", "f8E4M3FN", "f8E4M3FNUZ"),
        *("f8E4M3B11FNUZ", "f8E5M2", "f8E5M2FNUZ", "f8E8M0FNU", "f4E2M1FN"),
        *("complex<f32>", "complex<f64>"),
    ]
    types = [f"tensor<{size}{name}>" for name in names for size in ("5x3x", "", "0x")]
    inputs = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(types))
    values = ", ".join(f"%a{i}" for i in range(len(types)))
    body = f"return {values} : {', '.join(types)}"
    module = text(function(body, inputs, ", ".join(types)))
    verification = verified(module, module, specials=True, trials=2, backend="both")
    assert verification.same
    assert verification.elements == 16 * len(names)


def test_exports_of_every_dtype_that_the_format_has():
    dtypes = [
        *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
        *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *("float4_e2m1fn", "complex64"),
    ]
    specs = [spec(8, 2, dtype=jnp.dtype(d), sharding=sharded("data", "model")) for d in dtypes]
    before = exported(lambda *arrays: [array.T for array in arrays], *specs)
    verification = verified(before, before, specials=True, trials=1)
    assert verification.same
    assert verification.devices == 8


def test_output_layouts_may_differ():
    x = spec(8, 8, sharding=sharded("data"))
    whole, tiles = (
        exported(lambda x: x * 2, x, jit={"out_shardings": sharded(*axes)})
        for axes in ((None, None), ("data", "model"))
    )
    assert verified(whole, tiles).same


def test_a_bare_module_and_an_export():
    before = layer()
    after = text(artifacts.to_text(before.module), "after.mlir")
    verification = verified(before, after)
    assert verification.same
    assert (verification.devices, verification.elements) == (8, 193)
    assert verification.outputs[0].name == "result['loss']"


def test_replicas_get_inputs_of_their_own_and_inputs_can_be_set():
    module, other = text(TORCH_XLA_STYLE), text(WITHOUT_TOKEN, "other.mlir")
    verification = verified(module, module)
    assert verification.same
    assert (verification.devices, verification.elements) == (8, 8 * (64 + 8))
    verification = verified(module, other, fixed={0: 0.0})
    assert [output.differing for output in verification.outputs] == [0, 64]


def test_the_program_of_each_device_may_use_flattened_ids():
    collective = """
      %g = "stablehlo.all_gather"(%a) <{all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids
      }> : (tensor<4xf32>) -> tensor<16xf32>
      %id = stablehlo.partition_id : tensor<ui32>
      return %g, %id : tensor<16xf32>, tensor<ui32>"""
    inside = function(collective, outputs="tensor<16xf32>, tensor<ui32>")
    stated = text(f"module attributes {{mhlo.num_partitions = 8 : i32}} {{ {inside} }}")
    verification = verified(stated, text(inside))
    assert verification.same
    assert (verification.devices, verification.elements) == (8, 8 * 17)


def test_donated_inputs_are_the_same_for_both():
    module = text(
        function(
            "%b = stablehlo.add %a, %a : tensor<1024xf32>\n return %b : tensor<1024xf32>",
            "%a: tensor<1024xf32> {tf.aliasing_output = 0 : i32}",
            "tensor<1024xf32>",
        )
    )
    assert verified(module, module, trials=2).same


def test_fusion_does_not_change_rounding():
    """Left alone, XLA:CPU contracts `x * y + z` where nothing stands between."""
    kind = "tensor<64x64xf32>"
    inputs = f"%x: {kind}, %y: {kind}, %z: {kind}"
    product = f"%p = stablehlo.multiply %x, %y : {kind}\n"
    barrier = f"%q = stablehlo.optimization_barrier %p : {kind}\n"
    tail = f"%s = stablehlo.add %{{}}, %z : {kind}\n return %s : {kind}"
    together = text(function(product + tail.format("p"), inputs, kind))
    apart = text(function(product + barrier + tail.format("q"), inputs, kind))
    assert verified(together, apart).same


LOOP = """
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %token = stablehlo.after_all : !stablehlo.token
  %r:3 = stablehlo.while(%i = %zero, %x = %a, %t = %token)
      : tensor<i32>, tensor<4xf32>, !stablehlo.token cond {
    %n = stablehlo.constant dense<COUNT> : tensor<i32>
    %more = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %b:2 = stablehlo.optimization_barrier %x, %t : tensor<4xf32>, !stablehlo.token
    %p = "stablehlo.collective_permute"(%b#0) <{
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
    }> : (tensor<4xf32>) -> tensor<4xf32>
    %c:2 = stablehlo.optimization_barrier %p, %b#1 : tensor<4xf32>, !stablehlo.token
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %c#0, %c#1 : tensor<i32>, tensor<4xf32>, !stablehlo.token
  }
  return %r#1 : tensor<4xf32>"""


def test_the_interpreter_runs_collectives_in_loops():
    """Three swaps are one swap, on both backends; the interpreter alone mixes iterations."""
    thrice, once = (text(function(LOOP.replace("COUNT", count))) for count in "31")
    assert verified(thrice, once, backend="both", trials=20).same
    twice = text(function(LOOP.replace("COUNT", "2")))
    assert not verified(thrice, twice, backend="interpreter").same


def test_the_interpreter_numbers_replicas_and_partitions():
    body = """
      %r = stablehlo.replica_id : tensor<ui32>
      %p = stablehlo.partition_id : tensor<ui32>
      return %r, %p : tensor<ui32>, tensor<ui32>"""
    modules = [
        text(
            f"module attributes {{mhlo.num_replicas = {r} : i32, mhlo.num_partitions = {p} : i32}}"
            f"{{ {function(body, '', 'tensor<ui32>, tensor<ui32>')} }}"
        )
        for r, p in ((2, 1), (1, 2))
    ]
    constants = """
      %zero = stablehlo.constant dense<0> : tensor<ui32>
      %id = stablehlo.ID : tensor<ui32>
      return %A, %B : tensor<ui32>, tensor<ui32>"""
    for module, (wanted, first, second) in zip(
        modules, (("replica_id", "id", "zero"), ("partition_id", "zero", "id")), strict=True
    ):
        body = (
            constants.replace("ID", wanted).replace("%A", f"%{first}").replace("%B", f"%{second}")
        )
        expected = text(function(body, "", "tensor<ui32>, tensor<ui32>"))
        verification = verified(module, expected, backend="both", trials=1)
        assert verification.same
        assert verification.devices == 2


# What runs and differs.


def test_the_output_and_the_element_that_differ_are_named():
    verification = verified(layer(), layer(wrong=(9, 7)))
    assert not verification.same
    assert verification.trials == 1
    assert verification.before_repeats
    loss, y = verification.outputs
    assert (loss.differing, y.differing, y.elements) == (0, 1, 192)
    assert y.name == "result['y']"
    assert y.max_abs_difference == pytest.approx(1.0)
    assert y.first is not None
    assert y.first.index == (9, 7)


REPLICATED = """
module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  func.func @main(%a: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
      -> tensor<4xf32> {
    %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"x"}]>]
        out_shardings=[<@mesh, [{}]>] manual_axes={"x"} (%b: tensor<1xf32>) {
      %g = "stablehlo.all_gather"(%b) <{all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids
      }> : (tensor<1xf32>) -> tensor<4xf32>
      %id = stablehlo.partition_id : tensor<ui32>
      %liar = stablehlo.constant dense<LIAR> : tensor<ui32>
      %lies = stablehlo.compare EQ, %id, %liar : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
      %n = stablehlo.negate %g : tensor<4xf32>
      %s = stablehlo.select %lies, %n, %g : tensor<i1>, tensor<4xf32>
      sdy.return %s : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}"""


def test_a_replicated_output_that_differs_on_one_device():
    honest, liar = (text(REPLICATED.replace("LIAR", number)) for number in "92")
    (output,) = verified(honest, liar).outputs
    assert (output.elements, output.differing) == (4, 4)
    assert output.first is not None
    assert output.first.device == 2


def constants(values: str) -> Artifact:
    body = f"%c = stablehlo.constant dense<{values}> : tensor<2xf32>\nreturn %c : tensor<2xf32>"
    return text(function(body, "", "tensor<2xf32>"))


def test_nan_payloads_and_signs_of_zero_differ_unless_tolerated():
    before, after = constants("[0x7FC00001, 0.0]"), constants("[0xFFC00002, -0.0]")
    (output,) = verified(before, after, backend="both").outputs
    assert output.differing == 2
    assert output.first is not None
    assert (output.first.before, output.first.after) == ("nan(0x7fc00001)", "nan(0xffc00002)")
    assert verified(before, after, rule=Rule(atol=0.0)).same


# What is refused, and how it is said.


def test_signatures_that_differ():
    one, other = (exported(lambda x: {"y": x[:2]}, spec(size), name=f"{size}.e") for size in (4, 8))
    assert refusal(one, other) == (
        "8.e: error: the signatures differ: input 0 (args[0]) is f32[4] in 4.e, f32[8] in 8.e"
    )
    both = exported(lambda x: (x[:2], x), spec(4), name="both.e")
    assert "1 output in 4.e, 2 outputs in both.e" in refusal(one, both)
    half = exported(lambda x: {"y": x[:2].astype(jnp.bfloat16)}, spec(4), name="half.e")
    assert "output 0 (result['y']) is f32[2] in 4.e, bf16[2] in half.e" in refusal(one, half)


def test_symbolic_sizes():
    (batch,) = export.symbolic_shape("batch")
    shape: Any = jax.ShapeDtypeStruct((batch, 4), jnp.float32)
    before = exported(lambda x: x.sum(0) + x.shape[0], shape, name="symbolic.e")
    reversed_ = exported(lambda x: x[::-1].sum(0) + x.shape[0], shape, name="reversed.e")
    answer = verified(before, reversed_, arithmetic="exact", trials=1)
    assert answer.same
    assert answer.sizes == ("batch=8", "batch=16")
    shorter = exported(lambda x: x.sum(0) + 8, shape, name="eight.e")
    wrong = verified(before, shorter, arithmetic="exact", trials=1)
    assert not wrong.same
    assert wrong.sizes == ("batch=8", "batch=16")  # with 8 the two are the same
    fixed = exported(lambda x: x + 1, spec(8, 4), name="fixed.e")
    message = refusal(before, fixed)
    assert "the symbolic dimensions differ: batch in symbolic.e, none in fixed.e" in message
    module = text(function("return %a : tensor<?xf32>", "%a: tensor<?xf32>", "tensor<?xf32>"))
    assert "module.mlir:1:17: error: input 0 is tensor<?xf32>: its sizes" in refusal(module, module)


def test_device_counts_that_differ():
    four = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    placed = NamedSharding(four, PartitionSpec("data"))
    few = exported(lambda x: x * 2, spec(8, sharding=placed), name="four.e")
    eight = exported(lambda x: x * 2, spec(8, sharding=sharded("data")), name="eight.e")
    assert "number of devices: 4 in four.e, 8 in eight.e" in refusal(few, eight)


@pytest.mark.parametrize("arithmetic", ["exact", "floats"])
def test_one_device_against_many(arithmetic: str):
    one = exported(lambda x: jnp.cumsum(x) * 2, spec(8), name="one.e")
    eight = exported(lambda x: jnp.cumsum(x) * 2, spec(8, sharding=sharded("data")), name="eight.e")
    other = exported(lambda x: jnp.cumsum(x) * 3, spec(8, sharding=sharded("data")), name="other.e")
    for pair in ((one, eight), (eight, one)):
        assert verified(*pair, arithmetic=arithmetic).same
    assert not verified(one, other, arithmetic=arithmetic).same


def test_the_program_of_each_device_is_not_that_of_all():
    assert "one.e" in refusal(exported(lambda x: x, spec(16, 8), name="one.e"), layer())


def test_tokens_and_ordered_effects():
    inputs = "%a: tensor<4xf32>, %t: !stablehlo.token"
    module = text(function("return %a : tensor<4xf32>", inputs))
    assert "module.mlir:1:36: error: input 1 is a token" in refusal(module, module)
    before = exported(lambda x: x * 2, spec(8))
    assert before.exported is not None
    effect: Any = "PrintEffect"
    before.exported = dataclasses.replace(before.exported, ordered_effects=(effect,))
    assert "a token for each ordered effect (PrintEffect)" in refusal(before, before)


def test_which_function_is_the_program():
    several = "func.func @f() { return }\nfunc.func @g() { return }"
    assert "several public functions: @f, @g" in refusal(text(several), text(several))
    nothing = function("return", "", "")
    assert "the programs have no outputs to compare" in refusal(text(nothing), text(nothing))


def test_inputs_that_are_not_there_cannot_be_set():
    module = constants("0.0")
    assert "there is no input 0 to set" in refusal(module, module, fixed={0: 1.0})


def test_what_the_interpreter_cannot_run():
    eight = text(TORCH_XLA_STYLE)
    assert "trusted with at most 2 devices, and this program needs 8" in refusal(
        eight, eight, backend="interpreter"
    )
    token = text(
        function("%t = stablehlo.create_token : !stablehlo.token\n return %a : tensor<4xf32>")
    )
    message = refusal(token, token, backend="interpreter")
    assert (
        "module.mlir:2:6: error: the reference interpreter does not support stablehlo.create_token"
        in message
    )
    manual = text(REPLICATED.replace("LIAR", "0"))
    assert "does not run sdy.manual_computation" in refusal(manual, manual, backend="interpreter")


HANG = """
  %id = stablehlo.replica_id : tensor<ui32>
  %zero = stablehlo.constant dense<0> : tensor<ui32>
  %first = stablehlo.compare EQ, %id, %zero : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
  %r = "stablehlo.if"(%first) ({
    %sum = "stablehlo.all_reduce"(%a) <{
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    }> ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %s = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %sum : tensor<4xf32>
  }, {
    stablehlo.return %a : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  return %r : tensor<4xf32>"""


def test_a_hang_ends_in_an_error(monkeypatch: pytest.MonkeyPatch):
    limits = {"warn_stuck": 2, "terminate": 6}  # seconds from when one waits
    flags = [f"--xla_cpu_collective_call_{name}_timeout_seconds={s}" for name, s in limits.items()]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    fine = text(function("return %a : tensor<4xf32>"), "fine.mlir")
    message = refusal(fine, text(function(HANG), "hangs.mlir"))
    assert "hangs.mlir: error: did not finish" in message
    assert "in trial 0: a deadlock:" in message
    assert "all reduce of devices [0, 1]" in message


def test_what_the_compiler_refuses_is_passed_on():
    unknown = """
      %b = stablehlo.custom_call @nobody_has_this(%a) : (tensor<4xf32>) -> tensor<4xf32>
      return %b : tensor<4xf32>"""
    fine = text(function("return %a : tensor<4xf32>"), "fine.mlir")
    message = refusal(fine, text(function(unknown), "unknown.mlir"))
    assert "unknown.mlir: error: XLA:CPU failed while" in message
    assert "nobody_has_this" in message


# The command.


def test_the_command_says_yes_and_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, values in (("a", "[1.0, 2.0]"), ("b", "[1.0, 2.125]")):
        artifacts.save(constants(values), tmp_path / f"{name}.mlir")
    a, b = (str(tmp_path / f"{name}.mlir") for name in "ab")
    assert main(["verify", a, a, "--floats", "--trials", "1"]) == 0
    assert capsys.readouterr().out == "same: 1 output, 2 elements, bitwise, 1 trial, 1 device\n"
    assert main(["verify", a, b, "--floats"]) == 1
    assert capsys.readouterr().out == (
        "differs: output 0, f32[2]: 1 of 2 elements, largest absolute difference 0.125\n"
        "  first at [1]: 2.0 before, 2.125 after\n"
        "compared bitwise, in trial 0\n"
        "a different order of float additions has this effect: allow it with tolerances\n"
        f"try: stablehlo-tools verify {a} {b} --floats --rtol 1e-4 --atol 1e-6\n"
    )
    assert main(["verify", a, b, "--rtol", "0.01"]) == 1
    assert capsys.readouterr().out == (
        "differs: output 0, f32[2]: 1 of 2 elements, largest absolute difference 0.125\n"
        "  first at [1]: 2.0 before, 2.125 after\n"
        "compared within rtol=0.01 atol=0, in trial 0\n"
    )
    assert main(["verify", a, b, "--json", "--rtol", "0.05"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["outputs"][0]["first"] == {
        "index": [1],
        "device": None,
        "before": "2.0",
        "after": "2.125",
    }
    assert (answer["same"], answer["devices"]) == (False, 1)


def test_values_that_no_rounding_explains_have_no_such_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, values in (("a", "[1.0, 2.0]"), ("b", "[1.0, 2.5]")):
        artifacts.save(constants(values), tmp_path / f"{name}.mlir")
    paths = [str(tmp_path / f"{name}.mlir") for name in "ab"]
    assert main(["verify", *paths, "--floats"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "compared bitwise, in trial 0"


def test_the_command_refuses_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = str(tmp_path / "missing.mlir")
    assert main(["verify", missing, missing]) == 2
    assert capsys.readouterr().err.startswith(f"{missing}: error: cannot read the file: ")
    with pytest.raises(SystemExit) as caught:
        main(["verify", missing, missing, "--rtol", "-1"])
    assert caught.value.code == 2


def test_nothing_shown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "nan.mlir"
    artifacts.save(constants("0x7FC00001"), path)
    for words in ([], ["--json"]):
        assert main(["verify", str(path), str(path), "--floats", *words]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert "error: nothing was compared: 1 output, NaN or infinite everywhere" in err
        assert "--set INDEX=VALUE" in err


def test_what_was_not_compared_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "partly.mlir")
    body = """
      %n = stablehlo.negate %a : tensor<4xf32>
      %s = stablehlo.sqrt %a : tensor<4xf32>
      %t = stablehlo.log %n : tensor<4xf32>
      %u = stablehlo.add %s, %t : tensor<4xf32>
      return %u, %a : tensor<4xf32>, tensor<4xf32>"""
    artifacts.save(text(function(body, outputs="tensor<4xf32>, tensor<4xf32>")), path)
    assert main(["verify", path, path, "--floats"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "same: 1 of 2 outputs, 4 elements, bitwise, 3 trials, 1 device; "
        "1 not compared: NaN or infinite everywhere, in every trial\n"
    )
    assert "warning: 1 output, first output 0, NaN or infinite everywhere" in err
    assert main(["verify", path, path, "--floats", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["same"], answer["compared"], answer["vacuous"]) == (True, 1, [0])
    assert [output["finite"] for output in answer["outputs"]] == [0, 4]


def test_unsharded_inputs_are_placed_on_the_program_s_own_mesh() -> None:
    """On a mesh of one axis jax could not name the sharding of this output."""
    mesh = Mesh(numpy.array(jax.devices()).reshape(2, 4), ("d", "s"))
    mapped = jax.shard_map(
        lambda a: jax.lax.psum(a, "s"),
        mesh=mesh,
        in_specs=PartitionSpec(None, "d"),
        out_specs=PartitionSpec(None, "d"),
        check_vma=False,
    )
    exported = export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    artifact = artifacts.from_exported(exported)
    assert verify_artifacts(artifact, artifact, Options(trials=1)).same


def test_modules_that_call_lapack_are_run() -> None:
    """A bare module is run below JAX, which otherwise hands LAPACK's functions to its kernels."""
    spec = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    exported = export.export(jax.jit(lambda x: jnp.linalg.qr(x @ x.T + jnp.eye(4))[1]))(spec)
    module = artifacts.parse(exported.mlir_module().encode(), "qr.mlir")
    assert verify_artifacts(module, module, Options(trials=1)).same

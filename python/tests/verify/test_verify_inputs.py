"""The inputs that `verify` draws: what a program can live with, and one for devices that share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from soaking import first

from stablehlo_tools.analysis.argument_ranges import index_limits, steering_arguments
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.verify import Options, verify_artifacts
from stablehlo_tools.verify.device_grid import shared_inputs
from stablehlo_tools.verify.element_types import element_type
from stablehlo_tools.verify.random_inputs import made_valid, put_about_zero
from stablehlo_tools.verify.run_plan import make_plan
from stablehlo_tools.verify.signatures import module_signature

Tree = Any


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def exported(function: Callable[..., Any], *specs: Any) -> Artifact:
    return artifacts.from_exported(export.export(jax.jit(function))(*specs), "step")


def limits(function: Callable[..., Any], *specs: Any) -> list[int]:
    return index_limits(exported(function, *specs).module)


def lamb(parameters: Tree, gradients: Tree, moments: Tree) -> Tree:
    """Layers in a scan, as a stacked model has them."""

    def layer(total: Any, state: Any) -> Any:
        parameter, gradient, moment = state
        moment = 0.999 * moment + 0.001 * jnp.square(gradient)
        update = gradient * lax.rsqrt(moment + 1e-6)
        norms = jnp.linalg.norm(parameter), jnp.linalg.norm(update)
        ratio = jnp.where(norms[1] > 0, norms[0] / norms[1], 1.0)
        return total + ratio, (parameter - ratio * update, moment)

    return lax.scan(layer, jnp.float32(0), (parameters, gradients, moments))


def cross_entropy(probabilities: Any, labels: Any, table: Any) -> Any:
    rows = jnp.take(table, labels, axis=0, mode="fill")
    chosen = jax.nn.one_hot(labels, 3) * jnp.log(probabilities)
    return chosen.sum() + jnp.log1p(-probabilities).sum() + rows.sum()


INDEX = spec(dtype=jnp.int32)


@pytest.mark.parametrize(
    ("function", "specs", "expected"),
    [
        (cross_entropy, [spec(5, 3), spec(5, dtype=jnp.int32), spec(4, 2)], [0, 3, 0]),
        (lambda x, i: lax.dynamic_slice(x, (i,), (2,)), [spec(6), INDEX], [0, 6]),
        (lambda x, i: x.at[i].set(0.0), [spec(6), INDEX], [0, 6]),
        (lambda x, i: lax.cond(i > 9, jnp.sin, jnp.cos, x), [spec(4), INDEX], [0, 0]),
    ],
)
def test_limits_follow_from_what_is_indexed(
    function: Callable[..., Any], specs: list[Any], expected: list[int]
) -> None:
    assert limits(function, *specs) == expected


def euler(time: Any, end: Any, step: Any, state: Any) -> Any:
    """An adaptive step of a solver: of no numbers where times or steps are negative."""

    def body(carry: Any) -> Any:
        now, size, y = carry
        error = jnp.abs(size * size * y).max()
        factor = jnp.clip((1e-2 / error) ** 0.5, 0.2, 5.0)
        return now + size, size * factor, y + size * jnp.log1p(-jnp.exp(-now * size) / 2)

    taken = lax.fori_loop(0, 3, lambda _, carry: body(carry), (time, step, state))
    return jax.tree.map(lambda v: v * jnp.sqrt(end - time + 2.0), taken)


@pytest.mark.parametrize("seed", first(1, [0, 1]))
@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (lamb, [spec(3, 4)] * 3),
        (cross_entropy, [spec(5, 3), spec(5, dtype=jnp.int32), spec(4, 2)]),
        (euler, [spec(), spec(), spec(), spec(4)]),
        (lambda x: (jnp.sqrt(x - 0.5), jnp.exp(100 * x - 50)), [spec(8)]),
    ],
    ids=["lamb", "cross entropy", "adaptive step", "found by trying"],
)
def test_every_output_can_be_compared(
    function: Callable[..., Any], specs: list[Any], seed: int
) -> None:
    program = exported(function, *specs)
    verification = verify_artifacts(program, program, Options(trials=1, seed=seed))
    assert verification.same
    assert not verification.vacuous
    assert len(verification.compared) == len(verification.outputs)


COUNTED = """
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%n: tensor<i32>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %more = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %s = "stablehlo.collective_permute"(%h) <{
      source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
    }> : (tensor<4xf32>) -> tensor<4xf32>
    %y = stablehlo.add %s, FACTOR : tensor<4xf32>
    %k = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %k, %y : tensor<i32>, tensor<4xf32>
  }
  return %r#1 : tensor<4xf32>
}
}
"""


def counted(factor: str = "%x") -> Artifact:
    return artifacts.parse(COUNTED.replace("FACTOR", factor).encode(), "counted.mlir")


def test_devices_agree_on_how_often_a_loop_runs() -> None:
    for seed in range(2):
        verification = verify_artifacts(counted(), counted(), Options(trials=2, seed=seed))
        assert verification.same


def test_what_decides_is_named_where_programs_differ(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steering_arguments(counted().module) == [0]
    before, after = tmp_path / "before.mlir", tmp_path / "after.mlir"
    artifacts.save(counted(), before)
    artifacts.save(counted("%h"), after)
    words = ["verify", str(before), str(after), "--trials", "2"]
    assert main([*words, "--set", "0=3"]) == 1
    assert "note" not in capsys.readouterr().out
    assert main([*words, "--set", "0=0"]) == 0
    capsys.readouterr()
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "note: input 0, an integer, decides how often a loop runs" in told
    assert "--set 0=VALUE" in told


def shared_by(*axes: str | None) -> Artifact:
    """An argument that some axes of a mesh of two by two shard, as each device sees it."""
    dims = ", ".join(f'{{"{axis}"}}' if axis else "{}" for axis in axes)
    text = f"""
    module attributes {{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32}} {{
    sdy.mesh @mesh = <["a"=2, "b"=2]>
    func.func @main(%x: tensor<2x2xi32> {{sdy.sharding = #sdy.sharding<@mesh, [{dims}]>}},
        %y: tensor<2xf32>, %n: tensor<i32>, %f: tensor<f32>) -> tensor<2x2xi32> {{
      return %x : tensor<2x2xi32>
    }}
    }}"""
    return artifacts.parse(text.encode(), "shared.mlir")


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        ((None, None), (0, 0, 0, 0)),
        (("a", None), (0, 0, 2, 2)),
        ((None, "b"), (0, 1, 0, 1)),
        (("a", "b"), (0, 1, 2, 3)),
    ],
)
def test_devices_at_one_position_are_given_the_same(
    axes: tuple[str | None, ...], first: tuple[int, ...]
) -> None:
    module = shared_by(*axes).module
    inputs = module_signature(module).inputs
    shared = shared_inputs(module, inputs, ProcessGrid(1, 4), 4)
    assert shared == (first, (0, 1, 2, 3), (0, 0, 0, 0), (0, 1, 2, 3))
    replicas = shared_inputs(module, inputs, ProcessGrid(2, 4), 2)
    assert replicas == ((0, 1), (0, 1), (0, 0), (0, 1))


def test_limits_of_the_inputs_of_a_shard_map() -> None:
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def local(x: Any, index: Any) -> Any:
        return lax.psum(lax.dynamic_slice(x, (index,), (1,)), "x")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    unused = exported(lambda a, x, i: mapped(x, i), spec(2), spec(8), INDEX)
    assert index_limits(unused.module) == [0, 4]
    assert [value.below for value in _inputs(unused)] == [0, 0, 4]


def _inputs(program: Artifact) -> Any:
    return make_plan({"before": program, "after": program}, "cpu").run.inputs


def test_valid_values() -> None:
    element = element_type("f32")
    assert element is not None
    drawn = np.linspace(-3, 3, 7, dtype=np.float32)
    assert (made_valid(drawn, element, 0) > 0).all()
    whole = element_type("i8")
    assert whole is not None
    numbers = np.array([-128, -1, 0, 127], np.int8)
    assert made_valid(numbers, whole, 5).tolist() == [2, 4, 0, 2]
    assert made_valid(numbers, whole, 0).tolist() == numbers.tolist()
    indices = np.array([0, 1, 6, 7], np.int8)
    assert put_about_zero(indices, whole, 4).tolist() == [0, -3, 2, -1]
    assert put_about_zero(drawn, element, 0).tolist() == drawn.tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            lambda x: jnp.where(x > 0, jnp.log(x), -x),
            lambda x: jnp.where(x > 0, jnp.log(x), -2 * x),
            id="behind a select",
        ),
        pytest.param(
            lambda x: (jnp.sqrt(x), jnp.tanh(x)),
            lambda x: (jnp.sqrt(x), jnp.abs(jnp.tanh(x))),
            id="in another output",
        ),
        pytest.param(
            lambda x: jnp.where(jnp.abs(x) < 1, jnp.arctanh(x), 2 * x),
            lambda x: jnp.where(jnp.abs(x) < 1, jnp.arctanh(x), 3 * x),
            id="outside of an interval",
        ),
    ],
)
def test_what_differs_for_negative_numbers_alone_is_found(
    before: Callable[[Any], Any], after: Callable[[Any], Any]
) -> None:
    """A range is a heuristic: it must not hide what a program does out of it."""
    assert not verify_artifacts(exported(before, spec(64)), exported(after, spec(64))).same


def test_what_differs_for_negative_indices_alone_is_found() -> None:
    specs = spec(8, 4), spec(dtype=jnp.int32)
    counted = exported(lambda x, i: x[i], *specs)
    clamped = exported(lambda x, i: x[jnp.maximum(i, 0)], *specs)
    assert not verify_artifacts(counted, clamped).same

"""`verify` in exact arithmetic, from the command line: what it says and with which exit code."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stablehlo_tools.cli.main import main

_NUMBERS = itertools.count()
FACTOR = np.float32(1 + 2.0**-20)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class Command:
    """`verify` on two functions or texts, and what it answered."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.capsys = capsys
        self.output = self.errors = ""

    def write(self, program: Any, specs: tuple[Any, ...], **how: Any) -> str:
        if isinstance(program, str):
            path = self.directory / f"{next(_NUMBERS)}.mlir"
            path.write_text(program)
        else:
            jitted = jax.jit(program, **how.pop("jit", {}))
            path = self.directory / f"{next(_NUMBERS)}.jax_export"
            path.write_bytes(bytes(export.export(jitted, **how)(*specs).serialize()))
        return str(path)

    def __call__(self, before: Any, after: Any, *specs: Any, words: str = "", **how: Any) -> int:
        paths = [self.write(program, specs, **dict(how)) for program in (before, after)]
        try:
            code = main(["verify", *paths, *words.split()])
        except SystemExit as error:  # of the parser
            code = int(error.code or 0)
        self.output, self.errors = self.capsys.readouterr()
        return code

    @property
    def first(self) -> str:
        return self.output.splitlines()[0]


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


# The answer.


def test_the_first_line_of_programs_that_are_the_same(verify: Command):
    code = verify(
        lambda x, y: {"sum": (x + y).sum(), "product": x @ y.T},
        lambda x, y: {"sum": y.sum() + x.sum(), "product": (y @ x.T).T},
        f32(2, 3),
        f32(2, 3),
    )
    assert code == 0
    assert verify.first == "identical in exact arithmetic: 2 outputs, 5 elements, 3 inputs"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_a_difference_of_one_part_in_a_million(verify: Command, dtype: Any):
    """Where one factor in a chain of layers differs, no float of this type does."""

    def layers(x: jax.Array, w: jax.Array, factor: Any) -> jax.Array:
        hidden = jnp.tanh(x.astype(jnp.float32) @ w.astype(jnp.float32)) * factor
        return (hidden @ w.astype(jnp.float32)).astype(dtype)

    specs = jax.ShapeDtypeStruct((8, 16), dtype), jax.ShapeDtypeStruct((16, 16), dtype)
    code = verify(lambda x, w: layers(x, w, 1), lambda x, w: layers(x, w, FACTOR), *specs)
    assert code == 1
    assert verify.first.startswith("differs in exact arithmetic: output 0")
    assert "128 of 128 elements" in verify.first


RNG = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %x = stablehlo.constant dense<1.0> : tensor<f32>
  %n = stablehlo.constant dense<4> : tensor<1xi64>
  %r = stablehlo.rng %x, %x, %n, distribution = UNIFORM
    : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>
  %0 = stablehlo.add %a, %r : tensor<4xf32>
  return %0 : tensor<4xf32>
}"""


def test_an_op_without_a_form_is_refused_or_compared_in_floats(verify: Command):
    assert verify(RNG, RNG, words="--exact") == 2
    assert "stablehlo.rng" in verify.errors
    assert "mlir:4" in verify.errors
    verify(RNG, RNG)
    assert verify.first.startswith("compared in floats: stablehlo.rng at ")
    assert ":4:" in verify.first


def test_the_first_line_has_the_word_exact_only_if_the_answer_is(verify: Command):
    verify(RNG, RNG)
    assert "exact" not in verify.first


FLOAT_WORDS = (
    "--floats",
    "--rtol 1e-3",
    "--atol 1e-3",
    "--any-nan",
    "--as-deployed",
    "--set 0=-0.0",
)


@pytest.mark.parametrize("words", FLOAT_WORDS)
def test_words_that_ask_for_floats(verify: Command, words: str):
    assert verify(lambda x: 2 * x, lambda x: x + x, f32(4), words=words) == 0
    assert verify.first.startswith("same: 1 output, 4 elements")
    assert "exact" not in verify.output


@pytest.mark.parametrize(
    "words", ["--rtol 0.1", "--specials", "--set 0=nan", "--set 0=-0.0", "--floats"]
)
def test_exact_and_floats_are_a_usage_error(verify: Command, words: str):
    assert verify(lambda x: 2 * x, lambda x: x + x, f32(4), words=f"--exact {words}") == 2
    assert "--exact" in verify.errors


def test_special_numbers_tell_x_and_x_plus_0(verify: Command):
    before, after = (lambda x: x + 0.0), (lambda x: x)
    assert verify(before, after, f32(4)) == 0
    assert verify(before, after, f32(4), words="--set 0=-0.0") == 1
    assert verify(before, after, f32(4), words="--specials") == 1


def test_json(verify: Command):
    assert verify(lambda x: 2 * x, lambda x: x + x, f32(4), words="--json") == 0
    answer = json.loads(verify.output)
    assert (answer["kind"], answer["same"], answer["trials"]) == ("exact", True, 3)
    assert answer["exact"]["prime"] > 2**23
    assert verify(lambda x: 2 * x, lambda x: x * FACTOR, f32(4), words="--json") == 1
    assert json.loads(verify.output)["kind"] == "exact"
    assert verify(lambda x: 2 * x, lambda x: x + x, f32(4), words="--json --floats") == 0
    answer = json.loads(verify.output)
    assert (answer["kind"], answer["exact"]) == ("floats", None)
    verify(RNG, RNG, words="--json")
    answer = json.loads(verify.output)
    assert answer["kind"] == "floats"
    assert "stablehlo.rng" in answer["in_floats"]


def test_seeds_and_trials(verify: Command):
    assert verify(lambda x: x * x, lambda x: x**2, f32(4), words="--trials 5 --seed 7") == 0
    assert verify.first.endswith("5 inputs")


def test_set_gives_an_input_a_value(verify: Command):
    before, after = (lambda x, y: x * y), (lambda x, y: x)
    assert verify(before, after, f32(4), f32(4)) == 1
    assert verify(before, after, f32(4), f32(4), words="--set 1=1.0 --exact") == 0
    assert verify(before, lambda x, y: x / 2, f32(4), f32(4), words="--set 1=0.5") == 0
    assert verify(before, after, f32(4), f32(4), words="--set 2=1.0") == 2


# Inputs.


def test_exports_that_use_different_arguments(verify: Command):
    def before(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return x + z

    def after(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return z + x + 0 * y

    assert verify(before, after, f32(3), f32(3), f32(3)) == 0
    assert verify(after, before, f32(3), f32(3), f32(3)) == 0
    assert verify(before, lambda x, y, z: x + y, f32(3), f32(3), f32(3)) == 1
    assert verify(before, lambda x, y, z: jnp.zeros(3), f32(3), f32(3), f32(3)) == 1


def test_keys(verify: Command):
    key = jax.eval_shape(lambda: jax.random.key(0))

    def draw(scale: Any) -> Callable[..., Any]:
        def run(key: jax.Array, x: jax.Array) -> Any:
            first, second = jax.random.split(key)
            kept = jax.random.bernoulli(first, 0.9, (40,))
            noise = jax.random.uniform(second, (40,)) + jax.random.normal(first, (40,))
            return jnp.where(kept, x * scale, 0) + noise, second

        return run

    assert verify(draw(1), draw(1), key, f32(40)) == 0
    assert "2 outputs, 42 elements" in verify.first
    assert verify(draw(1), draw(FACTOR), key, f32(40)) == 1


def test_float0(verify: Command):
    """An input and an output without values: the cotangent of integers."""
    tangent = jax.ShapeDtypeStruct((3,), jax.dtypes.float0)

    def run(factor: Any) -> Callable[..., Any]:
        return lambda x, t: (x * factor, t)

    assert verify(run(2), run(2), f32(3), tangent) == 0
    assert verify(run(2), run(2 * FACTOR), f32(3), tangent) == 1


def test_several_platforms(verify: Command):
    def run(scale: Any) -> Callable[..., Any]:
        def by_platform(x: jax.Array) -> jax.Array:
            return lax.platform_dependent(x, cpu=lambda x: x * scale, default=lambda x: x + x)

        return by_platform

    platforms = ("cpu", "cuda")
    assert verify(run(2), run(2), f32(3), platforms=platforms) == 0
    assert verify(run(2), run(2 * FACTOR), f32(3), platforms=platforms) == 1


def test_donated_arguments(verify: Command):
    jit = {"donate_argnums": (0,)}
    assert verify(lambda x, y: x + y, lambda x, y: y + x, f32(4), f32(4), jit=jit) == 0
    assert verify(lambda x, y: x + y, lambda x, y: x - y, f32(4), f32(4), jit=jit) == 1


REPLICAS = """module attributes {{mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32}} {{
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
  %0 = "stablehlo.all_reduce"(%a) <{{replica_groups = dense<{groups}> : tensor<{shape}xi64>}}> ({{
  ^bb0(%x: tensor<f32>, %y: tensor<f32>):
    %s = stablehlo.{op} %x, %y : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }}) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}}
}}"""


def test_replicas(verify: Command):
    whole = REPLICAS.format(groups="[[0, 1, 2, 3]]", shape="1x4", op="add")
    turned = REPLICAS.format(groups="[[3, 1, 0, 2]]", shape="1x4", op="add")
    halves = REPLICAS.format(groups="[[0, 1], [2, 3]]", shape="2x2", op="add")
    largest = REPLICAS.format(groups="[[0, 1, 2, 3]]", shape="1x4", op="maximum")
    assert verify(whole, turned) == 0
    assert verify(whole, halves) == 1
    assert verify(largest, largest) == 0
    assert verify(whole, largest) == 1


PARTITIONS = """module attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32}} {{
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
  %0 = "stablehlo.collective_permute"(%a) <{{
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    source_target_pairs = dense<{pairs}> : tensor<{count}x2xi64>}}>
    : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.multiply %0, %a : tensor<4xf32>
  return %1 : tensor<4xf32>
}}
}}"""


def test_a_bare_module_of_four_partitions(verify: Command):
    ring = PARTITIONS.format(pairs="[[0, 1], [1, 2], [2, 3], [3, 0]]", count=4)
    other = PARTITIONS.format(pairs="[[3, 0], [1, 2], [0, 1], [2, 3]]", count=4)
    without = PARTITIONS.format(pairs="[[0, 1], [1, 2], [2, 3]]", count=3)
    assert verify(ring, other) == 0
    assert verify(ring, without) == 1


def test_shardings_and_collectives(verify: Command):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows, columns = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), (None, "model"))
    )
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=columns)

    def step(factor: Any, sharding: Any) -> Callable[..., Any]:
        def run(x: jax.Array, w: jax.Array) -> Any:
            y = lax.with_sharding_constraint(jnp.exp(x @ w), sharding)
            return y.mean() * factor, y

        return run

    assert verify(step(1, rows), step(1, columns), x, w) == 0
    assert verify(step(1, rows), step(FACTOR, rows), x, w) == 1


def test_complex_integer_and_boolean_inputs(verify: Command):
    specs = (
        jax.ShapeDtypeStruct((4,), jnp.complex64),
        jax.ShapeDtypeStruct((4,), jnp.bool_),
        jax.ShapeDtypeStruct((4,), jnp.uint8),
        jax.ShapeDtypeStruct((), jnp.int16),
        jax.ShapeDtypeStruct((4,), jnp.int4),
    )

    def run(factor: Any) -> Callable[..., Any]:
        return lambda q, b, u, i, n: (jnp.where(b, q * factor, 0), u + 1, i * 2, n)

    assert verify(run(2), run(2), *specs) == 0
    assert "4 outputs, 13 elements" in verify.first
    assert verify(run(2), run(2 * FACTOR), *specs) == 1


# Branches.


def at_step(condition: Callable[[Any], Any], factor: Any) -> Callable[..., Any]:
    return lambda x, step: lax.cond(condition(step), lambda x: x * factor, lambda x: x + 1, x)


CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "step == 10": lambda step: step == 10,
    "step % 10 == 9": lambda step: step % 10 == 9,
    "step < 3": lambda step: step < 3,
    "odd": lambda step: step % 2 == 1,
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_branches_that_a_step_decides_are_entered(verify: Command, name: str):
    condition = CONDITIONS[name]
    same, other = at_step(condition, 2), at_step(condition, 2 * FACTOR)
    assert verify(same, other, f32(3), i32()) == 1
    assert verify(same, same, f32(3), i32()) == 0
    assert "no input entered" not in verify.output


LATE: dict[str, Callable[[Any], Any]] = {
    "step >= 1000": lambda step: step >= 1000,
    "float(step) > 99.5": lambda step: step.astype(jnp.float32) > 99.5,
}


@pytest.mark.parametrize("name", LATE)
def test_late_branches_are_entered(verify: Command, name: str):
    condition = LATE[name]
    assert verify(at_step(condition, 2), at_step(condition, 2 * FACTOR), f32(3), i32()) == 1


def test_each_branch_of_a_switch_is_entered(verify: Command):
    def run(*factors: Any) -> Callable[..., Any]:
        return lambda x, i: lax.switch(i, [lambda x, f=f: x * f for f in factors], x)

    same = run(1, 2, 3, 4, 5)
    for wrong in range(5):
        factors = [n + 1 + (n == wrong) * 2.0**-20 for n in range(5)]
        assert verify(same, run(*factors), f32(3), i32()) == 1
    assert verify(same, same, f32(3), i32()) == 0
    assert "no input entered" not in verify.output


def test_a_branch_that_no_input_can_enter_is_reported(verify: Command):
    def run(x: jax.Array, i: jax.Array) -> Any:
        never = (i > 5) & (i < 3)
        doubled = lax.cond(never, lambda x: x * 2, lambda x: x, x)
        return doubled, lax.while_loop(lambda y: never, lambda y: y + 1, x)

    assert verify(run, run, f32(3), i32()) == 0
    assert verify.first.startswith("identical in exact arithmetic in the code that ran: 2 outputs")
    assert "no input entered 2 of 3 branches and loops in BEFORE: " in verify.output
    assert "in AFTER" in verify.output
    assert "true of if" in verify.output or "branch 1 of case" in verify.output
    assert "the loop while" in verify.output


def test_a_loop_until_a_residual_is_small_runs(verify: Command):
    """The residual starts as a constant, so the order of constants must let an iteration run."""

    def solve(factor: float) -> Callable[..., Any]:
        def run(x: jax.Array) -> Any:
            def improve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                y = state[0] * factor + x
                return y, jnp.sum(y * y)

            start = (jnp.zeros_like(x), jnp.float32(1))
            return lax.while_loop(lambda state: state[1] > 1e-6, improve, start)

        return run

    assert verify(solve(0.5), solve(0.5), f32(3)) == 0
    assert verify.first.startswith("identical in exact arithmetic: ")
    assert verify(solve(0.5), solve(0.25), f32(3)) == 1


def test_loops_run_several_times_once_and_never(verify: Command):
    """A loop that is wrong only in its second, its first or no iteration."""

    def run(change: Callable[[Any], Any]) -> Callable[..., Any]:
        def looped(x: jax.Array, n: jax.Array) -> jax.Array:
            done = lax.fori_loop(0, n, lambda i, y: y * 2 + i, x)
            return jnp.where(change(n), done + 1, done)

        return looped

    same = run(lambda n: n == 99)
    for wrong in (lambda n: n == 0, lambda n: n == 1, lambda n: n > 1):
        assert verify(same, run(wrong), f32(3), i32()) == 1


# Indices outside of what they index.


def test_slices_past_the_end(verify: Command):
    """A slice starts earlier if it would end too late; a gather of the rows does not."""

    def clamped(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (i, 0), (3, 2))

    def filled(x: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.take(x, i + jnp.arange(3), 0, mode="clip")

    assert verify(clamped, filled, f32(6, 2), i32()) == 1

    def clamped_before(x: jax.Array, i: jax.Array) -> jax.Array:
        return clamped(x, jnp.clip(jnp.where(i < 0, i + 6, i), 0, 3))  # as jax counts

    assert verify(clamped, clamped_before, f32(6, 2), i32()) == 0


def test_updates_past_the_end(verify: Command):
    def updated(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, y, (i,))

    def dropped(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return x.at[i + jnp.arange(3)].set(y, mode="drop")

    specs = f32(6), f32(3), i32()
    assert verify(updated, dropped, *specs) == 1
    assert verify(updated, lambda x, y, i: updated(x, y, jnp.minimum(i, 3)), *specs) == 0


MODES = ("clip", "fill", "wrap")


@pytest.mark.parametrize("modes", list(itertools.combinations(MODES, 2)), ids=str)
def test_gathers_with_different_modes(verify: Command, modes: tuple[str, str]):
    one, other = (lambda x, i, mode=mode: jnp.take(x, i, 0, mode=mode) for mode in modes)
    assert verify(one, other, f32(6, 2), i32(60)) == 1
    assert verify(one, one, f32(6, 2), i32(60)) == 0


def test_scatters_outside(verify: Command):
    def run(mode: str) -> Callable[..., Any]:
        return lambda x, y, i: x.at[i].add(y, mode=mode)

    assert verify(run("drop"), run("clip"), f32(6), f32(60), i32(60)) == 1
    assert verify(run("drop"), run("drop"), f32(6), f32(60), i32(60)) == 0


def test_segments_that_are_empty(verify: Command):
    def segments(x: jax.Array, i: jax.Array) -> Any:
        count = jax.ops.segment_sum(jnp.ones(60), i, 6)
        return jax.ops.segment_sum(x, i, 6), count

    def mean(guarded: bool) -> Callable[..., Any]:
        def run(x: jax.Array, i: jax.Array) -> jax.Array:
            total, count = segments(x, i)
            return jnp.where(count > 0, total / count, 7.0) if guarded else total / count

        return run

    assert verify(mean(True), mean(False), f32(60), i32(60)) == 1
    assert verify(mean(True), mean(True), f32(60), i32(60)) == 0


# What a threshold divides.


def test_both_sides_of_a_threshold_are_reached(verify: Command):
    """Residues are between constants: with an order by themselves, none was between -1 and 1."""

    def huber(x: jax.Array, inner: Any, outer: Any) -> jax.Array:
        return jnp.where(jnp.abs(x) < 1, inner * x * x, outer * (jnp.abs(x) - 0.5))

    same = lambda x: huber(x, 0.5, 1)  # noqa: E731
    assert verify(same, lambda x: huber(x, 0.5 * FACTOR, 1), f32(100)) == 1
    assert verify(same, lambda x: huber(x, 0.5, FACTOR), f32(100)) == 1
    assert verify(lambda x: jnp.clip(x, -1, 1), jnp.sign, f32(100)) == 1
    assert verify(jax.nn.relu6, lambda x: 6.0 * (x > 0), f32(100)) == 1
    assert (
        verify(lambda x: jnp.minimum(x, 1e-3), lambda x: jnp.where(x < 0, x, 1e-3), f32(100)) == 1
    )


def test_a_comparison_of_counts_is_that_of_integers(verify: Command):
    """`jnp.var` divides only if it has enough elements; dropout and schedules compare, too."""

    def wrong(x: jax.Array) -> jax.Array:
        return jnp.square(x * FACTOR - x.mean()).mean()

    assert verify(jnp.var, wrong, f32(300, 7)) == 1
    assert verify(jnp.var, lambda x: jnp.square(x - x.mean()).mean(), f32(300, 7)) == 0

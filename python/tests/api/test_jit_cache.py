"""`stablehlo_tools.jit` traces anew when `jax.jit` does, and only then.

Each case is a question that jax's own tests of its caches ask: of api_test.py and pjit_test.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

X = np.arange(4, dtype=np.float32)
PASS = "strip-tokens"
Jit = Callable[..., Any]


def ours(function: Jit, **options: Any) -> Any:
    return stablehlo_tools.jit(function, PASS, **options)


JITS = [pytest.param(ours, id="ours"), pytest.param(jax.jit, id="jax's")]


class Alike:
    """Equal to its subclasses' objects, and of one hash."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


class Subclass(Alike):
    pass


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    ("statics", "traces"),
    [
        ([1, 1, 2], 2),
        ([1, 1.0, True], 3),
        ([0.0, -0.0], 1),
        ([float("nan"), float("nan")], 2),
        ([np.int32(1), 1, np.int64(1)], 3),
        ([(1,), (1,), (1.0,)], 1),
        ([Alike(1), Alike(2), Subclass(1)], 2),
        (["a", "a", b"a"], 2),
    ],
    ids=["one", "types", "zeros", "nan", "numpy", "inside", "subclass", "text"],
)
def test_static_arguments_count_by_type_and_value(
    jit: Jit, statics: list[Any], traces: int
) -> None:
    seen: list[Any] = []

    def function(static: Any, x: jax.Array) -> jax.Array:
        seen.append(static)
        return x + 1

    jitted = jit(function, static_argnums=0)
    for static in statics:
        jitted(static, X)
    assert len(seen) == traces
    by_name = jit(function, static_argnames="static")
    seen.clear()
    for static in statics:
        by_name(static=static, x=X)
    assert len(seen) == traces


def test_the_type_of_a_static_argument_is_the_result_s() -> None:
    def function(static: Any, x: jax.Array) -> Any:
        return static * x

    jitted = ours(function, static_argnums=0)
    given = np.arange(4)
    assert [jitted(s, given).dtype for s in (1, 1.0, 1)] == [jnp.int32, jnp.float32, jnp.int32]


CALLS: dict[str, tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], int]] = {
    "dtypes": ([((X,), {}), ((X.astype("f2"),), {}), ((X.astype("i4"),), {})], 3),
    "shapes": ([((X,), {}), ((X[:2],), {}), ((X[None],), {})], 3),
    "weak types": ([((1.0,), {}), ((2.0,), {}), ((np.float32(1),), {}), ((1,), {})], 3),
    "booleans": ([((True,), {}), ((1,), {})], 2),
    "numbers of numpy": ([((np.float32(1),), {}), ((jnp.float32(1),), {})], 1),
    "numpy and jax": ([((X,), {}), ((jnp.asarray(X),), {})], 1),
    "trees": ([(({"a": X},), {}), (({"b": X},), {}), (([X],), {}), (((X,),), {})], 4),
    "nothing": ([(({"a": X, "b": None},), {}), (({"a": X},), {})], 2),
    "names": ([((X,), {}), ((), {"x": X}), ((), {"x": X + 1})], 2),
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("case", CALLS)
def test_calls_of_one_kind(jit: Jit, case: str) -> None:
    calls, traces = CALLS[case]
    seen: list[Any] = []

    def function(x: Any) -> Any:
        seen.append(x)
        return jax.tree.map(lambda leaf: leaf * 2, x)

    jitted = jit(function)
    for args, kwargs in calls:
        jitted(*args, **kwargs)
    assert len(seen) == traces


CONFIGURATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "rank promotion": lambda: jax.numpy_rank_promotion("warn"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "threefry": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "default device": lambda: jax.default_device(jax.devices()[1]),
    "mesh": lambda: jax.set_mesh(Mesh(np.array(jax.devices()), ("x",))),
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_the_configuration_counts(jit: Jit, case: str) -> None:
    seen: list[Any] = []

    def function(x: Any) -> Any:
        seen.append(x)
        return x * 2

    jitted = jit(function)
    jitted(X)
    with CONFIGURATIONS[case]():
        jitted(X)
        jitted(X)
    jitted(X)
    assert len(seen) == 2


def test_the_configuration_is_in_the_program() -> None:
    jitted = ours(lambda x: x @ x)
    given = np.eye(4, dtype=np.float32)
    jitted(given)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(jitted.export(given).mlir_module())
    assert "HIGHEST" not in str(jitted.export(given).mlir_module())
    wide = ours(lambda x: jnp.sum(x) + jnp.arange(3)[0])
    assert wide(np.arange(3.0)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert wide(np.arange(3.0)).dtype == jnp.float64


def test_committed_arguments_count_by_their_sharding() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    whole = np.arange(16, dtype=np.float32)
    jitted = ours(lambda x: x * 2)
    first = jax.device_put(whole, NamedSharding(mesh, P("x")))
    placements = [whole, first, first + 1, jax.device_put(whole, NamedSharding(mesh, P()))]
    placements += [jax.device_put(whole, device) for device in jax.devices()[:2]]
    for given in placements:
        result = jitted(given)
        np.testing.assert_array_equal(result, np.asarray(given) * 2)
        if isinstance(given, jax.Array):
            assert result.devices() == given.devices()
    assert sum(map(len, jitted.calls.values())) == 5


@pytest.mark.parametrize("jit", JITS)
def test_static_arguments_that_cannot_be_hashed(jit: Jit) -> None:
    jitted = jit(lambda x, static: x, static_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        jitted(X, [1])


@pytest.mark.parametrize("jit", JITS)
def test_arguments_that_are_no_arrays(jit: Jit) -> None:
    with pytest.raises(TypeError, match="str"):
        jit(lambda x: x)("text")


@pytest.mark.parametrize("jit", JITS)
def test_which_arguments_are_static(jit: Jit) -> None:
    def function(x: Any, *others: Any, factor: Any = 2) -> Any:
        return x * len(others) * factor

    np.testing.assert_array_equal(jit(function, static_argnames="factor")(X, X, factor=3), X * 3)
    np.testing.assert_array_equal(jit(function, static_argnums=(1, 2))(X, "a", "b"), X * 4)
    last = jit(lambda x, y: x * y, static_argnums=-1)
    np.testing.assert_array_equal(last(X, 3), X * 3)
    np.testing.assert_array_equal(last(X, y=4), X * 4)


@pytest.mark.parametrize("jit", JITS)
def test_a_method_of_static_objects(jit: Jit) -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def scaled(self, x: Any) -> Any:
            return x * self.factor

        jitted = jit(scaled, static_argnums=0)

    two, three = Scaled(2), Scaled(3)
    for each in (two, three, two):
        np.testing.assert_array_equal(each.jitted(X), X * each.factor)


@pytest.mark.parametrize("jit", JITS)
def test_functions_that_are_made_anew(jit: Jit) -> None:
    def made(array: Any) -> Jit:
        return jit(lambda x: x + array)

    one, two = made(X), made(jnp.ones(4))
    for _ in range(2):
        np.testing.assert_array_equal(one(X), 2 * X)
        np.testing.assert_array_equal(two(X), X + 1)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("clear", ["its own", "all of jax's"])
def test_a_cleared_cache_sees_what_changed(jit: Jit, clear: str) -> None:
    factor = 2.0
    jitted = jit(lambda x: x * factor)
    np.testing.assert_array_equal(jitted(X), X * 2)
    factor = 3.0
    np.testing.assert_array_equal(jitted(X), X * 2)
    (jitted.clear_cache if clear == "its own" else jax.clear_caches)()
    np.testing.assert_array_equal(jitted(X), X * 3)


@pytest.mark.parametrize("jit", JITS)
def test_recursion(jit: Jit) -> None:
    def power(x: Any, n: int) -> Any:
        return x if n == 0 else x * jitted(x, n - 1)

    jitted = jit(power, static_argnums=1)
    np.testing.assert_array_equal(jitted(X, 3), X**4)


def test_threads_share_one_cache() -> None:
    jitted = ours(lambda x, n: x * n, static_argnums=1)
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        results[number] = jitted(X, number % 2)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in results.items():
        np.testing.assert_array_equal(result, X * (number % 2))
    assert len(results) == 8


def test_a_donated_argument_is_gone_each_time() -> None:
    jitted = ours(lambda x: x * 2, donate_argnums=0)
    for _ in range(2):
        given = jnp.asarray(X)
        np.testing.assert_array_equal(jitted(given), X * 2)
        assert given.is_deleted()


def _twice(x: Any) -> Any:
    return np.asarray(x) * 2


def _printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    return x


def _called(x: jax.Array) -> jax.Array:
    jax.debug.callback(_twice, x)
    return x


def _pure(x: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: jax.pure_callback(_twice, row, row), x[None])


def _effect(x: jax.Array) -> jax.Array:
    return io_callback(_twice, x, x, ordered=True)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_printed, "jax.debug.print"),
        (_called, "jax.debug.callback"),
        (_pure, "jax.pure_callback"),
        (_effect, "jax.experimental.io_callback"),
    ],
)
def test_what_calls_python_is_named(function: Jit, name: str) -> None:
    jitted = ours(function)
    for call in (jitted, jitted.export):
        with pytest.raises(ToolError, match="calls Python, which an exported program") as raised:
            call(X)
        shown = str(raised.value)
        assert shown.startswith("test_jit_cache.py:")
        assert f"in {function.__name__}" in shown
        assert f"error: {name} calls Python" in shown
        assert "leave this function to jax.jit" in shown

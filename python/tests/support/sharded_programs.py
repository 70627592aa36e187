"""Sharded programs, and what holds a partitioned program against the same function unsharded.

The yardstick is the function on one device, not the original artifact: XLA's own partitioner is
wrong for a few of them (a sum that starts from 5 over a divided dimension starts from 5 on every
device; a row that dynamic_update_slice must clamp is dropped; some gradients of convolutions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools

Constrain = Callable[[Any, P], Any]

_SCATTERED = (3, 1, 7, 5, 0, 2, 6, 4)  # an order of devices that no axis explains


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...], order: Sequence[int] = range(8)) -> Mesh:
    return Mesh(np.array(jax.devices())[list(order)].reshape(sizes), names)


# Functions, since devices exist only once a test runs.
MESHES: dict[str, Callable[[], Mesh]] = {
    "4x2": lambda: _mesh((4, 2), ("x", "y")),
    "scattered": lambda: _mesh((4, 2), ("x", "y"), _SCATTERED),
    "2x2x2": lambda: _mesh((2, 2, 2), ("x", "y", "z")),
    "8": lambda: _mesh((8,), ("x",)),
}


@dataclass(frozen=True)
class ShardedProgram:
    """A function of a constraint and arrays, and how its arguments and results are sharded.

    `function(constrain, *arguments)` calls `constrain(value, spec)` for a sharding in between.
    `results` has a spec for each result, None where the compiler is free. With `tolerance` floats
    may differ by so much, relative to 1 or to their size; without, every bit counts but a NaN's.
    `soak` marks what only long runs try.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    specs: tuple[P, ...]
    mesh: str = "4x2"
    results: Any = None
    tolerance: float = 0.0
    soak: bool = False

    def exported(self) -> Exported:
        """The artifact of the sharded program."""
        mesh = MESHES[self.mesh]()

        def sharding(spec: P) -> NamedSharding:
            return NamedSharding(mesh, spec)

        def constrain(value: Any, spec: P) -> Any:
            return lax.with_sharding_constraint(value, sharding(spec))

        def is_spec(leaf: Any) -> bool:
            return isinstance(leaf, P)

        shardings: dict[str, Any] = {"in_shardings": tuple(map(sharding, self.specs))}
        if self.results is not None:
            shardings["out_shardings"] = jax.tree.map(sharding, self.results, is_leaf=is_spec)
        jitted = jax.jit(lambda *arguments: self.function(constrain, *arguments), **shardings)
        return export.export(jitted)(*self.arguments)

    def expected(self) -> list[np.ndarray]:
        """The results of the function on one device."""
        jitted = jax.jit(lambda *arguments: self.function(lambda v, _: v, *arguments))
        return _arrays(jitted(*self.arguments))

    def run(self, exported: Exported) -> list[np.ndarray]:
        """The results of an artifact of this program on eight devices."""
        mesh = MESHES[self.mesh]()
        placed = [
            jax.device_put(argument, NamedSharding(mesh, spec))
            for argument, spec in zip(self.arguments, self.specs, strict=True)
        ]
        return _arrays(jax.jit(exported.call)(*placed))


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def difference(one: np.ndarray, other: np.ndarray, tolerance: float) -> str | None:
    """What distinguishes two results; None for nothing."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype}{one.shape} and {other.dtype}{other.shape}"
    if tolerance:
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        close = np.isclose(
            one.astype(wide), other.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True
        )
        return None if close.all() else f"{(~close).sum()} of {close.size} elements are not close"
    if one.dtype.kind in "iub":
        same = one == other
    else:
        undefined = np.isnan(one) & np.isnan(other)
        same = undefined | _same_bits(one, other)
    return None if same.all() else f"{(~same).sum()} of {same.size} elements differ"


def _same_bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    size = one.dtype.itemsize
    bits = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in (one, other)]
    return (bits[0] == bits[1]).reshape(*one.shape, size).all(axis=-1)


def complaint(program: ShardedProgram) -> str | None:
    """What is wrong with the partitioned program; None where its values are right.

    Where they are not those of one device they must be the original artifact's, and where an
    all_reduce or reduce_scatter runs, zeros have no sign: those of XLA:CPU make 0.0 of -0.0.
    """
    exported = program.exported()
    partitioned = stablehlo_tools.transform(exported, "partition")
    text = partitioned.mlir_module()
    adds = "stablehlo.all_reduce" in text or "stablehlo.reduce_scatter" in text
    wanted, got = (
        [_without_signs_of_zeros(value) if adds else value for value in values]
        for values in (program.expected(), program.run(partitioned))
    )
    found = _differences(wanted, got, program.tolerance)
    if found:
        original = _differences(program.run(exported), got, program.tolerance)
        found = {number: said for number, said in found.items() if number in original}
    return "; ".join(f"result {number}: {said}" for number, said in found.items()) or None


def _without_signs_of_zeros(value: np.ndarray) -> np.ndarray:
    return value if value.dtype.kind in "iub" else np.where(value == 0, np.abs(value), value)


def _differences(
    wanted: Sequence[np.ndarray], got: Sequence[np.ndarray], tolerance: float
) -> dict[int, str]:
    each = [difference(*pair, tolerance) for pair in zip(wanted, got, strict=True)]
    return {number: said for number, said in enumerate(each) if said is not None}


_RNG = np.random.default_rng(7)


def _whole(*shape: int, kind: Any = np.float32, low: int = -5, high: int = 6) -> np.ndarray:
    return _RNG.integers(low, high, shape).astype(kind)


def _odd(*shape: int) -> np.ndarray:
    """Normal numbers, and among them a NaN, infinities and both zeros."""
    values = _RNG.standard_normal(shape).astype(np.float32)
    places = _RNG.permutation(values.size)[:5]
    values.reshape(-1)[places] = (-0.0, 0.0, np.nan, np.inf, -np.inf)
    return values


_INDEX = np.array([[0, 5, -1, 31, 40], [-40, 7, 7, 2, 31]], np.int32)
_UPDATES = _whole(2, 5, 8)
_UNIQUE = np.array([3, 30, 9, 17], np.int32)
_TABLE = _odd(32, 8)
_IMAGES = (_whole(8, 16, 16, 8, low=-3, high=3), _whole(3, 3, 8, 16, low=-3, high=3))
_LAYOUTS = (P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")))
# What finds elements along a dimension is done otherwise where that is whole.
_INDEXED = ("takes", "adds", "dynamic")


def _each(
    name: str, function: Callable[..., Any], *arguments: Any, specs: Sequence[P] = (), **more: Any
) -> list[ShardedProgram]:
    """A program with its first argument in every layout; `specs` are those of the others."""
    return [
        ShardedProgram(
            f"{name} of {layout}",
            function,
            arguments,
            (layout, *specs),
            soak=number in (1, 2) or (number == 3 and name not in _INDEXED),
            **more,
        )
        for number, layout in enumerate(_LAYOUTS)
    ]


def _moves(_: Constrain, x: Any) -> Any:
    square = x[:16]
    return (
        (x[1:], x[::2, ::3], x[5:21, 3:7], x[8:24], x[:-1] - x[1:], x[::-1, ::-1]),
        (lax.pad(x, jnp.float32(7), [(-1, 1, 0), (2, -2, 0)]), jnp.roll(x, (5, -3), (0, 1))),
        (lax.pad(x, jnp.float32(7), [(0, 0, 1), (1, 0, 2)]), jnp.pad(x, 1)[1:-1, 1:-1]),
        (jnp.concatenate([x, x[:8], -x]), jnp.concatenate([x, x[:, :3]], 1), jnp.tile(x, (2, 3))),
        (jnp.repeat(x, 3, 0), jnp.stack([x, -x], 1), jnp.split(x, 4), jnp.rot90(x), square.T),
    )


def _reshapes(_: Constrain, x: Any) -> Any:
    shapes = ((256,), (2, 16, 8), (8, 32), (32, 2, 4), (64, 4), (4, 8, 2, 4), (16, 16))
    return tuple(-x.reshape(shape) for shape in shapes), -x.T.reshape(-1)


def _reductions(_: Constrain, x: Any) -> Any:
    functions: Sequence[Any] = (jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.ptp)
    found = [function(x, axis) for function in functions for axis in (0, 1, None)]
    flags = [function(x > 2, axis) for function in (jnp.any, jnp.all) for axis in (0, 1)]
    return found, flags, jnp.cumsum(x, 0), lax.cummax(x, 0), jnp.sort(x, 0), jnp.argsort(x, 1)


def _starts(_: Constrain, x: Any, start: Any) -> Any:
    """Reductions that start from something else than an identity."""
    five = np.float32(5)
    return (
        [lax.reduce(x, five, function, (0,)) for function in (lax.add, lax.max, lax.min)],
        [lax.reduce(x, start, function, (0,)) for function in (lax.add, lax.max)],
        lax.reduce(x, np.float32(-9), lambda a, b: jnp.where(a > b, a, b) + 0, (0,)),
        lax.reduce((x, -x), (five, five), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,)),
    )


def _takes(_: Constrain, x: Any, i: Any) -> Any:
    modes = [jnp.take(x, i, axis, mode=m) for axis in (0, 1) for m in ("clip", "fill", "wrap")]
    narrow = [x[i.astype(kind)] for kind in (jnp.int8, jnp.uint8, jnp.uint32)]
    return modes, narrow, x[i, i], x[i, None, 2:5], x[i[0, 1]], x[:, i[0, 1]], jnp.isnan(x)[i]


def _adds(_: Constrain, x: Any, i: Any, u: Any) -> Any:
    hows = ("add", "max", "min", "multiply")
    rows = [getattr(x.at[i], how)(u, mode=m) for how in hows for m in ("drop", "clip")]
    counts = jnp.bincount(i.ravel(), length=16), jax.ops.segment_sum(u[0], i[0], 16)
    return rows, x.at[i, i].add(u[..., 0]), x.at[:, 3].add(1.0), x.at[1:17:2].add(2.0), counts


def _sets(_: Constrain, x: Any, i: Any, u: Any) -> Any:
    return (
        (x.at[i].set(u, unique_indices=True), x.at[3:7, 2].set(0.0), x.at[i].apply(jnp.negative)),
        jax.vmap(lambda row, k: row.at[k % 8].set(9.0))(x, jnp.arange(32)),
        jax.vmap(lambda row, k: lax.dynamic_update_slice(row, row[:2], (k,)))(x, jnp.arange(32)),
        jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    )


def _dynamic(_: Constrain, x: Any, starts: Any) -> Any:
    """Slices and updates from starts of several types, some outside."""
    found: list[Any] = []
    every = ((1, 8), (5, 8), (1, 1), (32, 2))
    for n, kind in enumerate((jnp.int32, jnp.int8, jnp.uint8)):
        i = starts[n].astype(kind)
        zero = jnp.zeros((), kind)
        for sizes in every if n == 0 else every[1::2]:
            taken = lax.dynamic_slice(x, (i, zero), sizes)
            found.extend((taken, lax.dynamic_update_slice(x, -taken, (i, i))))
    return found


def _products(_: Constrain, a: Any, b: Any) -> Any:
    integers = lax.dot(a.astype(jnp.int8), b.astype(jnp.int8), preferred_element_type=jnp.int32)
    halves = lax.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
    heads = jnp.einsum("bshd,bthd->bhst", *(v.reshape(4, 8, 2, 4) for v in (a, b)))
    return a @ b, a.T @ b.T, integers, halves, heads, (a > 0) @ (b > 0), (a * 1j) @ b


def _convolve(x: Any, w: Any, stride: int = 1, padding: str = "SAME", **more: Any) -> Any:
    form = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=form, **more)


def _convolutions(_: Constrain, x: Any, w: Any) -> Any:
    def loss(x: Any, w: Any) -> Any:
        return (_convolve(x, w) * 3).sum() + _convolve(x, w, 2).sum()

    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    return (
        (_convolve(x, w), _convolve(x, w, 2), _convolve(x, w, rhs_dilation=(2, 1))),
        _convolve(x, w[:, :, :2], feature_group_count=4),
        jax.grad(loss, (0, 1))(x, w),
        jax.grad(lambda x: (pooled(x) * jnp.arange(8.0)).sum())(x),
    )


def _loops(constrain: Constrain, x: Any) -> Any:
    def swapped(carry: Any, row: Any) -> tuple[Any, Any]:
        return constrain(carry + row, P("x")), constrain(carry * 2, P("y"))

    def odd(i: Any, v: Any) -> Any:
        return lax.cond(i % 2 == 0, lambda u: u.T, lambda u: jnp.flip(u, 0) + 1, v)

    return (
        lax.scan(swapped, jnp.zeros(16), x),
        lax.scan(lambda c, v: (c + v, c), x[0], x, reverse=True, unroll=2),
        lax.fori_loop(0, 5, lambda i, v: v.at[i].add(v[i + 1]), x),
        lax.while_loop(lambda v: v.sum() < 1000, lambda v: jnp.roll(v, 1, 0) + 1, x),
        lax.fori_loop(0, 3, odd, x),
        lax.switch(x[0, 0].astype(int) % 2, [lambda v: v.sum(0), lambda v: v[3]], x),
        lax.map(lambda v: v.sum() * v, x),
    )


def _functions(constrain: Constrain, x: Any) -> Any:
    """Several calls of one function, differentiated, rematerialised and as a composite."""
    square = jax.jit(lambda v: v * v + v.sum(0))
    composite = lax.composite(lambda v: v.sum(0) * 2, "tests.double_sum")
    constrained = square(constrain(x, P("y")).T) + square(square(x))
    gradient = jax.grad(lambda v: (jax.checkpoint(square)(v) * constrain(v, P(None, "x"))).sum())
    return constrained, gradient(x), composite(x) + composite(-x), (x, x, -x)


def _uneven(constrain: Constrain, x: Any) -> Any:
    tokens = jnp.concatenate([x[:1], x])
    loss = jax.grad(lambda v: (jnp.concatenate([v[:1], v])[:-1] * v[:, :1]).sum())
    kept = constrain(x[:, :-1] * 2, P("y", "x")), constrain(tokens, P("x", P.UNCONSTRAINED))
    return kept, tokens @ x.T, loss(x), x[:, :-1].reshape(-1), (tokens @ x.T).sum(0)


def _manual(_: Constrain, x: Any) -> Any:
    mesh = MESHES["4x2"]()
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def over(function: Any, inside: P, outside: Any, names: set[str], value: Any = x) -> Any:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=inside, out_specs=outside, axis_names=names,
            check_vma=False,
        )  # fmt: skip
        return mapped(value)

    return (
        over(
            lambda v: lax.psum(v, "x") + lax.axis_index("y"), P("x", "y"), P(None, "y"), {"x", "y"}
        ),
        over(lambda v: lax.ppermute(v, "x", ring) * lax.axis_index("x"), P("x"), P("x"), {"x"}),
        over(lambda v: lax.all_gather(v, "x", tiled=True), P("x"), P(), {"x"}),
        over(lambda v: lax.all_to_all(v, "x", 0, 1, tiled=True), P(None, "x"), P("x"), {"x"}),
        over(lambda v: lax.psum_scatter(v, "x", tiled=True), P(), P("x"), {"x"}),
        over(lambda v: jnp.argmax(v, 1), P("x"), P("x"), {"x"}),
        over(lambda v: (v, v, lax.pmax(v.sum(0), "x")), P("x"), (P("x"), P("x"), P()), {"x"}),
        over(lambda v: v[jnp.array([0, 3, 3])].sum(1), P("x"), P("x"), {"x"}, -x),
    )


def _makes(_: Constrain, x: Any, key: Any) -> Any:
    """Values that come from nowhere: constants, iotas, random numbers; and none at all."""
    random = jax.random.uniform(jax.random.wrap_key_data(key), (16, 16))
    iotas = [lax.broadcasted_iota(kind, (1032, 2), 0) for kind in (jnp.bfloat16, jnp.int8)]
    return x + _TABLE[:16, :1], jnp.asarray(_TABLE), random, iotas, x[:0], x[:0].sum(0), jnp.eye(16)


def _smooth(_: Constrain, x: Any) -> Any:
    """Floats that no exactness can be asked of."""
    positive = jnp.eye(8) * 99 + jnp.einsum("bij,bkj->bik", x, x)
    attention = jax.grad(lambda v: (jax.nn.softmax(v @ v.swapaxes(1, 2)) @ v).sum())
    factors = jnp.linalg.cholesky(positive), jnp.linalg.eigh(positive)[0]
    return factors, jnp.linalg.solve(positive, x), attention(x), jnp.fft.fft2(x), jnp.var(x, 0)


PROGRAMS: tuple[ShardedProgram, ...] = (
    *_each("moves", _moves, _TABLE),
    *_each("reshapes", _reshapes, _TABLE),
    *_each("reductions", _reductions, _whole(16, 8)),
    *_each("starts", _starts, _whole(16, 8), np.float32(4), specs=[P()]),
    *_each("takes", _takes, _TABLE, _INDEX, specs=[P("y")]),
    *_each("adds", _adds, _whole(32, 8), _INDEX, _UPDATES, specs=[P("y"), P(None, None, "x")]),
    *_each("sets", _sets, _TABLE, _UNIQUE, _odd(4, 8), specs=[P("x"), P("y")]),
    *_each("dynamic", _dynamic, _TABLE, np.array([31, 127, 9], np.int32), specs=[P()]),
    *_each("products", _products, _whole(16, 16), _whole(16, 16), specs=[P("y", "x")]),
    *_each("loops", _loops, _whole(16, 16)),
    *_each("functions", _functions, _whole(16, 16)),
    *_each("uneven", _uneven, _whole(16, 8)),
    *_each("manual", _manual, _whole(16, 16)),
    *_each("makes", _makes, _whole(16, 16), np.array([3, 4], np.uint32), specs=[P()]),
    *_each("smooth", _smooth, _whole(8, 8, 8), tolerance=1e-3),
    *(
        ShardedProgram(f"convolutions of {x}", _convolutions, _IMAGES, (x, w), soak=soak)
        for x, w, soak in (
            (P("x", None, None, "y"), P(), True),
            (P("x", "y"), P(), True),
            (P(None, "x", None, "y"), P(None, None, "y", "x"), False),
        )
    ),
    ShardedProgram("resharded on other devices", lambda _, x: -x, (_TABLE,), (P("x", "y"),),
                   "scattered", P("y", "x")),
    ShardedProgram("merged axes", lambda _, x: x.reshape(64, 4), (_TABLE,), (P(("z", "x"), "y"),),
                   "2x2x2", P(("x", "y", "z"))),
)  # fmt: skip

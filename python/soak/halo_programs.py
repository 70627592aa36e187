"""Random programs whose ops look at neighbours along divided dimensions, or have dimensions that do
not divide, to be held against the same function on one device in float64.

    run = drawn(seed)          # a ShardedProgram: random ops, sizes, windows, layouts and mesh

Each takes one array of random sizes through a few ops that move elements, and returns all values;
every second one returns a gradient as well. Constraints in between may leave uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sharded_programs import MESHES, ShardedProgram

Array = jax.Array
Step = Callable[[Array], Array]


def _dim(rng: np.random.Generator, v: Any) -> int:
    return int(rng.integers(v.ndim))


def _slice(rng: np.random.Generator, v: Any) -> Step:
    starts = [int(rng.integers(0, max(1, n // 2))) for n in v.shape]
    limits = [int(rng.integers(s + 1, n + 1)) for s, n in zip(starts, v.shape, strict=True)]
    strides = [int(rng.choice([1, 1, 1, 2, 3])) for _ in v.shape]
    return lambda u: lax.slice(u, starts, limits, strides)


def _shift(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    cut = int(rng.integers(0, min(4, v.shape[dim])))
    front = lax.slice_in_dim

    def step(u: Array) -> Array:
        size = u.shape[dim]
        return front(u, cut, size, axis=dim) - 2 * front(u, 0, size - cut, axis=dim)

    return step


def _roll(rng: np.random.Generator, v: Any) -> Step:
    by = [int(n) for n in rng.integers(-5, 6, v.ndim)]
    return lambda u: jnp.roll(u, by, tuple(range(u.ndim)))


def _pad(rng: np.random.Generator, v: Any) -> Step:
    edges = [(int(a), int(b), int(rng.choice([0, 0, 0, 1, 2])))
             for a, b in rng.integers(-1, 5, (v.ndim, 2))]  # fmt: skip
    edges = [e if n > 3 else (0, 0, 0) for e, n in zip(edges, v.shape, strict=True)]
    value = float(rng.choice([0.0, 7.0]))
    return lambda u: lax.pad(u, jnp.asarray(value, u.dtype), edges)


def _border(rng: np.random.Generator, v: Any) -> Step:
    mode = str(rng.choice(["wrap", "edge", "reflect", "symmetric", "constant"]))
    drawn_widths = zip(rng.integers(0, 4, (v.ndim, 2)), v.shape, strict=True)
    widths = [(int(a), int(b)) if n > 4 else (0, 0) for (a, b), n in drawn_widths]
    return lambda u: jnp.pad(u, widths, mode=mode)


def _stencil(rng: np.random.Generator, v: Any) -> Step:
    mode = str(rng.choice(["wrap", "edge", "constant"]))
    dims = [d for d, n in enumerate(v.shape) if n > 2]

    def step(u: Array) -> Array:
        wide = jnp.pad(u, [(1, 1) if d in dims else (0, 0) for d in range(u.ndim)], mode=mode)
        total = -2.0 * len(dims) * u
        for d in dims:
            for start in (0, 2):
                starts = [start if e == d else int(e in dims) for e in range(u.ndim)]
                limits = [s + n for s, n in zip(starts, u.shape, strict=True)]
                total = total + lax.slice(wide, starts, limits)
        return total

    return step


def _ends(rng: np.random.Generator, v: Any) -> Step:
    """Differences of neighbours, with other formulas or values at the ends."""
    dim, front = _dim(rng, v), lax.slice_in_dim
    low, high = (int(n) for n in rng.integers(0, 3, 2))
    kind = str(rng.choice(["onesided", "copied", "constant", "padded", "periodic"]))

    def step(u: Array) -> Array:
        size = u.shape[dim]
        inner = front(u, low + high, size, axis=dim) - 0.5 * front(
            u, 0, size - low - high, axis=dim
        )
        inner = jnp.tanh(inner) + front(u, low, size - high, axis=dim)
        if kind == "padded":
            return lax.pad(inner, u.dtype.type(3), [(low, high, 0) if d == dim else (0, 0, 0)
                                                    for d in range(u.ndim)])  # fmt: skip
        first, last = front(u, 0, low, axis=dim), front(u, size - high, size, axis=dim)
        if kind == "onesided":
            first = front(u, 1, low + 1, axis=dim) - first
            last = last - front(u, size - high - 1, size - 1, axis=dim)
        if kind == "constant":
            first, last = jnp.ones_like(first), jnp.zeros_like(last)
        if kind == "periodic":
            first, last = front(u, size - low, size, axis=dim), front(u, 0, high, axis=dim)
        return jnp.concatenate([first, inner, last], dim)

    return step


def _interior(rng: np.random.Generator, v: Any) -> Step:
    """An update of the interior along some dimensions by a stencil on neighbours; in half of them,
    its largest element is used, too, as a residual."""
    dims = [d for d, n in enumerate(v.shape) if n > 4 and rng.integers(2)]
    how = str(rng.choice(["set", "add", "multiply"]))
    far, with_residual = int(rng.integers(1, 3)), bool(rng.integers(2))

    def step(u: Array) -> Array:
        def place(d: int, by: int) -> tuple[slice, ...]:
            return tuple(
                slice(far + by * (e == d), n - far + by * (e == d)) if e in dims else slice(None)
                for e, n in enumerate(u.shape)
            )

        total = sum((u[place(d, far)] + u[place(d, -1)] for d in dims), -2 * u[place(0, 0)])
        change = jnp.tanh(total) * jnp.arange(u.shape[-1])[place(0, 0)[-1]]
        changed: Array = getattr(u.at[place(0, 0)], how)(change)
        return changed + jnp.max(jnp.abs(change)) if with_residual else changed

    return step


def _first(rng: np.random.Generator, v: Any) -> Step:
    """A few of the smallest or largest rows, by value or place."""
    dim, count = _dim(rng, v), int(rng.integers(1, 3))
    kind = str(rng.choice(["largest", "smallest", "places"]))

    def step(u: Array) -> Array:
        if kind == "places":
            return jnp.argsort(u, dim)[(slice(None),) * dim + (slice(count),)].astype(u.dtype)
        found = jnp.sort(u, dim)
        size = u.shape[dim]
        start = size - count if kind == "largest" else 0
        return lax.slice_in_dim(found, start, start + count, axis=dim)

    return step


def _join(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    cuts = sorted(int(n) for n in rng.integers(0, v.shape[dim] + 1, 2))

    def step(u: Array) -> Array:
        first, second, third = jnp.split(u, cuts, axis=dim)
        return jnp.concatenate([third, -first, u, second], dim)

    return step


def _flip(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    return lambda u: jnp.flip(u, dim)


def _update(rng: np.random.Generator, v: Any) -> Step:
    sizes = [int(rng.integers(1, n + 1)) for n in v.shape]
    starts = [int(n) for n in rng.integers(0, 9, v.ndim)]
    is_known = bool(rng.integers(2))

    def step(u: Array) -> Array:
        update = lax.slice(u, [0] * u.ndim, sizes) * 2 + 1
        zero = 0 if is_known else (u.ravel()[0] * 0).astype(jnp.int32)
        return lax.dynamic_update_slice(u, update, [s + zero for s in starts])

    return step


def _set(rng: np.random.Generator, v: Any) -> Step:
    places = tuple(slice(1, -1) if n > 2 and rng.integers(2) else slice(None) for n in v.shape)
    how = str(rng.choice(["set", "add", "multiply"]))

    def step(u: Array) -> Array:
        changed: Array = getattr(u.at[places], how)(u[places] * 0.5)
        return changed

    return step


def _take(rng: np.random.Generator, v: Any) -> Step:
    sizes = [int(rng.integers(1, n + 1)) for n in v.shape]
    starts = [int(n) for n in rng.integers(0, 9, v.ndim)]
    return lambda u: lax.dynamic_slice(
        u, [s + (u.ravel()[0] * 0).astype(jnp.int32) for s in starts], sizes
    )


def _window(rng: np.random.Generator, v: Any) -> Step:
    sizes = tuple(min(n, int(rng.choice([1, 2, 3, 4]))) for n in v.shape)
    strides = tuple(int(rng.choice([1, 1, 2, 3])) for _ in v.shape)
    dilation = tuple(int(rng.choice([1, 1, 2])) for _ in v.shape)
    padding = [(int(a), int(b)) for a, b in rng.integers(0, 3, (v.ndim, 2))]
    padding = [(a, b + 8) if n < 8 else (a, b) for (a, b), n in zip(padding, v.shape, strict=True)]
    if rng.integers(2):
        return lambda u: lax.reduce_window(u, 0.0, lax.add, sizes, strides, padding, None, dilation)
    found = -np.inf if rng.integers(2) else -50.0
    return lambda u: jnp.maximum(
        lax.reduce_window(u, found, lax.max, sizes, strides, padding, None, dilation), -50.0
    )


def _pool(rng: np.random.Generator, v: Any) -> Step:
    """With a gradient that is a select_and_scatter."""
    sizes = tuple(int(rng.choice([1, 2, 3])) if n > 3 else 1 for n in v.shape)
    strides = tuple(int(rng.choice([1, 2])) if s > 1 else 1 for s in sizes)
    padding = str(rng.choice(["SAME", "VALID"]))
    return lambda u: lax.reduce_window(u, -np.inf, lax.max, sizes, strides, padding)


def _conv(rng: np.random.Generator, v: Any) -> Step:
    """Over all dimensions as space, of one feature."""
    kernel = tuple(int(rng.choice([1, 2, 3, 4])) for _ in v.shape)
    strides = tuple(int(rng.choice([1, 1, 2])) for _ in v.shape)
    spread = tuple(int(rng.choice([1, 1, 2])) for _ in v.shape)
    apart = tuple(int(rng.choice([1, 1, 2])) for _ in v.shape)
    padding = [(int(a) + 3, int(b) + 3) for a, b in rng.integers(-1, 3, (v.ndim, 2))]
    weights = rng.integers(-3, 4, kernel).astype(np.float64)

    def step(u: Array) -> Array:
        total = lax.conv_general_dilated(
            u[None, None], jnp.asarray(weights)[None, None], strides, padding, spread, apart
        )
        return total[0, 0]

    return step


def _filter(rng: np.random.Generator, v: Any) -> Step:
    """A convolution whose kernel is as long as the image: what a kernel's gradient is."""
    most = [min(n, 3) for n in v.shape]
    kernel = tuple(n - int(rng.integers(0, m)) for n, m in zip(v.shape, most, strict=True))

    def step(u: Array) -> Array:
        weights = lax.slice(u, [0] * u.ndim, kernel)
        padding = [(1, 1)] * u.ndim
        found = lax.conv_general_dilated(u[None, None], weights[None, None], [1] * u.ndim, padding)
        return u + found.sum() + found[0, 0].ravel()[0]

    return step


def _reduce(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    kind: Any = [jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.mean, jnp.prod][int(rng.integers(6))]
    return lambda u: u + kind(jnp.tanh(u), axis=dim, keepdims=True)


def _norm(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    return lambda u: jax.nn.softmax(jnp.tanh(u), dim) * 10


def _dot(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    return lambda u: jnp.tensordot(u, jnp.tanh(u), axes=(dim, dim))


def _index(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    index = rng.integers(-v.shape[dim], v.shape[dim], int(rng.integers(1, 7)))
    if rng.integers(2):
        return lambda u: jnp.take(u, jnp.asarray(index), axis=dim)
    places = (*(slice(None),) * dim, index)
    return lambda u: u.at[places].add(1.5)


def _sort(rng: np.random.Generator, v: Any) -> Step:
    dim = _dim(rng, v)
    return lambda u: jnp.cumsum(jnp.sort(jnp.tanh(u), dim), dim)


_KINDS: dict[str, Callable[[np.random.Generator, Any], Step]] = {
    "slice": _slice, "shift": _shift, "roll": _roll, "pad": _pad, "border": _border,
    "stencil": _stencil, "join": _join, "flip": _flip, "update": _update, "set": _set,
    "take": _take, "window": _window, "pool": _pool, "conv": _conv, "filter": _filter,
    "reduce": _reduce, "norm": _norm, "dot": _dot, "index": _index, "sort": _sort,
    "ends": _ends, "interior": _interior, "first": _first,
}  # fmt: skip
_MOST = 1 << 12  # elements


def _spec(rng: np.random.Generator, mesh: Mesh, shape: tuple[int, ...], *, even: bool) -> P:
    """Axes on dimensions that they divide, or where uneven parts are allowed any."""
    dims: list[list[str]] = [[] for _ in shape]
    for name in rng.permutation(np.array(mesh.axis_names)):
        dim = int(rng.integers(len(shape)))
        parts = int(np.prod([mesh.shape[axis] for axis in [*dims[dim], str(name)]]))
        if shape[dim] % parts == 0 if even else shape[dim] >= 3:
            dims[dim].append(str(name))
    return P(*(tuple(axes) or None for axes in dims))


def drawn(seed: int, most: int = 4) -> ShardedProgram:
    """The program of a seed."""
    rng = np.random.default_rng(seed)
    name = str(rng.choice(sorted(MESHES)))
    mesh = MESHES[name]()
    rank = int(rng.integers(1, 4))
    sizes = {1: (32, 24, 48, 16), 2: (16, 24, 8, 12), 3: (8, 16, 6)}[rank]
    shape = tuple(int(n) for n in rng.choice(sizes, rank))
    argument = rng.standard_normal(shape)
    steps: list[tuple[Step, P | None]] = []
    names: list[str] = []
    value: Any = jax.ShapeDtypeStruct(shape, argument.dtype)
    for _ in range(int(rng.integers(1, most + 1))):
        kind = str(rng.choice(list(_KINDS)))
        if not all(value.shape):
            break
        step = _KINDS[kind](rng, value)
        try:
            after = jax.eval_shape(step, value)
        except (TypeError, ValueError):
            continue
        if not after.shape or int(np.prod(after.shape)) > _MOST or len(after.shape) > 4:
            continue
        spec = None
        if rng.random() < 0.5 and all(after.shape):
            spec = _spec(rng, mesh, after.shape, even=False)
        steps.append((step, spec))
        names.append(kind)
        value = after

    def through(constrain: Any, x: Array) -> list[Array]:
        values = [x]
        for step, spec in steps:
            after = step(values[-1])
            values.append(after if spec is None else constrain(after, spec))
        return values[1:]

    def gradient(constrain: Any, x: Array) -> Array:
        return jax.grad(lambda y: sum(jnp.tanh(v).sum() for v in through(constrain, y)))(x)

    has_gradient = (
        bool(steps) and not seed % 2 and not {"window", "sort", "first"} & set(names)
    )  # not all have one in jax

    def function(constrain: Any, x: Array) -> Any:
        values = through(constrain, x)
        return (values, gradient(constrain, x)) if has_gradient else values

    spec = _spec(rng, mesh, shape, even=True)
    label = f"seed {seed}: {' '.join(names)} of {shape} {spec} on {name}"
    return ShardedProgram(label, function, (argument,), (spec,), name, tolerance=1e-9)

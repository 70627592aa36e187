"""Random sharded programs: a chain of array ops with random shardings of arguments, results and
values in between, on a random mesh of eight devices.

Values are small whole numbers, so that sums and products are exact in any order and the
partitioned program must give the very bits of the same function on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from sharded_programs import MESHES, Constrain, ShardedProgram

Value = jax.Array
Step = Callable[[list[Value], Constrain], Value]

_LIMIT = 9  # values are kept below, so that no sum is rounded
_SHAPES = ((16, 8), (8, 16), (32,), (8, 8, 4), (4, 6, 8), (17, 8), (2, 31))
_MOST = 1 << 11  # elements


def random_spec(rng: np.random.Generator, mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    """Axes put on dimensions that they divide, in a random order; some left out."""
    dims: list[list[str]] = [[] for _ in shape]
    for name in rng.permutation(np.array(mesh.axis_names)):
        if not shape or rng.random() < 0.25:
            continue
        dim = int(rng.integers(len(shape)))
        parts = int(np.prod([mesh.shape[axis] for axis in [*dims[dim], str(name)]]))
        if shape[dim] and shape[dim] % parts == 0:
            dims[dim].append(str(name))
    return PartitionSpec(*(tuple(axes) or None for axes in dims))


@dataclass
class _Drawing:
    """A program as it is drawn: what each step computes, and the shapes of all values so far."""

    rng: np.random.Generator
    mesh: Mesh
    arguments: list[np.ndarray]
    steps: list[Step] = field(default_factory=list[Step])
    shapes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    names: list[str] = field(default_factory=list[str])

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def pick[T](self, options: list[T] | tuple[T, ...]) -> T:
        """One of several."""
        return options[self.number(0, len(options) - 1)]

    def draw_step(self) -> None:
        """Adds one step, on any value; one that its shape does not allow is left out."""
        source = self.number(0, len(self.shapes) - 1)
        name, make = self.pick(_MAKERS)
        made = make(self, self.shapes[source])
        if made is None:
            return
        spec = None

        def step(values: list[Value], constrain: Constrain) -> Value:
            result = _tame(made(values[source]))
            return constrain(result, spec) if spec is not None else result

        spaces = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        shape = jax.eval_shape(lambda *values: step(list(values), _free), *spaces).shape
        if int(np.prod(shape)) > _MOST or not all(shape):
            return
        if self.rng.random() < 0.3:
            spec = random_spec(self.rng, self.mesh, shape)
        self.steps.append(step)
        self.shapes.append(shape)
        self.names.append(name)


def _tame(value: Value) -> Value:
    """A small whole number for each element, whatever it was."""
    return jnp.fmod(value.astype(jnp.float32), float(_LIMIT))


def _free(value: Value, spec: PartitionSpec) -> Value:
    del spec
    return value


Maker = Callable[[_Drawing, tuple[int, ...]], "Callable[[Value], Value] | None"]


def _dim(d: _Drawing, shape: tuple[int, ...]) -> int | None:
    return d.number(0, len(shape) - 1) if shape else None


def _on_dim(function: Callable[[Value, int], Value]) -> Maker:
    def make(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
        dim = _dim(d, shape)
        return None if dim is None else (lambda v: function(v, dim))

    return make


def _reshape(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value]:
    left, sizes = int(np.prod(shape)), list[int]()
    while left > 1 and len(sizes) < 3:
        size = d.pick([n for n in (2, 3, 4, 6, 8, 16, left) if left % n == 0])
        sizes.insert(d.number(0, len(sizes)), size)
        left //= size
    sizes.insert(d.number(0, len(sizes)), left)
    return lambda v: v.reshape(sizes)


def _transpose(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value]:
    order = [int(n) for n in d.rng.permutation(len(shape))]
    return lambda v: v.transpose(order)


def _slice(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value]:
    starts = [d.number(0, n // 2) for n in shape]
    limits = [d.number(s + 1, n) for s, n in zip(starts, shape, strict=True)]
    strides = [d.pick((1, 1, 2, 3)) for _ in shape]
    return lambda v: lax.slice(v, starts, limits, strides)


def _pad(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value]:
    edges = [(d.number(-1, 2), d.number(-1, 2), d.pick((0, 0, 1))) for _ in shape]
    return lambda v: lax.pad(v, jnp.float32(-3), edges)


def _concatenate(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    dim = _dim(d, shape)
    if dim is None:
        return None
    cut = d.number(1, shape[dim])
    return lambda v: jnp.concatenate([v, -lax.slice_in_dim(v, 0, cut, axis=dim)], dim)


def _roll(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    dim, by = _dim(d, shape), d.number(-5, 5)
    return None if dim is None else lambda v: jnp.roll(v, by, dim)


def _reduce(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    dim = _dim(d, shape)
    reducers = (jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.any, jnp.count_nonzero)
    function: Any = d.pick(reducers)
    return None if dim is None else lambda v: function(v, axis=dim)


def _index(d: _Drawing, shape: tuple[int, ...]) -> tuple[int, np.ndarray] | None:
    dim = _dim(d, shape)
    if dim is None:
        return None
    size = shape[dim]
    return dim, d.rng.integers(-size - 2, size + 3, d.pick(((4,), (3, 2), (8,)))).astype(np.int32)


def _take(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    found, mode = _index(d, shape), d.pick(("clip", "wrap", "fill"))
    if found is None:
        return None
    dim, index = found
    return lambda v: jnp.nan_to_num(jnp.take(v, index, axis=dim, mode=mode), nan=5.0)


def _scatter(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    found, how = _index(d, shape), d.pick(("add", "max", "min", "mul", "set"))
    if found is None:
        return None
    dim, index = found
    places = (*(slice(None),) * dim, index)
    update = 1.0 if how == "set" else 2.0

    def run(v: Value) -> Value:
        changed: Value = getattr(v.at[places], how)(update)
        return changed

    return run


def _dynamic(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    """A slice that starts where a value says, moved to another such place."""
    if not shape:
        return None
    sizes = [d.number(1, n) if d.number(0, 1) else n for n in shape]
    kind = d.pick((jnp.int32, jnp.int8, jnp.uint8))

    def run(v: Value) -> Value:
        start = jnp.abs(v.ravel()[0]).astype(kind)
        taken = lax.dynamic_slice(v, [start] * v.ndim, sizes)
        return lax.dynamic_update_slice(v, taken + 1, [start + start] * v.ndim)

    return run


def _dot(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    dim = _dim(d, shape)
    return None if dim is None else lambda v: jnp.tensordot(v, v, axes=(dim, dim))


def _scan(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    if not shape or shape[0] == 0:
        return None
    reverse = bool(d.number(0, 1))

    def body(carry: Value, x: Value) -> tuple[Value, Value]:
        return _tame(carry + x), carry - x

    return lambda v: lax.scan(body, v[0] * 0, v, reverse=reverse)[1]


def _branch(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value]:
    del d, shape
    return lambda v: lax.cond(v.sum() > 0, jnp.flip, lambda u: u + 1, v)


def _loop(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    dim, count = _dim(d, shape), d.number(1, 3)
    if dim is None:
        return None
    return lambda v: lax.fori_loop(0, count, lambda i, u: _tame(jnp.roll(u, 1, dim) + i), v)


def _window(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    if not shape:
        return None
    sizes = tuple(min(n, d.pick((1, 1, 2, 3))) for n in shape)
    strides = tuple(d.pick((1, 1, 2)) for _ in shape)
    padding = d.pick(("SAME", "VALID"))
    return lambda v: lax.reduce_window(v, -jnp.inf, lax.max, sizes, strides, padding)


def _mask(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value]:
    mask = d.rng.integers(0, 2, shape).astype(bool)
    return lambda v: jnp.where(mask, v, -1.0)


def _count(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    dim = _dim(d, shape)
    return None if dim is None else lambda v: v + lax.broadcasted_iota(jnp.float32, v.shape, dim)


def _gradient(d: _Drawing, shape: tuple[int, ...]) -> Callable[[Value], Value] | None:
    inner = d.pick((_slice, _pad, _concatenate, _roll, _take, _transpose, _dot))(d, shape)
    if inner is None:
        return None
    return jax.grad(lambda v: (inner(v) * inner(v)).sum())


_MAKERS: tuple[tuple[str, Maker], ...] = (
    ("reshape", _reshape),
    ("reshape", _reshape),
    ("transpose", _transpose),
    ("slice", _slice),
    ("pad", _pad),
    ("concatenate", _concatenate),
    ("roll", _roll),
    ("reduce", _reduce),
    ("take", _take),
    ("scatter", _scatter),
    ("dynamic", _dynamic),
    ("dot", _dot),
    ("scan", _scan),
    ("branch", _branch),
    ("loop", _loop),
    ("window", _window),
    ("mask", _mask),
    ("count", _count),
    ("gradient", _gradient),
    ("sort", _on_dim(jnp.sort)),
    ("cumsum", _on_dim(jnp.cumsum)),
    ("reverse", _on_dim(jnp.flip)),
    ("one-hot", _on_dim(lambda v, _: jax.nn.one_hot(v.astype(jnp.int32), 8))),
)


def random_program(seed: int, most: int = 6) -> ShardedProgram:
    """The program of a seed, of up to `most` steps."""
    rng = np.random.default_rng(seed)
    name = str(rng.choice(sorted(MESHES)))
    mesh = MESHES[name]()
    shapes = [_SHAPES[int(n)] for n in rng.integers(0, len(_SHAPES), 2)]
    arguments = [rng.integers(-_LIMIT, _LIMIT, shape).astype(np.float32) for shape in shapes]
    drawing = _Drawing(rng, mesh, arguments, shapes=list(shapes))
    while len(drawing.steps) < most:
        drawing.draw_step()
    specs = [random_spec(rng, mesh, shape) for shape in shapes]
    results = [random_spec(rng, mesh, shape) for shape in drawing.shapes[2:]]

    def function(constrain: Constrain, *arguments: Value) -> tuple[Value, ...]:
        values = list(arguments)
        for step in drawing.steps:
            values.append(step(values, constrain))
        return tuple(values[2:])

    label = f"seed-{seed}: {' '.join(drawing.names)}"
    outs = tuple(results) if rng.random() < 0.5 else None
    return ShardedProgram(label, function, tuple(arguments), tuple(specs), name, outs)

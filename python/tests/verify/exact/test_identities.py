"""Which identities of real arithmetic `verify` sees, which it does not, and what it cannot see.

Each side of an identity is a Python expression of the inputs below. All left sides are one program,
all right sides another one: a table costs one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from soaking import one_in

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.verify import Options, Verification, verify_artifacts

Table = Mapping[str, tuple[str, ...]]


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


INPUTS: dict[str, Any] = {
    **dict.fromkeys("xyz", spec(6, 4)),
    **dict.fromkeys("mn", spec(4, 4)),
    **dict.fromkeys("vw", spec(8)),
    "s": spec(),
    "q": spec(8, dtype=jnp.complex64),
    "i": spec(6, dtype=jnp.int32),
    "b": spec(6, 4, dtype=jnp.bool_),
    "image": spec(2, 3, 8, 8),
    "kernel": spec(4, 3, 3, 3),
}

# Functions that the expressions use.

conv = partial(lax.conv, window_strides=(1, 1), padding="VALID")


def numerators(x: jax.Array) -> jax.Array:
    """Those of a softmax over rows."""
    return jnp.exp(x - x.max(1, keepdims=True))


def shifted_products(image: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution as a sum of nine shifted products."""
    total = jnp.zeros(())
    for r, c in np.ndindex(3, 3):
        window = image[:, :, r : r + 6, c : c + 6]
        total = total + jnp.einsum("nchw,oc->nohw", window, kernel[:, :, r, c])
    return total


def recurrence(x: jax.Array, y: jax.Array) -> jax.Array:
    """h = x h + y, step by step."""

    def step(h: jax.Array, each: Any) -> tuple[jax.Array, jax.Array]:
        h = each[0] * h + each[1]
        return h, h

    return lax.scan(step, jnp.zeros(4), (x, y))[1]


def recurrence_as_tree(x: jax.Array, y: jax.Array) -> jax.Array:
    def combine(one: Any, other: Any) -> Any:
        return one[0] * other[0], one[1] * other[0] + other[1]

    return lax.associative_scan(combine, (x, y))[1]


def loss(m: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x @ m - y))


def microbatched_gradient(m: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean gradient of three microbatches of two rows."""

    def accumulate(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        return total + jax.grad(loss)(m, *part), None

    parts = x.reshape(3, 2, 4), y.reshape(3, 2, 4)
    return lax.scan(accumulate, jnp.zeros_like(m), parts)[0] / 3


def attention(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), x @ y.T / 2, -1e9)
    weights = numerators(scores)
    return (weights / weights.sum(1, keepdims=True)) @ z


def attention_divided_last(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    rows = jnp.arange(6)
    weights = numerators(jnp.where(rows[:, None] >= rows, (0.5 * x) @ y.T, -1e9))
    return (weights @ z) / weights.sum(1)[:, None]


def turned(x: jax.Array, y: jax.Array) -> jax.Array:
    """Rotary embeddings as products of complex numbers."""
    product = (x[:, :2] + 1j * x[:, 2:]) * (y[:, :2] + 1j * y[:, 2:])
    return jnp.concatenate([product.real, product.imag], 1)


def turned_in_parts(x: jax.Array, y: jax.Array) -> jax.Array:
    (a, b), (c, d) = (jnp.split(each, 2, 1) for each in (x, y))
    return jnp.concatenate([a * c - b * d, a * d + b * c], 1)


SEEN: Table = {
    # Sums and products.
    "sums in any order": ("x.sum()", "x[::-1].T.reshape(4, 3, 2).sum((0, 2)).sum()"),
    "sums one by one": ("x.sum(0)", "lax.fori_loop(0, 6, lambda r, t: t + x[r], jnp.zeros(4))"),
    "associativity": ("(x + y) + z", "x + (z + y)"),
    "associativity of products": ("(x * y) * z", "y * (x * z)"),
    "distributivity": ("x * (y + z)", "x * y + x * z"),
    "squares of sums": ("(x + y) ** 2", "x * x + 2 * x * y + y * y"),
    "integer powers": ("x ** 3 / x ** 5", "1 / (x * x)"),
    "differences of squares": ("x * x - y * y", "(x + y) * (x - y)"),
    "x - x = 0": ("x - x", "jnp.zeros_like(x)"),
    "x * 0 = 0": ("x * 0", "jnp.zeros_like(x)"),
    "x / x = 1": ("x / x", "jnp.ones_like(x)"),
    "negation": ("-(x - y)", "y - x"),
    "polynomials by Horner": ("((3 * x + 2) * x + 1) * x - 5", "3 * x**3 + 2 * x**2 + x - 5"),
    # Quotients.
    "x * 8 = x / 0.125": ("x * 8", "x / 0.125"),
    "a count and its exact reciprocal": ("x.sum() / 32", "x.sum() * (1 / 32)"),
    "a reciprocal that is computed": ("x / 3", "x * (s / (3 * s))"),
    "x / y = x * (1 / y)": ("x / y", "x * (1 / y)"),
    "(x / y) / z = x / (y z)": ("(x / y) / z", "x / (y * z)"),
    "x / (y / z) = x z / y": ("x / (y / z)", "x * z / y"),
    "common denominators": ("x / z + y / z", "(x + y) / z"),
    "scales before a mean": ("(s * x).mean()", "s * x.mean()"),
    "means of means of equal groups": ("x.mean()", "x.reshape(3, 2, 4).mean((1, 2)).mean()"),
    "masked means": ("jnp.where(b, x, 0).sum() / b.sum()", "(x * b).sum() / b.astype(float).sum()"),
    "variances": ("x.var(0)", "(x * x).mean(0) - x.mean(0) ** 2"),
    "covariances": ("(x * y).mean() - x.mean() * y.mean()", "((x - x.mean()) * y).mean()"),
    # Order.
    "clamps": ("lax.clamp(-1., x, 1.)", "jnp.minimum(jnp.maximum(x, -1), 1)"),
    "maxima in any order": ("x.max()", "jnp.maximum(x[:3], x[3:][::-1]).max(1).max()"),
    "a maximum is a choice": ("jnp.maximum(x, y)", "jnp.where(x > y, x, y)"),
    "minima are maxima": ("jnp.minimum(x, y)", "-jnp.maximum(-x, -y)"),
    "max + min = x + y": ("jnp.maximum(x, y) + jnp.minimum(x, y)", "x + y"),
    "|x| = max(x, -x)": ("jnp.abs(x)", "jnp.maximum(x, -x)"),
    "|x| sign(x) = x": ("jnp.abs(x) * jnp.sign(x)", "x"),
    "relu": ("jnp.maximum(x, 0)", "(x + jnp.abs(x)) / 2"),
    "leaky relu": ("jnp.where(x > 0, x, x / 4)", "jnp.maximum(x, 0) + jnp.minimum(x, 0) / 4"),
    "the gradient of relu": ("jax.grad(lambda x: jax.nn.relu(x).sum())(x)", "1.0 * (x > 0)"),
    "argmax": ("jnp.argmax(x, 1)", "jnp.argsort(-x, 1)[:, 0]"),
    "argmax of blocks": (
        "jnp.argmax(v)",
        "(lambda u, k: k * 4 + jnp.argmax(u[k]))(v.reshape(2, 4), v.reshape(2, 4).max(1).argmax())",
    ),
    "top-k": ("lax.top_k(x, 2)[0]", "jnp.sort(x, 1)[:, ::-1][:, :2]"),
    "sorts": ("jnp.sort(v)", "v[jnp.argsort(v)]"),
    "x < y, or y <= x": ("x < y", "~(y <= x)"),
    "x < y, or -x > -y": ("x < y", "-x > -y"),
    # Contractions.
    "a dot in blocks": ("x @ m", "x[:, :2] @ m[:2] + x[:, 2:] @ m[2:]"),
    "a dot as a sum": ("x @ m", "(x[:, :, None] * m).sum(1)"),
    "(x m) n = x (m n)": ("(x @ m) @ n", "x @ (m @ n)"),
    "transposed products": ("(x @ m).T", "m.T @ x.T"),
    "one dot for two": ("jnp.concatenate([x @ m, x @ n], 1)", "x @ jnp.concatenate([m, n], 1)"),
    "traces": ("jnp.trace(m @ n)", "jnp.trace(n @ m)"),
    "a convolution of shifted products": ("conv(image, kernel)", "shifted_products(image, kernel)"),
    "a convolution by features": (
        "conv(image, kernel)",
        "conv(image[:, :2], kernel[:, :2]) + conv(image[:, 2:], kernel[:, 2:])",
    ),
    "transforms and back": ("jnp.fft.ifft(jnp.fft.fft(q))", "q"),
    "a convolution by transforms": (
        "(v * w[-jnp.arange(8)]).sum()",
        "jnp.fft.irfft(jnp.fft.rfft(v) * jnp.fft.rfft(w), 8)[0]",
    ),
    "cumulative sums by a triangular dot": ("jnp.cumsum(x, 0)", "jnp.tril(jnp.ones((6, 6))) @ x"),
    "cumulative sums from behind": (
        "jnp.cumsum(x, 0)",
        "x.sum(0) - lax.cumsum(x, 0, reverse=True) + x",
    ),
    # Moving elements.
    "transposes and maps": ("jnp.exp(x).T", "jnp.exp(x.T)"),
    "reshapes and maps": ("jnp.tanh(x.reshape(3, 8))", "jnp.tanh(x).reshape(3, 8)"),
    "slices of sums": ("(x + y)[2:]", "x[2:] + y[2:]"),
    "masks": ("jnp.where(b, x, 0)", "x * b"),
    "a gather as a dot": ("x[i % 6]", "jax.nn.one_hot(i % 6, 6) @ x"),
    "a scatter as a dot": ("jnp.zeros((6, 4)).at[i % 6].add(x)", "jax.nn.one_hot(i % 6, 6).T @ x"),
    "segment sums": (
        "jax.ops.segment_sum(x, i, 5)",
        "(x[None] * (i == jnp.arange(5)[:, None])[..., None]).sum(1)",
    ),
    "padding and sums": ("jnp.pad(x, 2).sum(1)[2:-2]", "x.sum(1)"),
    "updates and masks": (
        "lax.dynamic_update_slice(x, y[:2], (3, 0))",
        "(lambda r: jnp.where((r >= 3) & (r < 5), jnp.roll(y, 3, 0), x))(jnp.arange(6)[:, None])",
    ),
    # Types.
    "sums of integers": ("(i + i).astype(float)", "2 * i.astype(float)"),
    "complex products": ("(q * q.conj()).real", "q.real**2 + q.imag**2"),
    "rotations": ("turned(x, y)", "turned_in_parts(x, y)"),
    # Loops and derivatives.
    "a loop unrolled": (
        "lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ m), x)",
        "jnp.tanh(jnp.tanh(jnp.tanh(x @ m) @ m) @ m)",
    ),
    "a scan as a tree": ("recurrence(x, y)", "recurrence_as_tree(x, y)"),
    "gradients of microbatches": ("jax.grad(loss)(m, x, y)", "microbatched_gradient(m, x, y)"),
    "sums of gradients": (
        "jax.grad(lambda m: loss(m, x, y) + (m * m).sum())(m)",
        "x.T @ (x @ m - y) / 12 + 2 * m",
    ),
    "forward and backward derivatives": (
        "jax.jvp(lambda x: jnp.sin(x @ m).sum(), (x,), (jnp.ones_like(x),))[1]",
        "jax.grad(lambda x: jnp.sin(x @ m).sum())(x).sum()",
    ),
    "rematerialization": (
        "jax.grad(lambda x: jnp.tanh(jnp.exp(x) @ m).sum())(x)",
        "jax.grad(jax.checkpoint(lambda x: jnp.tanh(jnp.exp(x) @ m).sum()))(x)",
    ),
    "vmap": ("jax.vmap(lambda row: row @ m)(x)", "jnp.stack([row @ m for row in x])"),
    # Models.
    "momentum": ("z - 0.125 * (0.75 * x + 0.25 * y)", "z - (3 * x + y) / 32"),
    "masks of attention": ("attention(x, y, z)", "attention_divided_last(x, y, z)"),
    "normalization": (
        "(x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 0.5)",
        "((x.T - x.sum(1) / 4) * lax.rsqrt((x * x).mean(1) - x.mean(1) ** 2 + 0.5)).T",
    ),
    "the divisor of a softmax": (
        "(jax.nn.softmax(x, 1) * y).sum(1)",
        "(numerators(x) * y).sum(1) / numerators(x).sum(1)",
    ),
}

# Identities of real arithmetic that `verify` calls different: write both programs the same way.
NOT_SEEN: Table = {
    "exp(x) exp(y) = exp(x + y)": ("jnp.exp(x) * jnp.exp(y)", "jnp.exp(x + y)"),
    "exp(-x) = 1 / exp(x)": ("jnp.exp(-x)", "1 / jnp.exp(x)"),
    "softmax without its maximum": (
        "jax.nn.softmax(x, 1)",
        "jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True)",
    ),
    "log(exp(x)) = x": ("jnp.log(jnp.exp(x))", "x"),
    "log(x y) = log(x) + log(y)": ("jnp.log(x * y)", "jnp.log(x) + jnp.log(y)"),
    "sqrt(x x) = |x|": ("jnp.sqrt(x * x)", "jnp.abs(x)"),
    "sqrt(x) sqrt(x) = x": ("jnp.sqrt(x) * jnp.sqrt(x)", "x"),
    "rsqrt(x) = 1 / sqrt(x)": ("lax.rsqrt(x)", "1 / jnp.sqrt(x)"),
    "x ** 0.5 = sqrt(x)": ("x ** 0.5 + 0 * y", "jnp.sqrt(x) + 0 * y"),
    "x ** 1.5 = x sqrt(x)": ("x ** 1.5", "x * jnp.sqrt(x)"),
    "expm1(x) = exp(x) - 1": ("jnp.expm1(x)", "jnp.exp(x) - 1"),
    "log1p(x) = log(1 + x)": ("jnp.log1p(x)", "jnp.log(1 + x)"),
    "tanh(-x) = -tanh(x)": ("jnp.tanh(-x)", "-jnp.tanh(x)"),
    "tanh by exp": ("jnp.tanh(x)", "(jnp.exp(2 * x) - 1) / (jnp.exp(2 * x) + 1)"),
    "sin(x)^2 + cos(x)^2 = 1": ("jnp.sin(x) ** 2 + jnp.cos(x) ** 2", "jnp.ones_like(x)"),
    "|q|^2": ("jnp.abs(q) ** 2", "(q * q.conj()).real"),
    "x / 3 = x * 0.333...": ("x / 3", "x * (1 / 3)"),
    "x / 10 = x * 0.1": ("x / 10", "x * 0.1"),
    "1 - 0.9 = 0.1": ("x * (1 - np.float32(0.9))", "x * np.float32(0.1)"),
    "constants of two types": ("x * 0.1", "x * jnp.bfloat16(0.1).astype(jnp.float32)"),
    "relu(2 x) = 2 relu(x)": ("jax.nn.relu(2 * x)", "2 * jax.nn.relu(x)"),
    "max(x + s, y + s) = max(x, y) + s": ("jnp.maximum(x + s, y + s)", "jnp.maximum(x, y) + s"),
    "x > y is x - y > 0": ("x > y", "x - y > 0"),
    "x * x >= 0": ("x * x >= 0", "jnp.ones_like(x, bool)"),
    "exp(x) > 0": ("jnp.exp(x) > 0", "jnp.ones_like(x, bool)"),
    "the order of 3 x": ("jnp.argsort(3 * v)", "jnp.argsort(v)"),
    "floor(1.5) = 1": ("x + jnp.floor(x * 0 + 1.5)", "x + 1"),
    "floor(x + 1) = floor(x) + 1": ("jnp.floor(x + 1)", "jnp.floor(x) + 1"),
    "factors of a matrix": ("(lambda l: l @ l.T)(jnp.linalg.cholesky(m))", "(m + m.T) / 2"),
    "inverses of a matrix": ("jnp.linalg.inv(m) @ m", "jnp.eye(4)"),
}

# Programs that floats tell apart and exact arithmetic does not: `verify --floats` shows these.
INVISIBLE: Table = {
    "bfloat16 casts": ("x.astype(jnp.bfloat16).astype(float)", "x"),
    "sums in bfloat16": ("x.astype(jnp.bfloat16).sum(0).astype(float)", "x.sum(0)"),
    "float8": ("x.astype(jnp.float8_e4m3fn).astype(float)", "x"),
    "reduced precision": ("lax.reduce_precision(x, 5, 3)", "x"),
    "precision of dots": ("lax.dot(x, m, precision='highest')", "x @ m"),
    "rounding of sums": ("(x + 2.0**60) - 2.0**60", "x"),
    "overflow": ("(x * 1e30 * 2.0**100) / 1e30 / 2.0**100", "x"),
    "the sign of zero": ("x + 0.0", "x"),
    "x - x of infinities": ("x - x", "x * 0"),
    "tests for infinity": ("jnp.where(jnp.isfinite(x), x, 1)", "x"),
    "tests for NaN": ("jnp.where(jnp.isnan(x), 1, x)", "x"),
    "division by zero": ("x / (x * 0)", "x * 0"),
    "a way through integers": ("x.astype(jnp.int32).astype(float)", "x"),
}


def exported(expressions: Mapping[str, str]) -> Artifact:
    """One program with a result for each expression of the inputs."""

    def run(given: dict[str, Any]) -> dict[str, Any]:
        names = {**globals(), **given}
        return {title: eval(text, names) for title, text in expressions.items()}

    data = export.export(jax.jit(run))(INPUTS).serialize()
    return artifacts.parse(bytes(data), "export.jax_export")


def compared(table: Table) -> tuple[Verification, dict[str, bool]]:
    """Verifies all left sides against all right ones; says of each case whether it is the same."""
    left, right = (exported({name: sides[k] for name, sides in table.items()}) for k in (0, 1))
    answer = verify_artifacts(left, right, Options(arithmetic="exact"))
    names = sorted(table)  # as a dictionary's leaves are
    return answer, {names[each.index]: not each.differing for each in answer.outputs}


def cases(same: Mapping[str, bool], *, are: bool) -> list[str]:
    return [name for name, is_same in same.items() if is_same == are]


def test_identities_that_are_seen():
    answer, same = compared(SEEN)
    assert cases(same, are=False) == []
    assert answer.same
    assert [sorted(same)[i] for i in answer.vacuous] == ["x * 0 = 0", "x - x = 0"]


def test_identities_that_are_not_seen():
    _, same = compared(NOT_SEEN)
    assert cases(same, are=True) == []


def test_what_exact_arithmetic_cannot_see():
    _, same = compared(INVISIBLE)
    assert cases(same, are=False) == []


# Several devices.

D, WHOLE = PartitionSpec("d"), PartitionSpec()
Local = Callable[..., Any]


def mesh() -> Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


# What each device does, the shardings of its operands and of its result, and the plain program.
ON_DEVICES: dict[str, tuple[str, str, tuple[PartitionSpec, ...], PartitionSpec, str]] = {
    "sums": ("x", "lax.psum(x.sum(0), 'd')", (D,), WHOLE, "x.sum(0)"),
    "sums in bfloat16": ("h", "lax.psum(h.sum(0), 'd')", (D,), WHOLE, "h.sum(0)"),
    "means": ("x", "lax.pmean(x.mean(0), 'd')", (D,), WHOLE, "x.mean(0)"),
    "maxima": ("x", "lax.pmax(x.max(0), 'd')", (D,), WHOLE, "x.max(0)"),
    "minima": ("x", "lax.pmin(x.min(0), 'd')", (D,), WHOLE, "x.min(0)"),
    "gathers": ("x", "lax.all_gather(x, 'd', tiled=True)", (D,), WHOLE, "x"),
    "scattered sums": (
        "xw",
        "lax.psum_scatter(x.T @ x @ w, 'd', tiled=True)",
        (D, WHOLE),
        D,
        "x.T @ x @ w",
    ),
    "exchanges": (
        "x",
        "lax.all_to_all(x, 'd', 1, 0, tiled=True)",
        (D,),
        PartitionSpec(None, "d"),
        "x",
    ),
    "rings": (
        "x",
        "lax.ppermute(x, 'd', [(i, (i + 1) % 8) for i in range(8)])",
        (D,),
        D,
        "jnp.roll(x, 2, 0)",
    ),
    "tensor parallel": (
        "xw",
        "lax.psum(x @ w, 'd')",
        (PartitionSpec(None, "d"), D),
        WHOLE,
        "x @ w",
    ),
    "gradients": (
        "xw",
        "lax.pmean(jax.grad(lambda w: jnp.square(x @ w).mean())(w), 'd')",
        (D, WHOLE),
        WHOLE,
        "jax.grad(lambda w: jnp.square(x @ w).mean())(w)",
    ),
    "softmax over devices": (
        "x",
        "(lambda e: e / lax.psum(e.sum(0), 'd'))(jnp.exp(x - lax.pmax(x.max(0), 'd')))",
        (D,),
        D,
        "jax.nn.softmax(x, 0)",
    ),
}


def device_sides(*, plain: bool) -> Artifact:
    """The plain programs, or those of each device in a shard_map; inputs are divided by rows."""
    specs = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), D))
        for name, shape, dtype in (
            ("x", (16, 8), jnp.float32),
            ("h", (16, 8), jnp.bfloat16),
            ("w", (8, 8), jnp.float32),
        )
    }

    def evaluate(text: str, names: str, *values: jax.Array) -> Any:
        return eval(text, {**globals(), **dict(zip(names, values, strict=True))})

    def run(given: dict[str, Any]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for title, (names, local, in_specs, out_specs, whole) in ON_DEVICES.items():
            function = partial(evaluate, whole if plain else local, names)
            if not plain:
                function = jax.shard_map(
                    function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
                )
            results[title] = function(*[given[name] for name in names])
        return results

    data = export.export(jax.jit(run))(specs).serialize()
    return artifacts.parse(bytes(data), "export.jax_export")


def test_identities_across_devices():
    """shard_map on eight devices against the program that a partitioner divides, and in turns."""
    sides = device_sides(plain=False), device_sides(plain=True)
    for before, after in (sides, sides[::-1]):
        answer = verify_artifacts(before, after, Options(arithmetic="exact"))
        assert answer.devices == 8
        assert [output.name for output in answer.outputs if output.differing] == []


# Random programs, each written in two ways. Each op has several forms.

FORMS: Table = {
    "add": ("x + y", "y + x", "x - (-y)", "(2 * x + 2 * y) / 2"),
    "subtract": ("x - y", "-(y - x)", "(x + 1) - (y + 1)"),
    "multiply": ("x * y", "y * x", "x * (y + 1) - x", "((x + y) ** 2 - (x - y) ** 2) / 4"),
    "divide": ("x / (y + 2)", "x * (1 / (2 + y))", "(3 * x) / (3 * y + 6)", "1 / ((y + 2) / x)"),
    "dot": (
        "x @ m",
        "(m.T @ x.T).T",
        "x[:, :1] @ m[:1] + x[:, 1:] @ m[1:]",
        "jnp.stack([row @ m for row in x])",
        "lax.map(lambda row: (row[:, None] * m).sum(0), x)",
        "lax.conv(x.T[None], m.T[:, :, None], (1,), 'VALID')[0].T",
    ),
    "mix rows": ("y @ (y.T @ x)", "(y @ y.T) @ x", "jnp.einsum('ij,kj,kl->il', y, y, x)"),
    "mean": (
        "x + y.mean(0)",
        "x + y[::-1].sum(0) / 6",
        "x + y.reshape(3, 2, 4).mean(1).mean(0)",
        "(6 * x + y.sum(0)) / 6",
    ),
    "variance": ("x * y.var(0)", "x * ((y * y).mean(0) - y.mean(0) ** 2)"),
    "cumulative sum": (
        "jnp.cumsum(x, 0) + y",
        "jnp.tril(jnp.ones((6, 6))) @ x + y",
        "y + lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(4), x)[1]",
    ),
    "maximum": (
        "jnp.maximum(x, y)",
        "jnp.where(y >= x, y, x)",
        "-jnp.minimum(-x, -y)",
        "x + y - jnp.minimum(y, x)",
    ),
    "clip": (
        "jnp.clip(x, -1, 1) + y",
        "y + jnp.maximum(jnp.minimum(x, 1), -1)",
        "y + jnp.where(jnp.abs(x) < 1, x, jnp.sign(x))",
    ),
    "relu": ("jax.nn.relu(x) + y", "jnp.where(x > 0, x, 0) + y", "(x + jnp.abs(x)) / 2 + y"),
    "rows in order": (
        "jnp.sort(x, 1) + y",
        "-jnp.sort(-x, 1)[:, ::-1] + y",
        "jnp.take_along_axis(x, jnp.argsort(x, 1), 1) + y",
    ),
    "largest": (
        "x.max(1, keepdims=True) * x + y",
        "jnp.sort(x, 1)[:, 3:] * x + y",
        "lax.top_k(x, 1)[0] * x + y",
    ),
    "exponential": (
        "jnp.exp(x) + y",
        "jnp.exp(x.T).T + y",
        "jnp.concatenate([jnp.exp(x[:2]), jnp.exp(x[2:])]) + y",
    ),
    "tanh": ("jnp.tanh(x + y)", "jax.vmap(jnp.tanh)(y + x)", "jnp.tanh((x + y).T).T"),
    "softmax": (
        "jax.nn.softmax(x, 1) * y",
        "numerators(x) * y / numerators(x).sum(1, keepdims=True)",
        "numerators(x) * (1 / (numerators(x) @ jnp.ones((4, 1)))) * y",
    ),
    "attention": ("attention(x, y, x @ m)", "attention_divided_last(x, y, x @ m)"),
    "roll": (
        "jnp.roll(x, 2, 0) * y",
        "x[(jnp.arange(6) + 4) % 6] * y",
        "jax.nn.one_hot((jnp.arange(6) + 4) % 6, 6) @ x * y",
    ),
    "scatter": (
        "y.at[jnp.array([1, 1, 0, 5, 3, 1])].add(x)",
        "y + jax.ops.segment_sum(x, jnp.array([1, 1, 0, 5, 3, 1]), 6)",
        "y + jax.nn.one_hot(jnp.array([1, 1, 0, 5, 3, 1]), 6).T @ x",
    ),
    "recurrence": ("recurrence(x, y)", "recurrence_as_tree(x, y)"),
    "loop": (
        "lax.fori_loop(0, 3, lambda i, h: h @ m + y * i, x)",
        "((x @ m) @ m + y) @ m + 2 * y",
        "x @ (m @ m @ m) + y @ m + y + y",
    ),
    "gradient": (
        "jax.grad(lambda x: ((x @ m - y) ** 2).mean())(x)",
        "2 * (x @ m - y) @ m.T / 24",
        "jax.vjp(lambda x: x @ m, x)[1]((x @ m - y) / 12)[0]",
    ),
    "normalize": (
        "(x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 0.5) * y",
        "((x.T - x.sum(1) / 4) / jnp.sqrt((x * x).mean(1) - x.mean(1) ** 2 + 0.5)).T * y",
    ),
}
OPS = 10


def random_program(seed: int, *, vary: bool, changed: bool) -> str:
    """An expression of ten ops, each on the last value and on an earlier one. `vary` writes each op
    in a random form, and `changed` multiplies one value by 1 + 2**-20."""
    rng, forms = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    text, wrong = "[y, x]", int(forms.integers(OPS - 1)) if changed else -1
    for number, name in enumerate(rng.choice(list(FORMS), OPS)):
        form = FORMS[name][int(forms.integers(len(FORMS[name]))) if vary else 0]
        factor = "np.float32(1 + 2.0**-20)" if number == wrong else "1"
        place = int(rng.integers(number + 1))
        text = (
            f"(lambda values: (lambda x, y: [*values, {factor} * ({form})])"
            f"(values[-1], values[{place}]))({text})"
        )
    return f"{text}[-1]"


def differing_programs(seeds: Iterable[int], **how: bool) -> list[int]:
    """Which of some random programs differ from the same program, written in another way."""
    same = {"vary": False, "changed": False}
    numbers = list(seeds)
    before, after = (
        exported({f"{number:05}": random_program(number, **options) for number in numbers})
        for options in (same, {**same, **how})
    )
    answer = verify_artifacts(before, after, Options(arithmetic="exact"))
    assert not answer.vacuous
    return [numbers[output.index] for output in answer.outputs if output.differing]


@pytest.mark.parametrize("first", one_in(20, range(0, 200, 10)))
def test_random_programs_in_two_ways(first: int):
    assert differing_programs(range(first, first + 10), vary=True) == []


@pytest.mark.parametrize("first", one_in(20, range(0, 200, 10)))
def test_a_changed_value_of_a_random_program_is_found(first: int):
    seeds = range(first, first + 10)
    assert differing_programs(seeds, vary=True, changed=True) == list(seeds)

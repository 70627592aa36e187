"""Pairs of programs that issue the same collectives, one of them with ops around a collective that
a compiler may simplify with it; and a reading of the collectives of compiled HLO text.

The reading is a few regular expressions of its own: it checks what `check-order` reads.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from gpipe_programs import Array  # first: sets up the devices
from models.devices import mesh

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax
from jax.export import Exported
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS, TRIPS = 4, 8, 3
AXIS = "i"
Change = Callable[[Array, Array], Array]  # of a value, and of an argument of its shape

COLLECTIVES: dict[str, Callable[[Array], Array]] = {
    "psum": lambda x: lax.psum(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
}


OPERANDS: dict[str, Change] = {
    "plain": lambda x, y: x + y,
    "argument": lambda x, y: x,
    "cast": lambda x, y: x.astype(jnp.bfloat16).astype(x.dtype),
    "broadcast": lambda x, y: jnp.broadcast_to(x[:1], x.shape),
    "broadcast scalar": lambda x, y: jnp.broadcast_to(x[0, 0], x.shape),
    "constant": lambda x, y: jnp.ones_like(x),
    "iota": lambda x, y: lax.broadcasted_iota(x.dtype, x.shape, 1),
    "slice": lambda x, y: jnp.concatenate([x, y])[2:-2],
    "transpose": lambda x, y: jnp.reshape(x, x.shape[::-1]).T,
    "reshape": lambda x, y: jnp.reshape(jnp.reshape(x, (-1,)), x.shape),
    "reverse": lambda x, y: x[::-1],
    "pad": lambda x, y: jnp.pad(x[:-1], ((0, 1), (0, 0))),
    "tanh": lambda x, y: jnp.tanh(x),
    "scaled": lambda x, y: x * 2,
    "zero": lambda x, y: x * 0,
    "minus itself": lambda x, y: x - x,
    "scan": lambda x, y: lax.scan(
        lambda c, _: (jnp.tanh(c).astype(x.dtype) + x, None), jnp.zeros_like(x), length=TRIPS
    )[0],
    "index": lambda x, y: x * lax.axis_index(AXIS).astype(x.dtype),
    "psum": lambda x, y: lax.psum(x, AXIS),
    "psum of constant": lambda x, y: x * lax.psum(jnp.ones((), x.dtype), AXIS),
}


def _own_slice(r: Array, y: Array) -> Array:
    start = lax.axis_index(AXIS) * (r.shape[0] // 2)
    return lax.dynamic_slice_in_dim(r, start, r.shape[0] // 2)


def _vanishing_carry(r: Array, y: Array) -> Array:
    first = (r, jnp.resize(y, r.shape))
    return lax.scan(lambda c, _: ((c[1], c[1] * 2), None), first, length=2)[0][0]


def _turned_carry(r: Array, y: Array) -> Array:
    first = (r, jnp.resize(y, r.shape))
    return lax.scan(lambda c, _: ((c[1], c[0]), None), first, length=2)[0][1]


def _convolved(r: Array, y: Array) -> Array:
    kernel = jnp.resize(y, (1, 1, 3)).astype(r.dtype)
    return lax.conv_general_dilated(r[:, None, :], kernel, (1,), "SAME")


RESULTS: dict[str, Change] = {
    "plain": lambda r, y: r,
    "tanh": lambda r, y: jnp.tanh(r),
    "cast": lambda r, y: r.astype(jnp.bfloat16),
    "cast back": lambda r, y: r.astype(jnp.bfloat16).astype(r.dtype),
    "tanh cast": lambda r, y: jnp.tanh(r).astype(jnp.bfloat16),
    "sum cast": lambda r, y: (r + jnp.resize(y, r.shape)).astype(jnp.bfloat16),
    "half cast": lambda r, y: (r / 2).astype(jnp.bfloat16),
    "row sums cast": lambda r, y: jnp.sum(r, 0).astype(jnp.bfloat16),
    "cast twice": lambda r, y: jnp.tanh(r.astype(jnp.bfloat16)),
    "dot and itself": lambda r, y: jnp.sum(r @ r.T) + r,
    "cast and itself": lambda r, y: r.astype(jnp.bfloat16).astype(r.dtype) + r,
    "product sum": lambda r, y: jnp.sum(r * jnp.resize(y, r.shape)),
    "integer": lambda r, y: r.astype(jnp.int32),
    "boolean": lambda r, y: r.astype(jnp.bool_),
    "dot": lambda r, y: r @ jnp.resize(y, (r.shape[1], 3)).astype(r.dtype),
    "cast dot": lambda r, y: (
        r.astype(jnp.bfloat16) @ jnp.resize(y, (r.shape[1], 3)).astype("bfloat16")
    ),
    "dot itself": lambda r, y: r @ r.T,
    "dot zero": lambda r, y: r @ jnp.zeros((r.shape[1], 3), r.dtype),
    "dot one-hot": lambda r, y: r @ jnp.eye(r.shape[1], 3, dtype=r.dtype),
    "where none": lambda r, y: jnp.where(jnp.arange(r.shape[1]) < 0, r, 0),
    "where all": lambda r, y: jnp.where(jnp.arange(r.shape[1]) >= 0, r, 0),
    "where equal": lambda r, y: jnp.where(y[0, 0] > 0, r, r),
    "set": lambda r, y: r.at[:].set(jnp.resize(y, r.shape)),
    "written": lambda r, y: lax.dynamic_update_slice(r, jnp.resize(y, r.shape), (0, 0)),
    "top_k": lambda r, y: lax.top_k(r[:, :1], 1)[1],
    "argmax": lambda r, y: jnp.argmax(r[:, :1], axis=1),
    "own slice": _own_slice,
    "first half": lambda r, y: r[: r.shape[0] // 2],
    "first column": lambda r, y: r[:, :1],
    "gather": lambda r, y: r[jnp.array([0, 1, 0])],
    "strided": lambda r, y: r[:, ::2],
    "carry": lambda r, y: lax.scan(
        lambda c, _: ((c[0], c[1] + c[0]), None), (r, jnp.zeros_like(r)), length=4
    )[0][1],
    "unused carry": lambda r, y: lax.scan(
        lambda c, _: ((c[0] * 2, c[1] + 1), None), (r, y), length=4
    )[0][1],
    "vanishing carry": _vanishing_carry,
    "turned carry": _turned_carry,
    "no trips": lambda r, y: lax.fori_loop(3, 3, lambda _, c: c + r[0, 0], y),
    "norm": lambda r, y: jnp.sqrt(jnp.sum(r * r)),
    "sum": lambda r, y: jnp.sum(r),
    "row sums": lambda r, y: jnp.sum(r, 0),
    "mean": lambda r, y: jnp.mean(r),
    "sum of none": lambda r, y: jnp.sum(r[:0], 0),
    "no rows": lambda r, y: r[:0].T @ jnp.zeros((0, 3), r.dtype),
    "maximum": lambda r, y: jnp.max(r),
    "at least infinity": lambda r, y: jnp.maximum(r, jnp.inf),
    "clipped": lambda r, y: jnp.clip(r, 0, 0),
    "times zero": lambda r, y: r * 0,
    "times one": lambda r, y: r * 1,
    "times device": lambda r, y: r * lax.axis_index(AXIS).astype(r.dtype),
    "times mask": lambda r, y: r * jnp.resize(jnp.array([0, 1], r.dtype), r.shape),
    "times infinity": lambda r, y: r * jnp.inf,
    "plus zero": lambda r, y: r + 0,
    "plus infinity": lambda r, y: r + jnp.inf,
    "minus itself": lambda r, y: r - r,
    "minus reshaped": lambda r, y: r - r.reshape(-1).reshape(r.shape),
    "over itself": lambda r, y: r / r,
    "zero over": lambda r, y: jnp.zeros_like(r) / r,
    "over infinity": lambda r, y: r / jnp.inf,
    "tanh minus": lambda r, y: jnp.tanh(r) - jnp.tanh(r),
    "power zero": lambda r, y: r**0.0,
    "sign": lambda r, y: jnp.sign(r),
    "abs of exp": lambda r, y: jnp.abs(jnp.exp(r)),
    "log of exp": lambda r, y: jnp.log(jnp.exp(r)),
    "finite": lambda r, y: jnp.isfinite(r),
    "not number": lambda r, y: r != r,
    "round": lambda r, y: jnp.round(r),
    "negate": lambda r, y: -r,
    "transpose": lambda r, y: r.T,
    "reshape": lambda r, y: jnp.reshape(r, (-1,)),
    "reverse": lambda r, y: r[::-1],
    "broadcast": lambda r, y: jnp.broadcast_to(r, (2, *r.shape)),
    "broadcast sum": lambda r, y: jnp.sum(jnp.broadcast_to(r, (2, *r.shape)), 0),
    "joined": lambda r, y: jnp.concatenate([r, r]),
    "joined and cut": lambda r, y: jnp.concatenate([r, jnp.zeros_like(r)])[r.shape[0] :],
    "pad": lambda r, y: jnp.pad(r, 1),
    "cut pad": lambda r, y: lax.pad(r, jnp.zeros((), r.dtype), ((-1, 1, 0), (0, 0, 0))),
    "conv": _convolved,
    "sorted": lambda r, y: jnp.sort(r, axis=1),
    "cumulative": lambda r, y: jnp.cumsum(r, axis=1),
    "branch": lambda r, y: lax.cond(
        y[0, 0] > 0, lambda: jnp.sum(r), lambda: jnp.zeros((), r.dtype)
    ),
    "psum": lambda r, y: lax.psum(r, AXIS),
    "psum of tanh": lambda r, y: lax.psum(jnp.tanh(r), AXIS),
    "gathered": lambda r, y: lax.all_gather(r, AXIS, tiled=True),
    "scattered": lambda r, y: lax.psum_scatter(r, AXIS, tiled=True),
    "permuted": lambda r, y: lax.ppermute(r, AXIS, [(0, 1), (1, 0)]),
    "permuted sum": lambda r, y: r + lax.ppermute(r, AXIS, [(0, 1), (1, 0)]),
    "difference": lambda r, y: r - lax.psum(r, AXIS),
    "complex": lambda r, y: jnp.real(jnp.fft.fft(r)),
    "erf": lambda r, y: jax.nn.gelu(r),
    "softmax": lambda r, y: jax.nn.softmax(r, axis=1),
    "softmax of one": lambda r, y: jax.nn.softmax(r[:, :1], axis=1),
    "variance of one": lambda r, y: jnp.var(r[:, :1], axis=1),
}
# Results that issue collectives themselves, which the plain program of the pair issues as well.
_ISSUING = {
    "psum",
    "psum of tanh",
    "gathered",
    "scattered",
    "permuted",
    "permuted sum",
    "difference",
}


def _fitted(r: Array, x: Array) -> Array:
    """A value of the shape of `x` that all elements of `r` add to."""
    parts = r.reshape(-1, x.size) if r.size >= x.size else jnp.tile(r.reshape(-1), x.size // r.size)
    return parts.sum(0).reshape(x.shape) if parts.ndim == 2 else parts.reshape(x.shape)


def _looped(first: Change, step: Change, trips: int = TRIPS) -> Callable[..., Array]:
    def frame(issue: Callable[[Array], Array], x: Array, y: Array) -> Array:
        def body(carry: Array, _: None) -> tuple[Array, None]:
            return step(_fitted(issue(carry), x), y).astype(x.dtype), None

        return lax.scan(body, first(x, y), length=trips)[0]

    return frame


def _last(issue: Callable[[Array], Array], x: Array, y: Array) -> Array:
    def body(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        return (carry[0] * 2 + y, _fitted(issue(carry[0]), x)), None

    return lax.scan(body, (x, y), length=TRIPS)[0][1]


FRAMES: dict[str, Callable[..., Array]] = {
    "straight": lambda issue, x, y: issue(x),
    "after sum": lambda issue, x, y: issue(jnp.tanh(lax.psum(jnp.tanh(x), AXIS))),
    "of sum": lambda issue, x, y: issue(lax.psum(x, AXIS)),
    "two": lambda issue, x, y: issue(x) + issue(jnp.tanh(y)),
    "two apart": lambda issue, x, y: jnp.concatenate([issue(x), issue(y) * 2]),
    "scan": _looped(lambda x, y: x, lambda c, y: jnp.tanh(c) + y),
    "scan constant": _looped(lambda x, y: jnp.ones_like(x), lambda c, y: jnp.tanh(c) + y),
    "scan invariant": _looped(lambda x, y: x, lambda c, y: y),
    "scan linear": _looped(lambda x, y: jnp.ones_like(x), lambda c, y: c * 2),
    "scan last": _last,
    "scan once": _looped(lambda x, y: x, lambda c, y: jnp.tanh(c) + y, 1),
}
# Frames whose plain program is of another frame with the same collectives.
_PLAIN_FRAME = {
    "of sum": "after sum",
    "scan constant": "scan",
    "scan invariant": "scan",
    "scan linear": "scan",
    "scan last": "scan",
}


@dataclass(frozen=True)
class Surrounding:
    """A program that issues a collective, with ops around it."""

    collective: str
    operand: str = "plain"
    result: str = "plain"
    frame: str = "straight"
    dtype: str = "float32"

    @property
    def plain(self) -> Surrounding:
        """The program with the same collectives in its text and plain surroundings."""
        result = self.result if self.result in _ISSUING - {"psum", "difference"} else "plain"
        if self.result in ("psum", "difference"):
            result = "psum of tanh"
        operand = self.operand if self.operand in ("psum", "psum of constant") else "plain"
        frame = _PLAIN_FRAME.get(self.frame, self.frame)
        return replace(self, operand=operand, result=result, frame=frame)

    def step(self, x: Array, y: Array) -> Array:
        """What a device computes of its two arguments."""
        issue, operand = COLLECTIVES[self.collective], OPERANDS[self.operand]
        frame, result = FRAMES[self.frame], RESULTS[self.result]
        return jnp.atleast_1d(result(frame(lambda value: issue(operand(value, y)), x, y), y))


@cache
def exported(*made: Surrounding) -> Exported:
    """One program for two devices of some surroundings, each with its own arguments."""

    def step(*arguments: Array) -> list[Array]:
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        return [each.step(*pair) for each, pair in zip(made, pairs, strict=True)]

    mapped = jax.shard_map(
        step, mesh=mesh(i=2), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    shape = (2 * ROWS, COLUMNS)
    arguments = [jax.ShapeDtypeStruct(shape, each.dtype) for each in made for _ in range(2)]
    return export.export(jax.jit(mapped), platforms=("cpu",))(*arguments)


def surroundings(seed: int) -> Iterator[Surrounding]:
    """Random programs that differ from their plain ones, without end."""
    source = random.Random(seed)
    while True:
        made = Surrounding(
            source.choice(list(COLLECTIVES)),
            source.choice(["plain", *OPERANDS]) if source.random() < 0.6 else "plain",
            source.choice(list(RESULTS)) if source.random() < 0.8 else "plain",
            "straight" if source.random() < 0.5 else source.choice(list(FRAMES)),
            source.choices(["float32", "bfloat16", "float16", "int32"], [7, 1, 1, 1])[0],
        )
        if made != made.plain:
            yield made


_OPENING = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_ISSUE = re.compile(
    r" = (\(?.*?\)?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\((.*?)\)(.*)"
)
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs|dimensions)=(?:\{[{}\d,]*\}|\S+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations)=\{?((?:%[\w.-]+(?:, )?)+)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")


def listed_collectives(text: str) -> list[str]:
    """The collectives of a scheduled HLO text in the order in which a device begins them: kind,
    shapes and groups, those of a loop as often as it runs if the text says how often."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.split("\n"):
        opening = _OPENING.match(line)
        if opening:
            name = opening[1]
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    types = {
        found[1]: _LAYOUT.sub("", found[2])
        for lines in bodies.values()
        for line in lines
        if (found := re.match(r"\s*(?:ROOT )?(%?[\w.-]+) = (\(.*?\)|\S+) ", line))
    }

    def of(computation: str) -> list[str]:
        found: list[str] = []
        for line in bodies[computation]:
            issue = _ISSUE.search(line)
            if issue:
                operands = [types[word] for word in re.findall(r"%[\w.-]+", issue[3])]
                groups = [each.rstrip(",") for each in _GROUPS.findall(issue[4])]
                found.append(" ".join([issue[2], *operands, *groups]))
                continue
            called = [
                word for part in _CALLED.findall(line) for word in re.findall(r"[\w.-]+", part)
            ]
            inner = [each for callee in called for each in of(callee)]
            trips = _TRIPS.search(line)
            if inner and "condition=" in line and trips is None:
                inner = ["while", *inner, "end"]
            if inner and " conditional(" in line:
                inner = ["branch", *inner, "end"]
            found += inner * (int(trips[1]) if trips else 1)
        return found

    return of(entry)

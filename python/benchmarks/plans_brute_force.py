"""How far plans of small programs are from the best of all divisions of their arguments.

    python python/benchmarks/plans_brute_force.py [NAME ...] [--target gpu] [--list]

Each program gets a mesh of 2 x 2. Every division of its arguments over that mesh is compiled, of
those that differ in the names of the axes one. The result of a state is divided as it is taken. The
plan is compiled in the same way.

    assignments   divisions that were compiled
    best, plan    us of a run, as the target's compiler schedules it
    ratio         plan / best
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from stablehlo_tools.analysis.entry import next_values
from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import Dims
from stablehlo_tools.artifacts.artifact import Artifact, from_exported
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import shape_of
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.optimization.plan_request import PlanRequest, spec_text
from stablehlo_tools.optimization.plan_trials import PlanCandidate, build_plan, time_program
from stablehlo_tools.optimization.planning import plan

AXES = (("data", 2), ("model", 2))
HARDWARE = {"gpu": "h100", "tpu": "tpu-v5e"}
_MOST = 200  # assignments
_TIMEOUT = 120.0  # seconds of one compilation

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
Step = tuple[Callable[..., Any], tuple[tuple[tuple[int, ...], Any], ...], tuple[int, ...]]


def _sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, *rest: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, *rest)
        return weights - 1e-3 * gradient, value

    return step


def _products(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T


def _square(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


def _scan(weights: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights)[0] ** 2)


def _attention(x: Any, w: Any) -> Any:
    q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 3, 16, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def _embedding(table: Any, ids: Any) -> Any:
    h = table[ids]
    logits = h @ table.T
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(h * h, -1))


def _experts(x: Any, weights: Any) -> Any:
    chosen = jax.nn.softmax(x[:, : weights.shape[0]])
    return jnp.einsum("te,tef->tf", chosen, jax.nn.relu(jnp.einsum("td,edf->tef", x, weights)))


def _convolution(image: Any, kernel: Any) -> Any:
    return jax.nn.relu(
        lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )


def _stencil(field: Any) -> Any:
    def once(u: Any, _: Any) -> tuple[Any, None]:
        around = sum(jnp.roll(u, s, a) for s in (1, -1) for a in (0, 1))
        return u + 0.1 * (around - 4 * u), None

    return lax.scan(once, field, None, length=8)[0]


def _norm(x: Any, scale: Any, w: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    return ((x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * scale) @ w


def _decode(cache: Any, query: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("hd,khd->hk", query, cache))
    return jnp.einsum("hk,khd->hd", scores, cache)


STEPS: Mapping[str, Step] = {
    "products": (_products, (((8192, 4096), BF16), ((4096, 16384), BF16)), ()),
    "few-rows": (_products, (((64, 8192), BF16), ((8192, 32768), BF16)), ()),
    "step": (_sgd(_square), (((8192, 8192), F32), ((16384, 8192), F32)), (0,)),
    "step-few-rows": (_sgd(_square), (((16384, 16384), F32), ((512, 16384), F32)), (0,)),
    "scan-step": (_sgd(_scan), (((4, 4096, 4096), F32), ((16384, 4096), F32)), (0,)),
    "attention": (_attention, (((16, 1024, 1024), BF16), ((1024, 3072), BF16)), ()),
    "embedding-step": (_sgd(_embedding), (((32768, 1024), F32), ((8192,), I32)), (0,)),
    "experts": (_experts, (((8192, 1024), BF16), ((8, 1024, 4096), BF16)), ()),
    "convolution": (_convolution, (((64, 56, 56, 256), BF16), ((3, 3, 256, 512), BF16)), ()),
    "stencil": (_stencil, (((8192, 8192), F32),), (0,)),
    "norm": (_norm, (((16384, 4096), BF16), ((4096,), BF16), ((4096, 4096), BF16)), ()),
    "decode": (_decode, (((65536, 16, 128), BF16), ((16, 128), BF16)), ()),
}


def main() -> None:
    """Prints a row for each program as it is found."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*STEPS, []])
    parser.add_argument("--target", choices=tuple(HARDWARE), default="gpu")
    parser.add_argument("--list", action="store_true", help="count the assignments only")
    arguments = parser.parse_args()
    print(
        f"{'program':16s} {'assignments':>11s} {'best':>9s} {'plan':>9s} {'ratio':>6s}  plan; best"
    )
    for name in arguments.names or STEPS:
        given = artifact_of(name, arguments.target)
        if arguments.list:
            print(f"{name:16s} {len(list(_assignments(given))):11d}")
            continue
        print(compared(name, given, arguments.target), flush=True)


def artifact_of(name: str, target: str) -> Artifact:
    """Returns a small program, exported for one device."""
    function, shapes, donated = STEPS[name]
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    jitted = jax.jit(function, donate_argnums=donated)
    platform = "cuda" if target == "gpu" else "tpu"
    return from_exported(export.export(jitted, platforms=[platform])(*types), name)


def compared(name: str, given: Artifact, target: str) -> str:
    """Returns the row of a program."""
    hardware = load_hardware(HARDWARE[target])
    request = PlanRequest(hardware, 4, axes=AXES, target=target, budget=10 * _TIMEOUT)
    found = plan(given, request)
    chosen = tuple(each.dims for each in found.arguments)
    best, what, count = found.best.ns, chosen, 0
    for dims in _assignments(given):
        try:
            ns = _time(given, request, found.best, dims)
        except ToolError as error:
            print(f"  {_told(dims)}: {error}", file=sys.stderr)
            continue
        count += 1
        if ns < best:
            best, what = ns, dims
    ratio = found.best.ns / best
    told = f"{_told(chosen)}; {_told(what)}"
    return (
        f"{name:16s} {count:11d} {best / 1e3:9.1f} {found.best.ns / 1e3:9.1f} {ratio:6.3f}  {told}"
    )


def _told(dims: tuple[Dims, ...]) -> str:
    return " ".join(map(spec_text, dims))


def _time(
    given: Artifact, request: PlanRequest, like: PlanCandidate, dims: tuple[Dims, ...]
) -> float:
    """Returns the ns of a division of the arguments; the search divides the rest."""
    pinned = replace(request, stated=dict(enumerate(dims)), budget=0, passes="")
    choices = plan(given, pinned).best.choices
    built = build_plan(given, request, replace(like, choices=choices, after=""))
    return time_program(built, request, _TIMEOUT).contended_ns


def _assignments(given: Artifact) -> Iterator[tuple[Dims, ...]]:
    """Yields the divisions of all arguments; one of those that exchange the axes."""
    main = entry_function(given.module)
    arguments = list(Function(main).body.arguments)
    assert next_values(main) is not None
    seen: set[tuple[Dims, ...]] = set()
    every = [list(_divisions(shape_of(each))) for each in arguments]
    for count, dims in enumerate(itertools.product(*every)):
        other = tuple(_exchanged(each) for each in dims)
        if other in seen:
            continue
        seen.add(dims)
        if len(seen) > _MOST:
            raise SystemExit(f"more than {_MOST} assignments, {count} tried")
        yield dims


def _divisions(shape: list[int]) -> Iterator[Dims]:
    """Yields the divisions of an argument: each axis on no dimension, or on one that it divides."""
    data, model = (AxisRef(name) for name, _ in AXES)
    places = [None, *(d for d, size in enumerate(shape) if size % 4 == 0)]
    for one, two in itertools.product(places, repeat=2):
        yield tuple(
            tuple(axis for axis, place in ((data, one), (model, two)) if place == dim)
            for dim in range(len(shape))
        )


def _exchanged(dims: Dims) -> Dims:
    data, model = (AxisRef(name) for name, _ in AXES)
    other = {data: model, model: data}
    return tuple(tuple(sorted((other[a] for a in axes), key=lambda a: a.name)) for axes in dims)


if __name__ == "__main__":
    main()

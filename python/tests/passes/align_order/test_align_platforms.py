"""`align-order` and `check-order` on programs for several platforms: cases over the platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from models.devices import mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
from jax import export, lax, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from order_cases import rule, verdict

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.transforms.align_order import Aligned, align_order
from stablehlo_tools.transforms.thread_tokens import ThreadTokensPass
from stablehlo_tools.verify import Options as Trials
from stablehlo_tools.verify import verify_artifacts

AXIS = "x"
PLATFORMS = ("cpu", "cuda", "tpu")
ROWS = jax.ShapeDtypeStruct((8,), jnp.float32)
Local = Callable[[jax.Array, jax.Array], Any]


def total(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


def largest(x: jax.Array) -> jax.Array:
    return lax.pmax(x, AXIS)


def gathered(x: jax.Array) -> jax.Array:
    """Of several platforms, each has its own lowering of a gather: a case."""
    return lax.all_gather(x, AXIS, tiled=True)


def in_case(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cpu=lambda x: total(x) + 1, default=lambda x: total(x) * 2)


def in_nested_case(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cpu=in_case, default=lambda x: total(x) * 3)


def two_in_case(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(
        x, cpu=lambda x: total(x) + largest(x), default=lambda x: total(x) * largest(x)
    )


def two_others_in_case(x: jax.Array) -> jax.Array:
    def both(x: jax.Array) -> jax.Array:
        return lax.pmin(x, AXIS) + gathered(x).sum()

    return lax.platform_dependent(x, cpu=both, default=lambda x: both(x) * 2)


def independent(one: Callable[[jax.Array], jax.Array], other: Callable[[jax.Array], jax.Array]):
    """Two values of a worker, computed in the text's order or the other way round."""

    def worker(turned: bool) -> Local:
        def local(x: jax.Array, y: jax.Array) -> Any:
            if turned:
                second = other(y)
                return one(x).sum() + x, second.sum() + y
            first = one(x)
            return first.sum() + x, other(y).sum() + y

        return local

    return worker


def lowered_by_platform(turned: bool) -> Local:
    """Cases without collectives, which each capture values, between collectives."""

    def local(x: jax.Array, y: jax.Array) -> Any:
        key = random.wrap_key_data(lax.bitcast_convert_type(x[:2], jnp.uint32))
        draw = independent(
            lambda _: total(random.uniform(key, (4,))),
            lambda y: largest(jnp.cumsum(jax.scipy.special.erf(y))),
        )
        one, other = draw(turned)(x, y)
        return independent(lambda x: largest(jnp.sort(x)), lambda y: total(jnp.cumsum(y)))(turned)(
            one, other
        )

    return local


def in_a_loop(turned: bool) -> Local:
    def local(x: jax.Array, y: jax.Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            return independent(in_case, largest)(turned)(*carry)

        return lax.fori_loop(0, 3, step, (x, y))

    return local


KINDS = {
    "gather": independent(gathered, total),
    "beside one outside": independent(in_case, largest),
    "both in cases": independent(in_case, gathered),
    "nested": independent(in_nested_case, largest),
    "several in each": independent(two_in_case, two_others_in_case),
    "lowered by platform": lowered_by_platform,
    "in a loop": in_a_loop,
}


def exported(local: Local, platforms: tuple[str, ...] = PLATFORMS) -> export.Exported:
    """A function of rows of two devices."""
    on = mesh(x=2)
    mapped = jax.shard_map(local, mesh=on, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    step = jax.jit(mapped, in_shardings=(NamedSharding(on, P(AXIS)),) * 2)
    return export.export(step, platforms=platforms)(ROWS, ROWS)


def workers(
    worker: Callable[[bool], Local], platforms: tuple[str, ...] = PLATFORMS
) -> tuple[Artifact, ...]:
    return tuple(
        artifact.from_exported(exported(worker(turned), platforms), f"worker{number}")
        for number, turned in enumerate((False, True))
    )


def copied(artifacts: tuple[Artifact, ...]) -> tuple[Artifact, ...]:
    return tuple(loaded.copy() for loaded in artifacts)


def aligned(artifacts: tuple[Artifact, ...], platform: str = "cpu") -> Aligned:
    return align_order(ProgramJob(artifacts, JobOptions(platform=platform)), ThreadTokensPass())


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_cases_comes_into_one_order(kind: str) -> None:
    pair = workers(KINDS[kind])
    assert rule(verdict(copied(pair), JobOptions(platform="cpu"))) == "conflicting-order"
    before = pair[1].copy()
    assert aligned(pair).finding is None
    for platform in PLATFORMS:
        assert rule(verdict(copied(pair), JobOptions(platform=platform))) == "ordered"
    assert verify_artifacts(before, pair[1], Trials(trials=1)).same


@pytest.mark.parametrize("kind", ["gather", pytest.param("in a loop", marks=pytest.mark.soak)])
def test_one_platform_and_several_get_one_answer(kind: str) -> None:
    alone = workers(KINDS[kind], ("cpu",))
    assert aligned(alone).finding is None
    assert rule(verdict(alone)) == "ordered"


def test_xla_issues_what_was_aligned_in_that_order() -> None:
    pair = workers(KINDS["gather"])
    assert aligned(pair).finding is None
    issued = []
    for loaded in pair:
        compiled = compile_artifact(loaded, "cpu")
        kinds = {op.id: op.kind for op in compiled.tagged}
        issued.append([kinds[i] for e in compiled.schedule.events if e.issues for i in e.ids])
    assert issued[0] == issued[1]
    assert sorted(issued[0]) == ["all_gather", "all_reduce"]


def test_what_a_case_is_computed_from_stays_before_it() -> None:
    def worker(turned: bool) -> Local:
        def local(x: jax.Array, y: jax.Array) -> Any:
            if turned:
                sums = total(x + largest(y))
                return sums, y
            return x, largest(in_case(x) + y)

        return local

    finding = aligned(workers(worker)).finding
    assert finding is not None
    assert finding.rule == "no-common-order"
    assert all("is computed from all_reduce" in told for told in finding.sentences)


def test_what_no_common_order_keeps_together_is_told() -> None:
    """A case issues two; the other worker needs one that is computed from both in between."""

    def worker(turned: bool) -> Local:
        def local(x: jax.Array, y: jax.Array) -> Any:
            if turned:
                lowest = lax.pmin(total(x), AXIS)
                return lowest, largest(lowest)
            return two_in_case(x), lax.pmin(y, AXIS)

        return local

    finding = aligned(workers(worker)).finding
    assert finding is not None
    assert finding.rule == "no-common-order"
    assert any("kept by the region around one of the two" in told for told in finding.sentences)


def used_on(platforms: str) -> Callable[[bool], Local]:
    """Worker 0 uses a sum on some of the platforms, worker 1 on all."""

    def worker(turned: bool) -> Local:
        def local(x: jax.Array, y: jax.Array) -> Any:
            sums = total(x)
            if turned:
                return sums + x, y
            ways = {platforms: lambda sums, x: sums + x}
            return lax.platform_dependent(sums, x, default=lambda _, x: x * 3, **ways), y

        return local

    return worker


def test_what_the_platform_does_not_use_is_not_issued() -> None:
    """On the others a compiler deletes it, and worker 1 waits for ever."""
    pair = workers(used_on("tpu"))
    assert rule(verdict(copied(pair), JobOptions(platform="tpu"))) == "ordered"
    assert rule(verdict(copied(pair), JobOptions(platform="cpu"))) == "dead-collective"
    finding = aligned(pair).finding
    assert finding is not None
    assert finding.rule == "dead-collective"


def test_only_the_branch_of_the_platform_orders() -> None:
    def worker(_: bool) -> Local:
        def local(x: jax.Array, y: jax.Array) -> Any:
            sums = total(x)
            chosen = lax.platform_dependent(
                sums, y, cpu=lambda sums, y: sums + y, default=lambda _, y: y
            )
            return sums, largest(chosen)

        return local

    pair = workers(worker)
    assert rule(verdict(copied(pair), JobOptions(platform="cpu"))) == "ordered"
    assert rule(verdict(copied(pair), JobOptions(platform="tpu"))) == "unordered"

"""`optimize` on exported programs, with XLA:GPU's compiler where it is installed."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compile_targets import TARGETS
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stablehlo_tools.api.transforming import transform
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.candidate_search import CandidateTrial
from stablehlo_tools.optimization.crew import PROVE, CandidateModule, Crew
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.optimizer import OptimizationRequest, Optimum, optimize
from stablehlo_tools.optimization.optimum_report import page, to_json, to_text
from stablehlo_tools.optimization.option_trials import PROPOSALS
from stablehlo_tools.optimization.proof import CandidateProof, prove, tolerance_of
from stablehlo_tools.optimization.road import RoadCandidate
from stablehlo_tools.passes.base import RoadStage
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions

GPU = next(each for each in TARGETS if each.values == (Target.GPU,))
ON_GPU = pytest.mark.parametrize("target", [GPU])


@cache
def sharded_layers() -> Artifact:
    """A forward pass over four layers whose weights are gathered in each, on 8 devices.

    Built once: where it was traced from is in its bytes.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            hidden = jnp.tanh(carry @ weight)
            return jax.lax.with_sharding_constraint(hidden, rows), None

        return jax.lax.scan(layer, x, weights)[0]

    jitted = jax.jit(layers, in_shardings=(rows, split), out_shardings=rows)
    shapes = (
        jax.ShapeDtypeStruct((16, 64), jnp.float32),
        jax.ShapeDtypeStruct((4, 64, 64), jnp.float32),
    )
    return artifact.from_exported(export.export(jitted, platforms=["cuda"])(*shapes), "layers")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests of this file, so that each candidate is compiled once."""
    return tmp_path_factory.mktemp("cache")


def optimized(kept: Path, **options: object) -> Optimum:
    request = OptimizationRequest(target="gpu", candidates=3, cache=kept, try_options=False)
    return optimize(sharded_layers(), replace(request, **options))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def all_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compiler made of a candidate takes half the time, so that one is best."""
    evaluate = Crew.evaluate

    def halved(
        crew: Crew,
        module: CandidateModule | None,
        more: CompilerOptions = NO_OPTIONS,
        *,
        with_code: bool = False,
    ) -> Figures:
        figures = evaluate(crew, module, more, with_code=with_code)
        half = {name: getattr(figures, name) / 2 for name in ("total_ns", "contended_ns")}
        return figures if module is None else replace(figures, **half)

    monkeypatch.setattr(Crew, "evaluate", halved)


@ON_GPU
def test_what_is_written_is_no_worse_proven_and_what_opt_makes(target: Target, kept: Path):
    optimum = optimized(kept)
    assert optimum.after.total_ns <= optimum.before.total_ns
    assert optimum.after.contended_ns <= optimum.before.contended_ns
    assert optimum.after.total_ns <= optimum.after.contended_ns
    assert 1 < len(optimum.trials) <= 4
    assert optimum.proof.values.state == optimum.proof.order.state == "proven"
    if optimum.changed:
        repeated = transform(sharded_layers(), optimum.pipeline)
        texts = [artifact.encode(each, ArtifactForm.TEXT) for each in (repeated, optimum.artifact)]
        assert texts[0] == texts[1]


@ON_GPU
def test_the_report_has_both_sides_and_every_trial(target: Target, kept: Path):
    optimum = optimized(kept)
    told = to_json(optimum)
    for side in ("before", "after"):
        assert {"total_ns", "exposed_ns", "peak_bytes"} <= told[side].keys()
    assert told["pipeline"] == optimum.pipeline
    assert len(told["trials"]) == len(optimum.trials) > 1
    drawn, text = page(optimum, "0"), to_text(optimum)
    for trial in optimum.trials[1:]:
        assert str(trial.candidate).split("{")[0] in drawn
        assert str(trial.candidate) in text


@ON_GPU
def test_a_search_that_compiled_nothing_does_not_say_that_nothing_was_faster(
    target: Target, kept: Path
):
    optimum = optimized(kept)
    unsearched = replace(
        optimum, pipeline="", trials=optimum.trials[:1], ended="the budget was spent"
    )
    for said in (to_text(unsearched), page(unsearched, "0")):
        assert "no candidate was compiled" in said
        assert "no candidate is faster" not in said


def trial(optimum: Optimum, share: float, time: float, *passes: str) -> CandidateTrial:
    """A candidate that takes these parts of the export's memory and time."""
    before = optimum.before
    figures = replace(
        before,
        total_ns=time * before.total_ns,
        peak_bytes=share * before.peak_bytes,
        compiler_bytes=round(share * before.compiler_bytes),
    )
    return CandidateTrial(
        RoadCandidate(tuple((RoadStage.PARTITION, text) for text in passes)), figures=figures
    )


@ON_GPU
def test_what_makes_a_program_fit_is_compared(target: Target, kept: Path):
    optimum = optimized(kept)
    assert to_json(optimum)["ways_to_fit"] == [], "it fits"
    trials = (
        *optimum.trials[:1],
        trial(optimum, 0.4, 1.2, "accumulate-gradients{microbatches=2}", "partition"),
        trial(optimum, 0.3, 1.1, "partition", "rematerialize{margin=0.2}"),
        trial(optimum, 0.4, 0.9, "partition", "rematerialize{offload}"),
        trial(optimum, 0.3, 1.0, "partition", "rematerialize"),
        trial(optimum, 0.9, 0.1, "partition"),
    )
    needed = optimum.before.needed_bytes
    found = replace(optimum, trials=trials, memory_limit=0.5 * needed)
    ways = {each["way"]: each["pipeline"] for each in to_json(found)["ways_to_fit"]}
    assert list(ways) == [
        "recomputation and the host's memory",
        "recomputation",
        "fewer samples at a time",
    ]
    assert ways["recomputation"] == "partition,rematerialize"
    text = to_text(replace(found, after=trials[3].figures or optimum.after))
    assert "ways to make it fit, each with its fastest compiled candidate:" in text


@ON_GPU
def test_what_is_faster_and_was_not_taken_says_what_decided(target: Target, kept: Path):
    optimum = optimized(kept)
    held_up = trial(optimum, 1.0, 0.1, "partition")
    assert held_up.figures is not None
    slower = replace(held_up.figures, contended_ns=2 * optimum.after.contended_ns)
    told = to_text(replace(optimum, trials=(*optimum.trials, replace(held_up, figures=slower))))
    assert "  partition: contended " in told
    assert ", but the answer " in told
    assert ", but the answer " not in to_text(optimum)


@ON_GPU
def test_compiler_options_are_tried_beside_the_answer_and_no_part_of_it(
    target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(PROPOSALS, target, PROPOSALS[target][:2])  # each is compiled twice
    optimum = optimized(kept, try_options=True)
    without = optimized(kept)
    assert without.options == ()
    assert (without.pipeline, without.after) == (optimum.pipeline, optimum.after)
    told = to_json(optimum)["options"]
    alone = [dict(proposal.options.values) for proposal in PROPOSALS[target]]
    assert [each["options"] for each in told[:2]] == alone
    for each in told[:2]:
        assert each["after"]["ratio"] == each["after"]["total_ns"] / optimum.after.total_ns
        assert each["before"]["ratio"] == each["before"]["total_ns"] / optimum.before.total_ns
    assert "other compiler options" in to_text(optimum)
    assert "Other compiler options" in page(optimum, "0")


@pytest.mark.soak  # every program anew, with the option
@ON_GPU
def test_what_a_user_gives_the_compiler_is_in_all_figures(target: Target, kept: Path):
    given = CompilerOptions.parse(["xla_gpu_all_gather_combine_threshold_bytes=0"])
    optimum = optimized(kept, options=given, candidates=1, try_options=True)
    assert to_json(optimum)["compiler_options"] == dict(given.values)
    tried = {name for trial in optimum.options for name, _ in trial.proposal.options.values}
    assert tried
    assert not tried & {name for name, _ in given.values}


@ON_GPU
def test_an_option_that_the_compiler_does_not_have_ends_the_command(target: Target, kept: Path):
    given = CompilerOptions.parse(["xla_gpu_nonsense=1"])
    with pytest.raises(ToolError, match="XLA:GPU has no compiler option xla_gpu_nonsense"):
        optimized(kept, options=given)


@ON_GPU
def test_a_second_run_compiles_nothing(target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch):
    first = optimized(kept)

    def asked(*_: object) -> None:
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(Crew, "_ask", asked)
    again = optimized(kept)
    assert again.pipeline == first.pipeline
    assert again.trials == first.trials
    assert again.proof == first.proof


@ON_GPU
def test_interrupted_at_once_nothing_comes_out(target: Target, tmp_path: Path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        optimize(sharded_layers(), OptimizationRequest(cache=tmp_path), stop=stop)


@ON_GPU
def test_what_is_refuted_is_not_taken(
    target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch, all_are_faster: None
):
    def wrong(
        crew: Crew, module: CandidateModule, figures: tuple[Figures, Figures], limit: float
    ) -> CandidateProof:
        before = sharded_layers()
        text = artifact.to_text(before.module).replace("stablehlo.tanh", "stablehlo.sine")
        after = replace(before, module=artifact.parse(text.encode()).module)
        return prove(before, after, figures, limit)

    monkeypatch.setattr(Crew, "prove", wrong)
    optimum = optimized(kept, candidates=1, memory_limit=70.0)  # no other test asks that
    assert not optimum.changed
    assert len(optimum.remarks) == 1
    assert all("was rejected: values: refuted" in remark for remark in optimum.remarks)


@pytest.mark.soak  # another search, for its last answer
@ON_GPU
def test_what_ends_the_process_that_proves_it_is_not_taken(
    target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch, all_are_faster: None
):
    ask = Crew._ask  # pyright: ignore[reportPrivateUsage]

    def limitless(crew: Crew, head: dict[str, Any], doing: str) -> dict[str, Any]:
        return ask(crew, {**head, "limit": None} if head["job"] == PROVE else head, doing)

    monkeypatch.setattr(Crew, "_ask", limitless)
    optimum = optimized(kept, candidates=1, memory_limit=72.0)
    assert not optimum.changed
    assert len(optimum.remarks) == 1
    assert "the process ended with exit code 1, without an answer" in optimum.remarks[0]


@ON_GPU
def test_an_answer_without_code_is_rejected(
    target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch, all_are_faster: None
):
    evaluate = Crew.evaluate

    def without_code(
        crew: Crew, module: CandidateModule | None, *, with_code: bool = False
    ) -> Figures:
        if with_code:
            raise ToolError("no code")
        return evaluate(crew, module)

    monkeypatch.setattr(Crew, "evaluate", without_code)
    optimum = optimized(kept, candidates=1, memory_limit=69.0)
    assert not optimum.changed
    assert ["was rejected: no code" in remark for remark in optimum.remarks] == [True]


@pytest.mark.soak  # another search, for its last answer
@ON_GPU
def test_what_cannot_be_made_in_one_go_is_not_taken(
    target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch, all_are_faster: None
):
    rewrite = Crew.rewrite

    def one_by_one(crew: Crew, module: CandidateModule | None, passes: str) -> CandidateModule:
        if module is None and passes:
            raise ToolError("not in one go")
        return rewrite(crew, module, passes)

    monkeypatch.setattr(Crew, "rewrite", one_by_one)
    optimum = optimized(kept, candidates=2, memory_limit=71.0)
    assert not optimum.changed
    refused = [trial for trial in optimum.trials if "not in one go" in trial.refused]
    assert len(optimum.remarks) == len(refused) > 0


def test_the_tolerance_is_that_of_the_least_precise_float():
    program = sharded_layers()
    assert tolerance_of(program.module) == 1e-4
    text = artifact.to_text(program.module).replace("f32", "bf16")
    assert tolerance_of(artifact.parse(text.encode()).module) == 5e-2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (OptimizationRequest(target="cpu"), "optimized for gpu or tpu"),
        (OptimizationRequest(hardware="h1000"), "h1000"),
        (OptimizationRequest(hardware="tpu-v5e"), "XLA:GPU does not compile for tpu-v5e"),
    ],
)
def test_machines_that_nothing_is_known_of_are_refused(request_: OptimizationRequest, message: str):
    with pytest.raises(ToolError, match=message):
        optimize(sharded_layers(), request_)

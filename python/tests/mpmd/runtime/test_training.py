"""Training with all ranks in one process: values, the state and its checkpoints, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from mpmd_steps import Step
from training_runs import batches, first_state, odd_arguments, odd_step, trained, write_set

from stablehlo_tools import mpmd
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.rank_set import write

STEPS = 4
CASES = [
    ("1f1b", 2, None, Step(microbatches=4)),
    ("zb-v", 2, None, Step(microbatches=4)),
    ("1f1b", 2, None, Step(microbatches=4, devices=2)),
]
MORE = [
    ("dualpipe-v", 2, None, Step(microbatches=4)),
    ("interleaved-1f1b", 3, 2, Step(microbatches=6)),
    ("1f1b", 1, None, Step(microbatches=4)),
    ("1f1b", 1, None, Step(microbatches=4, devices=2)),
    ("zb-h1", 3, None, Step(microbatches=4, form="unrolled")),
]


def close(one: Any, other: Any) -> None:
    """Within a few roundings of the largest element."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        scale = max(float(np.abs(np.asarray(a)).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "step"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)],
)
def test_steps_are_those_of_the_original(
    schedule: str, ranks: int, chunks: int | None, step: Step, tmp_path: Path
):
    """Tied weights and the optimizer's counter lie on several ranks, and stay the same there."""
    expected, losses = trained(step, STEPS)
    given = first_state(step)
    before = jax.tree.map(np.copy, given)
    with mpmd.load(write_set(tmp_path, step, schedule, ranks, chunks)) as job:
        state = job.init(*given)
        found: list[float] = []
        for tokens in batches(step, STEPS):
            state, results = job.step(state, tokens)
            tokens[:] = 0  # a loader may use its memory again at once
            assert set(results) == {"[2]"}
            found.append(float(results["[2]"]))
        assert state.step == STEPS
        gathered = job.gather(state)
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    assert jax.tree.structure(gathered) == jax.tree.structure(expected)
    close(expected, gathered)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(a, b)  # what was given is not consumed


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("zb-v", 2), ("1f1b", 1)])
def test_an_odd_signature(schedule: str, ranks: int, tmp_path: Path):
    """Named data, a dictionary of results, and leaves of the state that nothing reads."""
    state, data = odd_arguments()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), (state, data))
    exported = export.export(jax.jit(odd_step))(shapes[0], **shapes[1])
    request = ExpansionRequest(schedule, ranks, load_hardware("h100"))
    made = expand_mpmd(artifact.from_exported(exported), request)
    write(tmp_path / "set", made.manifest, made.modules)
    with mpmd.load(tmp_path / "set") as job:
        assert set(job.data_spec) == {"['batch']['x']", "['batch']['y']", "['rate']"}
        going, expected = job.init(state), state
        for _ in range(3):
            going, results = job.step(going, **data)
            answer = jax.jit(odd_step)(expected, **data)
            expected = answer["state"]
            assert set(results) == {"['loss']", "['next_rate']"}
            np.testing.assert_array_equal(results["['loss']"], answer["loss"])
        found = job.gather(going)
        job.save(tmp_path / "checkpoint", going)
        again = job.gather(job.restore(tmp_path / "checkpoint"))
    for tree in (found, again):
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(tree), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), b)


STEP = Step(microbatches=4)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> mpmd.Job:
    """A job of two ranks."""
    return mpmd.load(write_set(tmp_path_factory.mktemp("set"), STEP, "1f1b", 2))


def test_what_a_job_says(job: mpmd.Job):
    assert job.ranks == (0, 1)
    assert job.carried["[0]['words']"] == "[0]['words']"
    assert all(result == argument for result, argument in job.carried.items())
    need = job.data_spec["[2]"]
    assert need.type == "tensor<8x5xi32>"
    assert set(need.rows) == {0, 1}


def test_checkpoints_are_the_originals(job: mpmd.Job, tmp_path: Path):
    """Written by one set, read by the original and by a set of another schedule and more ranks."""
    from orbax import checkpoint as orbax

    expected, losses = trained(STEP, STEPS)
    state = job.init(*first_state(STEP))
    data = list(batches(STEP, STEPS))
    for tokens in data[:2]:
        state, _ = job.step(state, tokens)
    job.save(tmp_path / "at_2", state)
    restored = orbax.PyTreeCheckpointer().restore(tmp_path / "at_2")
    leaves = jax.tree.leaves(restored)
    weights, optimizer = first_state(STEP)
    like = jax.tree.structure((weights, optimizer))
    assert len(leaves) == like.num_leaves
    close(job.gather(state), jax.tree.unflatten(like, leaves))
    with pytest.raises(ToolError, match="a checkpoint never overwrites another"):
        job.save(tmp_path / "at_2", state)
    with mpmd.load(write_set(tmp_path, STEP, "zb-v", 3)) as other:
        going = other.restore(tmp_path / "at_2", step=2)
        for number, tokens in enumerate(data[2:], start=2):
            going, results = other.step(going, tokens)
            assert float(results["[2]"]) == pytest.approx(losses[number], rel=2e-5)
        assert going.step == STEPS
        close(jax.tree.leaves(expected), jax.tree.leaves(other.gather(going)))
    with pytest.raises(ToolError, match=r"checkpoint .*nowhere.* does not exist"):
        job.restore(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ToolError, match="is not a readable checkpoint"):
        job.restore(tmp_path / "empty")


def test_what_does_not_fit_is_refused_before_anything_runs(job: mpmd.Job):
    weights, optimizer = first_state(STEP)
    (tokens,) = batches(STEP, 1)
    with pytest.raises(ToolError, match=r"the state has the arguments \[0\], \[1\]"):
        job.init(weights)
    with pytest.raises(ToolError, match=r"\[0\]\['words'\] is missing from the state"):
        job.init({"layers": weights["layers"]}, optimizer)
    with pytest.raises(ToolError, match=r"\[0\]\['words'\] is float32\[3\]"):
        job.init({**weights, "words": np.zeros(3, np.float32)}, optimizer)
    state = job.init(weights, optimizer)
    for wrong in (tokens[:3], tokens.astype(np.float32)):
        with pytest.raises(ToolError, match=r"\[2\] is \w+\[\d+, 5\], but the set has tensor"):
            job.step(state, wrong)
    with pytest.raises(ToolError, match=r"a step takes the arguments \[2\]"):
        job.step(state)
    with pytest.raises(ToolError, match=r"rank 0 reads \[2\], which is missing"):
        job.step(state, None)
    after, results = job.step(state, tokens)  # the state has stayed
    with pytest.raises(ToolError, match="a step consumed this state"):
        job.step(state, tokens)
    with pytest.raises(KeyError, match=r"there is no result \[7\]: \[2\]"):
        results["[7]"]
    assert job.share(results).keys() == {"[2]"}
    assert after.step == 1


def test_a_job_that_is_closed_does_nothing(tmp_path: Path):
    with mpmd.load(write_set(tmp_path, STEP, "1f1b", 1)) as job:
        state = job.init(*first_state(STEP))
    with pytest.raises(ToolError, match="this job is closed"):
        job.step(state, *batches(STEP, 1))


def test_a_set_for_more_devices_than_there_are(tmp_path: Path):
    step = Step(microbatches=4, devices=8)
    with pytest.raises(ToolError, match="this process has 8 devices, but the set is for 16"):
        mpmd.load(write_set(tmp_path, step, "1f1b", 2))


def test_functions_are_compiled_once(tmp_path: Path):
    """A second load takes them from jax's compilation cache, by their content."""
    path = write_set(tmp_path, STEP, "1f1b", 2)
    kept = jax.config.jax_compilation_cache_dir
    from jax._src import compilation_cache

    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
        compilation_cache.reset_cache()
        mpmd.load(path)
        count = len(list((tmp_path / "cache").glob("stablehlo-tools-*-cache")))
        assert count > 0
        with mpmd.load(path) as job:
            _, results = job.step(job.init(*first_state(STEP)), *batches(STEP, 1))
            assert float(results["[2]"]) == pytest.approx(trained(STEP, 1)[1][0], rel=2e-5)
        assert len(list((tmp_path / "cache").glob("stablehlo-tools-*-cache"))) == count
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        compilation_cache.reset_cache()

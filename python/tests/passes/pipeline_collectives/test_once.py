"""pipeline-collectives direction=once: weights gathered and gradients reduced once for all."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import microbatch_programs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.export import Exported
from kept_values import assert_kept, compared
from models.zoo import ZOO
from random_branches import random_branching_program
from random_nested import random_nested_program
from test_pipeline_collectives_repeated import executed

import stablehlo_tools
from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.pipeline import Pipeline

SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
MODEL = "decoder-2d-scan-step"


def run(program: Artifact, text: str) -> list[list[bytes]]:
    """What four devices give, each for small whole numbers of its own."""
    there = jax.devices()[:4]
    rng = np.random.default_rng(0)
    signature = text[text.index("@main(") : text.index(") -> ")]
    shapes = [
        [int(n) for n in s.split("x")] for s in re.findall(r"tensor<([\dx]+)xf32>", signature)
    ]
    given = [[rng.integers(-2, 3, s).astype(np.float32) for _ in there] for s in shapes]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module), 1, 4, there, partitioned=False
    )
    results = bindings.run_on_devices(executable, given, there)
    return [[(np.asarray(part) + 0.0).tobytes() for part in parts] for parts in results]


def moved(text: str, options: str) -> tuple[Artifact, list[str]]:
    """The program after the pass, and what that said."""
    program, diagnostics = artifact.parse(text.encode()), Diagnostics()
    steps = f"pipeline-collectives{{{options} explain=true}}"
    Pipeline.parse(steps).run(program.module, diagnostics, None)
    program.module.operation.verify()
    return program, [str(each.message) for each in diagnostics.collected]


def check(chosen: random.Random) -> None:
    """All sums are of small whole numbers, so that their order does not matter."""
    text = random_nested_program(chosen)
    check_kept(text, chosen.choice(["once", "once", "sink", "auto"]))


def check_kept(text: str, direction: str) -> None:
    after, _ = moved(text, f"direction={direction}")
    before = artifact.parse(text.encode())
    if artifact.to_text(after.module) != artifact.to_text(before.module):
        assert run(before, text) == run(after, text), f"{direction}\n{text}"


@settings(max_examples=12, suppress_health_check=SLOW, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_nested_loops_keep_their_values(seed: int):
    check(random.Random(seed))


@pytest.mark.soak
@settings(max_examples=600, suppress_health_check=SLOW)
@given(st.integers(0, 2**32))
def test_random_nested_loops_keep_their_values_soak(seed: int):
    check(random.Random(seed))


def test_most_random_nested_loops_are_rewritten():
    texts = [random_nested_program(random.Random(seed)) for seed in range(40)]
    notes = [moved(text, "direction=once")[1] for text in texts]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert any(n.startswith(f"{kind} runs once") for each in notes for n in each), kind
    assert sum(any("runs once" in note for note in each) for each in notes) > len(notes) / 2


@settings(max_examples=25, suppress_health_check=SLOW, derandomize=True)
@given(st.integers(0, 2**32))
def test_what_branches_add_up_keeps_its_values(seed: int):
    check_kept(random_branching_program(random.Random(seed)), "once")


@pytest.mark.soak
@settings(max_examples=600, suppress_health_check=SLOW)
@given(st.integers(0, 2**32))
def test_what_branches_add_up_keeps_its_values_soak(seed: int):
    check_kept(random_branching_program(random.Random(seed)), "once")


def test_branches_gather_before_the_loop_and_reduce_behind_it():
    texts = [random_branching_program(random.Random(seed)) for seed in range(40)]
    notes = [{note.split(",")[0] for note in moved(text, "direction=once")[1]} for text in texts]
    counts = Counter(note for each in notes for note in each if "runs once" in note)
    for kind, least in (("all_gather", 15), ("all_reduce", 5), ("reduce_scatter", 5)):
        assert counts[f"{kind} runs once"] >= least, (kind, counts)


def by_table(groups: str) -> str:
    """A program whose devices 0 and 1 add to other rows than 2 and 3, and reduce in `groups`."""
    for seed in range(1000):
        text = random_nested_program(random.Random(seed))
        tables = re.findall(r"dense<\[\[([\d, ]*)\], \[([\d, ]*)\]\]> : tensor<2x\dxi32>", text)
        differs = tables[0][0] != tables[0][1] and "%chunk = stablehlo.add %v" in text
        if f"dense<{groups}>" in text and differs:
            return text
    raise AssertionError("no such program")


def test_devices_that_add_to_other_rows_are_not_summed_together():
    _, alike = moved(by_table("[[0, 1], [2, 3]]"), "direction=sink")
    _, mixed = moved(by_table("[[0, 2], [1, 3]]"), "direction=sink")
    said = "the devices of a group are not known to add to the same row"
    assert any("on the sums of its operands, in rows" in note for note in alike)
    assert any(said in note for note in mixed)


def test_a_second_run_changes_nothing():
    for seed in range(20):
        once, _ = moved(random_nested_program(random.Random(seed)), "direction=once")
        text = artifact.to_text(once.module)
        assert artifact.to_text(moved(text, "direction=once")[0].module) == text


@cache
def transformed(pipeline: str, **options: Any) -> tuple[Exported, Exported]:
    """A small decoder's training step in a loop over microbatches, before and after."""
    program = ZOO[MODEL].build(optimizer="sgd", **options)
    assert isinstance(program, Exported)
    before = stablehlo_tools.transform(program, f"{pipeline},partition,create-reduce-scatter")
    return before, stablehlo_tools.transform(before, "pipeline-collectives{direction=once}")


ACCUMULATED = ("accumulate-gradients{microbatches=4}", {"fsdp": 4, "model": 2, "batch": 16})
PIPELINES = {"stage": 2, "fsdp": 2, "model": 2, "layers": 4}


@pytest.mark.soak  # a quarter of a minute each; what forward and backward share is run below
@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        ACCUMULATED,
        ("expand-pipeline{microbatches=4 schedule=1f1b repeats=2}", PIPELINES),
        ("expand-pipeline{microbatches=4 schedule=gpipe}", PIPELINES),
        ("expand-pipeline{microbatches=4 schedule=circular repeats=2}", PIPELINES),
    ],
)
def test_a_model_keeps_its_values(pipeline: str, options: dict[str, Any]):
    before, after = transformed(pipeline, **options)
    assert_kept(compared(before, after, ZOO[MODEL].arguments(optimizer="sgd", **options)))


def sent(program: Exported, kind: str) -> int:
    """Bytes that a kind of collective makes on a device in a run."""
    found = executed(program)
    return sum(times * (size or 0) for (each, size), times in found.items() if each == kind)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_weights_are_gathered_and_gradients_reduced_once(kind: str):
    before, after = transformed(ACCUMULATED[0], **ACCUMULATED[1])
    assert sent(after, kind) < 0.8 * sent(before, kind)


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"remat": True, "unroll": 2}])
def test_forward_and_backward_share_what_they_gather(options: dict[str, Any]):
    """Also behind the barriers of jax.checkpoint: one gather of each of two stacks is left, and in
    a loop over pairs of layers of each half of them."""
    before = microbatch_programs.exported(**options)
    after = stablehlo_tools.transform(before, "pipeline-collectives{direction=once}")
    text = str(after.mlir_module())
    gathers = 2 * options.get("unroll", 1)
    assert text[: text.index("stablehlo.while")].count("stablehlo.all_gather") == gathers
    assert text.count("stablehlo.all_gather") == gathers
    rng = np.random.default_rng(0)
    arguments = jax.tree.map(
        lambda aval: rng.normal(size=aval.shape).astype(np.float32),
        before.in_tree.unflatten(before.in_avals)[0],
    )
    assert_kept(compared(before, after, arguments))


@pytest.mark.parametrize(("limit", "fits"), [("", True), (" memory-limit=0.000001", False)])
@pytest.mark.parametrize("is_model", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_auto_takes_what_pays_and_memory_holds(is_model: bool, limit: str, fits: bool):
    """On a machine of the slowest links, so that gathers are worth their memory."""
    before = (
        transformed(ACCUMULATED[0], **ACCUMULATED[1])[0]
        if is_model
        else microbatch_programs.exported()
    )
    steps = f"pipeline-collectives{{hardware=tpu-v5e{limit}}}"
    after = stablehlo_tools.transform(before, steps)
    assert (sent(after, "all_gather") < sent(before, "all_gather")) is fits

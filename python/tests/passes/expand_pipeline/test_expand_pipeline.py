"""expand-pipeline on whole programs: values, what is sent, bytes, and idle ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept
from models.zoo import LAYER_SCANS, programs
from pipeline_checks import Sent, collectives_after_partition, loops, reference
from soaking import one_in

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError


class Run(NamedTuple):
    """A program of the zoo with options of its own, and options of the pass."""

    name: str
    pipeline: str
    program: Mapping[str, Any] = MappingProxyType({})

    @property
    def id(self) -> str:
        """What the test is called."""
        changed = [f"{key}={value}" for key, value in self.program.items()]
        return " ".join([self.name, *changed, self.pipeline])


GPIPE = "microbatches=4"
CIRCULAR = "microbatches=4 schedule=circular repeats=2"
ONE = "microbatches=4 schedule=1f1b"
INTERLEAVED = "microbatches=4 schedule=1f1b repeats=2"
EAGER = "microbatches=4 schedule=eager-1f1b"
# What is forward alone is the same ops on fewer samples: no bit changes.
BITWISE = [
    Run("mlp-forward", GPIPE),
    Run("mlp-forward", CIRCULAR),
    Run("uneven-forward", GPIPE),
    Run("reverse-forward", CIRCULAR),
    Run("encoder-decoder-forward", GPIPE),
]
CLOSE = [
    *(Run("mlp-gradients", pipeline) for pipeline in (GPIPE, CIRCULAR, ONE, INTERLEAVED)),
    Run("mlp-gradients", f"{ONE} skip=false"),
    Run("mlp-gradients", EAGER),
    Run("time-major-gradients", f"{EAGER} repeats=2"),
    Run("mlp-gradients", f"{GPIPE} skip=true"),
    Run("mlp-gradients", INTERLEAVED, {"layers": 11}),
    Run("twelve-gradients", "microbatches=6 schedule=1f1b"),
    Run("twelve-gradients", "microbatches=3 schedule=circular repeats=2"),
    Run("time-major-gradients", ONE),
    Run("read-twice-gradients", ONE),
    Run("mlp-gradients", ONE, {"form": "reverse"}),
    Run("decode-forward", GPIPE),
    Run("accumulate-fori-step", ONE),
    Run("two-stacks-gradients", INTERLEAVED, {"stage": 2}),
    Run("encoder-decoder-gradients", ONE, {"stage": 2}),
    Run("mlp-gradients", ONE, {"dtype": "bfloat16"}),
]


def transformed(before: Exported, options: str) -> Exported:
    """The pipeline of a program, with explicit collectives, as other axes of a mesh need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stablehlo_tools.transform(before, f"expand-pipeline{{{options}}},partition")


def after(run: Run) -> Exported:
    """The program with the pass applied."""
    return transformed(LAYER_SCANS[run.name].build(**run.program), run.pipeline)


@pytest.mark.parametrize("run", BITWISE, ids=lambda run: run.id)
def test_forwards_keep_every_bit(run: Run):
    known = reference(LAYER_SCANS[run.name], **run.program)
    assert_kept(known.compared(after(run)), bitwise=True)


@pytest.mark.parametrize("run", one_in(3, CLOSE), ids=lambda run: run.id)
def test_values_are_as_exact_as_before(run: Run):
    known = reference(LAYER_SCANS[run.name], **run.program)
    assert_kept(known.compared(after(run)))


@pytest.mark.parametrize(("then", "asked"), [("", True), (",partition", False)])
def test_partition_is_asked_for_where_it_does_not_follow(then: str, asked: bool):
    before = LAYER_SCANS["time-major-gradients"].build(data=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stablehlo_tools.transform(before, f"expand-pipeline{{{ONE}}}{then}")
    assert any("run partition after this pass" in str(each.message) for each in said) == asked


@pytest.mark.parametrize(
    ("options", "kind"),
    [(GPIPE, AxisType.Auto), (INTERLEAVED, AxisType.Explicit)],
    ids=["gpipe auto", "interleaved-1f1b explicit"],
)
def test_weights_that_both_ends_and_every_layer_use(options: str, kind: AxisType):
    def loss(weights: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            return jnp.tanh(h @ w + h @ weights["shared"]), None

        hidden, _ = lax.scan(layer, batch @ weights["tied"], weights["layers"])
        return jnp.square(hidden @ weights["tied"].T - batch).mean()

    random = np.random.default_rng(0)
    sizes = {"layers": (8, 8, 8), "shared": (8, 8), "tied": (8, 8)}
    arrays = {name: random.normal(size=size).astype("f4") for name, size in sizes.items()}
    arguments = (arrays, random.normal(size=(8, 8)).astype("f4"))
    before = for_stages(jax.value_and_grad(loss), *arguments, kind=kind)
    assert_kept(Known.of(before, arguments).compared(transformed(before, options)))


def for_stages(
    function: Callable[..., Any], *arguments: Any, kind: AxisType = AxisType.Auto
) -> Exported:
    """A function exported for four stages, everything on all of them."""
    whole = NamedSharding(AbstractMesh((4,), ("stage",), axis_types=(kind,)), P())
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arguments
    )
    return export.export(jax.jit(function))(*shapes)


@pytest.mark.parametrize("options", [GPIPE, ONE])
def test_of_a_mask_that_all_samples_share_only_one_is_brought_in(options: str):
    def loss(weights: Any, batch: Any) -> Any:
        mask = jnp.tril(jnp.ones((8, 8), bool))

        def layer(h: Any, w: Any) -> tuple[Any, None]:
            scores = jnp.where(mask, h @ w @ h.mT, -1e9)
            return h + jax.nn.softmax(scores) @ h, None

        return jnp.square(lax.scan(layer, batch, weights)[0]).mean()

    random = np.random.default_rng(0)
    # Scores near 1: of larger ones the softmax has gradients that rounding decides.
    shapes = ((8, 4, 4), (16, 8, 4))
    arguments = [(0.5 * random.normal(size=size)).astype("f4") for size in shapes]
    before = for_stages(jax.value_and_grad(loss), *arguments)
    after = stablehlo_tools.transform(before, f"expand-pipeline{{{options}}}")
    taken = " ".join(re.findall(r"\} : \((.*?)\) -> ", after.mlir_module()))
    assert "tensor<8x8xi1>" in taken
    assert "tensor<16x8x8x" not in taken
    assert_kept(Known.of(before, arguments).compared(transformed(before, options)))


def test_shardings_in_types_are_no_hindrance():
    def forward(weights: Any, batch: Any) -> Any:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, weights)[0]

    random = np.random.default_rng(0)
    arguments = [random.normal(size=size).astype("f4") for size in ((8, 8, 8), (8, 8))]
    before = for_stages(forward, *arguments, kind=AxisType.Explicit)
    assert_kept(Known.of(before, arguments).compared(transformed(before, GPIPE)), bitwise=True)


# Programs whose stages are too many for two chunks on each, in the form that the zoo has them in.
FEWER_STAGES: dict[str, dict[str, Any]] = {
    "raw-gradients": {"stage": 4},
    "remainder-forward": {"stage": 2, "layers": 12},
    "remainder-gradients": {"stage": 2, "layers": 12},
    **{
        f"{name}-{kind}": {"stage": 2}
        for name in ("unrolled", "encoder-decoder", "two-stacks", "nested", "paired", "uneven")
        for kind in ("forward", "gradients")
    },
}
# One set of weights for all layers: no rank has layers of its own.
UNIVERSAL = {"universal-forward", "universal-gradients"}
# A loss that reads what the forward leaves of each layer.
NOT_IN_TURN = {"hidden-states-gradients"}


def soaked() -> list[Any]:
    """Every program that can be a pipeline, on each schedule that it can have."""
    found: list[Any] = []
    cases = programs(layer_scan=True, refused=False)
    for case, options in product(cases, (GPIPE, CIRCULAR, ONE, INTERLEAVED)):
        name = case.name
        no_turns = "waits" in case.tags or not case.training or name in NOT_IN_TURN
        if name in UNIVERSAL or ("1f1b" in options and (no_turns or "evaluation" in name)):
            continue
        run = Run(name, options, FEWER_STAGES.get(name, {}))
        found.append(pytest.param(run, id=run.id))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("run", soaked())
def test_every_program_on_every_schedule(run: Run):
    known = reference(LAYER_SCANS[run.name], **run.program)
    assert_kept(known.compared(after(run)))


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 3, 5, 6])
@pytest.mark.parametrize("schedule", ["gpipe", "circular repeats=3", "1f1b", "1f1b repeats=3"])
def test_every_size(stage: int, microbatches: int, schedule: str):
    program = {"stage": stage, "batch": 30, "layers": 25, "staged": False}
    run = Run("mlp-gradients", f"microbatches={microbatches} schedule={schedule}", program)
    assert_kept(reference(LAYER_SCANS[run.name], **program).compared(after(run)))


@pytest.mark.parametrize("options", [GPIPE, CIRCULAR, ONE])
def test_activations_are_sent_and_weights_stay(options: str):
    before = LAYER_SCANS["mlp-gradients"].build(data=2)
    expanded = collectives_after_partition(transformed(before, options), "cse")
    along = [sent for sent in expanded if "stage" in sent.axes]
    in_ticks = [sent for sent in along if sent.depth]
    assert Counter(sent.kind for sent in in_ticks) == {"collective_permute": 2}
    assert {sent.operands for sent in in_ticks} == {((1, 16),)}, "a sample of a microbatch each"
    assert Counter(map(_steps, in_ticks)) == {1: 1, -1: 1}
    assert "all_gather" not in {sent.kind for sent in along}
    assert "all_gather" in {sent.kind for sent in collectives_after_partition(before)}


def _steps(sent: Sent) -> int:
    """By how many ranks of four a ring goes on, the data axis being the inner one."""
    (step,) = {(target - source) // 2 % 4 for source, target in sent.groups}
    return step if step < 2 else step - 4


def test_ticks_and_layers_are_those_of_the_schedule():
    before = LAYER_SCANS["mlp-gradients"].build()
    found = {
        options: [[loop.trips, *(inner.trips for inner in loop.inner)] for loop in loops(program)]
        for options in (GPIPE, CIRCULAR, ONE)
        for program in [_expanded(before, options)]
    }
    assert found == {
        GPIPE: [[4 + 3, 2], [4 + 3, 2]],
        CIRCULAR: [[2 * 4 + 3, 1], [2 * 4 + 3, 1]],
        ONE: [[2 * (4 + 3), None, None]],
    }


def _expanded(before: Exported, options: str) -> Exported:
    return stablehlo_tools.transform(before, f"expand-pipeline{{{options}}}")


def test_ranks_without_work_run_no_layers():
    """The trips of the loop over a rank's layers are then known only where it runs."""
    before = LAYER_SCANS["mlp-forward"].build()
    found = {
        skip: [
            inner.trips
            for loop in loops(_expanded(before, f"microbatches=4 skip={skip}"))
            for inner in loop.inner
        ]
        for skip in ("true", "false")
    }
    assert found == {"true": [None], "false": [2]}


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("batch-norm-forward", GPIPE, r"stablehlo\.reduce mixes samples .*\(P4\)"),
        ("balanced-experts-gradients", GPIPE, r"\(P4\)"),
        ("dynamic-depth-forward", GPIPE, r"\(P2\)"),
        ("until-settled-forward", GPIPE, r"\(P2\)"),
        ("by-outputs-gradients", ONE, r"combines all samples .*\(P7\)"),
        ("mlp-forward", ONE, r"\(P7\)"),
        ("mlp-gradients", "microbatches=3", r"\(P3\)"),
        ("mlp-gradients", "microbatches=4 schedule=circular repeats=4", r"\(P2\)"),
        ("mlp-gradients", "axis=pipe", r"'pipe' of at least two ranks \(P1\)"),
        ("mlp-gradients", "microbatches=4 repeats=2", r"\(P5\)"),
    ],
)
def test_what_is_refused_is_named(name: str, options: str, told: str):
    with pytest.raises(ToolError, match=told):
        _expanded(LAYER_SCANS[name].build(), options)


def test_what_mixes_samples_is_found_in_the_source():
    with pytest.raises(ToolError) as refused:
        _expanded(LAYER_SCANS["batch-norm-forward"].build(), GPIPE)
    assert "layer_scan/variants.py" in str(refused.value)
    assert "in batch_norm" in str(refused.value)


def test_a_microbatch_that_the_data_axis_does_not_divide_is_warned_of():
    before = LAYER_SCANS["mlp-forward"].build(stage=2, data=4)
    with pytest.warns(UserWarning, match="divided over 4 devices .* a microbatch has 2 samples"):
        _expanded(before, GPIPE)


def test_two_runs_give_the_same_bytes(tmp_path: Path):
    given = tmp_path / "before.jax_export"
    given.write_bytes(bytes(LAYER_SCANS["mlp-gradients"].build().serialize()))
    made: set[bytes] = set()
    for seed in ("1", "2"):
        out = tmp_path / f"after{seed}.jax_export"
        done = _opt([given, "-p", f"expand-pipeline{{{ONE}}}", "-o", out], PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        made.add(out.read_bytes())
    assert len(made) == 1


def test_many_sums_of_the_head_come_in_one_order():
    before, kept = LAYER_SCANS["penalty-gradients"].build(), list[list[object]]()
    made: set[str] = set()
    for count in (17, 1017, 2017, 3017):
        kept.append([object() for _ in range(count)])  # other addresses for what is made then
        made.add(transformed(before, ONE).mlir_module())
    assert len(made) == 1


def test_a_refusal_writes_no_file(tmp_path: Path):
    given, out = tmp_path / "before.jax_export", tmp_path / "after.jax_export"
    given.write_bytes(bytes(LAYER_SCANS["batch-norm-forward"].build().serialize()))
    done = _opt([given, "-p", f"expand-pipeline{{{GPIPE}}}", "-o", out])
    assert done.returncode == 2
    assert "error: expand-pipeline: stablehlo.reduce mixes samples" in done.stderr
    assert not out.exists()


def _opt(words: list[Any], **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from stablehlo_tools.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "opt", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )

"""jax's explicit asynchronous collectives, which are pairs of custom calls, in every analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from async_call_programs import KINDS, REDUCING, config, done, module, pairs, start
from jax import export
from jax._src.lax import parallel
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.liveness import dead_collectives, live_values
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.artifacts.program_set import JobOptions, read_programs
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.async_calls import (
    find_async_starts,
    is_waited_for_beside,
    lower_async_calls,
)
from stablehlo_tools.order.order_findings import OrderFinding
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package
from stablehlo_tools.transforms import schedule_overlap
from stablehlo_tools.transforms.keep_alive import keep_alive

each_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target,
            id=target.value,
            marks=pytest.mark.skipif(
                missing_package(target) is not None, reason="the compiler is not installed"
            ),
        )
        for target in Target
    ],
)
UNCHECKED = [
    export.DisabledSafetyCheck.custom_call(f"{kind}-{end}")
    for kind in KINDS
    for end in ("start", "done")
]
STABLEHLO = {kind: kind.replace("-", "_") for kind in KINDS}


def read(text: str) -> Artifact:
    return artifact.parse(text.encode(), "program.mlir")


def finding(tmp_path: Path, *texts: str) -> OrderFinding | None:
    """What check-order finds of programs for equal parts of a job."""
    paths = [tmp_path / f"{number}.mlir" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return decide(read_programs([str(path) for path in paths], JobOptions())).finding


def exported_kinds() -> Artifact:
    """All five kinds, by jax itself."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def local(a: Any) -> Any:
        a = parallel.psum_scatter_start(a, "x", tiled=True).done()
        a = parallel.all_gather_start(jnp.tanh(a), "x", tiled=True, axis=1).done()
        a = parallel.psum_start(jnp.sin(a), ("x", "y")).done()
        a = parallel.all_to_all_start(jnp.cos(a), "y", 0, 1, tiled=True).done()
        return parallel.ppermute_start(a, "x", [(0, 1), (1, 0)]).done()

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y")))
    given = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    return artifact.from_exported(export.export(step, disabled_checks=UNCHECKED)(given))


def test_what_jax_writes_is_understood() -> None:
    loaded = exported_kinds()
    collectives = find_collectives(loaded.module)
    facts = ModuleFacts.from_module(loaded.module, collectives)
    assert [each.kind for each in collectives] == [
        *("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "collective_permute")
    ]
    assert all(each.is_async and each.channel_id == 1 for each in collectives)
    assert [facts.groups(each) for each in collectives] == [
        ((0, 2), (1, 3)),
        ((0, 2), (1, 3)),
        ((0, 1, 2, 3),),
        ((0, 1), (2, 3)),
        ((0, 2), (2, 0), (1, 3), (3, 1)),
    ]
    assert [each.reduction for each in collectives] == ["add", None, "add", None, None]
    assert (collectives[0].bytes_in, collectives[0].bytes_out) == (8 * 4 * 4, 4 * 4 * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_what_its_plain_form_is(kind: str) -> None:
    loaded = read(pairs(kind))
    (pair,) = find_collectives(loaded.module)
    lowered = loaded.copy()
    lower_async_calls(lowered.module)
    (plain,) = find_collectives(lowered.module)
    assert "custom_call" not in str(lowered.module)
    assert (pair.kind, plain.kind) == (STABLEHLO[kind],) * 2
    assert dict(pair.inner.attributes.items()) == dict(plain.inner.attributes.items())
    assert pair.reduction == plain.reduction
    assert pair.group_mode is plain.group_mode


@pytest.mark.parametrize("form", ArtifactForm)
def test_the_text_is_kept(form: ArtifactForm) -> None:
    loaded = exported_kinds() if form is ArtifactForm.JAX_EXPORT else read(pairs(*KINDS))
    text = artifact.to_text(loaded.module)
    again = artifact.parse(artifact.encode(loaded, form))
    assert artifact.to_text(again.module) == text


@pytest.mark.parametrize("apart", [True, False])
def test_opposite_orders_may_deadlock(tmp_path: Path, apart: bool) -> None:
    one = pairs("reduce-scatter", "all-gather", apart=apart)
    other = pairs("all-gather", "reduce-scatter", apart=apart)
    found = finding(tmp_path, one, other)
    assert found is not None
    assert found.rule == "conflicting-order"
    again = finding(tmp_path, one, one)
    assert again is not None
    assert again.rule == "unordered"
    assert finding(tmp_path, one) is None


def test_a_value_orders_them(tmp_path: Path) -> None:
    lines = [start("all-reduce", "%f", "%x"), done("all-reduce", "%s", "%f")]
    lines += [start("all-gather", "%g", "%s"), done("all-gather", "%r", "%g")]
    text = module("\n".join(lines), "%r", "tensor<4x4xf32>")
    assert finding(tmp_path, text, text) is None


def test_another_kind_or_group_is_a_mismatch(tmp_path: Path) -> None:
    found = finding(tmp_path, pairs("all-reduce"), pairs("collective-permute"))
    assert found is not None
    assert found.verdict.value == "mismatch"


def test_one_whose_result_nobody_uses_is_deleted() -> None:
    text = module(start("all-reduce", "%f", "%x"), "%x", "tensor<2x4xf32>")
    (dead,) = dead_collectives(read(text).module)
    assert dead.kind == "all_reduce"
    compiled = compile_artifact(read(text), Target.CPU)
    assert compiled.order.deleted == (0,)


BROKEN = {
    "is invalid JSON": "{",
    "is not a JSON object": "[1]",
    "nested too deep": "[" * 100_000,
    "must have replica_groups": config("all-reduce", replica_groups=None),
    "lists of ids": config("all-reduce", replica_groups=[["0"]]),
    "channel_id, a number": config("all-reduce", channel_id=True),
    "has unknown entries": config("all-reduce", unheard_of=1),
}


@pytest.mark.parametrize("told", BROKEN)
def test_a_configuration_that_is_not_understood_is_refused(told: str) -> None:
    line = start("all-reduce", "%f", "%x", BROKEN[told])
    text = module("\n".join([line, done("all-reduce", "%r", "%f")]), "%r", KINDS["all-reduce"][1])
    with pytest.raises(ToolError, match=told) as caught:
        find_collectives(read(text).module)
    assert "all-reduce-start" in str(caught.value)
    assert caught.value.diagnostic.place.line == 7


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_do_not_fit_are_refused(kind: str) -> None:
    given, made = KINDS[kind]
    text = pairs(kind).replace(f"({given}) -> {made}", f"({given}) -> tensor<3x4xf32>", 1)
    text = text.replace(f"({made}) -> {made}", "(tensor<3x4xf32>) -> tensor<3x4xf32>")
    text = text.replace(f"(tensor<2x4xf32>) -> {made}", "(tensor<2x4xf32>) -> tensor<3x4xf32>")
    text = text.replace(f"-> ({made})", "-> (tensor<3x4xf32>)").replace(
        f"%d0 : {made}", "%d0 : tensor<3x4xf32>"
    )
    with pytest.raises(ToolError, match=f"{kind}-start"):
        find_collectives(read(text).module)


@pytest.mark.parametrize("kind", REDUCING)
def test_what_it_reduces_with_has_to_be_known(kind: str) -> None:
    text = pairs(kind).replace("called_computations = [@sum], ", "")
    with pytest.raises(ToolError, match="that returns one, the reduction"):
        find_collectives(read(text).module)


def test_a_done_has_a_start_of_its_kind() -> None:
    stray = [start("all-reduce", "%f", "%x"), done("collective-permute", "%r", "%f")]
    with pytest.raises(ToolError, match='collective-permute-done" must wait for'):
        find_collectives(read(module("\n".join(stray), "%r", "tensor<2x4xf32>")).module)
    of_sum = ["%f = stablehlo.add %x, %y : tensor<2x4xf32>", done("all-reduce", "%r", "%f")]
    with pytest.raises(ToolError, match=r"its operand is the result of stablehlo\.add"):
        find_collectives(read(module("\n".join(of_sum), "%r", "tensor<2x4xf32>")).module)


@pytest.mark.filterwarnings("ignore:.*now comes before:UserWarning")
@each_target
def test_compilers_schedule_what_is_the_programs_own(target: Target) -> None:
    text = pairs("collective-permute", "all-gather", "all-reduce")
    loaded = read(text.replace("4xf32", "1024xf32"))
    compiled = compile_artifact(transforming.transform(loaded, "thread-tokens"), target)
    ids = [event.ids for event in compiled.schedule.events if event.issues]
    assert ids == [(0,), (1,), (2,)]
    assert compiled.order.same_order


def test_generated_tests_show_them(tmp_path: Path) -> None:
    program, test = tmp_path / "program.mlir", tmp_path / "test.mlir"
    program.write_text(pairs("all-gather"))
    assert main(["make-test", str(program), "-p", "thread-tokens", "-o", str(test)]) == 0
    checks = [line for line in test.read_text().splitlines() if line.startswith("// CHECK")]
    assert any("all-gather-start" in line for line in checks)
    assert any("all-gather-done" in line for line in checks)


def test_no_pass_puts_a_barrier_on_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers end their process at one; the done is what may wait."""
    monkeypatch.setattr(schedule_overlap, "_WORTH", float("inf"))
    loaded = read(scheduled_late())
    rewritten = transforming.transform(loaded, "schedule-overlap")
    barriers = [line for line in str(rewritten.module).splitlines() if "_barrier" in line]
    futures = [line.split()[0] for line in str(rewritten.module).splitlines() if '-start"' in line]
    assert barriers
    assert not any(future + "," in line for line in barriers for future in futures)


def scheduled_late() -> str:
    """Matrix products first, then the collectives that they could hide."""
    large = "tensor<4096x4096xf32>"

    def product(result: str, one: str, other: str) -> str:
        dims = "contracting_dims = [1] x [0]"
        return (
            f"{result} = stablehlo.dot_general {one}, {other}, {dims} "
            f": ({large}, {large}) -> {large}"
        )

    lines = [product("%m", "%y", "%y"), product("%n", "%m", "%y"), product("%o", "%n", "%y")]
    lines += [start("all-reduce", "%f", "%x"), done("all-reduce", "%d", "%f")]
    lines += [product("%q", "%o", "%d"), start("collective-permute", "%g", "%x")]
    lines += [done("collective-permute", "%e", "%g"), product("%r", "%q", "%e")]
    text = module("\n".join(lines), "%r", "tensor<2x4xf32>")
    return text.replace("tensor<2x4xf32>", large)


def test_a_use_is_made_of_the_done_and_not_of_the_future() -> None:
    lines = [start("all-reduce", "%f", "%x"), done("all-reduce", "%unused", "%f")]
    lines += ["%s = stablehlo.add %x, %y : tensor<2x4xf32>"]
    loaded = read(module("\n".join(lines), "%s", "tensor<2x4xf32>"))
    (dead,) = dead_collectives(loaded.module)
    keep_alive(dead, live_values(loaded.module))
    (start_op,) = find_async_starts(loaded.module)
    assert is_waited_for_beside(start_op)
    assert not dead_collectives(loaded.module)

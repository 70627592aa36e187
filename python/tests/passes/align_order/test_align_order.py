"""`align-order`: one order for programs compiled apart, the same values, and all files or none."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import order_models
import pytest
from models.zoo import SMALL
from order_cases import all_reduce, copies, main, read, rule, verdict
from order_models import DEVICES
from tree import FIXTURES

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.cli.main import main as run
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package
from stablehlo_tools.transforms.align_order import Aligned, align_order
from stablehlo_tools.transforms.thread_tokens import ThreadTokensPass
from stablehlo_tools.verify import Options as Trials
from stablehlo_tools.verify import verify_artifacts

TRUSTED = JobOptions(trust_partitioner=True)
TWICE = Trials(trials=2)
T = "tensor<4xf32>"
PAIR = FIXTURES / "torch_xla" / "deadlock_pair"


def aligned(artifacts: Sequence[Artifact], options: JobOptions = TRUSTED) -> Aligned:
    return align_order(ProgramJob(tuple(artifacts), options), ThreadTokensPass())


def kinds(loaded: Artifact) -> list[str]:
    return [collective.kind for collective in find_collectives(loaded.module)]


@pytest.mark.parametrize("name", ["independent", "permute-loop", "inner-functions", "llama-scan"])
def test_copies_of_a_model_come_into_one_order(name: str) -> None:
    built = SMALL[name].build()
    assert not isinstance(built, str)
    workers = copies(built, 2)
    assert rule(verdict(workers, TRUSTED)) != "ordered"
    workers = copies(built, 2)
    assert aligned(workers).finding is None
    assert rule(verdict(workers, TRUSTED)) == "ordered"
    assert artifact.to_text(workers[0].module) == artifact.to_text(workers[1].module)


@pytest.mark.parametrize("name", ["permute-loop", "inner-functions"])
def test_an_aligned_program_runs_on_all_devices_with_the_same_values(name: str) -> None:
    built = SMALL[name].build()
    assert not isinstance(built, str)
    before, after = copies(built, 1)[0], copies(built, 2)
    assert aligned(after).finding is None
    assert verify_artifacts(before, after[1], TWICE).same


def test_opposite_text_orders_come_into_one() -> None:
    one, other = (copies(order_models.both_orders(turned=turned), 1)[0] for turned in (False, True))
    assert kinds(one) == kinds(other)[::-1] == ["all_reduce", "reduce_scatter"]
    before = other.copy()
    assert aligned([one, other]).finding is None
    assert kinds(one) == kinds(other) == ["all_reduce", "reduce_scatter"]
    assert rule(verdict([one, other], TRUSTED)) == "ordered"
    assert verify_artifacts(before, other, TWICE).same


def test_a_chain_of_this_toolkit_is_put_in_anew() -> None:
    threaded = [
        copies(order_models.both_orders(turned=turned), 1, "thread-tokens")[0]
        for turned in (False, True)
    ]
    assert rule(verdict([loaded.copy() for loaded in threaded])) == "conflicting-order"
    assert aligned(threaded).finding is None
    assert rule(verdict(threaded)) == "ordered"


def test_composites_stay_composites() -> None:
    workers = copies(order_models.both_orders(turned=False), 2)
    job = ProgramJob(workers, TRUSTED)
    assert align_order(job, ThreadTokensPass(form="composite")).finding is None
    assert "stablehlo.composite" in artifact.to_text(workers[0].module)
    assert rule(verdict(workers)) == "ordered"


def test_aligning_twice_changes_nothing() -> None:
    workers = copies(order_models.both_orders(turned=False), 2)
    assert aligned(workers).finding is None
    once = artifact.to_text(workers[0].module)
    assert aligned(workers).finding is None
    assert artifact.to_text(workers[0].module) == once


def test_what_values_order_otherwise_cannot_be_aligned() -> None:
    gather = """%b = "stablehlo.all_gather"(%v) <{all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}>
        : (tensor<4xf32>) -> tensor<8xf32>"""
    half = "stablehlo.slice %b [0:4] : (tensor<8xf32>) -> tensor<4xf32>"
    one = f"{all_reduce('%a', '%x')}\n{gather.replace('%v', '%a')}\nreturn %b : tensor<8xf32>"
    other = f"{gather.replace('%v', '%x')}\n%c = {half}\n{all_reduce('%a', '%c')}\nreturn %a : {T}"
    found = aligned(
        read(
            main(one, arguments=f"%x: {T}", results="tensor<8xf32>"),
            main(other, arguments=f"%x: {T}", results=T),
        )
    )
    assert found.finding is not None
    assert found.finding.rule == "no-common-order"
    assert len(found.finding.sentences) == 2
    assert "in p0, all_gather at p0:" in found.finding.sentences[0]
    assert "is computed from all_reduce" in found.finding.sentences[0]


def test_what_is_missing_cannot_be_mended() -> None:
    workers = [*copies(order_models.chained(), 7), *copies(order_models.chained(extra=True), 1)]
    finding = aligned(workers).finding
    assert finding is not None
    assert finding.rule == "missing-collective"


DEAD = main(
    f"{all_reduce('%r', '%x')}\n{all_reduce('%s', '%y')}\nreturn %s, %z : {T}, tensor<KIND>",
    arguments=f"%x: {T}, %y: {T}, %z: tensor<KIND>",
    results=f"{T}, tensor<KIND>",
)
USED = DEAD.replace(
    "return %s, %z", "%u = stablehlo.multiply %r, %s : tensor<4xf32>\nreturn %u, %z"
)
# What is written in another way than the others: a boolean, a pair.
KINDS = [
    pytest.param(kind, marks=() if kind in ("i1", "complex<f32>") else pytest.mark.soak)
    for kind in ("f32", "f64", "bf16", "f8E4M3FN", "i32", "i4", "ui8", "i1", "complex<f32>")
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_collective_that_others_wait_for_is_kept_alive(kind: str) -> None:
    dead, used = read(DEAD.replace("KIND", kind), USED.replace("KIND", kind))
    before = dead.copy()
    assert rule(verdict([dead.copy(), used.copy()])) == "dead-collective"
    found = aligned([dead, used])
    assert found.finding is None
    ((name, warning),) = found.warnings
    assert name == "p0"
    assert "others wait for it, so a returned value now uses it" in warning.message
    assert rule(verdict([dead.copy(), used])) == "ordered"
    assert verify_artifacts(before, dead, TWICE).same


GATHERED = """
    %g = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}>
      : (tensor<2x3xKIND>) -> tensor<4x3xKIND>
    return RESULT"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_collective_of_any_type_is_kept_alive(kind: str) -> None:
    arguments, gathered = f"%x: tensor<2x3x{kind}>, %y: {T}", f"tensor<4x3x{kind}>"
    body = GATHERED.replace("KIND", kind)
    dead, used = read(
        main(body.replace("RESULT", f"%y : {T}"), arguments=arguments, results=T),
        main(
            body.replace("RESULT", f"%y, %g : {T}, {gathered}"),
            arguments=arguments,
            results=f"{T}, {gathered}",
        ),
    )
    before = dead.copy()
    assert aligned([dead, used]).finding is None
    assert compile_artifact(dead.copy(), "cpu").order.deleted == ()
    assert verify_artifacts(before, dead, TWICE).same


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("kind", ["f32", pytest.param("i1", marks=pytest.mark.soak)])
def test_what_is_kept_alive_is_alive_in_every_compiler(target: Target, kind: str) -> None:
    if missing_package(target) is not None:
        pytest.skip(f"{target.title} is not installed")
    dead, used = read(DEAD.replace("KIND", kind), USED.replace("KIND", kind))
    assert compile_artifact(dead.copy(), target).order.deleted == (0,)
    assert aligned([dead, used]).finding is None
    order = compile_artifact(dead, target).order
    assert (order.deleted, order.same_order) == ((), True)


def test_a_dead_collective_with_nothing_beside_it_is_refused() -> None:
    dead = f"{all_reduce('%r', '%x')}\nreturn %t : !stablehlo.token"
    used = f"{all_reduce('%r', '%x')}\nreturn %t, %r : !stablehlo.token, {T}"
    arguments, token = f"%x: {T}, %t: !stablehlo.token", "!stablehlo.token"
    programs = read(
        main(dead, arguments=arguments, results=token),
        main(used, arguments=arguments, results=f"{token}, {T}"),
    )
    with pytest.raises(ToolError, match="returns no tensor that could depend on it") as raised:
        aligned(programs)
    assert raised.value.input_name == "p0"


def test_the_pair_of_torch_xla_that_hangs() -> None:
    pair = [artifact.load(PAIR / f"notoken_r{rank}.mlir") for rank in (0, 1)]
    assert aligned(pair).finding is None
    assert rule(verdict(pair)) == "ordered"
    for rank, loaded in enumerate(pair):
        before = artifact.load(PAIR / f"notoken_r{rank}.mlir")
        assert verify_artifacts(before, loaded, TWICE).same


def written(tmp_path: Path, turned: bool, name: str) -> str:
    path = tmp_path / name
    artifact.save(copies(order_models.both_orders(turned=turned), 1)[0], path)
    return os.fspath(path)


def test_the_command_writes_each_in_its_own_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = [
        written(tmp_path, turned=False, name="a.jax_export"),
        written(tmp_path, turned=True, name="b.bc"),
    ]
    out = tmp_path / "out"
    assert run(["align-order", "--target", "none", *programs, "-o", os.fspath(out)]) == 0
    files = [out / "a.jax_export", out / "b.bc"]
    assert capsys.readouterr().out.splitlines() == [os.fspath(file) for file in files]
    forms = [artifact.form_of(file.read_bytes()) for file in files]
    assert forms == [artifact.ArtifactForm.JAX_EXPORT, artifact.ArtifactForm.PORTABLE]
    assert run(["check-order", "--target", "none", *map(os.fspath, files)]) == 0
    loaded = artifact.load(files[0])
    assert loaded.exported is not None
    assert loaded.exported.nr_devices == DEVICES


def test_the_command_writes_nothing_where_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = tmp_path / "extra.bc"
    artifact.save(copies(order_models.chained(extra=True), 1)[0], extra)
    plain = tmp_path / "plain.bc"
    artifact.save(copies(order_models.chained(), 1)[0], plain)
    out = tmp_path / "out"
    assert run(["align-order", os.fspath(plain), os.fspath(extra), "-o", os.fspath(out)]) == 1
    assert capsys.readouterr().out.startswith("mismatch: device 4 issues all_reduce")
    assert not out.exists()


def test_the_command_writes_all_or_none(tmp_path: Path) -> None:
    names = ("a.bc", "b.bc")
    programs = [
        written(tmp_path, turned=turned, name=n)
        for n, turned in zip(names, (False, True), strict=True)
    ]
    out = tmp_path / "out"
    (out / "b.bc").mkdir(parents=True)  # in the way of the second
    (out / "a.bc").write_bytes(b"kept")
    assert run(["align-order", *programs, "-o", os.fspath(out)]) == 2
    assert (out / "a.bc").read_bytes() == b"kept"
    assert sorted(path.name for path in out.iterdir()) == ["a.bc", "b.bc"]


def test_a_directory_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [os.fspath(PAIR / f"notoken_r{rank}.mlir") for rank in (0, 1)]
    assert run(["align-order", *programs, "-o", "/proc/out"]) == 2
    assert "error: cannot make '/proc/out': No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("programs", "output", "message"),
    [
        (("a.bc", "sub/a.bc"), "out", "two programs are called 'a.bc'"),
        (("a.bc", "-"), "out", "standard input has no file name"),
        (("a.bc", "b.bc"), "file", "not a directory"),
        (("a.bc", "b.bc"), "no/out", "no directory"),
    ],
)
def test_bad_outputs_are_refused_before_anything_is_read(
    programs: tuple[str, str],
    output: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    given = [name if name == "-" else os.fspath(tmp_path / name) for name in programs]
    assert run(["align-order", *given, "-o", os.fspath(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert re.search(message, error), error


def test_a_dead_collective_of_a_manual_computation_is_kept_alive() -> None:
    text = """module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 2 : i32} {
      sdy.mesh @mesh = <["x"=2]>
      func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        %y = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>]
            out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%v: tensor<2xf32>) {
          %w = "stablehlo.collective_permute"(%v) {
            channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
            source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
          } : (tensor<2xf32>) -> tensor<2xf32>
          sdy.return %v : tensor<2xf32>
        } : (tensor<4xf32>) -> tensor<4xf32>
        return %y : tensor<4xf32>
      }
    }"""
    dead, used = read(text, text.replace("sdy.return %v", "sdy.return %w"))
    before = dead.copy()
    assert rule(verdict([dead.copy(), used.copy()])) == "dead-collective"
    assert aligned([dead, used]).finding is None
    assert compile_artifact(dead.copy(), "cpu").order.deleted == ()
    assert verify_artifacts(before, dead, TWICE).same

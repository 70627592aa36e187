"""The order of a job on the schedules of its compilers: what is compiled, and what is said of it.

Most tests put a stub in place of the compiler, which returns schedules written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import order_models
import pytest
from jax import export
from models import collectives as models
from models.devices import mesh  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact, ArtifactForm
from stablehlo_tools.artifacts.program_set import JobOptions
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.order.order_findings import Verdict
from stablehlo_tools.targets import job_schedules
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions
from stablehlo_tools.targets.job_schedules import JobOrder, decide_order, default_targets

GRID = "attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}"
NARROW, WIDE = "tensor<4xf32>", "tensor<8xf32>"


def gather(result: str, operand: str) -> str:
    return f"""{result} = "stablehlo.all_gather"({operand}) <{{all_gather_dim = 0 : i64,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}}>
        : ({NARROW}) -> {WIDE}"""


def two_gathers(name: str, *, turned: bool = False) -> Artifact:
    """A program that gathers its two arguments; its module is called as the program."""
    lines = [gather("%a", "%x"), gather("%b", "%y")]
    body = "\n".join(lines[::-1] if turned else lines)
    text = f"""module @{name} {GRID} {{ func.func @main(%x: {NARROW}, %y: {NARROW})
        -> ({WIDE}, {WIDE}) {{\n{body}\nreturn %a, %b : {WIDE}, {WIDE}\n}} }}"""
    return artifact.parse(text.encode(), name)


def schedule(*marks: int) -> str:
    """A schedule of gathers `%g0`, `%g1` …, which stand for the collectives of these numbers."""
    lines = [
        f"  g{i} = f32[8] all-gather(p), channel_id=1, replica_groups={{{{0,1}}}}, "
        f'dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="step/gather"}}'
        for i in range(len(marks))
    ]
    values = ", ".join(f"g{i}" for i in range(len(marks)))
    types = ", ".join(["f32[8]"] * len(marks))
    return "\n".join(
        [
            "HloModule m, is_scheduled=true, num_partitions=2\n",
            "ENTRY e {",
            "  p = f32[4] parameter(0)",
            *lines,
            f"  ROOT t = ({types}) tuple({values})",
            "}",
        ]
    )


@dataclass
class Stub:
    """A compiler that returns the marks given for a program, by name, and refuses the others."""

    marks: Mapping[str, Sequence[int]]
    refusing: frozenset[Target] = frozenset()
    asked: list[tuple[str, Target]] = field(default_factory=list[tuple[str, Target]])
    options: list[CompilerOptions] = field(default_factory=list[CompilerOptions])

    def __call__(
        self,
        program: Artifact,
        target: Target,
        timeout: float,
        *,
        options: CompilerOptions = NO_OPTIONS,
    ) -> SimpleNamespace:
        self.asked.append((program.name, target))
        self.options.append(options)
        if target in self.refusing:
            raise ToolError(f"{target.title} refused the program: no such op")
        marks = self.marks[program.name]
        events = [SimpleNamespace(instruction=f"g{i}", ids=(mark,)) for i, mark in enumerate(marks)]
        return SimpleNamespace(schedule=SimpleNamespace(events=events), text=schedule(*marks))


type Stubbing = Callable[..., Stub]


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Stubbing:
    """Puts a stub in place of the compiler and takes every compiler to be installed."""

    def put(marks: Mapping[str, Sequence[int]], *refusing: Target) -> Stub:
        stub = Stub(marks, frozenset(refusing))
        monkeypatch.setattr(job_schedules, "compile_artifact", stub)
        monkeypatch.setattr(job_schedules, "missing_package", lambda target: None)
        monkeypatch.setattr(job_schedules, "compiler_version", lambda target: f"{target.title} 1.0")
        return stub

    return put


def decided(*programs: Artifact, targets: Sequence[Target] | None = (Target.CPU,)) -> JobOrder:
    return decide_order(programs, JobOptions(), targets)


def test_equal_programs_are_compiled_once(stubbed: Stubbing) -> None:
    stub = stubbed({"step": (0, 1), "other": (0, 1)})
    assert decided(two_gathers("step"), two_gathers("step")).holds
    assert stub.asked == [("step", Target.CPU)]
    stub.asked.clear()
    assert decided(two_gathers("step"), two_gathers("other")).holds
    assert sorted(stub.asked) == [("other", Target.CPU), ("step", Target.CPU)]


def test_each_target_is_asked(stubbed: Stubbing) -> None:
    stub = stubbed({"step": (0, 1)})
    order = decided(two_gathers("step"), two_gathers("step"), targets=(Target.GPU, Target.TPU))
    assert stub.asked == [("step", Target.GPU), ("step", Target.TPU)]
    assert [each.target for each in order.answers] == [Target.GPU, Target.TPU]
    assert [each.compiler for each in order.answers] == ["XLA:GPU 1.0", "XLA:TPU 1.0"]


def test_one_program_for_all_devices_needs_no_compiler(stubbed: Stubbing) -> None:
    stub = stubbed({})
    order = decided(two_gathers("step"), targets=None)
    assert order.holds
    assert order.worst.target is None
    assert not stub.asked


def test_gathers_that_are_swapped_in_one_schedule(stubbed: Stubbing) -> None:
    """The two have the same form, so the devices exchange other data and none waits for ever."""
    stubbed({"one": (0, 1), "other": (1, 0)})
    order = decided(two_gathers("one"), two_gathers("other"))
    finding = order.worst.decided.finding
    assert finding is not None
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "swapped")
    assert finding.confirmed
    assert "another one of the same form" in finding.message


def test_gathers_that_are_swapped_in_both_schedules(stubbed: Stubbing) -> None:
    stubbed({"one": (1, 0), "other": (1, 0)})
    order = decided(two_gathers("one"), two_gathers("other"))
    assert order.holds
    assert "nothing orders all_gather" in order.worst.open_in_text


def test_a_gather_that_one_schedule_lacks(stubbed: Stubbing) -> None:
    stubbed({"one": (0, 1), "other": (0,)})
    finding = decided(two_gathers("one"), two_gathers("other")).worst.decided.finding
    assert finding is not None
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "missing-collective")


def test_the_worst_answer_is_told_first(
    stubbed: Stubbing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = stubbed({"one": (0, 1), "other": (0, 1)})
    paths = saved(tmp_path, one=two_gathers("one"), other=two_gathers("other"))
    stub.marks = {paths[0]: (0, 1), paths[1]: (0, 1)}
    plain = stub.__call__
    swapped = Stub({paths[0]: (0, 1), paths[1]: (1, 0)})

    def compiled(program: Artifact, target: Target, timeout: float, **options: CompilerOptions):
        return (swapped if target is Target.TPU else plain)(program, target, timeout, **options)

    job_schedules.compile_artifact = compiled  # pyright: ignore[reportAttributeAccessIssue]
    assert main(["check-order", *paths, "--target", "cpu", "--target", "tpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mismatch:")
    assert lines[1] == "  as scheduled by XLA:TPU 1.0"
    assert any(line == "  as scheduled by XLA:CPU 1.0" for line in lines)


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [
        (("cpu",), [Target.CPU]),
        (("cuda",), [Target.GPU]),
        (("tpu",), [Target.TPU]),
        (("tpu", "cpu"), [Target.CPU, Target.TPU]),
    ],
)
def test_default_targets_follow_the_platforms_of_the_exports(
    monkeypatch: pytest.MonkeyPatch, platforms: tuple[str, ...], expected: list[Target]
) -> None:
    monkeypatch.setattr(job_schedules, "missing_package", lambda target: None)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    made = artifact.from_exported(export.export(jax.jit(jnp.tanh), platforms=platforms)(shape))
    assert default_targets([made], None) == expected
    assert default_targets([made, two_gathers("text")], None) == expected
    assert default_targets([made], "tpu") == [Target.TPU]


def test_programs_without_a_platform_are_for_the_compilers_that_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = {Target.GPU: "jax-cuda13-plugin"}
    monkeypatch.setattr(job_schedules, "missing_package", missing.get)
    assert default_targets([two_gathers("step")], None) == [Target.CPU, Target.TPU]


def saved(directory: Path, **programs: Artifact) -> list[str]:
    """The files of some programs, by name."""
    paths: list[str] = []
    for name, program in programs.items():
        form = ArtifactForm.TEXT if program.exported is None else ArtifactForm.JAX_EXPORT
        path = directory / f"{name}{form.value}"
        path.write_bytes(artifact.encode(program, form))
        paths.append(str(path))
    return paths


def test_a_compiler_that_refuses_is_left_out_by_default(
    stubbed: Stubbing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = saved(tmp_path, step=two_gathers("step"))
    stubbed({path: (0, 1)}, Target.TPU)
    assert main(["check-order", path, path]) == 0
    out = capsys.readouterr().out
    assert "XLA:TPU is omitted: XLA:TPU refused the program: no such op" in out
    assert main(["check-order", path, path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["target"] for each in report["compilers"]] == ["cpu", "gpu"]
    message = "XLA:TPU refused the program: no such op"
    assert report["refused"] == [{"target": "tpu", "message": message}]


def test_a_chosen_compiler_that_refuses_is_an_error(
    stubbed: Stubbing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = saved(tmp_path, step=two_gathers("step"))
    stubbed({path: (0, 1)}, Target.TPU)
    assert main(["check-order", path, path, "--target", "cpu", "--target", "tpu"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "XLA:TPU refused the program" in captured.err


def test_without_an_answer_the_texts_are_judged(stubbed: Stubbing) -> None:
    """The compilers refuse all programs: then nothing is claimed that one could rewrite."""
    stubbed({}, *Target)
    order = decided(two_gathers("step"), two_gathers("step"), targets=None)
    assert order.worst.target is None
    assert not order.holds
    assert [target for target, _ in order.refused] == list(Target)


def test_compiler_options_reach_the_compiler_and_are_named(
    stubbed: Stubbing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = saved(tmp_path, step=two_gathers("step"))
    stub = stubbed({path: (0, 1)})
    words = ["check-order", path, path, "--target", "gpu", "--compiler-option", "xla_a=2"]
    assert main(words) == 0
    assert stub.options == [CompilerOptions.from_values({"xla_a": 2})]
    assert "  as scheduled by XLA:GPU 1.0, with xla_a=2" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    (compiler,) = json.loads(capsys.readouterr().out)["compilers"]
    assert compiler["compiler_options"] == {"xla_a": 2}
    assert (
        main(["check-order", path, path, "--target", "none", "--compiler-option", "xla_a=2"]) == 2
    )


def test_schedules_are_not_compiled(stubbed: Stubbing) -> None:
    stub = stubbed({"step": (0, 1)})
    hlo = artifact.parse(schedule(0, 1).encode(), "dump")
    order = decided(hlo, hlo, targets=(Target.TPU,))
    assert order.holds
    assert order.worst.target is None
    assert not stub.asked
    decided(hlo, two_gathers("step"))  # a schedule beside a program
    assert stub.asked == [("step", Target.CPU)]


def test_one_program_that_each_device_compiles() -> None:
    """Nothing orders its sums, but one schedule has one order; another compiler may differ."""
    program = artifact.from_exported(order_models.data_parallel(), "step")
    order = decide_order([program], JobOptions(strict=True), [Target.CPU])
    assert order.holds
    assert len(order.worst.decided.programs) == order_models.DEVICES
    assert "nothing orders" in order.worst.open_in_text
    without = job_schedules.decide_without_compilers([program], JobOptions(strict=True))
    assert without.finding is not None


@pytest.mark.parametrize("target", ["cpu", "none"])
def test_a_plain_sharded_jit_is_refused_with_strict(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = saved(tmp_path, step=artifact.from_exported(sharded()))
    assert main(["check-order", path, "--target", target, "--strict"]) == 2
    assert "partition it first" in capsys.readouterr().err


def sharded() -> export.Exported:
    """A product whose operands are sharded over two devices, and which XLA partitions."""
    on = mesh(i=2)
    step = jax.jit(
        lambda x: jnp.sum(jnp.tanh(x) @ x.T),
        in_shardings=NamedSharding(on, P("i")),
        out_shardings=NamedSharding(on, P()),
    )
    return export.export(step, platforms=("cpu",))(jax.ShapeDtypeStruct((8, 4), jnp.float32))


def branching() -> export.Exported:
    """A sum or a maximum of all devices' rows, whichever an argument chooses."""

    def local(x: jax.Array, config: dict[str, jax.Array]) -> jax.Array:
        return lax.cond(
            config["warm"] > 0, lambda y: lax.psum(y, "i"), lambda y: jnp.tanh(lax.pmax(y, "i")), x
        )

    on = mesh(i=2)
    specs = (P("i"), {"warm": P()})
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P("i"), check_vma=False)
    config = {"warm": jax.ShapeDtypeStruct((), jnp.int32)}
    rows = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    shardings = jax.tree.map(lambda spec: NamedSharding(on, spec), specs)
    return export.export(jax.jit(mapped, in_shardings=shardings), platforms=("cpu",))(rows, config)


@pytest.mark.parametrize(
    ("equal", "code"),
    [
        ([], 1),
        (["config['warm']"], 0),
        (["1"], 0),
        (["0:1", "1:config['warm']"], 0),
        (["0:1"], 1),
        (["0"], 1),
        (["config['cold']"], 2),
        (["9"], 2),
    ],
)
def test_equal_arguments_decide_a_branch_of_schedules(
    equal: list[str], code: int, tmp_path: Path, compiled_once: None
) -> None:
    (path,) = saved(tmp_path, step=artifact.from_exported(branching(), "step"))
    words = [word for each in equal for word in ("--equal", each)]
    assert main(["check-order", path, path, "--target", "cpu", *words]) == code


@pytest.fixture(scope="module")
def kept() -> dict[str, object]:
    """What the compiler made of programs."""
    return {}


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch, kept: dict[str, object]) -> None:
    """The program of the branch is compiled by XLA:CPU for the first test alone."""
    compile_artifact = job_schedules.compile_artifact

    def compiled(program: Artifact, target: Target, timeout: float, **options: CompilerOptions):
        text = artifact.to_text(program.module, locations=False)
        if text not in kept:
            kept[text] = compile_artifact(program, target, timeout, **options)  # pyright: ignore[reportArgumentType]
        return kept[text]

    monkeypatch.setattr(job_schedules, "compile_artifact", compiled)


def test_models_of_one_chain_are_ordered_by_the_compiler() -> None:
    chain = artifact.from_exported(models.independent(), "step")
    order = decide_order([chain, chain], JobOptions(), [Target.CPU])
    assert order.holds
    assert order.worst.compiler.startswith("XLA:CPU of jaxlib")

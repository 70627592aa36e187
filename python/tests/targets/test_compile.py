"""Real exports through XLA:CPU, XLA:GPU and XLA:TPU, and what becomes of a compiler that fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compile_targets import TARGETS
from jax import export
from jax.export import Exported
from models import collectives as models

from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.hlo_input.async_forms import AsyncPhase
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets import topologies
from stablehlo_tools.targets.chips import DEFAULT_HARDWARE
from stablehlo_tools.targets.compilation import Compilation, bytes_refused, compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.targets.preparation import prepare
from stablehlo_tools.targets.topologies import Target

each_target = pytest.mark.parametrize("target", TARGETS)
tpu_only = pytest.mark.parametrize("target", TARGETS[-1:])


def raw(body: str, arguments: str = "%x: tensor<64x128xf32>", attributes: str = "") -> Artifact:
    """A module of four replicas; RING and ALL stand for the groups of its collectives."""
    text = f"module attributes {{{attributes}}} {{ func.func @main({arguments}) {body} }}"
    text = text.replace("ALL", "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>")
    ring = "source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>"
    return artifact.parse(text.replace("RING", ring).encode(), "step.mlir")


def issued(compiled: Compilation) -> list[int]:
    """The ids in the order in which a device begins them."""
    return [i for event in compiled.schedule.events if event.issues for i in event.ids]


@each_target
def test_every_collective_of_a_plain_program_is_found_again(target: Target) -> None:
    compiled = compile_artifact(artifact.from_exported(models.independent()), target)
    assert compiled.program_ids == (0, 1, 2)
    assert sorted(issued(compiled)) == [0, 1, 2]
    assert not compiled.order.same_order  # nothing keeps them in order: every XLA reorders them
    assert compiled.order.difference is not None
    assert not compiled.order.deleted
    assert not compiled.order.incomplete
    assert compiled.topology.devices == 8
    assert compiled.memory.argument_bytes > 0
    assert compiled.seconds > 0
    starts = {e.position for e in compiled.schedule.events if e.phase is AsyncPhase.START}
    assert starts == set(compiled.schedule.done_positions())


@each_target
@pytest.mark.parametrize("model", [models.independent, models.control_flow])
def test_a_compiler_that_ends_at_the_schedule_has_the_same_figures(
    model: Callable[[], Exported], target: Target
) -> None:
    """Only the last text differs: it lacks some source lines."""
    program = artifact.from_exported(model())
    whole, early = (compile_artifact(program, target, schedule_only=s) for s in (False, True))
    assert [event.ids for event in early.schedule.events] == [
        event.ids for event in whole.schedule.events
    ]
    assert early.order == whole.order
    # XLA:TPU pads its scratch memory.
    assert early.memory.total_bytes == pytest.approx(whole.memory.total_bytes, abs=64 << 10)
    hardware = load_hardware(DEFAULT_HARDWARE.get(target.value, "h100"))
    times = [
        simulate(hlo_task_graph(made.text, hardware, made.topology.devices)).total_ns
        for made in (whole, early)
    ]
    assert times[0] == times[1] > 0


def test_a_program_that_does_not_fit_is_refused_with_and_without_its_code() -> None:
    """XLA:TPU dumps a schedule of such a program, too, and then refuses it."""
    product = """-> tensor<65536x65536xf32> {
        %p = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
            : (tensor<65536x65536xf32>, tensor<65536x65536xf32>) -> tensor<65536x65536xf32>
        %t = stablehlo.tanh %p : tensor<65536x65536xf32>
        return %t : tensor<65536x65536xf32>
    }"""
    for schedule_only in (False, True):
        with pytest.raises(ToolError, match="Ran out of memory on HBM") as error:
            compile_artifact(
                raw(product, "%x: tensor<65536x65536xf32>"), Target.TPU, schedule_only=schedule_only
            )
        assert bytes_refused(error.value) == pytest.approx(2 * 65536**2 * 4, rel=0.01)


@each_target
def test_a_token_chain_keeps_the_program_order(target: Target) -> None:
    threaded = artifact.from_exported(models.independent())
    transforming.run_pipeline(threaded, Pipeline.parse("thread-tokens"))
    compiled = compile_artifact(threaded, target)
    assert issued(compiled) == [0, 1, 2]
    assert compiled.order.same_order


@each_target
def test_collectives_in_control_flow_are_nested(target: Target) -> None:
    compiled = compile_artifact(artifact.from_exported(models.control_flow()), target)
    assert sorted(set(issued(compiled))) == sorted(compiled.program_ids)
    assert all(event.nesting[0] == "while body" for event in compiled.schedule.events)
    assert any(event.nesting[-1].startswith("branch") for event in compiled.schedule.events)
    assert compiled.order.same_order  # each depends on the one before
    assert not compiled.order.moved


@each_target
def test_a_deleted_collective_is_reported(target: Target) -> None:
    unused = raw("""-> tensor<64x128xf32> {
        %g = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64, ALL}>
            : (tensor<64x128xf32>) -> tensor<256x128xf32>
        %p = "stablehlo.collective_permute"(%x) <{RING}>
            : (tensor<64x128xf32>) -> tensor<64x128xf32>
        return %p : tensor<64x128xf32>
    }""")
    compiled = compile_artifact(unused, target)
    assert compiled.topology.devices == 4  # as many as the groups name
    assert (issued(compiled), compiled.order.deleted) == ([1], (0,))
    assert compiled.order.same_order


@each_target
def test_merged_collectives_keep_their_ids(target: Target) -> None:
    """XLA:TPU drops the tags when it merges; the dumps of its combiner bring them back."""
    add = """({ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %s = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %s : tensor<f32> }) : (tensor<8xf32>) -> tensor<8xf32>"""
    ops = "".join(f'%{i} = "stablehlo.all_reduce"(%x{i}) <{{ALL}}> {add}\n' for i in range(3))
    arguments = ", ".join(f"%x{i}: tensor<8xf32>" for i in range(3))
    types = ", ".join(["tensor<8xf32>"] * 3)
    merged = raw(f"-> ({types}) {{ {ops} return %0, %1, %2 : {types} }}", arguments)
    compiled = compile_artifact(merged, target)
    assert compiled.order.merged == ((0, 1, 2),)
    assert compiled.order.same_order
    assert (compiled.order.deleted, compiled.order.incomplete) == ((), ())


@each_target
def test_a_program_for_one_device_may_name_partitions(target: Target) -> None:
    """Collectives outside a manual computation: XLA's partitioner must leave them alone."""
    per_device = raw(
        """-> tensor<64x128xf32> {
        %i = stablehlo.partition_id : tensor<ui32>
        %f = stablehlo.convert %i : (tensor<ui32>) -> tensor<f32>
        %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<64x128xf32>
        %p = "stablehlo.collective_permute"(%b) <{
            channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, RING}>
            : (tensor<64x128xf32>) -> tensor<64x128xf32>
        %s = stablehlo.add %p, %x : tensor<64x128xf32>
        return %s : tensor<64x128xf32>
        }""",
        attributes="mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32",
    )
    compiled = compile_artifact(per_device, target)
    assert (issued(compiled), compiled.order.same_order) == ([0], True)
    assert compiled.memory.argument_bytes >= 64 * 128 * 4


@each_target
def test_an_artifact_for_one_device(target: Target) -> None:
    compiled = compile_artifact(_one_device(), target)
    assert compiled.topology.devices == 1
    assert (compiled.schedule.events, compiled.program_ids) == ((), ())
    assert compiled.order.same_order


@pytest.mark.parametrize("target", TARGETS[:2])
def test_only_the_collectives_of_the_platform_are_compiled(target: Target) -> None:
    compiled = compile_artifact(artifact.from_exported(models.two_platforms()), target)
    kinds = {op.kind for op in compiled.tagged}
    assert ("all_gather" in kinds) is (target is Target.GPU)
    assert ("collective_permute" in kinds) is (target is Target.CPU)
    assert not compiled.order.deleted


@tpu_only
def test_a_platform_that_the_artifact_lacks_is_refused(target: Target) -> None:
    loaded = artifact.from_exported(models.two_platforms(), "step.jax_export")
    with pytest.raises(ToolError, match=r"step\.jax_export: error: .* exported for cpu, cuda"):
        compile_artifact(loaded, target)


@tpu_only
def test_a_compiler_that_aborts_is_one_error(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA:TPU ends its process at a device-to-device send."""
    handle = "channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>"
    pairs = "source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>, is_host_transfer = false"
    path = tmp_path / "step.mlir"
    path.write_text(f"""
        module attributes {{mhlo.num_partitions = 2 : i32}} {{
          func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
            %t = stablehlo.create_token : !stablehlo.token
            %s = "stablehlo.send"(%x, %t) <{{{handle}, {pairs}}}>
                : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
            %r:2 = "stablehlo.recv"(%s) <{{{handle}, {pairs}}}>
                : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
            return %r#0 : tensor<4xf32>
          }}
        }}
    """)
    assert main(["compile", str(path), "--target", target.value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    error, reason = err.splitlines()
    assert error == f"{path}: error: the compiler XLA:TPU was ended by SIGABRT while compiling"
    assert reason.startswith(f"{path}: note: it said: send_recv_emitter.cc:")
    assert reason.endswith("Check failed: send_recv_instr->is_host_transfer()")


def test_a_compiler_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(ToolError, match=r"XLA:CPU took more than 0\.05 s and was stopped"):
        compile_artifact(_one_device(), Target.CPU, timeout=0.05)


def test_a_compiler_that_cannot_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(ToolError, match="the compiler XLA:CPU ended with exit code") as raised:
        compile_artifact(_one_device(), Target.CPU)
    assert "xla_no_such_flag" in str(raised.value)


def test_a_refused_program_is_one_error() -> None:
    unknown = raw("""-> tensor<64x128xf32> {
        %y = stablehlo.custom_call @no_such_target(%x)
            : (tensor<64x128xf32>) -> tensor<64x128xf32>
        return %y : tensor<64x128xf32>
    }""")
    with pytest.raises(ToolError, match=r"step\.mlir: error: XLA:CPU refused .*no_such_target"):
        compile_artifact(unknown, "cpu")


@pytest.mark.parametrize(
    ("body", "arguments", "message"),
    [
        (
            "{ return }",
            "%x: tensor<?xf32>",
            "which has a symbolic shape; export with concrete shapes",
        ),
        (
            '{ "stablehlo.collective_permute"(%x) <{RING}> : (tensor<4xf32>) -> tensor<4xf32> '
            "return }",
            "%x: tensor<4xf32>",
            "id 2 is not one of the 2 cross_replica processes",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_before(body: str, arguments: str, message: str) -> None:
    loaded = raw(body, arguments, "mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32")
    with pytest.raises(ToolError, match=message):
        compile_artifact(loaded, "cpu")


@pytest.mark.parametrize(
    ("groups", "replicas", "partitions"),
    [
        ("replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>", 4, 1),
        ("replica_groups = dense<> : tensor<0x0xi64>", 8, 1),  # all replicas: one host of them
        (
            "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, "
            "use_global_device_ids, replica_groups = #stablehlo.replica_group_mesh_axes<"
            'mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>',
            1,
            6,
        ),
    ],
)
def test_a_module_that_states_no_devices_runs_on_those_it_names(
    groups: str, replicas: int, partitions: int
) -> None:
    text = f"""sdy.mesh @mesh = <["x"=2, "y"=3]>
        func.func @main(%x: tensor<2x4xf32>) -> tensor<?x4xf32> {{
        %g = "stablehlo.all_gather"(%x) <{{all_gather_dim = 0 : i64, {groups}}}>
            : (tensor<2x4xf32>) -> tensor<?x4xf32>
        return %g : tensor<?x4xf32> }}"""
    if partitions == 1:
        text = text.partition("\n")[2]
    grid = prepare(artifact.parse(text.encode()), Target.CPU).grid
    assert (grid.num_replicas, grid.num_partitions) == (replicas, partitions)


def test_a_missing_compiler_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "missing_package", lambda _: "libtpu")
    with pytest.raises(ToolError, match=r"package libtpu is missing\ntry: pip install"):
        compile_artifact(_one_device(), "tpu")


def test_the_command_prints_a_table_or_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.jax_export"
    artifact.save(artifact.from_exported(models.independent()), path)
    assert main(["compile", os.fspath(path), "--target", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "8 virtual CPU devices" in table
    assert "collectives.py:" in table
    assert "\norder: differs from the program: " in table
    assert main(["compile", os.fspath(path), "--target", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["target"], answer["devices"], answer["same_order"]) == ("cpu", 8, False)
    assert [entry["id"] for entry in answer["program_order"]] == [0, 1, 2]
    assert {entry["kind"] for entry in answer["order"]} == {
        "all_gather",
        "reduce_scatter",
        "collective_permute",
    }
    assert all(entry["position_done"] is not None for entry in answer["order"])
    assert answer["memory"]["argument_bytes"] > 0


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_timeout_is_a_positive_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", "step.mlir", "--target", "cpu", "--timeout", text])
    assert ended.value.code == 2
    assert "--timeout" in capsys.readouterr().err


def _one_device() -> Artifact:
    return raw("""-> tensor<64x64xf32> {
        %y = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1]
            : (tensor<64x128xf32>, tensor<64x128xf32>) -> tensor<64x64xf32>
        return %y : tensor<64x64xf32>
    }""")


def test_a_program_for_another_accelerator_is_told():
    step = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    for platform, said in (("tpu", "it was exported for tpu, not for cuda"), ("cpu", "")):
        program = export.export(jax.jit(jnp.tanh), platforms=[platform])(step)
        compilation = compile_artifact(artifact.from_exported(program), "gpu")
        assert compilation.foreign == said

"""Compiler options: how they are written, that XLA gets them, and how what they do is timed."""

from __future__ import annotations

import pytest
from compile_targets import TARGETS

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.compiler_options import CompilerOptions
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

SLOTS = "xla_gpu_experimental_parallel_collective_overlap_limit"
STREAMS = "xla_gpu_experimental_enable_collective_multi_streaming"
ON_GPU = pytest.mark.parametrize(
    "target", [next(each for each in TARGETS if each.values == (Target.GPU,))]
)
ON_TPU = pytest.mark.parametrize(
    "target", [next(each for each in TARGETS if each.values == (Target.TPU,))]
)

# Two gathers that nothing orders, one over NVLink and one over InfiniBand, and products to hide in.
PROGRAM = """
module attributes {mhlo.num_partitions = 16 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<512x8192xbf16>, %y: tensor<4096x8192xbf16>,
                         %z: tensor<8192x8192xbf16>)
      -> (tensor<4096x8192xbf16>, tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) {
    %near = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]>
        : tensor<2x8xi64>, use_global_device_ids}>
      : (tensor<512x8192xbf16>) -> tensor<4096x8192xbf16>
    %far = "stablehlo.all_gather"(%y) <{all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>,
      replica_groups = dense<[[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]>
        : tensor<8x2xi64>, use_global_device_ids}>
      : (tensor<4096x8192xbf16>) -> tensor<8192x8192xbf16>
    %p = stablehlo.dot_general %z, %z, contracting_dims = [1] x [0]
      : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
    return %near, %far, %p
      : tensor<4096x8192xbf16>, tensor<8192x8192xbf16>, tensor<8192x8192xbf16>
  }
}
"""


def program() -> artifact.Artifact:
    return artifact.parse(PROGRAM.encode(), "step.mlir")


def test_options_are_read_as_what_they_are():
    options = CompilerOptions.parse(["xla_b=1", "--xla_a=true", "xla_c=0.5", "xla_d=scale_up"])
    assert options.values == (("xla_a", True), ("xla_b", 1), ("xla_c", 0.5), ("xla_d", "scale_up"))
    assert CompilerOptions.parse(options.texts()) == options
    assert CompilerOptions.from_values(dict(options.values)) == options
    assert str(options) == "xla_a=true, xla_b=1, xla_c=0.5, xla_d=scale_up"


def test_of_two_the_second_has_the_last_word():
    first, second = (
        CompilerOptions.parse(["xla_a=1", "xla_b=1"]),
        CompilerOptions.parse(["xla_b=2"]),
    )
    assert (first | second).values == (("xla_a", 1), ("xla_b", 2))


@pytest.mark.parametrize("text", ["", "xla_a", "xla_a=", "=1", "gpu_autotune_level=4", "xla a=1"])
def test_what_is_no_option_is_refused(text: str):
    with pytest.raises(ToolError, match="is not a compiler option"):
        CompilerOptions.parse([text])


def test_a_name_twice_is_refused():
    with pytest.raises(ToolError, match="xla_a is given twice"):
        CompilerOptions.parse(["xla_a=1", "xla_a=1"])


def test_collectives_in_flight_together_share_a_stream_unless_told_otherwise():
    assert not CompilerOptions().one_stream
    assert not CompilerOptions.parse([f"{SLOTS}=1"]).one_stream
    assert CompilerOptions.parse([f"{SLOTS}=2"]).one_stream
    assert not CompilerOptions.parse([f"{SLOTS}=2", f"{STREAMS}=true"]).one_stream


@ON_GPU
def test_the_compiler_gets_them_and_one_stream_is_one_after_the_other(target: Target):
    hardware = load_hardware("h100")
    options = CompilerOptions.parse([f"{SLOTS}=2"])
    made = compile_artifact(program(), target, hardware=hardware, options=options)
    starts, dones = (made.text.count(f"all-gather-{end}(") for end in ("start", "done"))
    assert starts == dones == 2
    assert made.text.rindex("all-gather-start(") < made.text.index("all-gather-done(")
    apart, queued = (
        simulate(hlo_task_graph(made.text, hardware, 16, one_stream=one)) for one in (False, True)
    )
    both = sum(flight.ns for flight in queued.run.all_flights())
    assert max(flight.end for flight in queued.run.all_flights()) == pytest.approx(both, rel=0.01)
    assert max(flight.end for flight in apart.run.all_flights()) < 0.9 * both


@ON_GPU
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("xla_gpu_nonsense=1", "XLA:GPU has no compiler option xla_gpu_nonsense"),
        (f"{SLOTS}=abc", f"XLA:GPU refuses {SLOTS}=abc"),
    ],
)
def test_what_the_compiler_does_not_know_is_refused(target: Target, option: str, message: str):
    with pytest.raises(ToolError, match=message):
        compile_artifact(program(), target, options=CompilerOptions.parse([option]))


@ON_TPU
def test_tpu_refuses_what_it_does_not_know(target: Target):
    options = CompilerOptions.parse(["xla_tpu_nonsense=1"])
    with pytest.raises(ToolError, match="XLA:TPU has no compiler option xla_tpu_nonsense"):
        compile_artifact(program(), target, options=options)


def test_options_need_a_compiler(
    tmp_path: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
):
    path = f"{tmp_path}/step.mlir"
    artifact.save(program(), path)
    assert main(["inspect", path, "--hardware", "h100", "--compiler-option", "xla_a=1"]) == 2
    assert "--compiler-option needs a compiler" in capsys.readouterr().err

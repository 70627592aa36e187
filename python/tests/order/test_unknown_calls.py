"""`check-order` around custom calls of which nobody knows whether they communicate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob, read_programs
from stablehlo_tools.cli.main import main
from stablehlo_tools.dialect.custom_calls import stays_on_device
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.order.verdict import Decided, decide
from stablehlo_tools.order.verdict_report import as_json, as_text
from stablehlo_tools.transforms.align_order import align_order
from stablehlo_tools.transforms.thread_tokens import ThreadTokensPass

TYPE = "tensor<2x4xf32>"
PERMUTE = f"""%p = "stablehlo.collective_permute"(OPERAND) {{
  source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>,
  channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
}} : ({TYPE}) -> {TYPE}"""


def call(target: str, result: str = "%c", attributes: str = "") -> str:
    return f'{result} = stablehlo.custom_call @"{target}"(%x) {attributes} : ({TYPE}) -> {TYPE}'


def program(*lines: str, returned: str = "%p, %c") -> str:
    body = "\n".join(lines)
    return f"""module attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func @main(%x: {TYPE}) -> ({TYPE}, {TYPE}) {{
    {body}
    return {returned} : {TYPE}, {TYPE}
  }}
}}"""


def permute(operand: str = "%x") -> str:
    return PERMUTE.replace("OPERAND", operand)


def judged(tmp_path: Path, *texts: str, local: tuple[str, ...] = ()) -> Decided:
    paths = [tmp_path / f"{number}.mlir" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return decide(read_programs([str(path) for path in paths], JobOptions(local=local)))


ALONE = program(permute(), returned="%p, %x")
UNORDERED = program(call("nccl_exchange"), permute())
TURNED = program(permute(), call("nccl_exchange"))
TIED = program(call("nccl_exchange"), permute("%c"))


@pytest.mark.parametrize("other", [UNORDERED, TURNED, ALONE], ids=["same", "turned", "without"])
def test_nothing_is_proved_around_it(tmp_path: Path, other: str) -> None:
    decided = judged(tmp_path, UNORDERED, other)
    assert decided.finding is not None
    assert (decided.verdict.value, decided.finding.rule) == ("may-deadlock", "not-understood")
    told = as_text(decided)
    assert "unknown custom_call" in told
    assert "--local nccl_exchange" in told


def test_it_is_said_where_everything_is_ordered(tmp_path: Path) -> None:
    decided = judged(tmp_path, TIED, TIED)
    assert decided.finding is None
    assert "custom_call @nccl_exchange at" in as_text(decided)
    assert as_json(decided)["proof"]["steps"][-1]["step"] == "assumed"


def test_the_user_may_know_that_it_stays(tmp_path: Path) -> None:
    decided = judged(tmp_path, UNORDERED, ALONE, local=("nccl_exchange",))
    assert decided.finding is None
    assert "nccl_exchange" not in as_text(decided)
    flagged = program(call("log_it", attributes="{has_side_effect = true}"), permute())
    assert judged(tmp_path, flagged, ALONE).finding is not None
    assert judged(tmp_path, flagged, ALONE, local=("log_it",)).finding is None


def test_one_that_compilers_delete_is_no_matter(tmp_path: Path) -> None:
    unused = program(call("nccl_exchange", "%unused"), permute(), returned="%p, %x")
    assert judged(tmp_path, unused, unused).finding is None


def test_align_order_ties_it_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    artifacts = tuple(artifact.parse(text.encode(), "p.mlir") for text in (UNORDERED, TURNED))
    aligned = align_order(ProgramJob(artifacts, JobOptions()), ThreadTokensPass())
    assert aligned.finding is None
    texts = [artifact.to_text(loaded.module) for loaded in artifacts]
    assert all("may_communicate" not in text and "side_effect" not in text for text in texts)
    assert judged(tmp_path, *texts).finding is None


TPU = '{"custom_call_config": {"body": "AAAA"HAS}}'
STAYING = {
    "cusolver_getrf_ffi": "",
    "lapack_sgetrf_ffi": "",
    "mhlo.topk": "",
    "ApproxTopK": "",
    "Sharding": "",
    "xla.sdy.FuncResultSharding": "",
    "__cudnn$fmhaSoftmax": "",
    "__gpu$xla.gpu.triton": "",
    "xla_ffi_python_cpu_callback": "",
    "annotate_device_placement": "",
}


def quoted(text: str) -> str:
    return text.replace('"', "\\22")


@pytest.mark.parametrize("target", STAYING)
def test_what_is_known_to_stay_gives_no_alarm(tmp_path: Path, target: str) -> None:
    decided = judged(tmp_path, program(call(target), permute()), ALONE)
    assert decided.finding is None
    assert "not understood" not in as_text(decided)


@pytest.mark.parametrize(
    ("target", "attributes", "stays"),
    [
        ("tpu_custom_call", {"backend_config": TPU.replace("HAS", "")}, True),
        (
            "tpu_custom_call",
            {"backend_config": TPU.replace("HAS", ', "has_communication": false')},
            True,
        ),
        (
            "tpu_custom_call",
            {"backend_config": TPU.replace("HAS", ', "has_communication": true')},
            False,
        ),
        ("tpu_custom_call", {"backend_config": "{"}, False),
        ("tpu_custom_call", {}, False),
        ("mosaic_gpu_v2", {"backend_config": "module {}"}, True),
        ("mosaic_gpu_v2", {"backend_config": "call @nvshmem_my_pe"}, False),
        ("nvshmem_all_reduce", {}, False),
        ("xla.gpu.all_reduce", {}, False),
        ("my_library.anything", {"backend_config": '{"replica_groups": [[0, 1]]}'}, False),
    ],
)
def test_kernels_say_whether_they_communicate(
    target: str, attributes: dict[str, str], stays: bool
) -> None:
    written = ", ".join(f'{name} = "{quoted(text)}"' for name, text in attributes.items())
    loaded = artifact.parse(program(call(target, attributes=f"{{{written}}}"), permute()).encode())
    (main_function,) = functions_by_name(loaded.module).values()
    first = main_function.regions[0].blocks[0].operations[0].operation
    assert stays_on_device(first) is stays


def test_the_command_takes_what_is_local(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one.mlir", tmp_path / "other.mlir"]
    for path, text in zip(paths, (UNORDERED, ALONE), strict=True):
        path.write_text(text)
    names = [str(path) for path in paths]
    names += ["--target", "none"]
    assert main(["check-order", "--json", *names]) == 1
    assert json.loads(capsys.readouterr().out)["counterexample"]["rule"] == "not-understood"
    assert main(["check-order", *names, "--json", "--local", "nccl_exchange"]) == 1
    told = json.loads(capsys.readouterr().out)["counterexample"]["rule"]
    assert told == "rewritable"  # no barrier keeps the collectives

"""Functions that call the next one twice: no pass unfolds them to all that they would be."""

from __future__ import annotations

import pytest

from stablehlo_tools.analysis.tasks.reader import read_program
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.passes.pipeline import Pipeline

KIND = "tensor<8x8xf32>"
DEEP = 40  # 2^40 leaves
TANH = f"%0 = stablehlo.tanh %a : {KIND}"
PERMUTE = f"""%0 = "stablehlo.collective_permute"(%a) {{
    source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>,
    channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>}} : ({KIND}) -> {KIND}"""
# Those that look into functions as they are, and those that would have to unfold them.
AS_WRITTEN = [
    "break-permute-cycles",
    "create-reduce-scatter",
    "decompose-collective-permute",
    "import-pseudo-tokens",
    "strip-tokens",
    "thread-tokens",
]
UNFOLDING = [
    "accumulate-gradients{microbatches=2}",
    "bucket-collectives",
    "decompose-collective-permute{validity}",
    "expand-pipeline{microbatches=2}",
    "fold-pipeline",
    "pipeline-collectives",
    "schedule-overlap",
    "split-batch{parts=2 against=text}",
    "split-layers{counts=1,1}",
    "split-weight-gradients",
]


def chain(levels: int, leaf: str, calls: int = 2) -> Artifact:
    """Each function calls the next one so often, the last one is the leaf."""
    functions = [f"func.func public @main(%a: {KIND}) -> {KIND} {{ {_calls(0, 1)} }}"]
    functions += [
        f"func.func private @f{i}(%a: {KIND}) -> {KIND} {{ {_calls(i + 1, calls)} }}"
        for i in range(levels)
    ]
    functions.append(
        f"func.func private @f{levels}(%a: {KIND}) -> {KIND} {{ {leaf}\n return %0 : {KIND} }}"
    )
    text = "module attributes {mhlo.num_partitions = 2 : i32} {\n" + "\n".join(functions) + "\n}"
    return artifact.parse(text.encode(), "chain")


def _calls(callee: int, count: int) -> str:
    lines = [
        f"%{n} = call @f{callee}(%{n - 1 if n else 'a'}) : ({KIND}) -> {KIND}" for n in range(count)
    ]
    return "\n".join([*lines, f"return %{count - 1} : {KIND}"])


def run(program: Artifact, pipeline: str) -> None:
    transforming.run_pipeline(program, Pipeline.parse(pipeline))


@pytest.mark.parametrize("leaf", [TANH, PERMUTE], ids=["silent", "communicating"])
@pytest.mark.parametrize("pipeline", UNFOLDING)
def test_what_would_unfold_is_refused(pipeline: str, leaf: str) -> None:
    with pytest.raises(
        ToolError, match=r"inlining the calls of @f0 would grow \d+ ops to 1?[\d,]{15,}"
    ):
        run(chain(DEEP, leaf), pipeline)


@pytest.mark.parametrize("leaf", [TANH, PERMUTE], ids=["silent", "communicating"])
@pytest.mark.parametrize("pipeline", AS_WRITTEN)
def test_what_looks_at_functions_as_they_are_goes_on(pipeline: str, leaf: str) -> None:
    run(chain(DEEP, leaf), pipeline)


def test_check_order_refuses_too() -> None:
    with pytest.raises(ToolError, match="inlining the calls of @f0 would grow") as raised:
        ProgramJob((chain(DEEP, PERMUTE),), JobOptions()).read()
    assert raised.value.diagnostic.place.line is not None


def test_what_times_a_program_refuses_too() -> None:
    with pytest.raises(ToolError, match="inlining the calls of @f0 would grow"):
        read_program(chain(DEEP, TANH).module, "chain")


def test_a_few_levels_are_inlined() -> None:
    (issued,) = ProgramJob((chain(6, PERMUTE),), JobOptions()).read()
    assert decide([issued.program]).collectives == 64


def test_many_levels_of_one_call_are_inlined() -> None:
    program = chain(300, PERMUTE, calls=1)
    inline_all_calls(program.module)
    assert len(program.module.body.operations) == 1


def test_the_limit_is_on_what_the_text_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stablehlo_tools.ir.inline.MOST_UNFOLDED", 300)
    inline_all_calls(chain(6, TANH).module)  # 64 leaves of 22 ops: within 20 times the text
    monkeypatch.setattr("stablehlo_tools.ir.inline.MOST_GROWTH", 2)
    inline_all_calls(chain(5, TANH).module)
    with pytest.raises(ToolError, match="make a loop of repeated calls"):
        inline_all_calls(chain(8, TANH).module)

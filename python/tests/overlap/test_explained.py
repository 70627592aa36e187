"""What `explain` says of programs with hundreds of collectives, or with no loop to work on."""

from __future__ import annotations

import re

from stablehlo_tools.artifacts.artifact import parse
from stablehlo_tools.passes.pipeline import Diagnostics, Pipeline

SUM = """({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %s : tensor<f32>
  })"""
GROUPS = (
    "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids, "
    "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
)
LARGE = "tensor<4096x4096xf32>"


def _scalar_sums(count: int) -> str:
    return "".join(
        f'%r{n} = "stablehlo.all_reduce"(%x) {SUM} {{{GROUPS}}} : (tensor<f32>) -> tensor<f32>\n'
        f"%t{n} = stablehlo.add %{f't{n - 1}' if n else 'x'}, %r{n} : tensor<f32>\n"
        for n in range(count)
    )


def _notes(body: str, pipeline: str, scalar: str = "%x", large: str = "%w") -> list[str]:
    text = (
        "module attributes {mhlo.num_partitions = 2 : i32} {"
        f"func.func @main(%x: tensor<f32>, %w: {LARGE}) -> (tensor<f32>, {LARGE}) {{{body}"
        f"return {scalar}, {large} : tensor<f32>, {LARGE}}}}}"
    )
    diagnostics = Diagnostics()
    Pipeline.parse(pipeline).run(parse(text.encode()).module, diagnostics, None)
    return [entry.message for entry in diagnostics.collected]


def test_hundreds_of_scalars_share_a_note():
    large = f'%g = "stablehlo.all_reduce"(%w) {SUM} {{{GROUPS}}} : ({LARGE}) -> {LARGE}\n'
    notes = _notes(_scalar_sums(300) + large, "schedule-overlap{explain}", "%t299", "%g")
    sums = [text for text in notes if "all_reduce" in text]
    assert len(sums) == 2
    assert re.match(r"300 all_reduces of 4 B, .* together, .*: none of them hidden, ", sums[0])
    assert sums[1].startswith("all_reduce of ")


def test_a_few_have_a_note_each():
    notes = _notes(_scalar_sums(3), "schedule-overlap{explain}", "%t2")
    assert len([text for text in notes if text.startswith("all_reduce of ")]) == 3


def test_a_program_without_loops_is_told_what_to_do():
    (text,) = _notes(_scalar_sums(5), "pipeline-collectives{explain}")
    assert "the program has no loop" in text
    assert "its 5 communicating ops" in text
    assert "lax.scan" in text


def test_loops_without_collectives_are_no_loops_to_pipeline():
    loop = """
      %n = stablehlo.constant dense<4> : tensor<i32>
      %i = stablehlo.constant dense<0> : tensor<i32>
      %l = stablehlo.while(%k = %i) : tensor<i32>
        cond {
          %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %one = stablehlo.constant dense<1> : tensor<i32>
          %next = stablehlo.add %k, %one : tensor<i32>
          stablehlo.return %next : tensor<i32>
        }
    """
    (text,) = _notes(loop + _scalar_sums(2), "pipeline-collectives{explain}")
    assert "none of the program's 1 loops has a collective" in text
    assert _notes(loop, "pipeline-collectives{explain}") == [
        "nothing to pipeline: the program has no collective"
    ]

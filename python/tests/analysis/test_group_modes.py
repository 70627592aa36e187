"""Every pass on two replicas of two partitions: what the ids of groups and pairs count stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.verify import Options, verify_artifacts

HANDLE = ", channel_handle = #stablehlo.channel_handle<handle = {}, type = 0>"
NONE, ZERO, SEVEN = "", HANDLE.format(0), HANDLE.format(7)
SPLIT = "split-batch{arguments=0}"
SINK = "pipeline-collectives{direction=sink}"
LAYERS = "split-layers{counts=1,3}"
KEEPING = [SPLIT, SINK, LAYERS, "break-permute-cycles", "thread-tokens"]


def total(name: str, value: str, kind: str, handle: str) -> str:
    return f"""
    %{name} = "stablehlo.all_reduce"({value}) ({{
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %s = stablehlo.add %a, %b : tensor<i32>
      stablehlo.return %s : tensor<i32>
    }}) {{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>{handle}}} : ({kind}) -> {kind}"""


def module(body: str, inputs: str, results: Sequence[str], kinds: Sequence[str]) -> Artifact:
    listed = ", ".join(kinds)
    text = f"""
module attributes {{mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 2 : i32}} {{
func.func @main({inputs}) -> ({listed}) {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  {body}
  return {", ".join(results)} : {listed}
}}
}}"""
    return artifact.parse(text.encode(), "module.mlir")


def batch(handle: str) -> Artifact:
    """A sum, a gather, a ring and an exchange of what carries a batch; two sums are alike."""
    kind, wide = "tensor<4x2xi32>", "tensor<4x4xi32>"
    ring = "source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>"
    group = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"
    split = "split_dimension = 1, concat_dimension = 1, split_count = 2"
    body = f"""
    {total("x", "%arg", kind, handle)}
    %double = stablehlo.add %arg, %arg : {kind}
    {total("y", "%double", kind, handle)}
    {total("z", "%double", kind, SEVEN)}
    %g = "stablehlo.all_gather"(%arg) {{all_gather_dim = 1 : i64, {group}{handle}}}
      : ({kind}) -> {wide}
    %p = "stablehlo.collective_permute"(%arg) {{{ring}{handle}}} : ({kind}) -> {kind}
    %q = "stablehlo.collective_permute"(%arg) {{{ring}{SEVEN}}} : ({kind}) -> {kind}
    %e = "stablehlo.all_to_all"(%arg) {{{split}, {group}{handle}}} : ({kind}) -> {kind}"""
    results = ["%x", "%y", "%z", "%g", "%p", "%q", "%e"]
    kinds = [wide if name == "%g" else kind for name in results]
    return module(body, f"%arg: {kind}", results, kinds)


def loop(handle: str) -> Artifact:
    """A loop over layers that adds to one carry what replicas and what all processes sum."""
    kind, stack = "tensor<2x2xi32>", "tensor<4x2x2xi32>"
    state = f"tensor<i32>, {kind}, {kind}, {stack}"
    body = f"""
    %r:4 = stablehlo.while(%i = %zero, %h = %x, %t = %x, %ws = %w) : {state}
    cond {{
      %more = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    }} do {{
      %cut = stablehlo.dynamic_slice %ws, %i, %zero, %zero, sizes = [1, 2, 2]
        : ({stack}, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x2x2xi32>
      %row = stablehlo.reshape %cut : (tensor<1x2x2xi32>) -> {kind}
      %twice = stablehlo.add %row, %row : {kind}
      {total("among", "%row", kind, handle)}
      {total("of_all", "%twice", kind, SEVEN)}
      %both = stablehlo.add %among, %of_all : {kind}
      %sum = stablehlo.add %t, %both : {kind}
      {total("inner", "%h", kind, handle)}
      %next = stablehlo.add %inner, %row : {kind}
      %n = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %n, %next, %sum, %ws : {state}
    }}"""
    return module(body, f"%x: {kind}, %w: {stack}", ["%r#1", "%r#2"], [kind, kind])


def modes(program: Artifact) -> set[tuple[str, object]]:
    return {(each.kind, each.group_mode) for each in find_collectives(program.module)}


@pytest.mark.parametrize("handle", [NONE, ZERO], ids=["none", "zero"])
@pytest.mark.parametrize("pipeline", KEEPING)
def test_a_copy_counts_what_the_collective_did(pipeline: str, handle: str) -> None:
    program = loop(handle) if pipeline in (SINK, LAYERS) else batch(handle)
    after = transforming.transform(program, pipeline)
    assert str(after.module) != str(program.module)
    assert modes(after) == modes(program)


@pytest.mark.parametrize("pipeline", [SINK, LAYERS, f"{SPLIT},break-permute-cycles"])
def test_values_stay_on_replicas_of_partitions(pipeline: str) -> None:
    program = loop(ZERO) if pipeline in (SINK, LAYERS) else batch(ZERO)
    after = transforming.transform(program, pipeline)
    assert verify_artifacts(program, after, Options(trials=1)).same


def test_a_create_reduce_scatter_keeps_what_ids_count() -> None:
    kind, half = "tensor<4xi32>", "tensor<2xi32>"
    body = f"""
    {total("sum", "%x", kind, ZERO)}
    %id = stablehlo.replica_id : tensor<ui32>
    %number = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
    %at = stablehlo.add %number, %number : tensor<i32>
    %part = stablehlo.dynamic_slice %sum, %at, sizes = [2] : ({kind}, tensor<i32>) -> {half}"""
    program = module(body, f"%x: {kind}", ["%part"], [half])
    after = transforming.transform(program, "create-reduce-scatter")
    assert {mode for _, mode in modes(after)} == {mode for _, mode in modes(program)}
    assert [each.kind for each in find_collectives(after.module)] == ["reduce_scatter"]
    assert verify_artifacts(program, after, Options(trials=1)).same

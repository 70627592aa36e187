"""verify --backend interpreter: sends and recvs of one program for two devices."""

from __future__ import annotations

import pytest
from random_permutes import permute

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.verify.verification import Options, verify_artifacts

# A kind of each number by default; the other widths for `make soak`.
ELEMENTS = [
    pytest.param(kind, marks=() if kind in ("i1", "f32", "complex<f32>") else pytest.mark.soak)
    for kind in ("i1", "i4", "ui8", "i64", "f32", "bf16", "f8E4M3FN", "complex<f32>")
]


def module(body: str, kind: str, result: str = "%0") -> Artifact:
    text = f"""module attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 2 : i32}} {{
      func.func @main(%x: {kind}) -> {kind} {{
        {body}
        return {result} : {kind}
      }}
    }}"""
    return artifact.parse(text.encode())


def transferred(kind: str) -> Artifact:
    """Device 0 sends to device 1."""
    program = module(permute("%0", "%x", [(0, 1)], kind), kind)
    Pipeline.parse("decompose-collective-permute").run(program.module, Diagnostics(), None)
    return program


def same(before: Artifact, after: Artifact) -> bool:
    return verify_artifacts(before, after, Options(backend="interpreter", trials=1)).same


@pytest.mark.parametrize("element", ELEMENTS)
def test_without_a_sender_there_are_zeros(element: str):
    kind = f"tensor<3x{element}>"
    assert same(module(permute("%0", "%x", [(0, 1)], kind), kind), transferred(kind))


def test_another_pair_is_told_apart():
    kind = "tensor<3xf32>"
    assert not same(module(permute("%0", "%x", [(1, 0)], kind), kind), transferred(kind))
    assert not same(module("", kind, "%x"), transferred(kind))


def test_in_the_branches_of_the_devices():
    """Programs that differ from device to device: nothing is changed for them."""
    kind, handle = "tensor<3xf32>", "#stablehlo.channel_handle<handle = 1, type = 1>"
    common = f"channel_handle = {handle}, is_host_transfer = false"
    pairs = "source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>"
    body = f"""
      %id = stablehlo.partition_id : tensor<ui32>
      %index = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
      %t = stablehlo.after_all : !stablehlo.token
      %none = stablehlo.constant dense<0.0> : {kind}
      %0 = "stablehlo.case"(%index) ({{
        %s = "stablehlo.send"(%x, %t) <{{{common}, {pairs}}}>
          : ({kind}, !stablehlo.token) -> !stablehlo.token
        stablehlo.return %none : {kind}
      }}, {{
        %r:2 = "stablehlo.recv"(%t) <{{{common}, {pairs}}}>
          : (!stablehlo.token) -> ({kind}, !stablehlo.token)
        stablehlo.return %r#0 : {kind}
      }}) : (tensor<i32>) -> {kind}"""
    assert same(module(permute("%0", "%x", [(0, 1)], kind), kind), module(body, kind))

"""Branches whose regions are all equal are folded; others stay as they are."""

from __future__ import annotations

import pytest
from jax.export import Exported
from models import llama

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.ir.equal_branches import fold_equal_branches

GATHER = (
    '%{name} = "stablehlo.all_gather"(%x) {{all_gather_dim = 0 : i64, replica_groups = '
    "dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = "
    "{channel}, type = 1>, use_global_device_ids}} : (tensor<2xf32>) -> tensor<4xf32>"
)
SCALED = "%a = stablehlo.multiply %x, {other} : tensor<2xf32>"


def program(*branches: str, result: str = "4xf32") -> str:
    """A choice among texts that each make `%a`."""
    regions = ", ".join(f"{{\n{b}\nstablehlo.return %a : tensor<{result}>\n}}" for b in branches)
    return f"""
module attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}} {{
func.func @main(%i: tensor<i32>, %x: tensor<2xf32>, %y: tensor<2xf32>) -> tensor<{result}> {{
  %r = "stablehlo.case"(%i) ({regions}) : (tensor<i32>) -> tensor<{result}>
  return %r : tensor<{result}>
}}
}}"""


def folded(text: str) -> tuple[bool, str]:
    program = artifact.parse(text.encode())
    with program.module.context:
        changed = fold_equal_branches(program.module)
    program.module.operation.verify()
    return changed, artifact.to_text(program.module)


LOOP = """
%n = stablehlo.constant dense<{times}> : tensor<i32>
%zero = stablehlo.constant dense<0> : tensor<i32>
%z:2 = stablehlo.while(%k = %zero, %v = %x) : tensor<i32>, tensor<2xf32>
cond {{
  %more = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %more : tensor<i1>
}} do {{
  %one = stablehlo.constant dense<1> : tensor<i32>
  %next = stablehlo.add %k, %one : tensor<i32>
  %w = stablehlo.tanh %v : tensor<2xf32>
  stablehlo.return %next, %w : tensor<i32>, tensor<2xf32>
}}
%a = stablehlo.negate %z#1 : tensor<2xf32>
"""


@pytest.mark.parametrize(
    ("branches", "result"),
    [
        ([GATHER.format(name="a", channel=1)] * 3, "4xf32"),
        ([GATHER.format(name="a", channel=c) for c in (1, 2)], "4xf32"),
        ([SCALED.format(other="%y")] * 2, "2xf32"),
        ([LOOP.format(times=3)] * 2, "2xf32"),
    ],
)
def test_equal_branches_are_folded(branches: list[str], result: str):
    changed, text = folded(program(*branches, result=result))
    assert changed
    assert "stablehlo.case" not in text


@pytest.mark.parametrize(
    ("branches", "result"),
    [
        ([SCALED.format(other=other) for other in ("%x", "%y")], "2xf32"),
        ([SCALED.format(other="%y"), "%a = stablehlo.add %x, %y : tensor<2xf32>"], "2xf32"),
        ([LOOP.format(times=3), LOOP.format(times=4)], "2xf32"),
        ([SCALED.format(other="%y"), f"{SCALED.format(other='%y')}\n%b = stablehlo.negate %a : "
          "tensor<2xf32>"], "2xf32"),
        ([SCALED.format(other="%y")], "2xf32"),
    ],
)  # fmt: skip
def test_other_branches_stay(branches: list[str], result: str):
    before = program(*branches, result=result)
    changed, text = folded(before)
    assert not changed
    assert text == artifact.to_text(artifact.parse(before.encode()).module)


def test_what_one_branch_returns_of_the_outside_is_told_apart():
    text = program("%c = stablehlo.negate %x : tensor<2xf32>", result="2xf32")
    one, other = text.replace("return %a", "return %x"), text.replace("return %a", "return %y")
    regions = [t[t.index("({") + 1 : t.index("}) :") + 1] for t in (one, other)]
    both = one.replace(regions[0], ", ".join(regions))
    alike = one.replace(regions[0], ", ".join([regions[0], regions[0]]))
    assert folded(alike)[0]
    assert not folded(both)[0]


def test_branches_with_constants_of_complex_numbers_are_compared():
    constant = "%a = stablehlo.constant dense<[({}, 1.0), (0.0, 1.0)]> : tensor<2xcomplex<f32>>"
    one, other = constant.format("1.0"), constant.format("2.0")
    assert folded(program(one, one, result="2xcomplex<f32>"))[0]
    assert not folded(program(one, other, result="2xcomplex<f32>"))[0]


def test_a_choice_of_a_choice_goes_with_what_asked_for_it():
    """As jax writes it where two of the platforms have the same lowering."""
    branch = f"{{\n{SCALED.format(other='%y')}\nstablehlo.return %a : tensor<2xf32>\n}}"
    same = "{\nstablehlo.return %c : tensor<i32>\n}"
    text = program(SCALED.format(other="%y"), result="2xf32")
    start, end = text.index("  %r ="), text.index("  return %r")
    lines = (
        "  %c = stablehlo.constant dense<1> : tensor<i32>",
        f'  %k = "stablehlo.case"(%i) ({same}, {same}) : (tensor<i32>) -> tensor<i32>',
        f'  %r = "stablehlo.case"(%k) ({branch}, {branch}) : (tensor<i32>) -> tensor<2xf32>\n',
    )
    changed, folded_text = folded(text[:start] + "\n".join(lines) + text[end:])
    assert changed
    assert "stablehlo.case" not in folded_text


def test_a_program_for_two_platforms_has_its_collectives_moved():
    config = llama.LlamaConfig(layers=3, scan_layers=True, platforms=("cpu", "cuda"))
    before = llama.export_train_step(config)
    assert isinstance(before, Exported)
    after = stablehlo_tools.transform(before, "pipeline-collectives{direction=prefetch hold=false}")
    assert "stablehlo.case" in before.mlir_module()
    assert "stablehlo.case" not in after.mlir_module()
    assert after.platforms == before.platforms

"""Twins: programs too large to run, compared at sizes at which they can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify import Options, Rule
from stablehlo_tools.verify.twin import estimated_bytes, twins, verify_twins
from stablehlo_tools.verify.twin.extents import Extent, Extents, divide, keep, unite
from stablehlo_tools.verify.twin.verification import in_f64

GIB = 2**30
ONCE = Options(rule=Rule(1e-4, 1e-5), trials=1)

# Each of 4 devices holds rows of two weights of 4 GiB, and takes its own columns of the product.
STEP = """
module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%x: tensor<32x32768xf32>, %w: tensor<8192x32768xf32>,
                         %v: tensor<8192x32768xf32>) -> (tensor<32x8192xf32>, tensor<8192xf32>) {
    %w_all = "stablehlo.all_gather"(%w) <{all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}>
      : (tensor<8192x32768xf32>) -> tensor<32768x32768xf32>
    %v_all = "stablehlo.all_gather"(%v) <{all_gather_dim = 0 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}>
      : (tensor<8192x32768xf32>) -> tensor<32768x32768xf32>
    %y = stablehlo.dot_general %x, %w_all, contracting_dims = [1] x [0]
      : (tensor<32x32768xf32>, tensor<32768x32768xf32>) -> tensor<32x32768xf32>
    %z = stablehlo.dot_general %y, %v_all, contracting_dims = [1] x [1]
      : (tensor<32x32768xf32>, tensor<32768x32768xf32>) -> tensor<32x32768xf32>
    %sum = "stablehlo.all_reduce"(%z) <{
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<32x32768xf32>) -> tensor<32x32768xf32>
    %id = stablehlo.partition_id : tensor<ui32>
    %device = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
    %rows = stablehlo.constant dense<8192> : tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %start = stablehlo.multiply %device, %rows : tensor<i32>
    %own = stablehlo.dynamic_slice %sum, %zero, %start, sizes = [32, 8192]
      : (tensor<32x32768xf32>, tensor<i32>, tensor<i32>) -> tensor<32x8192xf32>
    %iota = stablehlo.iota dim = 0 : tensor<8192xi32>
    %first = stablehlo.broadcast_in_dim %start, dims = [] : (tensor<i32>) -> tensor<8192xi32>
    %number = stablehlo.add %iota, %first : tensor<8192xi32>
    %float = stablehlo.convert %number : (tensor<8192xi32>) -> tensor<8192xf32>
    return %own, %float : tensor<32x8192xf32>, tensor<8192xf32>
  }
}
"""
# What goes wrong in a rewrite, as text that stands in place of another.
MISTAKES = {
    "two collectives swapped": (("(%w) <", "(%u) <"), ("(%v) <", "(%w) <"), ("(%u) <", "(%v) <")),
    "a wrong group": (("dense<[[0, 1, 2, 3]]>", "dense<[[0, 1, 3, 2]]>"),),
    "an offset of one": (
        ("%sum, %zero, %start", "%sum, %zero, %late"),
        (
            "%own =",
            "%one = stablehlo.constant dense<1> : tensor<i32>\n"
            "%late = stablehlo.add %start, %one : tensor<i32>\n%own =",
        ),
    ),
    "a sum too few": (("dynamic_slice %sum", "dynamic_slice %z"),),
}


def program(text: str = STEP) -> Artifact:
    return artifacts.parse(text.encode(), "step.mlir")


def mistaken(name: str) -> Artifact:
    text = STEP
    for old, new in MISTAKES[name]:
        assert old in text
        text = text.replace(old, new, 1)
    return program(text)


def test_a_program_that_is_too_large_is_compared_at_a_reduced_size():
    answer = verify_twins(program(), program(), ONCE, GIB)
    assert answer.verification.same
    assert answer.twin.full_bytes > 16 * GIB
    assert answer.twin.bytes < 2**20
    assert set(answer.twin.factors) == {8192, 32768, 32}
    assert answer.to_json()["twin"]["not_shown"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_twin_shows_a_mistake(name: str):
    assert not verify_twins(program(), mistaken(name), ONCE, GIB).verification.same


def test_a_slice_may_take_nothing():
    none = program("""func.func @main(%x: tensor<4096x2xf32>) -> tensor<4096x0xf32> {
        %y = stablehlo.slice %x [0:4096, 2:2:2] : (tensor<4096x2xf32>) -> tensor<4096x0xf32>
        return %y : tensor<4096x0xf32>
    }""")
    assert twins(none, none, GIB).factors.keys() == {4096}


GROUPED = """func.func @main(%x: tensor<{n}x2048x{c}xf32>, %w: tensor<4x{i}x{o}xf32>)
    -> tensor<{m}x2048x{o}xf32> {{
  %y = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f],
    window = {{pad = [[3, 0]]}} {{batch_group_count = {b} : i64, feature_group_count = {f} : i64}}
    : (tensor<{n}x2048x{c}xf32>, tensor<4x{i}x{o}xf32>) -> tensor<{m}x2048x{o}xf32>
  return %y : tensor<{m}x2048x{o}xf32>
}}"""


@pytest.mark.parametrize(
    "sizes",
    [
        {"n": 8, "c": 5120, "i": 1, "o": 5120, "m": 8, "b": 1, "f": 5120},  # depthwise
        {"n": 8, "c": 5120, "i": 64, "o": 10240, "m": 8, "b": 1, "f": 80},
        {"n": 4096, "c": 64, "i": 64, "o": 4096, "m": 8, "b": 512, "f": 1},
    ],
)
def test_a_convolution_keeps_its_groups(sizes: dict[str, int]):
    grouped = program(GROUPED.format(**sizes))
    answer = verify_twins(grouped, grouped, ONCE, GIB)
    assert answer.verification.same
    assert answer.twin.bytes < answer.twin.full_bytes / 50


def test_a_limit_that_no_twin_keeps_names_what_is_kept():
    fft = """func.func @main(%x: tensor<4096x4096xf32>) -> tensor<4096x4096xf32> {
      %y = stablehlo.cholesky %x, lower = true : tensor<4096x4096xf32>
      return %y : tensor<4096x4096xf32>
    }"""
    with pytest.raises(ToolError, match="no twin") as raised:
        twins(program(fft), program(fft), 2**20)
    told = [note.message for note in raised.value.diagnostic.notes]
    assert "4096 is kept: cholesky" in told[0]
    assert "exported with fewer samples" in told[-1]


def test_programs_of_other_shapes_have_no_twin():
    other = program(STEP.replace("32x", "16x").replace("[32, 8192]", "[16, 8192]"))
    with pytest.raises(ToolError, match="the same shapes"):
        twins(program(), other, GIB)


def test_a_program_is_as_large_as_its_devices_need_it():
    assert estimated_bytes(program().module) > 4 * 3 * GIB


def test_a_division_into_shards_goes_through_a_division_into_heads():
    width = Extent(4096)
    shards, local = divide(width, [8, 512])
    heads, each = divide(width, [32, 128])
    keep(shards, "devices")
    Extents().settle([width])
    assert [leaf.size for leaf in width.leaves] == [8, 4, 128]
    assert (shards.reduced, heads.reduced) == (8, 32)
    assert local.reduced == 4 * each.reduced < 512


def test_divisions_that_do_not_go_together_keep_all():
    width = Extent(24)
    divide(width, [8, 3])
    divide(width, [3, 8])
    Extents().settle([width])
    assert width.is_whole


def test_a_position_less_is_one_less_in_the_twin():
    extents = Extents()
    whole, part = Extent(4096), Extent(4095)
    extents.join(whole, [Extent(1), part])
    extents.settle([whole])
    assert part.reduced == whole.reduced - 1 < 100
    np.testing.assert_array_equal(part.positions(), whole.positions()[1:] - 1)


def test_a_part_that_is_divided_is_one_of_two_that_make_the_whole():
    extents, whole, part = Extents(), Extent(300), Extent(290)
    extents.join(whole, [part, Extent(10)])
    divide(part, [29, 10])
    extents.settle([whole])
    assert whole.reduced == part.reduced + 10 < 300


def test_halves_of_a_dimension_stay_halves():
    extents = Extents()
    whole, halves = Extent(128), [Extent(64), Extent(64)]
    extents.join(whole, halves)
    extents.settle([whole])
    assert whole.reduced == 2 * halves[0].reduced == 2 * halves[1].reduced < 128


def test_extents_that_are_united_lose_the_same():
    one, other = Extent(512), Extent(512)
    unite(one, other)
    Extents().settle([one])
    assert one.reduced == other.reduced < 512


def chaotic(steps: int, *, order: str = "(ab)c", off: float = 0.0) -> Artifact:
    """A sum of three, then the logistic map: a difference of any size doubles in each step."""
    sums = {
        "(ab)c": ("%a, %b", "%s, %c"),
        "a(bc)": ("%b, %c", "%a, %s"),
    }
    first, second = sums[order]
    each = "\n".join(
        f"""    %d{i} = stablehlo.subtract %one, %x{i} : tensor<64x64x64xf32>
    %m{i} = stablehlo.multiply %x{i}, %d{i} : tensor<64x64x64xf32>
    %x{i + 1} = stablehlo.multiply %m{i}, %four : tensor<64x64x64xf32>"""
        for i in range(steps)
    )
    return program(f"""func.func @main(%a: tensor<64x64x64xf32>, %b: tensor<64x64x64xf32>,
        %c: tensor<64x64x64xf32>) -> (tensor<64x64x64xf32>, tensor<64x64x64xf32>) {{
    %one = stablehlo.constant dense<1.0> : tensor<64x64x64xf32>
    %four = stablehlo.constant dense<4.0> : tensor<64x64x64xf32>
    %off = stablehlo.constant dense<{off:.12f}> : tensor<64x64x64xf32>
    %s = stablehlo.add {first} : tensor<64x64x64xf32>
    %t = stablehlo.add {second} : tensor<64x64x64xf32>
    %u = stablehlo.add %t, %off : tensor<64x64x64xf32>
    %x0 = stablehlo.logistic %u : tensor<64x64x64xf32>
{each}
    return %t, %x{steps} : tensor<64x64x64xf32>, tensor<64x64x64xf32>
  }}""")


def test_what_rounding_moves_as_far_is_no_difference():
    limit = 2**16
    answer = verify_twins(chaotic(32), chaotic(32, order="a(bc)"), ONCE, limit).verification
    assert answer.same
    assert [output.index for output in answer.rounded] == [1]
    assert answer.rounded[0].rounding > 1e-9
    assert len(answer.compared) == 2


def test_a_mistake_in_what_rounding_moves_far_is_one():
    limit = 2**16
    assert not verify_twins(chaotic(32), chaotic(32, off=1e-9), ONCE, limit).verification.same
    assert not verify_twins(chaotic(4), chaotic(4, off=1e-4), ONCE, limit).verification.same


def test_of_an_output_that_is_all_rounding_nothing_is_shown():
    answer = verify_twins(chaotic(64), chaotic(64, order="a(bc)"), ONCE, 2**16).verification
    assert answer.same
    assert answer.vacuous == (1,)


def test_tolerances_that_are_given_hold_where_they_are_less() -> None:
    assert in_f64(Rule(1e-2, 1e-4)) == Rule(1e-6, 1e-9)
    assert in_f64(Rule(1e-12, None)) == Rule(1e-12, 1e-9)
    assert in_f64(Rule(None, 0.0, any_nan=True)) == Rule(1e-6, 0.0, any_nan=True)


def test_other_tolerances_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "step.mlir"
    step.write_text(
        "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"
    )
    words = ["verify", str(step), str(step), "--twin", "always", "--trials", "1", "--rtol"]
    told = "compared within rtol=1e-06 atol=1e-09, not within rtol=0.01 atol=0: "
    assert main([*words, "1e-2"]) == 0
    assert told in capsys.readouterr().out
    assert main([*words, "1e-6", "--atol", "1e-9"]) == 0
    assert "not within" not in capsys.readouterr().out


# What a language model reads, and what it is to say, of the same tokens, and the sequence in parts.
TOKENS = """
module attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}} {{
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%tokens: tensor<8x2049xi32>, %table: tensor<512x64xf32>)
      -> tensor<8x2048x64xf32> {{
    %read = stablehlo.slice %tokens [0:8, {read}] : (tensor<8x2049xi32>) -> tensor<8x2048xi32>
    %said = stablehlo.slice %tokens [0:8, {said}] : (tensor<8x2049xi32>) -> tensor<8x2048xi32>
    %0 = stablehlo.convert %read : (tensor<8x2048xi32>) -> tensor<8x2048xf32>
    %1 = stablehlo.convert %said : (tensor<8x2048xi32>) -> tensor<8x2048xf32>
    %2 = stablehlo.cosine %1 : tensor<8x2048xf32>
    %3 = stablehlo.multiply %0, %2 : tensor<8x2048xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1]
      : (tensor<8x2048xf32>) -> tensor<8x2048x64xf32>
    %5 = sdy.sharding_constraint %4 <@mesh, [{{}}, {{{axes}}}, {{}}]> : tensor<8x2048x64xf32>
    return %5 : tensor<8x2048x64xf32>
  }}
}}
"""


def _tokens(read: str = "0:2048", said: str = "1:2049", axes: str = "") -> Artifact:
    return program(TOKENS.format(read=read, said=said, axes=axes))


def test_two_overlapping_parts_of_a_sequence_that_is_divided_have_a_twin():
    answer = verify_twins(_tokens(), _tokens(axes='"x"'), ONCE, GIB)
    assert answer.verification.same
    assert answer.twin.factors[2049][0] == answer.twin.factors[2048][0] + 1 < 100


@pytest.mark.parametrize("parts", [("1:2049", "0:2048"), ("0:2048", "0:2048")])
def test_a_twin_shows_parts_that_are_taken_wrongly(parts: tuple[str, str]):
    wrong = _tokens(*parts, axes='"x"')
    assert not verify_twins(_tokens(), wrong, ONCE, GIB).verification.same


def test_a_barrier_hands_on_a_value_beside_a_token():
    text = """func.func @main(%x: tensor<4096x4096xf32>) -> tensor<4096x4096xf32> {{
      %t = stablehlo.after_all : !stablehlo.token
      {barrier}
      %z = stablehlo.add %y, %y : tensor<4096x4096xf32>
      return %z : tensor<4096x4096xf32>
    }}"""
    handed = "%y, %u = stablehlo.optimization_barrier %x, %t"
    barrier = f"{handed} : tensor<4096x4096xf32>, !stablehlo.token"
    plain = text.format(barrier="%y = stablehlo.negate %x : tensor<4096x4096xf32>")
    one = program(text.format(barrier=barrier))
    assert verify_twins(one, one, ONCE, GIB).twin.factors.keys() == {4096}
    assert not verify_twins(one, program(plain), ONCE, GIB).verification.same

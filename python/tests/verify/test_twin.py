"""Twins: programs too large to run, compared at sizes at which they can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify import Options
from stablehlo_tools.verify.twin import TwinVerification, estimated_bytes, twins, verify_twins
from stablehlo_tools.verify.twin import twin as twin_module
from stablehlo_tools.verify.twin.extents import Extents, TwinExtent, divide, keep, unite

GIB = 2**30
ONCE = Options(arithmetic="exact", trials=1, partitioned=False)

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
    assert answer.to_json()["twin"]["uniform"] == [32768, 32]


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
    assert answer.twin.bytes < answer.twin.full_bytes / 20


def test_a_limit_that_no_twin_keeps_names_what_is_kept():
    fft = """func.func @main(%x: tensor<4096x4096xf32>) -> tensor<4096x4096xf32> {
      %y = stablehlo.cholesky %x, lower = true : tensor<4096x4096xf32>
      return %y : tensor<4096x4096xf32>
    }"""
    with pytest.raises(ToolError, match="no twin") as raised:
        twins(program(fft), program(fft), 2**20)
    told = [note.message for note in raised.value.diagnostic.notes]
    assert "4096 is kept: cholesky" in told[0]
    assert "export the same step with fewer samples" in told[-1]


def test_programs_of_other_shapes_have_no_twin():
    other = program(STEP.replace("32x", "16x").replace("[32, 8192]", "[16, 8192]"))
    with pytest.raises(ToolError, match="different input or output shapes"):
        twins(program(), other, GIB)


def test_a_program_is_as_large_as_its_devices_need_it():
    assert estimated_bytes(program().module) > 4 * 3 * GIB


def test_a_division_into_shards_goes_through_a_division_into_heads():
    width = TwinExtent(4096)
    shards, local = divide(width, [8, 512])
    heads, each = divide(width, [32, 128])
    keep(shards, "devices")
    Extents().settle([width])
    assert [leaf.size for leaf in width.leaves] == [8, 4, 128]
    assert (shards.reduced, heads.reduced) == (8, 32)
    assert local.reduced == 4 * each.reduced < 512


def test_divisions_that_do_not_go_together_keep_all():
    width = TwinExtent(24)
    divide(width, [8, 3])
    divide(width, [3, 8])
    Extents().settle([width])
    assert width.is_whole


def test_a_position_less_is_one_less_in_the_twin():
    extents = Extents()
    whole, part = TwinExtent(4096), TwinExtent(4095)
    extents.join(whole, [TwinExtent(1), part])
    extents.settle([whole])
    assert part.reduced == whole.reduced - 1 < 100
    np.testing.assert_array_equal(part.positions(), whole.positions()[1:] - 1)


def test_a_part_that_is_divided_is_one_of_two_that_make_the_whole():
    extents, whole, part = Extents(), TwinExtent(300), TwinExtent(290)
    extents.join(whole, [part, TwinExtent(10)])
    divide(part, [29, 10])
    extents.settle([whole])
    assert whole.reduced == part.reduced + 10 < 300


def test_halves_of_a_dimension_stay_halves():
    extents = Extents()
    whole, halves = TwinExtent(128), [TwinExtent(64), TwinExtent(64)]
    extents.join(whole, halves)
    extents.settle([whole])
    assert whole.reduced == 2 * halves[0].reduced == 2 * halves[1].reduced < 128


def test_extents_that_are_united_lose_the_same():
    one, other = TwinExtent(512), TwinExtent(512)
    unite(one, other)
    Extents().settle([one])
    assert one.reduced == other.reduced < 512


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


def compared(before: str, after: str, options: Options = ONCE) -> TwinVerification:
    """The answer for two functions of one line each, given without `func.func @main`."""
    artifacts_ = [program(f"func.func @main{text}") for text in (before, after)]
    return verify_twins(artifacts_[0], artifacts_[1], options, GIB)


POSITIONS = """(%x: tensor<4096x4096xf32>) -> tensor<4096x4096xf32> {{
  %i = stablehlo.iota dim = 0 : tensor<4096x4096xi32>
  %j = stablehlo.iota dim = 1 : tensor<4096x4096xi32>
  {mask}
  %zero = stablehlo.constant dense<0.0> : tensor<4096x4096xf32>
  %y = stablehlo.select %in, %x, %zero : tensor<4096x4096xi1>, tensor<4096x4096xf32>
  return %y : tensor<4096x4096xf32>
}}"""
WINDOWS = {
    "a difference": """%c = stablehlo.constant dense<{n}> : tensor<4096x4096xi32>
  %d = stablehlo.subtract %i, %j : tensor<4096x4096xi32>
  %in = stablehlo.compare LT, %d, %c : (tensor<4096x4096xi32>, tensor<4096x4096xi32>)
    -> tensor<4096x4096xi1>""",
    "a shifted position, as of triu": """%c = stablehlo.constant dense<{n}> : tensor<i32>
  %many = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<i32>) -> tensor<4096x4096xi32>
  %k = stablehlo.add %j, %many : tensor<4096x4096xi32>
  %in = stablehlo.compare GT, %k, %i : (tensor<4096x4096xi32>, tensor<4096x4096xi32>)
    -> tensor<4096x4096xi1>""",
    "a largest difference": """%c = stablehlo.constant dense<{n}> : tensor<4096x4096xi32>
  %d = stablehlo.subtract %i, %j : tensor<4096x4096xi32>
  %e = stablehlo.minimum %d, %c : tensor<4096x4096xi32>
  %in = stablehlo.compare EQ, %d, %e : (tensor<4096x4096xi32>, tensor<4096x4096xi32>)
    -> tensor<4096x4096xi1>""",
    "a stride": """%c = stablehlo.constant dense<{n}> : tensor<4096x4096xi32>
  %d = stablehlo.remainder %i, %c : tensor<4096x4096xi32>
  %in = stablehlo.compare LT, %d, %j : (tensor<4096x4096xi32>, tensor<4096x4096xi32>)
    -> tensor<4096x4096xi1>""",
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("other", [512, 1023, 1025])
def test_a_twin_has_positions_on_both_sides_of_a_constant(window: str, other: int):
    one, two = (POSITIONS.format(mask=WINDOWS[window].format(n=n)) for n in (1024, other))
    answer = compared(one, two)
    assert not answer.verification.same
    assert not answer.same
    answer = compared(one, one)
    assert answer.same
    assert not any(answer.not_covered.values())


# Each token has a number among those of its expert; an expert takes the first of them.
CAPACITY = """(%expert: tensor<4096xi32>, %x: tensor<4096xf32>) -> tensor<4096xf32> {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %zeros = stablehlo.constant dense<0> : tensor<4096xi32>
  %none = stablehlo.constant dense<0.0> : tensor<4096xf32>
  %mine = stablehlo.compare EQ, %expert, %zeros : (tensor<4096xi32>, tensor<4096xi32>)
    -> tensor<4096xi1>
  %ones = stablehlo.convert %mine : (tensor<4096xi1>) -> tensor<4096xi32>
  %number = "stablehlo.reduce_window"(%ones, %zero) <{{window_dimensions = array<i64: 4096>,
    padding = dense<[[4095, 0]]> : tensor<1x2xi64>}}> ({{
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %s = stablehlo.add %a, %b : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }}) : (tensor<4096xi32>, tensor<i32>) -> tensor<4096xi32>
  %capacity = stablehlo.constant dense<{n}> : tensor<4096xi32>
  %in = stablehlo.compare {direction}, %number, %capacity : (tensor<4096xi32>, tensor<4096xi32>)
    -> tensor<4096xi1>
  %y = stablehlo.select %in, %x, %none : tensor<4096xi1>, tensor<4096xf32>
  return %y : tensor<4096xf32>
}}"""


def capacity(n: int, direction: str = "LE") -> str:
    return CAPACITY.format(n=n, direction=direction)


def verify(tmp_path: Path, before: str, after: str, *words: str) -> int:
    paths = [str(tmp_path / name) for name in ("before.mlir", "after.mlir")]
    for path, text in zip(paths, (before, after), strict=True):
        Path(path).write_text(f"func.func @main{text}")
    return main(["verify", *paths, "--twin", "always", *words])


def test_a_constant_that_lost_its_meaning_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert verify(tmp_path, capacity(64), capacity(64)) == 0
    lines = "\nnot uniform in 4096: 64 in compare\nnot covered: 64 in compare\n"
    assert lines in capsys.readouterr().out
    assert verify(tmp_path, capacity(64), capacity(64), "--floats") == 0  # nothing is counted
    assert lines in capsys.readouterr().out


def test_constants_that_differ_and_that_no_input_tells_apart_are_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert verify(tmp_path, capacity(64), capacity(32)) == 1
    out = capsys.readouterr().out
    assert "\ndiffers: BEFORE alone compares with 64 in compare\n" in out
    assert "\ndiffers: AFTER alone compares with 32 in compare\n" in out
    assert verify(tmp_path, capacity(64), capacity(32), "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["same"]
    assert answer["twin"]["unequal"] == {"before": ["64 in compare"], "after": ["32 in compare"]}


def test_the_same_bound_in_other_words_is_no_difference():
    answer = compared(capacity(64), capacity(65, "LT"))
    assert answer.same
    assert [str(constant) for constant in answer.not_covered["after"]] == ["65 in compare"]


def test_a_count_that_is_compared_with_all_there_are_is_not_named():
    answer = compared(capacity(4096), capacity(4096))
    assert answer.same
    assert not any(answer.not_covered.values())


def test_comparisons_that_have_one_outcome_at_full_size_are_not_named():
    normalized = """(%x: tensor<4096xf32>, %k: tensor<8xi32>) -> tensor<4096xf32> {
      %i = stablehlo.iota dim = 0 : tensor<4096xi32>
      %zero = stablehlo.constant dense<0> : tensor<4096xi32>
      %last = stablehlo.constant dense<4095> : tensor<4096xi32>
      %size = stablehlo.constant dense<4096> : tensor<4096xi32>
      %low = stablehlo.compare LT, %i, %zero : (tensor<4096xi32>, tensor<4096xi32>)
        -> tensor<4096xi1>
      %added = stablehlo.add %i, %size : tensor<4096xi32>
      %index = stablehlo.select %low, %added, %i : tensor<4096xi1>, tensor<4096xi32>
      %in = stablehlo.compare LE, %index, %last : (tensor<4096xi32>, tensor<4096xi32>)
        -> tensor<4096xi1>
      %none = stablehlo.constant dense<0.0> : tensor<4096xf32>
      %y = stablehlo.select %in, %x, %none : tensor<4096xi1>, tensor<4096xf32>
      return %y : tensor<4096xf32>
    }"""
    answer = compared(normalized, normalized)
    assert answer.same
    assert not any(answer.twin.counted.values())


UPDATE = """(%x: tensor<1024x4096xf32>) -> tensor<1024x4096xf32> {{
  %left = stablehlo.slice %x [0:1024, 0:4094] : (tensor<1024x4096xf32>) -> tensor<1024x4094xf32>
  %right = stablehlo.slice %x [0:1024, {right}] : (tensor<1024x4096xf32>) -> tensor<1024x4094xf32>
  %sum = stablehlo.add %left, %right : tensor<1024x4094xf32>
  {update}
  return %y : tensor<1024x4096xf32>
}}"""
BY_SCATTER = """%one = stablehlo.constant dense<{start}> : tensor<i32>
  %at = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<i32>) -> tensor<1xi32>
  %y = "stablehlo.scatter"(%x, %at, %sum) <{{scatter_dimension_numbers = #stablehlo.scatter<
    update_window_dims = [0, 1], scatter_dims_to_operand_dims = [1]>}}> ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    stablehlo.return %b : tensor<f32>
  }}) : (tensor<1024x4096xf32>, tensor<1xi32>, tensor<1024x4094xf32>) -> tensor<1024x4096xf32>"""
BY_SLICE = """%zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<{start}> : tensor<i32>
  %y = stablehlo.dynamic_update_slice %x, %sum, %zero, %one : (tensor<1024x4096xf32>,
    tensor<1024x4094xf32>, tensor<i32>, tensor<i32>) -> tensor<1024x4096xf32>"""
# The rightmost element of a part in a part, as of a halo.
BY_PARTS = """%first = stablehlo.slice %x [0:1024, 0:{start}]
    : (tensor<1024x4096xf32>) -> tensor<1024x{start}xf32>
  %most = stablehlo.slice %sum [0:1024, 0:4093]
    : (tensor<1024x4094xf32>) -> tensor<1024x4093xf32>
  %rest = stablehlo.slice %sum [0:1024, 4093:4094]
    : (tensor<1024x4094xf32>) -> tensor<1024x1xf32>
  %last = stablehlo.slice %x [0:1024, 4095:4096]
    : (tensor<1024x4096xf32>) -> tensor<1024x1xf32>
  %y = stablehlo.concatenate %first, %most, %rest, %last, dim = 1 : (tensor<1024x{start}xf32>,
    tensor<1024x4093xf32>, tensor<1024x1xf32>, tensor<1024x1xf32>) -> tensor<1024x4096xf32>"""


def update(way: str, start: int = 1, right: str = "2:4096") -> str:
    return UPDATE.format(right=right, update=way.format(start=start))


@pytest.mark.parametrize("way", [BY_SCATTER, BY_SLICE, BY_PARTS])
def test_the_update_of_an_interior_is_made_smaller(way: str):
    answer = compared(update(BY_SCATTER), update(way))
    assert answer.same
    assert answer.twin.factors.keys() == {4096, 1024}
    assert answer.twin.uniform == (1024,)


@pytest.mark.parametrize(
    "wrong",
    [
        update(BY_SCATTER, start=0),
        update(BY_SCATTER, start=2),
        update(BY_SLICE, start=2),
        update(BY_SCATTER, right="1:4095"),
    ],
)
def test_a_twin_shows_an_interior_that_is_off_by_one(wrong: str):
    assert not compared(update(BY_SCATTER), wrong).same


LARGEST = """(%x: tensor<4096x65536xf32>) -> tensor<4096x{k}xi32> {{
  %i = stablehlo.iota dim = 1 : tensor<4096x65536xi32>
  %sorted:2 = "stablehlo.sort"(%x, %i) <{{dimension = 1 : i64, is_stable = true}}> ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
    %m = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %m : tensor<i1>
  }}) : (tensor<4096x65536xf32>, tensor<4096x65536xi32>)
    -> (tensor<4096x65536xf32>, tensor<4096x65536xi32>)
  %y = stablehlo.slice %sorted#1 [0:4096, 0:{k}] : (tensor<4096x65536xi32>) -> tensor<4096x{k}xi32>
  return %y : tensor<4096x{k}xi32>
}}"""


@pytest.mark.parametrize("k", [5, 100])
def test_the_k_largest_stay_k(k: int):
    answer = compared(LARGEST.format(k=k), LARGEST.format(k=k))
    assert answer.same
    assert answer.twin.factors.keys() == {65536, 4096}
    assert answer.twin.factors[65536][0] >= k


def test_a_size_that_is_asked_for_is_the_full_one():
    mean = """(%x: tensor<4096x4096xf32>) -> tensor<4096x4096xf32> {{
      {size}
      %f = stablehlo.convert %n : (tensor<i32>) -> tensor<f32>
      %all = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4096x4096xf32>
      %y = stablehlo.multiply %x, %all : tensor<4096x4096xf32>
      return %y : tensor<4096x4096xf32>
    }}"""
    asked = "%n = stablehlo.get_dimension_size %x, dim = 1 : (tensor<4096x4096xf32>) -> tensor<i32>"
    said = "%n = stablehlo.constant dense<4096> : tensor<i32>"
    answer = compared(mean.format(size=asked), mean.format(size=said))
    assert answer.same
    assert answer.twin.is_uniform
    assert answer.limits() == ["uniform in 4096: no op depends on a position in them"]


SHARD = """
module attributes {{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func public @main(%x: tensor<32x32768xf32>) -> tensor<32x8192xf32> {{
    %id = stablehlo.partition_id : tensor<ui32>
    %device = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
    %size = stablehlo.constant dense<{size}> : tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %start = stablehlo.multiply %device, %size : tensor<i32>
    %own = stablehlo.dynamic_slice %x, %zero, %start, sizes = [32, 8192]
      : (tensor<32x32768xf32>, tensor<i32>, tensor<i32>) -> tensor<32x8192xf32>
    return %own : tensor<32x8192xf32>
  }}
}}
"""


def test_a_shard_is_no_position_and_any_other_place_is_one():
    shard, other = (program(SHARD.format(size=size)) for size in (8192, 8191))
    assert twins(shard, shard, GIB).uniform == (32768, 8192, 32)
    assert dict(twins(shard, other, GIB).positional)[32768] == "dynamic_slice"


def test_programs_that_differ_at_another_size_are_not_uniform(monkeypatch: pytest.MonkeyPatch):
    texts = iter("abcd")
    monkeypatch.setattr(twin_module, "_structure", lambda module: next(texts))
    shard = program(SHARD.format(size=8192))
    assert dict(twins(shard, shard, GIB).positional)[32].startswith("BEFORE has other ops")


def test_a_wanted_position_is_one_of_a_part_as_well():
    width = TwinExtent(4096)
    shards, local = divide(width, [8, 512])
    keep(shards, "devices")
    extents, tokens, read = Extents(), TwinExtent(2049), TwinExtent(2048)
    extents.join(tokens, [TwinExtent(1), read])
    extents.settle([width, tokens, read], [(width, 700), (read, 1000)])
    assert 188 in local.positions()
    assert 700 in width.positions()
    assert 1000 in read.positions()
    assert 1001 in tokens.positions()
    assert width.reduced < 100

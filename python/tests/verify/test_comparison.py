"""The comparison of two programs' outputs, on arrays made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stablehlo_tools.verify.comparison import (
    BITWISE,
    OutputComparison,
    Rule,
    Shard,
    compare_output,
    differs,
    show,
)
from stablehlo_tools.verify.element_types import Array, ElementType, element_type

TOLERANT = Rule(rtol=0.0, atol=0.0)


def known(name: str) -> ElementType:
    element = element_type(name)
    assert element is not None
    return element


def bits(name: str, *patterns: int) -> Array:
    """A vector of an element type, from its bit patterns."""
    dtype = known(name).dtype
    return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def whole(values: Array, device: int = 0, instance: int = 0) -> Shard:
    return Shard(device, (slice(None),) * values.ndim, values, instance)


def compare(name: str, before: Array, after: Array, rule: Rule = BITWISE) -> OutputComparison:
    return compare_output(known(name), before.shape, [whole(before)], [whole(after)], rule)


def test_equal_arrays_agree():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = compare("f32", values, values.copy())
    assert result == OutputComparison(elements=6, finite=6)


def test_the_first_differing_element_is_the_lowest_index():
    before = np.zeros((3, 4), np.float32)
    after = before.copy()
    after[2, 0], after[1, 3] = 1.5, -4.0
    result = compare("f32", before, after)
    assert result.differing == 2
    assert result.max_abs_difference == 4.0
    assert result.first is not None
    assert (result.first.index, result.first.before, result.first.after) == ((1, 3), "0.0", "-4.0")
    assert result.first.device is None


def test_the_sign_of_zero_counts_bitwise_only():
    before, after = np.array([0.0], np.float32), np.array([-0.0], np.float32)
    result = compare("f32", before, after)
    assert result.differing == 1
    assert result.first is not None
    assert (result.first.before, result.first.after) == ("0.0", "-0.0")
    assert compare("f32", before, after, TOLERANT).differing == 0


def test_the_payload_of_a_nan_counts_bitwise_only():
    before, after = bits("f32", 0x7FC00001), bits("f32", 0x7FC00002)
    result = compare("f32", before, after)
    assert result.first is not None
    assert (result.first.before, result.first.after) == ("nan(0x7fc00001)", "nan(0x7fc00002)")
    assert result.max_abs_difference is None
    assert result.shows_nothing
    assert compare("f32", before, after, TOLERANT).differing == 0
    assert compare("f32", before, after, Rule(any_nan=True)).differing == 0


def test_any_nan_leaves_the_rest_bitwise():
    before, after = bits("bf16", 0x7FC1, 0x0000), bits("bf16", 0xFFC2, 0x8000)
    result = compare("bf16", before, after, Rule(any_nan=True))
    assert result.differing == 1
    assert result.first is not None
    assert result.first.index == (1,)


def test_a_nan_equals_no_number():
    before, after = np.array([np.nan, 1.0], np.float32), np.array([0.0, np.nan], np.float32)
    for rule in (BITWISE, Rule(any_nan=True), Rule(rtol=1.0, atol=1.0)):
        assert compare("f32", before, after, rule).differing == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_infinities_agree_with_themselves_only(sign: int):
    infinity = np.array([sign * np.inf], np.float64)
    assert compare("f64", infinity, infinity.copy(), Rule(rtol=1.0)).differing == 0
    assert compare("f64", infinity, -infinity, Rule(rtol=1.0)).differing == 1
    assert compare("f64", infinity, np.array([1e300]), Rule(rtol=1.0)).differing == 1


def test_the_tolerance_is_absolute_plus_relative_to_before():
    before = np.array([100.0, 0.0], np.float64)
    after = np.array([101.0, 0.5], np.float64)
    rule = Rule(rtol=0.01, atol=0.0)
    assert differs(before, after, known("f64"), rule).tolist() == [False, True]
    assert differs(after, before, known("f64"), rule).tolist() == [False, True]
    assert not differs(before, after, known("f64"), Rule(rtol=0.005, atol=0.5)).any()


def test_a_tolerance_does_not_loosen_integers():
    before, after = np.array([5], np.int32), np.array([6], np.int32)
    assert compare("i32", before, after, Rule(rtol=1.0, atol=10.0)).differing == 1


def test_integer_differences_are_exact():
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    result = compare("i64", np.array([low]), np.array([high]))
    assert result.max_abs_difference == 2**64 - 1
    result = compare("ui64", np.array([2**64 - 1], np.uint64), np.array([0], np.uint64))
    assert result.max_abs_difference == 2**64 - 1


def test_complex_parts_are_compared_on_their_own():
    before = np.array([complex(1.0, 0.0)], np.complex64)
    after = np.array([complex(1.0, -0.0)], np.complex64)
    result = compare("complex<f32>", before, after)
    assert result.first is not None
    assert (result.first.before, result.first.after) == ("(1.0, 0.0)", "(1.0, -0.0)")
    assert compare("complex<f32>", before, after, TOLERANT).differing == 0
    one_nan = np.array([complex(np.nan, 0.0)], np.complex64)
    other_nan = -one_nan.conj()
    assert compare("complex<f32>", one_nan, other_nan, Rule(any_nan=True)).differing == 0


def test_padding_bits_of_small_types_are_ignored():
    one = np.array([-1], np.int8).astype(known("i4").dtype)
    other = np.array([0x0F], np.uint8).view(known("i4").dtype)
    assert compare("i4", one, other).differing == 0


@pytest.mark.parametrize(
    ("name", "pattern", "text"),
    [
        ("f32", 0x3DCCCCCD, "0.1"),
        ("bf16", 0x3F80, "1.0"),
        ("f16", 0x0001, "5.960464477539063e-08"),
        ("f8E4M3FN", 0xFF, "nan(0xff)"),
        ("f4E2M1FN", 0x7, "6.0"),
        ("i8", 0x80, "-128"),
        ("ui4", 0xF, "15"),
    ],
)
def test_values_are_shown(name: str, pattern: int, text: str):
    assert show(bits(name, pattern)[0], known(name)) == text


def shards(values: Array, parts: int, copies: int = 1) -> list[Shard]:
    """A vector in equal parts, each on as many neighbouring devices as there are copies."""
    size = len(values) // parts
    return [
        Shard(
            part * copies + copy,
            (slice(part * size, (part + 1) * size),),
            values[part * size : (part + 1) * size].copy(),
        )
        for part in range(parts)
        for copy in range(copies)
    ]


def test_one_device_of_a_replicated_output_differs():
    values = np.arange(4, dtype=np.float32)
    before, after = shards(values, 1, copies=3), shards(values, 1, copies=3)
    after[2].data[1] = 9.0
    result = compare_output(known("f32"), (4,), before, after, BITWISE)
    assert (result.elements, result.differing) == (4, 1)
    assert result.first is not None
    assert (result.first.index, result.first.device, result.first.after) == ((1,), 2, "9.0")


def test_an_element_counts_once_however_many_devices_hold_it():
    values = np.arange(4, dtype=np.float32)
    result = compare_output(
        known("f32"), (4,), shards(values, 2, copies=4), shards(values + 1, 2, copies=4), BITWISE
    )
    assert (result.elements, result.differing) == (4, 4)
    assert result.first is not None
    assert result.first.device is None


def test_the_index_of_a_shards_element_is_global():
    values = np.zeros(8, np.float32)
    after = shards(values, 4)
    after[3].data[1] = 1.0
    result = compare_output(known("f32"), (8,), shards(values, 4), after, BITWISE)
    assert result.first is not None
    assert result.first.index == (7,)
    assert result.first.device is None  # no other device holds it


def test_different_layouts_are_compared_by_global_index():
    values = np.arange(8, dtype=np.float32)
    result = compare_output(known("f32"), (8,), shards(values, 4), shards(values, 1, 4), BITWISE)
    assert result.differing == 0
    changed = values.copy()
    changed[5] = -1.0
    result = compare_output(known("f32"), (8,), shards(values, 4), shards(changed, 1, 4), BITWISE)
    assert result.differing == 1
    assert result.first is not None
    assert (result.first.index, result.first.before, result.first.after) == ((5,), "5.0", "-1.0")


def test_a_replica_that_strays_is_seen_in_another_layout_too():
    values = np.arange(4, dtype=np.float32)
    after = shards(values, 1, copies=4)
    after[3].data[2] = 7.0
    result = compare_output(known("f32"), (4,), shards(values, 4), after, BITWISE)
    assert result.first is not None
    assert (result.first.index, result.first.device, result.first.after) == ((2,), 3, "7.0")


def test_instances_are_arrays_of_their_own():
    before = [whole(np.full(2, float(d), np.float32), d, instance=d) for d in range(3)]
    after = [whole(np.full(2, float(d), np.float32), d, instance=d) for d in range(3)]
    after[1].data[0] = 5.0
    result = compare_output(known("f32"), (2,), before, after, BITWISE)
    assert (result.elements, result.differing) == (6, 1)
    assert result.first is not None
    assert (result.first.index, result.first.device, result.first.before) == ((0,), 1, "1.0")


def test_scalars_and_empty_arrays():
    one, other = np.array(1.0, np.float32), np.array(2.0, np.float32)
    result = compare("f32", one, other)
    assert result.first is not None
    assert (result.elements, result.first.index) == (1, ())
    empty = np.zeros((0, 3), np.float32)
    assert compare("f32", empty, empty) == OutputComparison(elements=0)

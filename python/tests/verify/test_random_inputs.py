"""Random inputs: every element type, reproducible, special values where asked for."""

from __future__ import annotations

import numpy as np
import pytest

from stablehlo_tools.verify.element_types import (
    ElementKind,
    ElementType,
    element_type,
    from_bits,
    from_dtype,
    real_part,
    to_bits,
)
from stablehlo_tools.verify.random_inputs import (
    Specials,
    random_array,
    random_words,
    special_values,
)

NAMES = [
    *("i1", "i2", "i4", "i8", "i16", "i32", "i64"),
    *("ui2", "ui4", "ui8", "ui16", "ui32", "ui64"),
    *("f64", "f32", "f16", "bf16", "f8E3M4", "f8E4M3", "f8E4M3FN", "f8E4M3FNUZ"),
    *("f8E4M3B11FNUZ", "f8E5M2", "f8E5M2FNUZ", "f8E8M0FNU", "f6E2M3FN", "f6E3M2FN", "f4E2M1FN"),
    *("complex<f32>", "complex<f64>"),
]
KEY = (0, 1, 2)


def known(name: str) -> ElementType:
    element = element_type(name)
    assert element is not None
    return element


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("specials", Specials)
def test_values_depend_on_the_key_alone(name: str, specials: Specials):
    element = known(name)
    first = random_array(element, (40, 5), KEY, specials=specials)
    again = random_array(element, (40, 5), KEY, specials=specials)
    other = random_array(element, (40, 5), (0, 1, 3), specials=specials)
    assert first.dtype == element.dtype
    assert first.shape == (40, 5)
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
def test_any_shape(name: str, shape: tuple[int, ...]):
    for specials in Specials:
        assert random_array(known(name), shape, KEY, specials=specials).shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_values_are_finite_and_not_all_the_same(name: str):
    values = random_array(known(name), (64, 64), KEY)
    wide = values.astype(np.complex128)
    assert np.isfinite(wide).all()
    assert len(np.unique(wide)) > 1


def test_matrices_keep_products_at_about_unit_size():
    vector = random_array(known("f32"), (256,), KEY)
    matrix = random_array(known("f32"), (256, 256), KEY)
    product = vector @ np.linalg.matrix_power(matrix, 4)
    assert 0.3 < float(product.std()) < 3


def test_integers_suit_indices_unless_wide():
    for name in ("i32", "ui8", "i64"):
        small = random_array(known(name), (1000,), KEY)
        assert (int(small.min()), int(small.max())) == (0, 7)
    wide = random_array(known("i32"), (5000,), KEY, wide=True)
    assert (int(wide.min()), int(wide.max())) == (-128, 127)
    assert 0 <= int(random_array(known("i32"), (), KEY, wide=True)) < 8
    assert int(random_array(known("i4"), (100,), KEY, wide=True).astype(int).min()) == -8


@pytest.mark.parametrize("name", [name for name in NAMES if name != "i1"])
def test_special_values_are_mixed_in(name: str):
    element = known(name)
    values = random_array(element, (2000,), KEY, specials=Specials.ALL)
    part = real_part(element)
    table = {int(pattern) for pattern in to_bits(special_values(part), part)}
    seen = to_bits(values, element).ravel()
    assert table <= {int(pattern) for pattern in seen}
    if (
        part.kind is ElementKind.FLOAT and part.bits > 8
    ):  # elsewhere ordinary values are special too
        share = np.isin(seen, list(table)).mean()
        assert 0.08 < share < 0.18


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_the_special_floats(name: str):
    element = known(name)
    values = special_values(element)
    wide = values.astype(np.float64)
    nans = np.isnan(wide)
    assert nans.sum() == 8
    assert len(np.unique(to_bits(values[nans], element))) == 8
    assert set(np.signbit(wide[nans])) == {True, False}
    quiet = 1 << ({"f64": 52, "f32": 23, "f16": 10, "bf16": 7}[name] - 1)
    assert all(int(pattern) & quiet for pattern in to_bits(values[nans], element))
    assert {np.inf, -np.inf} <= set(wide)
    assert set(np.signbit(wide[wide == 0])) == {True, False}
    assert (~nans & (wide != 0) & (np.abs(wide) < float(np.abs(wide[~nans]).max()))).any()


@pytest.mark.parametrize(
    ("name", "nans", "infinities"),
    [
        ("f8E5M2", 4, 2),  # 0x7e, 0x7f and their negatives; 0x7d signals
        ("f8E4M3FN", 2, 0),
        ("f8E4M3FNUZ", 1, 0),
        ("f8E8M0FNU", 1, 0),
        ("f4E2M1FN", 0, 0),
    ],
)
def test_the_special_small_floats(name: str, nans: int, infinities: int):
    wide = special_values(known(name)).astype(np.float64)
    assert np.isnan(wide).sum() == nans
    assert np.isinf(wide).sum() == infinities


@pytest.mark.parametrize("name", ["f64", "f32", "bf16", "f8E5M2"])
def test_tame_specials_do_not_spread(name: str):
    wide = special_values(known(name), Specials.TAME).astype(np.float64)
    assert len(wide) > 4
    assert (np.abs(wide) < 1).all()
    assert set(np.signbit(wide[wide == 0])) == {True, False}


def test_the_special_integers():
    assert set(special_values(known("i8")).tolist()) == {-128, 127, 0, -1}
    assert {0, 255} <= set(special_values(known("ui8")).tolist())
    assert special_values(known("i8"), Specials.TAME).size == 0
    assert special_values(known("i1")).size == 0


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("i1", "complex"))])
def test_bits_go_there_and_back(name: str):
    element = known(name)
    patterns = np.arange(min(2**element.bits, 4096)).astype(f"u{element.dtype.itemsize}")
    values = from_bits(patterns, element)
    assert to_bits(values, element).tolist() == patterns.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_names_and_dtypes_match(name: str):
    assert from_dtype(known(name).dtype) == known(name)


def test_unknown_types_are_none():
    assert element_type("!quant.uniform<i8:f32, 0.1>") is None
    assert from_dtype(np.dtype("U3")) is None


def test_key_words_fill_their_range():
    words = random_words((4000,), KEY)
    assert words.dtype == np.uint32
    assert int(words.min()) < 2**22
    assert int(words.max()) > 2**32 - 2**22

"""Bitcasts of MHLO in StableHLO's words: the same bytes, read in another layout."""

from __future__ import annotations

import numpy as np
import pytest

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import parse
from stablehlo_tools.ir.cleanup import write_as_values


def _lying(array: np.ndarray, layout: tuple[int, ...]) -> np.ndarray:
    """The elements in the order in which they lie, of a layout with the most minor one first."""
    return array.transpose(layout[::-1]).ravel()


@pytest.mark.parametrize(
    ("before", "source", "after", "result"),
    [
        ((2, 3, 4), (2, 1, 0), (6, 4), (1, 0)),
        ((2, 3, 4), (0, 2, 1), (1, 2, 3, 4), (3, 2, 1, 0)),
        ((2, 3), (0, 1), (3, 2), (1, 0)),
        ((4, 6), (0, 1), (2, 3, 4), (1, 2, 0)),
        ((), (), (1,), (0,)),
    ],
)
def test_a_bitcast_reads_the_same_bytes(
    before: tuple[int, ...],
    source: tuple[int, ...],
    after: tuple[int, ...],
    result: tuple[int, ...],
):
    def kind(shape: tuple[int, ...]) -> str:
        return "tensor<" + "".join(f"{size}x" for size in shape) + "i32>"

    def layout(order: tuple[int, ...]) -> str:
        listed = f"dense<{list(order)}>" if order else "dense<>"
        return f"{listed} : tensor<{len(order)}xindex>"

    module = parse(
        f"""func.func @main(%x: {kind(before)}) -> {kind(after)} {{
              %0 = mhlo.bitcast %x {{source_layout = {layout(source)},
                     result_layout = {layout(result)}}} : ({kind(before)}) -> {kind(after)}
              %1 = mhlo.copy %0 : {kind(after)}
              return %1 : {kind(after)}
            }}""".encode()
    ).module
    write_as_values(module)
    assert "mhlo." not in str(module)
    given = np.arange(np.prod(before, dtype=int), dtype=np.int32).reshape(before)
    with module.context:
        argument = bindings.ir.DenseElementsAttr.get(given)
        (answer,) = bindings.eval_module(module, [argument])
    found = np.array(answer).reshape(after)
    assert (_lying(found, result) == _lying(given, source)).all()


def test_a_bitcast_to_another_element_type_stays():
    module = parse(b"""func.func @main(%x: tensor<4xi32>) -> tensor<4xf32> {
      %0 = mhlo.bitcast %x : (tensor<4xi32>) -> tensor<4xf32>
      return %0 : tensor<4xf32>
    }""").module
    write_as_values(module)
    assert "mhlo.bitcast" in str(module)

"""What of a backward loop waits, and the fewest bytes that it takes from the chain."""

from __future__ import annotations

from pathlib import Path

import pytest
from named_ops import NamedOps, read

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.backward_division import (
    BackwardDivision,
    BackwardLoop,
    divide,
    has_chain,
    is_accumulator,
    is_write,
    size_of,
    states,
)
from stablehlo_tools.analysis.loops import Counted, LoopBody, count_trips, known_integer
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import functions_by_name, ops_named

LIT = Path(__file__).parents[4] / "lit_tests/transforms/split_weight_gradients.mlir"
TRAINING = LIT.read_text().split("\n// -----\n")[0]
COUNTER, WEIGHTS, KEPT, COTANGENT, GRADIENTS = range(5)  # the carries of the backward loop


def backward(named: NamedOps) -> BackwardLoop:
    """The last loop of a module."""
    op = ops_named(named.module.operation, {"stablehlo.while"})[-1]
    counting = count_trips(op, known_integer)
    assert isinstance(counting, Counted)
    body = LoopBody(op, Effects(functions_by_name(named.module)))
    return BackwardLoop(body, counting, reverse=True)


def divided(*replacements: tuple[str, str], fixed: tuple[int, ...] = ()) -> BackwardDivision | None:
    """How the backward loop is divided, with some of the program's text replaced."""
    text = TRAINING
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return divide(backward(read(text)), fixed)


def test_gradients_wait_and_take_a_cotangent_of_each_layer():
    division = divided()
    assert division is not None
    assert division.moved == (GRADIENTS,)
    body = division.loop.body
    assert list(division.stored) == [body.arguments[COTANGENT]]
    assert division.stored_bytes == 2 * 4 * 4
    assert division.loop.trips == 3


def test_a_carry_that_must_stay_does():
    assert divided(fixed=(GRADIENTS,)) is None


def test_carries_are_told_by_what_iterations_do_with_them():
    body = backward(read(TRAINING)).body
    assert states(body) == [COTANGENT, GRADIENTS]
    assert [is_write(body, carry) for carry in (COTANGENT, GRADIENTS)] == [False, True]
    assert not any(is_accumulator(body, carry) for carry in states(body))
    assert has_chain(body)


def test_a_loop_without_a_chain_is_not_divided():
    chain = "stablehlo.return %j, %ws, %kept, %dx, %stack"
    assert divided((chain, chain.replace("%dx", "%d"))) is None


def test_what_costs_little_does_not_wait_alone():
    """Without its contraction a gradient is a row of what is there: no second loop for that."""
    contraction = (
        "stablehlo.dot_general %h, %d, contracting_dims = [0] x [0] : "
        "(tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>"
    )
    assert divided((contraction, "stablehlo.negate %one : tensor<4x4xf32>")) is None


def test_a_gradient_that_the_chain_reads_does_not_wait():
    product = "%dx = stablehlo.dot_general %d, %one,"
    division = divided(
        (product, "%mixed = stablehlo.add %one, %dw : tensor<4x4xf32>\n" + product),
        ("%dx = stablehlo.dot_general %d, %one,", "%dx = stablehlo.dot_general %d, %mixed,"),
    )
    assert division is None  # the contraction is the chain's; what is left is a row to write


@pytest.mark.parametrize(
    ("element", "stored_as", "stored_bytes"),
    [("bf16", "bf16", 2 * 4 * 2), ("f64", "f32", 2 * 4 * 4)],
)
def test_the_narrower_of_a_value_and_what_is_made_of_it_is_stored(
    element: str, stored_as: str, stored_bytes: int
):
    """A cotangent, or its conversion, from which gradients are made."""
    gradient = "%dw = stablehlo.dot_general %h, %d, contracting_dims = [0] x [0] : "
    types = "(tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>"
    converted = (
        f"%made = stablehlo.convert %d : (tensor<2x4xf32>) -> tensor<2x4x{element}>\n"
        + gradient.replace("%d,", "%made,")
        + types.replace("tensor<2x4xf32>)", f"tensor<2x4x{element}>)")
    )
    division = divided((gradient + types, converted))
    assert division is not None
    assert [str(value.type) for value in division.stored] == [f"tensor<2x4x{stored_as}>"]
    assert division.stored_bytes == stored_bytes


def test_sizes_are_whole_bytes_and_known_for_static_tensors_only():
    types = {
        "tensor<3x5xf32>": 60,
        "tensor<3xcomplex<f32>>": 24,
        "tensor<7xi1>": 7,
        "tensor<3xbf16>": 6,
        "tensor<0xf32>": 0,
        "tensor<?xf32>": None,
        "!stablehlo.token": None,
    }
    arguments = ", ".join(f"%a{number}: {type_}" for number, type_ in enumerate(types))
    named = read(f"module {{ func.func public @main({arguments}) {{ return }} }}")
    values: list[ir.Value] = named.arguments()
    assert [size_of(value) for value in values] == list(types.values())

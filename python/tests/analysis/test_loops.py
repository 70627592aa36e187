"""What a loop's body tells of its other iterations: counters, invariants, indexed values."""

from __future__ import annotations

import pytest

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loops import LoopBody, constant_integer, count_trips
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import loops_of


def loop_of(kind: str, start: int, step: str, way: str, bound: int, mirrored: bool) -> ir.Operation:
    """A loop that counts in its second carry and swaps two others."""
    scalar = f"tensor<{kind}>"
    sides = "%b, %i" if mirrored else "%i, %b"
    text = f"""
    func.func @main(%x: {scalar}, %y: {scalar}) -> {scalar} {{
      %s = stablehlo.constant dense<{start}> : {scalar}
      %b = stablehlo.constant dense<{bound}> : {scalar}
      %k = stablehlo.constant dense<{step[1:]}> : {scalar}
      %r:4 = stablehlo.while(%p = %x, %i = %s, %q = %y, %c = %x)
        : {scalar}, {scalar}, {scalar}, {scalar}
      cond {{
        %m = stablehlo.compare {way}, {sides} : ({scalar}, {scalar}) -> tensor<i1>
        stablehlo.return %m : tensor<i1>
      }} do {{
        %n = stablehlo.{"add" if step[0] == "+" else "subtract"} %i, %k : {scalar}
        stablehlo.return %q, %n, %p, %c : {scalar}, {scalar}, {scalar}, {scalar}
      }}
      return %r#0 : {scalar}
    }}"""
    program = artifact.parse(text.encode())
    KEPT.append(program)
    return loops_of(program.module)[0]


KEPT: list[artifact.Artifact] = []  # modules whose loops tests hold


def known(value: ir.Value) -> tuple[int, ...] | None:
    number = constant_integer(value)
    return None if number is None else (number,)


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (("i32", 0, "+1", "LT", 5, False), 5),
        (("i32", 0, "+2", "LT", 5, False), 3),
        (("i64", 2, "+1", "LE", 5, False), 4),
        (("i32", 5, "-1", "GT", 0, False), 5),
        (("i32", 5, "-2", "GE", 0, False), 3),
        (("ui32", 13, "-3", "GE", 4, False), 4),
        (("i8", -100, "+50", "LT", 100, False), 4),
        (("i32", 0, "+3", "NE", 9, False), 3),
        (("i32", 0, "+1", "GT", 5, True), 5),
        (("i32", 5, "-1", "LE", 0, True), 6),
        (("i32", 3, "+1", "LT", 3, False), 0),
        (("i32", 0, "+2", "NE", 5, False), "overflow before it reaches its bound"),
        (("ui32", 5, "-1", "GE", 0, False), "overflow before it reaches its bound"),
        (("i8", 100, "+50", "LT", 120, False), "overflow before it reaches its bound"),
        (("i32", 0, "+0", "LT", 5, False), "the loop never ends"),
    ],
)
def test_iterations_are_counted(loop: tuple[str, int, str, str, int, bool], trips: int | str):
    found = count_trips(loop_of(*loop), known)
    if isinstance(trips, str):
        assert isinstance(found, str)
        assert trips in found
        return
    assert not isinstance(found, str), found
    assert found.trips == (trips,)
    assert found.counter.position == 1


def test_carries_are_told_apart():
    loop = loop_of("i32", 0, "+2", "LT", 5, False)
    body = LoopBody(loop, Effects(functions_by_name(KEPT[-1].module)))
    assert body.invariant == {3}
    assert body.steps == {1: 2}
    assert [body.is_indexed(a) for a in body.arguments] == [False, True, False, True]
    assert [body.is_moving(a) for a in body.arguments] == [False, True, False, False]

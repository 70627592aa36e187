"""How often a loop runs on each device, where a counter says so."""

from __future__ import annotations

import pytest
from test_uniformity import evaluated

from stablehlo_tools.analysis.uniformity import Variation
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.ir.walk import walk

GRID = "mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32"


def trips(text: str) -> Variation:
    """How often the only loop of a program for four partitions runs."""
    module, found = evaluated(f"module attributes {{{GRID}}} {{ {text} }}")
    loops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == WHILE:
            loops.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    (loop,) = loops
    return found.trips(loop)


def counted(
    start: int,
    compared: str,
    step: str = "stablehlo.add %i, %k",
    kind: str = "i32",
    k: int = 1,
    before: str = "",
) -> tuple[int, ...] | None:
    """The trips of a loop from `start`; `compared` is `LT 5`, or `5 GT` with the sides changed."""
    direction, bound = sorted(compared.split(), key=lambda word: not word.isalpha())
    sides = "%i, %n" if compared.startswith(direction) else "%n, %i"
    t = f"tensor<{kind}>"
    return trips(f"""func.func @main() -> {t} {{
        %s = stablehlo.constant dense<{start}> : {t}
        %k = stablehlo.constant dense<{k}> : {t}
        %w = stablehlo.while(%i = %s) : {t} cond {{
          %n = stablehlo.constant dense<{bound}> : {t}
          %p = stablehlo.compare {direction}, {sides} : ({t}, {t}) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }} do {{
          {before}
          %j = {step} : {t}
          stablehlo.return %j : {t}
        }}
        return %w : {t}
    }}""").values


def python_count(start: int, direction: str, bound: int, step: int) -> int:
    """The same by running it."""
    holds = {
        "LT": lambda i: i < bound,
        "LE": lambda i: i <= bound,
        "GT": lambda i: i > bound,
        "GE": lambda i: i >= bound,
        "NE": lambda i: i != bound,
        "EQ": lambda i: i == bound,
    }[direction]
    count = 0
    while holds(start):
        start, count = start + step, count + 1
    return count


@pytest.mark.parametrize("start", [-3, 0, 4])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("direction", ["LT", "LE"])
def test_counting_up(start: int, direction: str, step: int) -> None:
    found = counted(start, f"{direction} 5", k=step)
    assert found == (python_count(start, direction, 5, step),) * 4


@pytest.mark.parametrize("start", [9, 5, 4])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("direction", ["GT", "GE"])
def test_counting_down(start: int, direction: str, step: int) -> None:
    found = counted(start, f"{direction} 5", "stablehlo.subtract %i, %k", k=step)
    assert found == (python_count(start, direction, 5, -step),) * 4
    assert counted(start, f"{direction} 5", k=-step) == found


@pytest.mark.parametrize(
    ("start", "compared", "k", "expected"),
    [
        (0, "NE 6", 2, 3),
        (6, "NE 0", -3, 2),
        (4, "NE 4", 1, 0),
        (4, "NE 4", 0, 0),
        (4, "EQ 4", 1, 1),
        (3, "EQ 4", 1, 0),
        (0, "5 GT", 1, 5),
        (0, "5 GE", 1, 6),
        (9, "5 LT", -1, 4),
        (0, "LT 1000000000", 1, 10**9),
    ],
)
def test_other_directions(start: int, compared: str, k: int, expected: int) -> None:
    assert counted(start, compared, k=k) == (expected,) * 4


@pytest.mark.parametrize(
    ("start", "compared", "k"),
    [
        (0, "NE 5", 2),  # steps over the bound, and around
        (0, "NE 5", -1),
        (0, "NE 5", 0),
        (4, "EQ 4", 0),
        (0, "LT 5", 0),
        (0, "LT 5", -1),
        (0, "LE 2147483647", 1),  # there is no greater number to end at
        (0, "LT 2147483647", 2),  # steps over the greatest
        (0, "GE -2147483648", -1),
    ],
)
def test_wrapping_around_is_not_understood(start: int, compared: str, k: int) -> None:
    assert counted(start, compared, k=k) is None


def test_unsigned_counters() -> None:
    assert counted(0, "LT 4294967295", kind="ui32") == (2**32 - 1,) * 4
    assert counted(0, "LE 4294967295", kind="ui32") is None
    assert counted(3, "GE 0", "stablehlo.subtract %i, %k", kind="ui32") is None
    assert counted(3, "GT 0", "stablehlo.subtract %i, %k", kind="ui32") == (3,) * 4
    assert counted(200, "LT 255", kind="ui8", k=50) is None


def test_a_step_of_several_additions() -> None:
    before = "%h = stablehlo.subtract %i, %k : tensor<i32>\n%m = stablehlo.add %k, %h : tensor<i32>"
    twice = "%h = stablehlo.add %k, %i : tensor<i32>"
    assert counted(0, "LT 12", "stablehlo.add %h, %k", k=3, before=twice) == (2,) * 4
    assert counted(0, "LT 12", "stablehlo.add %m, %k", k=3, before=before) == (4,) * 4


@pytest.mark.parametrize(
    "step", ["stablehlo.multiply %i, %k", "stablehlo.add %i, %i", "stablehlo.subtract %k, %i"]
)
def test_other_steps_are_not_understood(step: str) -> None:
    assert counted(1, "LT 5", step, k=2) is None


BOUND = """func.func @main(ARGUMENT) -> tensor<i32> {
    %d = stablehlo.partition_id : tensor<ui32>
    LINE
    %s = stablehlo.constant dense<0> : tensor<i32>
    %w:2 = stablehlo.while(%i = %s, %n = %b) : tensor<i32>, tensor<i32> cond {
      %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %k = stablehlo.constant dense<1> : tensor<i32>
      %j = stablehlo.add %i, %k : tensor<i32>
      stablehlo.return %j, END : tensor<i32>, tensor<i32>
    }
    return %w#0 : tensor<i32>
}"""


def bounded(line: str, argument: str = "", end: str = "%n") -> Variation:
    """The trips of a loop whose bound is carried."""
    return trips(BOUND.replace("ARGUMENT", argument).replace("LINE", line).replace("END", end))


def test_a_bound_of_each_device() -> None:
    line = "%b = stablehlo.convert %d : (tensor<ui32>) -> tensor<i32>"
    assert bounded(line) == Variation((0, 1, 2, 3), (0, 1, 2, 3))


def test_a_bound_that_changes_is_not_understood() -> None:
    line = "%b = stablehlo.constant dense<4> : tensor<i32>"
    assert bounded(line).values == (4, 4, 4, 4)
    assert bounded(line, end="%i").values is None


def test_a_bound_that_is_given() -> None:
    line = "%unused = stablehlo.constant dense<4> : tensor<i32>"
    assert bounded(line, "%b: tensor<i32>").classes == (0, 1, 2, 3)
    alike = bounded(line, '%b: tensor<i32> {mhlo.sharding = "{replicated}"}')
    assert (alike.classes, alike.values) == ((0, 0, 0, 0), None)

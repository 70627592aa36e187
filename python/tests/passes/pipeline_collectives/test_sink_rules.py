"""Every op that can run on the stacked rows of a loop's iterations does so with equal values."""

from __future__ import annotations

import pytest
from sink_programs import (
    Sinking,
    all_reduce,
    arguments,
    collective,
    loop,
    parsed,
    planned,
    run,
    same,
    store,
    sunk,
)

G = "4x8xf32"


def one(op: str, rest: str, given: str, taken: str = G) -> str:
    return f"%h = stablehlo.{op} %g{rest} : (tensor<{taken}>) -> tensor<{given}>\n"


def alike(op: str, *others: str) -> str:
    return f"%h = stablehlo.{op} {', '.join(('%g', *others))} : tensor<{G}>\n"


SCALAR = "%k = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>\n"
SAME = f"%w = stablehlo.constant dense<3.0> : tensor<{G}>\n"
POINT = "%z = stablehlo.constant dense<2.0> : tensor<f32>\n"
# What is done to the reduced %g, of 4x8 floats, and the type of what comes out.
RULES: dict[str, tuple[str, str]] = {
    "all_gather": (
        f"%h = {collective('all_gather', '%g', G, '4x64xf32', 'all_gather_dim = 1 : i64')}\n",
        "4x64xf32",
    ),
    "all_to_all": (
        "%h = "
        + collective(
            "all_to_all",
            "%g",
            G,
            "32x1xf32",
            "split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 8 : i64",
        )
        + "\n",
        "32x1xf32",
    ),
    "reduce_scatter": (
        f"%h = {collective('reduce_scatter', '%g', G, '4x1xf32', 'scatter_dimension = 1 : i64')}\n",
        "4x1xf32",
    ),
    "collective_permute": (f"%h = {collective('collective_permute', '%g', G, G)}\n", G),
    "bitcast_same": (one("bitcast_convert", "", "4x8xi32"), "4x8xi32"),
    "bitcast_narrower": (one("bitcast_convert", "", "4x8x4xi8"), "4x8x4xi8"),
    "broadcast": (one("broadcast_in_dim", ", dims = [2, 0]", "8x3x4xf32"), "8x3x4xf32"),
    "concatenate": (
        SAME + f"%h = stablehlo.concatenate %g, %w, %x, dim = 1 : (tensor<{G}>, tensor<{G}>, "
        f"tensor<{G}>) -> tensor<4x24xf32>\n",
        "4x24xf32",
    ),
    "convert": (one("convert", "", "4x8xi32"), "4x8xi32"),
    "dynamic_slice": (
        "%h = stablehlo.dynamic_slice %g, %c1, %last, sizes = [2, 8] : "
        f"(tensor<{G}>, tensor<i32>, tensor<i32>) -> tensor<2x8xf32>\n",
        "2x8xf32",
    ),
    "pad": (
        POINT + "%h = stablehlo.pad %g, %z, low = [1, -1], high = [0, 2], interior = [2, 0] : "
        f"(tensor<{G}>, tensor<f32>) -> tensor<11x9xf32>\n",
        "11x9xf32",
    ),
    "reduce": (
        POINT + "%h = stablehlo.reduce(%g init: %z) applies stablehlo.add across dimensions = [0] "
        f": (tensor<{G}>, tensor<f32>) -> tensor<8xf32>\n",
        "8xf32",
    ),
    "reduce_with_outer_value": (
        POINT + "%h = stablehlo.reduce(%g init: %z) across dimensions = [1] : "
        f"(tensor<{G}>, tensor<f32>) -> tensor<4xf32>\n"
        "reducer(%p: tensor<f32>, %q: tensor<f32>) {\n"
        "%most = stablehlo.maximum %p, %q : tensor<f32>\n"
        "%more = stablehlo.maximum %most, %z : tensor<f32>\n"
        "stablehlo.return %more : tensor<f32>\n}\n",
        "4xf32",
    ),
    "reduce_to_scalar": (
        POINT + "%h = stablehlo.reduce(%g init: %z) applies stablehlo.minimum across "
        f"dimensions = [0, 1] : (tensor<{G}>, tensor<f32>) -> tensor<f32>\n",
        "f32",
    ),
    "reshape": (one("reshape", "", "2x2x8xf32"), "2x2x8xf32"),
    "reverse": (alike("reverse", "dims = [1]"), G),
    "slice": (one("slice", " [1:4:2, 0:7]", "2x7xf32"), "2x7xf32"),
    "transpose": (one("transpose", ", dims = [1, 0]", "8x4xf32"), "8x4xf32"),
    "negate": (alike("negate"), G),
    "with_the_same": (SAME + alike("multiply", "%w"), G),
    "with_another": (alike("subtract", "%x"), G),
    "with_itself": (alike("multiply", "%g"), G),
    "compare": (
        f"%h = stablehlo.compare GT, %g, %x : (tensor<{G}>, tensor<{G}>) -> tensor<4x8xi1>\n",
        "4x8xi1",
    ),
    "select_by_moving_scalar": (
        "%odd = stablehlo.compare EQ, %i, %c1 : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        f"%h = stablehlo.select %odd, %g, %x : tensor<i1>, tensor<{G}>\n",
        G,
    ),
    "select_by_scalar": (
        "%odd = stablehlo.compare EQ, %last, %c1 : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        f"%h = stablehlo.select %odd, %g, %x : tensor<i1>, tensor<{G}>\n",
        G,
    ),
    "clamp_by_scalars": (
        POINT + SCALAR + "%h = stablehlo.clamp %k, %g, %z : "
        f"(tensor<f32>, tensor<{G}>, tensor<f32>) -> tensor<{G}>\n",
        G,
    ),
}


def program(name: str, trips: int = 3) -> str:
    """Rows from the first to the last, of what is made of reduced values."""
    ops, given = RULES[name]
    made = f"tensor<1x{given}>"
    shaped = f"%row = stablehlo.reshape %h : (tensor<{given}>) -> {made}\n"
    body = f"%y = stablehlo.negate %x : tensor<{G}>\n%g = {all_reduce('%x', G)}\n" + ops + shaped
    stored = (
        store("%dst", "%row", "%new", given, trips, "%i")
        if "x" in given
        else "%new = stablehlo.dynamic_update_slice %dst, %row, %i : "
        f"(tensor<{trips}x{given}>, {made}, tensor<i32>) -> tensor<{trips}x{given}>\n"
    )
    return loop({"dst": f"{trips}x{given}", "x": G}, body + stored, ["%new", "%y"], trips=trips)


# Left to `make soak`, so that a plain run stays short.
SIMILAR = (
    "bitcast_same",
    "negate",
    "with_the_same",
    "convert",
    "all_to_all",
    "select_by_scalar",
    "reduce_to_scalar",
    "collective_permute",
    "reshape",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak if n in SIMILAR else ()) for n in RULES]
)
def test_stacked(name: str):
    before = parsed(program(name))
    plans = planned(before)
    assert all(isinstance(p, Sinking) and p.way == "batch" for p in plans), plans
    after = sunk(before)
    body = str(after.module).split("} do {")[1].split("\n    }\n")[0]
    assert "all_reduce" not in body
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))


def test_one_iteration():
    before = parsed(program("transpose", 1))
    after = sunk(before)
    assert [p.way for p in planned(before) if isinstance(p, Sinking)] == ["batch"]
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))

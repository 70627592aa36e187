"""Collectives that run once after their loop: which, why not the others, and the values of before.

Values are compared on eight virtual devices: small whole numbers, for which sums are exact in any
order, bit for bit; random numbers within the bound that `sinking.accumulation` states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest
from sink_programs import (
    Sinking,
    all_reduce,
    arguments,
    collective,
    loop,
    parsed,
    planned,
    reverse,
    row,
    run,
    same,
    store,
    sunk,
)

from stablehlo_tools.verify import Options, verify_artifacts


def soaked(values: Iterable[Any], soak: Collection[Any]) -> list[Any]:
    """All values, some of them for `make soak`."""
    return [pytest.param(v, marks=pytest.mark.soak if v in soak else ()) for v in values]


TRIPS = soaked(range(10), range(2, 9))
ROW = "8x16xbf16"
ONE = "1x8x16xbf16"
FLIPPED = "1x16x8xbf16"


def squared(trips: int = 3, name: str = "%m", of: str = "%src") -> str:
    """The square of the row that this iteration is about."""
    x = f"{name}_x"
    return row(of, x, ROW, trips) + f"{name} = stablehlo.multiply {x}, {x} : tensor<{ONE}>\n"


def binary(name: str, op: str, left: str, right: str, kind: str = ONE) -> str:
    return f"{name} = stablehlo.{op} {left}, {right} : tensor<{kind}>\n"


def spread(name: str, of: str) -> str:
    """A broadcast into a fourth dimension and a sum over it."""
    wide = "tensor<1x8x16x4xbf16>"
    return f"""
    {name}_w = stablehlo.broadcast_in_dim {of}, dims = [0, 1, 2] : (tensor<{ONE}>) -> {wide}
    {name}_0 = stablehlo.constant dense<0.0> : tensor<bf16>
    {name} = stablehlo.reduce({name}_w init: {name}_0) applies stablehlo.add
        across dimensions = [3] : ({wide}, tensor<bf16>) -> tensor<{ONE}>
    """


def transposed(name: str, of: str, taken: str, given: str) -> str:
    return (
        f"{name} = stablehlo.transpose {of}, dims = [0, 2, 1] : (tensor<{taken}>) -> "
        f"tensor<{given}>\n"
    )


def into_rows(body: str, value: str, trips: int = 3) -> str:
    """A loop that squares rows and stores what a body makes of them."""
    carries = {"dst": f"{trips}x{ROW}", "src": f"{trips}x{ROW}"}
    text = reverse(trips) + squared(trips) + body + store("%dst", value, "%new", ROW, trips)
    return loop(carries, text, ["%new", "%src"], trips=trips)


def into_several(body: str, stores: dict[str, str], sources: tuple[str, ...] = ("src",)) -> str:
    """The same with several buffers: what each takes."""
    kind = f"3x{ROW}"
    text = reverse(3) + "".join(squared(3, f"%m{i}", f"%{s}") for i, s in enumerate(sources))
    text += body + "".join(store(f"%{d}", v, f"%new_{d}", ROW, 3) for d, v in stores.items())
    ends = [*(f"%new_{d}" for d in stores), *(f"%{s}" for s in sources)]
    return loop(dict.fromkeys([*stores, *sources], kind), text, ends)


def formatted(trips: int = 3) -> str:
    """Transposed, reduced, added to, and transposed back (TransformIncrementIndexByOne…Sink)."""
    body = (
        transposed("%t", "%m", ONE, FLIPPED)
        + f"%ar = {all_reduce('%t', FLIPPED)}\n"
        + f"%c = stablehlo.constant dense<2.0> : tensor<{FLIPPED}>\n"
        + binary("%p", "add", "%ar", "%c", FLIPPED)
        + transposed("%q", "%p", FLIPPED, ONE)
    )
    return into_rows(body, "%q", trips)


SCATTERED = collective(
    "reduce_scatter", "%t", FLIPPED, "1x16x2xbf16", "scatter_dimension = 2 : i64", fours=True
)
GATHERED = collective(
    "all_gather", "%ar", "1x16x2xbf16", FLIPPED, "all_gather_dim = 2 : i64", fours=True
)
UPSTREAM: dict[str, tuple[str, int]] = {  # with how many collectives stay in the loop: none
    "not-first-index": (formatted(), 1),
    "all-reduce-feeding-all-gather": (
        into_rows(
            transposed("%t", "%m", ONE, FLIPPED)
            + f"%rs = {SCATTERED}\n%ar = {all_reduce('%rs', '1x16x2xbf16')}\n%ag = {GATHERED}\n"
            + transposed("%q", "%ag", FLIPPED, ONE),
            "%q",
        ),
        3,
    ),
    "consecutive-all-reduces": (
        into_rows(f"%ar = {all_reduce('%m', ONE)}\n%ar2 = {all_reduce('%ar', ONE)}\n", "%ar2"),
        2,
    ),
    "broadcast-pad-slice": (
        into_rows(
            f"%ar = {all_reduce('%m', ONE)}\n"
            "%sl = stablehlo.slice %ar [0:1, 0:8, 0:12] : "
            f"(tensor<{ONE}>) -> tensor<1x8x12xbf16>\n"
            "%five = stablehlo.constant dense<5.0> : tensor<bf16>\n"
            "%pd = stablehlo.pad %sl, %five, low = [0, 0, 0], high = [0, 0, 4], "
            "interior = [0, 0, 0] : (tensor<1x8x12xbf16>, tensor<bf16>) -> "
            f"tensor<{ONE}>\n" + spread("%wide", "%pd"),
            "%wide",
        ),
        1,
    ),
    "dependent": (
        into_rows(
            f"%ar = {all_reduce('%m', ONE)}\n"
            + spread("%wide", "%ar")
            + f"%ar2 = {all_reduce('%wide', ONE)}\n"
            + f"%two = stablehlo.constant dense<2.0> : tensor<{ONE}>\n"
            + binary("%d", "multiply", "%ar2", "%two")
            + binary("%e", "multiply", "%d", "%ar2"),
            "%e",
        ),
        2,
    ),
    "two-updates": (
        into_several(
            f"%ar = {all_reduce('%m0', ONE)}\n"
            + spread("%wide", "%ar")
            + binary("%d", "multiply", "%ar", "%ar")
            + binary("%e", "multiply", "%d", "%m0"),
            {"d1": "%wide", "d2": "%e"},
        ),
        1,
    ),
    "two-with-two-updates-each": (
        into_several(
            f"%ar1 = {all_reduce('%m0', ONE)}\n%ar2 = {all_reduce('%m1', ONE)}\n"
            + spread("%wide", "%ar1")
            + binary("%d", "multiply", "%ar1", "%ar1")
            + binary("%e", "multiply", "%d", "%m0")
            + binary("%f", "maximum", "%ar1", "%ar2")
            + f"%g = stablehlo.abs %ar2 : tensor<{ONE}>\n",
            {"d1": "%wide", "d2": "%e", "d3": "%f", "d4": "%g"},
            ("s1", "s2"),
        ),
        2,
    ),
    "four": (
        into_several(
            "".join(f"%ar{i} = {all_reduce('%m0', ONE)}\n" for i in (1, 2, 3, 4))
            + binary("%x", "add", "%ar1", "%ar3")
            + binary("%y", "add", "%ar2", "%ar3")
            + binary("%z", "add", "%ar2", "%ar4"),
            {"d1": "%x", "d2": "%y", "d3": "%z"},
        ),
        4,
    ),
    "shared-side-input": (
        into_several(
            f"%f = stablehlo.convert %i : (tensor<i32>) -> tensor<bf16>\n"
            f"%bc = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<bf16>) -> tensor<{ONE}>\n"
            f"%ar1 = {all_reduce('%m0', ONE)}\n%ar2 = {all_reduce('%m1', ONE, 'maximum')}\n"
            + binary("%x", "add", "%ar1", "%bc")
            + binary("%y", "add", "%ar2", "%bc"),
            {"d1": "%x", "d2": "%y"},
            ("s1", "s2"),
        ),
        2,
    ),
    "linear-shape": (
        loop(
            {"dst": "3x4097xbf16", "src": "3x4097xbf16"},
            reverse(3)
            + row("%src", "%m", "4097xbf16", 3)
            + f"%ar = {all_reduce('%m', '1x4097xbf16')}\n"
            + store("%dst", "%ar", "%new", "4097xbf16", 3),
            ["%new", "%src"],
        ),
        1,
    ),
}


def in_loops(program: Any) -> int:
    """How many collectives the loops' bodies still have."""
    text = str(program.module)
    bodies = "".join(re.findall(r"\} do \{\n(.*?)\n    \}\n", text, re.DOTALL))
    return len(re.findall(r'"stablehlo\.(all|reduce_sc|collective)', bodies))


@pytest.mark.parametrize("name", soaked(UPSTREAM, ["two-updates", "consecutive-all-reduces"]))
def test_rows_are_sent_together(name: str):
    text, count = UPSTREAM[name]
    before = parsed(text)
    plans = planned(before)
    assert [p if isinstance(p, str) else p.way for p in plans] == ["batch"] * count
    after = sunk(before)
    assert in_loops(before) == count
    assert in_loops(after) == 0
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))


@pytest.mark.parametrize("trips", TRIPS)
def test_rows_of_any_number_of_iterations(trips: int):
    before = parsed(formatted(trips)) if trips else None
    if before is None:  # a buffer without rows takes none
        text = loop({"x": "4xf32"}, f"%g = {all_reduce('%x', '4xf32')}\n", ["%g"], trips=0)
        assert planned(parsed(text)) == ["the loop never runs"]
        return
    after = sunk(before)
    assert in_loops(after) == 0
    values = arguments(before, trips)
    assert same(run(before, values), run(after, values))


def test_shared_side_input_is_stacked_once():
    before = parsed(UPSTREAM["shared-side-input"][0])
    text = str(sunk(before).module)
    assert text.count("dynamic_update_slice") == 3
    assert sum("broadcast_in_dim" in line for line in text.splitlines()) <= 2


G = "4x8xf32"
GRADIENT = f"%g = {all_reduce('%x', G)}\n"
NEXT_X = f"%y = stablehlo.negate %x : tensor<{G}>\n"
NEXT = binary("%next", "add", "%acc", "%g", G)


def scattered(operand: str, kind: str, size: str, name: str = "%s") -> str:
    attributes = "scatter_dimension = 1 : i64"
    return f"{name} = {collective('reduce_scatter', operand, kind, size, attributes)}\n"


def gathered(operand: str, kind: str, size: str, name: str = "%w") -> str:
    attributes = "all_gather_dim = 1 : i64"
    return f"{name} = {collective('all_gather', operand, kind, size, attributes)}\n"


def summed(
    body: str, end: str = "%next", acc: str = G, x: str = G, trips: int | None = 3, **other: Any
) -> str:
    """A loop that accumulates, and negates `%x` each time."""
    step = f"%y = stablehlo.negate %x : tensor<{x}>\n" if "i1" not in x else "%y = stablehlo."
    step = f"%y = stablehlo.not %x : tensor<{x}>\n" if x.endswith("i1") else step
    return loop({"acc": acc, "x": x}, step + body, [end, "%y"], trips=trips, **other)


def converted(name: str, of: str, taken: str, given: str) -> str:
    return f"{name} = stablehlo.convert {of} : (tensor<{taken}>) -> tensor<{given}>\n"


def half(x: str, acc: str) -> str:
    """Gradients of 16 bits, accumulated in 32."""
    shape = "4x8x"
    return summed(
        f"%g = {all_reduce('%x', shape + x)}\n"
        + converted("%f", "%g", shape + x, shape + acc)
        + binary("%next", "add", "%acc", "%f", shape + acc),
        acc=shape + acc,
        x=shape + x,
    )


def moved(name: str, given: str, attributes: str = "", op: str = "add") -> str:
    """What a collective that only moves makes, accumulated."""
    return summed(
        f"%g = {collective(name, '%x', G, given, attributes)}\n"
        + binary("%next", op, "%acc", "%g", given),
        acc=given,
    )


SUMS: dict[str, str] = {
    "all-reduce": summed(GRADIENT + NEXT),
    "other-order": summed(GRADIENT + binary("%next", "add", "%g", "%acc", G)),
    "subtracted": summed(GRADIENT + binary("%next", "subtract", "%acc", "%g", G)),
    "reduce-scatter": summed(
        scattered("%x", G, "4x1xf32") + binary("%next", "add", "%acc", "%s", "4x1xf32"),
        acc="4x1xf32",
    ),
    "reduce-scatter-all-gather": summed(
        scattered("%x", G, "4x1xf32")
        + gathered("%s", "4x1xf32", G)
        + binary("%next", "add", "%acc", "%w", G)
    ),
    "two-axes": summed(
        f"%f = {all_reduce('%x', G, fours=True)}\n%g = {all_reduce('%f', G)}\n" + NEXT
    ),
    "maximum": summed(
        f"%g = {all_reduce('%x', G, 'maximum')}\n" + binary("%next", "maximum", "%acc", "%g", G)
    ),
    "minimum-of-integers": summed(
        f"%g = {all_reduce('%x', '4xi8', 'minimum')}\n"
        + converted("%h", "%g", "4xi8", "4xi32")
        + binary("%next", "minimum", "%acc", "%h", "4xi32"),
        acc="4xi32",
        x="4xi8",
    ),
    "and": summed(
        f"%g = {all_reduce('%x', '4xi1', 'and')}\n" + binary("%next", "and", "%acc", "%g", "4xi1"),
        acc="4xi1",
        x="4xi1",
    ),
    "or": summed(
        f"%g = {all_reduce('%x', '4xi1', 'or')}\n" + binary("%next", "or", "%acc", "%g", "4xi1"),
        acc="4xi1",
        x="4xi1",
    ),
    "integers-that-wrap": summed(
        f"%g = {all_reduce('%x', '4xi8')}\n%c = stablehlo.constant dense<[37, -2, 90, 1]> : "
        "tensor<4xi8>\n"
        + binary("%h", "multiply", "%c", "%g", "4xi8")
        + binary("%next", "add", "%acc", "%h", "4xi8"),
        acc="4xi8",
        x="4xi8",
    ),
    "mean": summed(
        GRADIENT
        + f"%c = stablehlo.constant dense<8.0> : tensor<{G}>\n"
        + binary("%h", "divide", "%g", "%c", G)
        + binary("%next", "add", "%acc", "%h", G)
    ),
    "formatted": summed(
        f"%g = {all_reduce('%x', '4x8xbf16')}\n"
        "%t = stablehlo.transpose %g, dims = [1, 0] : (tensor<4x8xbf16>) -> tensor<8x4xbf16>\n"
        "%v = stablehlo.reverse %t, dims = [0] : tensor<8x4xbf16>\n"
        "%l = stablehlo.slice %v [0:6, 1:3] : (tensor<8x4xbf16>) -> tensor<6x2xbf16>\n"
        "%z = stablehlo.constant dense<0.0> : tensor<bf16>\n"
        "%p = stablehlo.pad %l, %z, low = [1, 0], high = [0, 1], interior = [0, 0] : "
        "(tensor<6x2xbf16>, tensor<bf16>) -> tensor<7x3xbf16>\n"
        "%q = stablehlo.reshape %p : (tensor<7x3xbf16>) -> tensor<21xbf16>\n"
        "%b = stablehlo.broadcast_in_dim %q, dims = [1] : (tensor<21xbf16>) -> tensor<2x21xbf16>\n"
        "%n = stablehlo.negate %b : tensor<2x21xbf16>\n"
        + converted("%f", "%n", "2x21xbf16", "2x21xf32")
        + binary("%next", "add", "%acc", "%f", "2x21xf32"),
        acc="2x21xf32",
        x="4x8xbf16",
    ),
    "window": summed(
        GRADIENT + "%l = stablehlo.dynamic_slice %g, %c1, %c0, sizes = [2, 8] : "
        "(tensor<4x8xf32>, tensor<i32>, tensor<i32>) -> tensor<2x8xf32>\n"
        + binary("%next", "add", "%acc", "%l", "2x8xf32"),
        acc="2x8xf32",
    ),
    "half-accumulated-in-single": half("bf16", "f32"),
    "single-accumulated-in-double": half("f32", "f64"),
    "unrolled": summed(
        GRADIENT
        + NEXT_X.replace("%y", "%x2")
        + f"%g2 = {all_reduce('%x2', G)}\n"
        + NEXT.replace("%next", "%part")
        + binary("%next", "add", "%part", "%g2", G)
    ),
    "terms-that-stay": summed(
        GRADIENT
        + binary("%part", "add", "%x", "%g", G)
        + binary("%more", "subtract", "%acc", "%y", G)
        + binary("%next", "subtract", "%more", "%part", G)
    ),
    "subtracted-from": summed(
        GRADIENT
        + binary("%part", "subtract", "%g", "%x", G)
        + binary("%next", "add", "%acc", "%part", G)
    ),
    "different-chains": summed(
        GRADIENT
        + scattered("%x", G, "4x1xf32")
        + gathered("%s", "4x1xf32", G)
        + binary("%part", "add", "%acc", "%w", G)
        + binary("%next", "add", "%part", "%g", G)
    ),
    "all-gather": moved("all_gather", "32x8xf32", "all_gather_dim = 0 : i64"),
    "all-gather-maximum": moved("all_gather", "32x8xf32", "all_gather_dim = 0 : i64", "maximum"),
    "all-to-all": moved(
        "all_to_all",
        "32x1xf32",
        "split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 8 : i64",
    ),
    "permute": moved("collective_permute", G),
    "gather-of-narrow-integers": summed(
        gathered("%x", "4x8xi8", "4x64xi8")
        + converted("%f", "%w", "4x64xi8", "4x64xi32")
        + binary("%next", "add", "%acc", "%f", "4x64xi32"),
        acc="4x64xi32",
        x="4x8xi8",
    ),
}
SIMILAR_SUMS = (
    "other-order",
    "or",
    "all-gather-maximum",
    "single-accumulated-in-double",
    "window",
    "two-axes",
    "all-to-all",
    "subtracted-from",
    "mean",
    "minimum-of-integers",
)


@pytest.mark.parametrize("name", soaked(SUMS, SIMILAR_SUMS))
def test_accumulators_are_sent_once(name: str):
    before = parsed(SUMS[name])
    plans = planned(before)
    assert {p if isinstance(p, str) else p.way for p in plans} == {"sum"}
    after = sunk(before)
    assert in_loops(before) == len(plans)
    assert in_loops(after) == 0
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))


@pytest.mark.parametrize("trips", TRIPS)
@pytest.mark.parametrize(
    "name",
    soaked(
        ["all-reduce", "maximum", "and", "formatted", "permute"], ["and", "formatted", "permute"]
    ),
)
def test_sums_of_an_unknown_number_of_iterations(name: str, trips: int):
    text = SUMS[name]
    unknown = text.replace("%bound = stablehlo.constant dense<3> : tensor<i32>", "")
    unknown = re.sub(r"(@main\([^)]*)\)", r"\1, %bound: tensor<i32>)", unknown, count=1)
    before = parsed(unknown)
    after = sunk(before)
    assert in_loops(after) == 0
    values = arguments(before, trips, bound=trips)
    assert same(run(before, values), run(after, values))


def test_terms_share_one_local_accumulator():
    text = str(sunk(parsed(SUMS["unrolled"])).module)
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("trips", soaked([0, 1, 4, 9], [1, 4]))
@pytest.mark.parametrize(("name", "terms", "factor"), [("unrolled", 2, 1.0), ("mean", 1, 0.125)])
def test_sums_stay_within_their_bound(name: str, terms: int, factor: float, trips: int):
    text = (
        SUMS[name].replace("f32", "f64").replace("%y = stablehlo.negate", "%y = stablehlo.cosine")
    )
    before = parsed(text.replace("dense<3> : tensor<i32>", f"dense<{trips}> : tensor<i32>"))
    after = sunk(before)
    rng = np.random.default_rng(0)
    values = [[rng.normal(size=(4, 8)) for _ in range(8)] for _ in range(2)]
    start, x = values
    u, n = 2.0**-53, trips * terms * 8 + 1
    gamma = n * u / (1 - n * u)
    sizes = np.abs(start[0])
    for _ in range(trips):
        sizes = sizes + factor * terms * sum(np.abs(part) for part in x)
        x = [np.cos(part) for part in x]
    one, other = run(before, values), run(after, values)
    difference = np.abs(one[0][0] - other[0][0])
    assert (difference <= 2 * gamma * sizes).all()
    assert difference.any() or trips < 9  # else the bound was not tried


@pytest.mark.parametrize(
    "name",
    soaked(["all-reduce-feeding-all-gather", "broadcast-pad-slice"], ["broadcast-pad-slice"]),
)
def test_rows_of_random_floats_keep_their_bits(name: str):
    before = parsed(UPSTREAM[name][0])
    assert verify_artifacts(before, sunk(before), Options(trials=2)).same


LAST: dict[str, str] = {
    "norm": loop({"norm": G, "x": G}, NEXT_X + GRADIENT, ["%g", "%y"]),
    "of-what-came": loop(
        {"norm": G, "x": G, "w": G},
        NEXT_X
        + binary("%z", "add", "%w", "%x", G)
        + GRADIENT
        + binary("%h", "multiply", "%g", "%w", G),
        ["%h", "%y", "%z"],
    ),
    "indexed": loop(
        {"norm": f"1x{G}", "xs": f"3x{G}"},
        row("%xs", "%x", G, 3, "%i")
        + "%k = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>\n"
        + f"%b = stablehlo.broadcast_in_dim %k, dims = [] : (tensor<f32>) -> tensor<1x{G}>\n"
        + f"%g = {all_reduce('%x', f'1x{G}')}\n"
        + binary("%h", "multiply", "%g", "%b", f"1x{G}"),
        ["%h", "%xs"],
    ),
    "two-in-one": loop(
        {"norm": G, "x": G},
        NEXT_X
        + GRADIENT
        + f"%g2 = {all_reduce('%y', G, 'maximum')}\n"
        + binary("%h", "multiply", "%g", "%g2", G),
        ["%h", "%y"],
    ),
    "in-two-carries": loop({"one": G, "two": G, "x": G}, NEXT_X + GRADIENT, ["%g", "%g", "%y"]),
    "complex": loop(
        {"sent": "4xcomplex<f32>", "x": "4xf32"},
        "%y = stablehlo.negate %x : tensor<4xf32>\n"
        "%c = stablehlo.complex %x, %y : tensor<4xcomplex<f32>>\n"
        f"%g = {collective('collective_permute', '%c', '4xcomplex<f32>', '4xcomplex<f32>')}\n",
        ["%g", "%y"],
    ),
}


@pytest.mark.parametrize("trips", soaked([1, 2, 3], [2]))
@pytest.mark.parametrize("name", LAST)
def test_last_values_are_sent_once(name: str, trips: int):
    text = LAST[name].replace("dense<3> : tensor<i32>", f"dense<{trips}> : tensor<i32>")
    before = parsed(text)
    plans = planned(before)
    assert {p if isinstance(p, str) else p.way for p in plans} == {"last"}
    assert in_loops(before) == len(plans)
    after = sunk(before)
    assert in_loops(after) == 0
    values = arguments(before, trips)
    assert same(run(before, values), run(after, values))


def groups(text: str) -> list[int]:
    """The groups of the collectives of a loop."""
    return [plan.group for plan in planned(parsed(text)) if isinstance(plan, Sinking)]


def test_groups_go_together():
    assert groups(LAST["two-in-one"]) == [0, 0]
    assert groups(SUMS["reduce-scatter-all-gather"]) == [0, 0]
    assert groups(SUMS["unrolled"]) == [0, 1]
    assert groups(UPSTREAM["four"][0]) == [0, 0, 0, 0]
    assert groups(UPSTREAM["shared-side-input"][0]) == [0, 1]


def extra(text: str) -> list[int | None]:
    """What a loop carries more for each of its collectives' groups."""
    return [plan.extra_bytes for plan in planned(parsed(text)) if isinstance(plan, Sinking)]


def test_extra_bytes():
    whole, shard = 4 * 8 * 4, 4 * 1 * 4
    assert extra(SUMS["all-reduce"]) == [0]
    assert extra(SUMS["reduce-scatter"]) == [whole - shard]
    assert extra(SUMS["all-gather"]) == [whole - 8 * whole]
    assert extra(SUMS["half-accumulated-in-single"]) == [0]
    assert extra(SUMS["unrolled"]) == [0, 0]
    assert extra(SUMS["terms-that-stay"]) == [whole]
    assert extra(SUMS["different-chains"]) == [whole] * 3
    assert extra(LAST["norm"]) == [0]
    assert extra(LAST["in-two-carries"]) == [-whole]
    row_bytes = 3 * 8 * 16 * 2
    assert extra(UPSTREAM["not-first-index"][0]) == [0]
    assert extra(UPSTREAM["shared-side-input"][0]) == [row_bytes, row_bytes]


def test_one_of_several_terms():
    before = parsed(SUMS["different-chains"])
    after = sunk(before, lambda plan: plan.group == 0)
    assert in_loops(after) == 2
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))


def gradients(count: int, kind: str = G) -> str:
    """A microbatch loop with as many gradients, each added up over the devices."""
    carries = {f"acc{i}_": kind for i in range(count)} | {f"x{i}_": kind for i in range(count)}
    body = "".join(
        f"%y{i} = stablehlo.negate %x{i}_ : tensor<{kind}>\n"
        f"%g{i} = {all_reduce(f'%x{i}_', kind)}\n"
        + binary(f"%next{i}", "add", f"%acc{i}_", f"%g{i}", kind)
        for i in range(count)
    )
    ends = [f"%{end}{i}" for end in ("next", "y") for i in range(count)]
    return loop(carries, body, ends)


def test_sixteen_all_reduces_become_one():
    before = parsed(gradients(16))
    after = sunk(before, merge=True)
    assert in_loops(before) == 16
    assert str(after.module).count("stablehlo.all_reduce") == 1
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))


def test_buckets_have_a_largest_size():
    after = sunk(parsed(gradients(5, "2048x2048xf32")), merge=True)  # 16 MiB each
    assert str(after.module).count("stablehlo.all_reduce") == 3


def test_unlike_collectives_are_not_merged():
    after = sunk(parsed(SUMS["different-chains"]), merge=True)
    assert str(after.module).count("stablehlo.all_reduce") == 1


NESTED = """module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%acc0: tensor<4x1xf32>, %x0: tensor<4x8xf32>) -> (tensor<4x1xf32>) {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %n = stablehlo.constant dense<3> : tensor<i32>
  %r:3 = stablehlo.while(%i = %c0, %acc = %acc0, %x = %x0)
      : tensor<i32>, tensor<4x1xf32>, tensor<4x8xf32> cond {
    %go = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %go : tensor<i1>
  } do {
    %q:3 = stablehlo.while(%j = %c0, %sum = %acc, %z = %x)
        : tensor<i32>, tensor<4x1xf32>, tensor<4x8xf32> cond {
      %on = stablehlo.compare LT, %j, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %on : tensor<i1>
    } do {
      SCATTER
      %next = stablehlo.add %sum, %s : tensor<4x1xf32>
      %y = stablehlo.negate %z : tensor<4x8xf32>
      %j1 = stablehlo.add %j, %c1 : tensor<i32>
      stablehlo.return %j1, %next, %y : tensor<i32>, tensor<4x1xf32>, tensor<4x8xf32>
    }
    %i1 = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %i1, %q#1, %q#2 : tensor<i32>, tensor<4x1xf32>, tensor<4x8xf32>
  }
  return %r#1 : tensor<4x1xf32>
}
}
"""


def test_nested_loops_send_once_after_the_outer_one():
    before = parsed(NESTED.replace("SCATTER", scattered("%z", G, "4x1xf32")))
    after = sunk(before)
    text = str(after.module)
    assert text.count("stablehlo.reduce_scatter") == 1
    assert text.index("stablehlo.reduce_scatter") > text.rindex("stablehlo.while")
    values = arguments(before, 0)
    assert same(run(before, values), run(after, values))

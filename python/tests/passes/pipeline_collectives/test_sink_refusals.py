"""Why a collective stays in its loop: one case for each reason, in which nothing changes."""

from __future__ import annotations

import re

import pytest
from sink_programs import all_reduce, collective, loop, parsed, planned, reverse, row, store

G = "4x8xf32"
REDUCED = f"%g = {all_reduce('%x', G)}\n"
KEPT = {"acc": G, "x": G}


def add(name: str, left: str, right: str, kind: str = G) -> str:
    return f"{name} = stablehlo.add {left}, {right} : tensor<{kind}>\n"


def halves(*, to: str, acc: str, x: str) -> str:
    """A gradient that is converted before it is accumulated."""
    return loop(
        {"acc": acc, "x": x},
        f"%g = {all_reduce('%x', x)}\n%f = stablehlo.convert %g : (tensor<{x}>) -> tensor<{to}>\n"
        + add("%next", "%acc", "%f", acc),
        ["%next", "%x"],
    )


def scaled(text: str) -> str:
    return loop(KEPT, REDUCED + text + add("%next", "%acc", "%h"), ["%next", "%x"])


PAIR = """%p:2 = "stablehlo.all_reduce"(%x, %acc) ({
  ^bb0(%left: tensor<f32>, %right: tensor<f32>):
    %both = stablehlo.add %left, %right : tensor<f32>
    stablehlo.return %both : tensor<f32>
}) {replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>, channel_handle =
    #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids}
  : (tensor<4x8xf32>, tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<4x8xf32>)
"""
CALL = "%h = stablehlo.custom_call @opaque(%g) : (tensor<4x8xf32>) -> tensor<4x8xf32>\n"
ACCUMULATED: dict[str, tuple[str, str]] = {
    "read-elsewhere": (
        loop(KEPT, REDUCED + add("%next", "%acc", "%g") + add("%y", "%acc", "%x"), ["%next", "%y"]),
        "the add also reads the accumulator, carry 1",
    ),
    "read-in-the-same-iteration": (
        loop(KEPT, REDUCED + add("%next", "%acc", "%g")
             + f"%y = stablehlo.negate %next : tensor<{G}>\n", ["%next", "%y"]),
        "the sum of the add has other readers than carry 1",
    ),
    "handed-on": (
        loop(KEPT, REDUCED + add("%next", "%acc", "%g"), ["%next", "%acc"]),
        "the loop also returns the accumulator as carry 2",
    ),
    "read-by-the-condition": (
        loop({"acc": "i32", "x": "i32"},
             f"%g = {all_reduce('%x', 'i32')}\n" + add("%next", "%acc", "%g", "i32"),
             ["%next", "%x"],
             condition="%go = stablehlo.compare LT, %acc, %bound : "
             "(tensor<i32>, tensor<i32>) -> tensor<i1>"),
        "the condition reads the accumulator, carry 1",
    ),
    "added-twice": (
        loop(KEPT, REDUCED + add("%two", "%g", "%g") + add("%next", "%acc", "%two"),
             ["%next", "%x"]),
        "carry 1 accumulates its result more than once",
    ),
    "read-by-two": (
        loop(KEPT, REDUCED + add("%next", "%acc", "%g")
             + f"%y = stablehlo.negate %g : tensor<{G}>\n", ["%next", "%y"]),
        "both the add .*and the negate .*read its result",
    ),
    "not-accumulated": (
        loop(KEPT, REDUCED + add("%next", "%x", "%g"), ["%next", "%acc"]),
        "the add.* does not add it to carry 1",
    ),
    "other-reduction": (
        loop(KEPT, f"%g = {all_reduce('%x', G, 'maximum')}\n" + add("%next", "%acc", "%g"),
             ["%next", "%x"]),
        "does not reduce by add",
    ),
    "narrowing": (halves(to="4xf16", acc="4xf16", x="4xf32"), "convert.* rounds"),
    "as-wide": (halves(to="4xf16", acc="4xf16", x="4xbf16"), "convert.* rounds"),
    "other-kind": (halves(to="4xf32", acc="4xf32", x="4xi32"), "changes the kind of number"),
    "may-wrap": (
        halves(to="4xi32", acc="4xi32", x="4xi8"),
        "the all_reduce.* may wrap around before the convert",
    ),
    "loses-the-sign": (halves(to="4xui16", acc="4xui16", x="4xi8"), "does not keep every integer"),
    "not-linear": (
        scaled(f"%h = stablehlo.abs %g : tensor<{G}>\n"), "the abs.* is not linear for add"
    ),
    "own-moving-factor": (
        scaled("%id = stablehlo.partition_id : tensor<ui32>\n"
               "%own = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>\n"
               "%mix = stablehlo.multiply %own, %i : tensor<i32>\n"
               "%c = stablehlo.convert %mix : (tensor<i32>) -> tensor<f32>\n"
               f"%d = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<{G}>\n"
               f"%h = stablehlo.multiply %g, %d : tensor<{G}>\n"),
        "the multiply.* has another operand that changes in the loop",
    ),
    "reciprocal": (
        scaled(f"%c = stablehlo.constant dense<8.0> : tensor<{G}>\n"
               f"%h = stablehlo.divide %c, %g : tensor<{G}>\n"),
        "the divide.* is not linear for add",
    ),
    "integer-division": (
        loop({"acc": "4xi32", "x": "4xi32"},
             f"%g = {all_reduce('%x', '4xi32')}\n%c = stablehlo.constant dense<8> : tensor<4xi32>\n"
             "%h = stablehlo.divide %g, %c : tensor<4xi32>\n"
             + add("%next", "%acc", "%h", "4xi32"), ["%next", "%x"]),
        "the divide.* is not linear for add",
    ),
    "custom-call": (scaled(CALL), "custom_call"),
    "several-operands": (
        loop(KEPT, PAIR + add("%next", "%p#1", "%p#0"), ["%next", "%x"]),
        "it has several operands",
    ),
    "permute-maximum": (
        loop(KEPT, f"%g = {collective('collective_permute', '%x', G, G)}\n"
             f"%next = stablehlo.maximum %acc, %g : tensor<{G}>\n", ["%next", "%x"]),
        "the collective_permute.* is not linear for maximum",
    ),
    "booleans-added": (halves(to="4xi1", acc="4xi1", x="4xi1"), "by add of i1"),
    "complex": (
        loop({"acc": "4xcomplex<f32>", "x": "4xcomplex<f32>"},
             f"%g = {collective('collective_permute', '%x', '4xcomplex<f32>', '4xcomplex<f32>')}\n"
             + add("%next", "%acc", "%g", "4xcomplex<f32>"), ["%next", "%x"]),
        "an accumulation by add of complex<f32> cannot be sunk",
    ),
    "eight-bit-floats": (
        halves(to="4xf8E4M3FN", acc="4xf8E4M3FN", x="4xf8E4M3FN"),
        "an accumulation by add of f8E4M3FN cannot be sunk",
    ),
}  # fmt: skip

ROW = "8x16xf32"
KEEPS = f"3x{ROW}"
SENT = f"%ar = {all_reduce('%x', '1x' + ROW)}\n"


def rows(body: str, ends: tuple[str, str] = ("%new", "%src"), trips: int | None = 3) -> str:
    text = reverse(3) + row("%src", "%x", ROW, 3) + SENT + body
    return loop({"dst": KEEPS, "src": KEEPS}, text, list(ends), trips=trips)


STORED = store("%dst", "%ar", "%new", ROW, 3)
LAST: dict[str, tuple[str, str]] = {
    "trips-unknown": (
        loop({"last_one": G, "x": G}, REDUCED, ["%g", "%x"], trips=None),
        "the loop is not known to run at all",
    ),
    "never": (loop({"kept": G, "x": G}, REDUCED, ["%g", "%x"], trips=0), "the loop never runs"),
    "read-by-the-next": (
        loop({"kept": G, "x": G}, REDUCED + add("%y", "%kept", "%x"), ["%g", "%y"]),
        "the next iteration reads its result, carry 1, in the add",
    ),
    "delayed": (
        loop({"kept": G, "x": G}, REDUCED, ["%g", "%kept"]),
        "carry 1 passes its result on to carry 2",
    ),
    "costly": (
        loop({"kept": "8x8xf32", "x": "8x8xf32"},
             f"%g = {all_reduce('%x', '8x8xf32')}\n"
             "%h = stablehlo.dot_general %g, %x, contracting_dims = [1] x [0] : "
             "(tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>\n", ["%h", "%x"]),
        "the dot_general needs its result",
    ),
    "nothing": (loop({"x": G}, REDUCED, ["%x"]), "the loop does not carry its result"),
}  # fmt: skip
STACKED: dict[str, tuple[str, str]] = {
    "fewer-rows-than-trips": (
        loop({"dst": f"2x{ROW}", "src": KEEPS},
             reverse(3) + row("%src", "%x", ROW, 3) + SENT + store("%dst", "%ar", "%new", ROW, 2),
             ["%new", "%src"]),
        "does not write the rows one after the other",
    ),
    "not-the-first-dimension": (
        loop({"dst": "8x3x16xf32", "src": KEEPS},
             reverse(3) + row("%src", "%x", ROW, 3) + SENT
             + "%r = stablehlo.reshape %ar : (tensor<1x8x16xf32>) -> tensor<8x1x16xf32>\n"
             "%new = stablehlo.dynamic_update_slice %dst, %r, %c0, %idx, %c0 : "
             "(tensor<8x3x16xf32>, tensor<8x1x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) "
             "-> tensor<8x3x16xf32>\n", ["%new", "%src"]),
        "does not write one whole row of the first dimension",
    ),
    "one-buffer-twice": (
        rows(STORED + store("%new", "%ar", "%newer", ROW, 3), ("%newer", "%src")),
        "is not just the next value of carry 1|writes into the result of another op",
    ),
    "buffer-read-twice": (
        rows(STORED + store("%dst", "%ar", "%newer", ROW, 3), ("%new", "%newer")),
        "the buffer, carry 1, is also read by the dynamic_update_slice",
    ),
    "buffer-read": (
        rows(STORED + row("%dst", "%old", ROW, 3, "%i") + store("%src", "%old", "%s2", ROW, 3),
             ("%new", "%s2")),
        "the buffer, carry 1, is also read by the dynamic_slice",
    ),
    "same-row": (
        rows(store("%dst", "%ar", "%new", ROW, 3, "%c1")),
        "does not write the rows one after the other",
    ),
    "wrapping": (
        loop({"dst": KEEPS, "src": KEEPS},
             reverse(2) + row("%src", "%x", ROW, 3) + SENT + STORED, ["%new", "%src"], start=0),
        "does not write the rows one after the other",
    ),
    "unknown-rows": (
        loop({"dst": KEEPS, "src": KEEPS, "at": "i32"},
             row("%src", "%x", ROW, 3, "%i") + SENT + store("%dst", "%ar", "%new", ROW, 3, "%at"),
             ["%new", "%src", "%at"]),
        "the rows that the dynamic_update_slice.* are not known before the run",
    ),
    "trips-unknown": (rows(STORED, trips=None), "the trip count of the loop is unknown"),
    "costly": (
        loop({"dst": "3x8x8xf32", "src": "3x8x8xf32"},
             row("%src", "%x", "8x8xf32", 3, "%i") + f"%ar = {all_reduce('%x', '1x8x8xf32')}\n"
             "%d = stablehlo.dot_general %ar, %x, batching_dims = [0] x [0], "
             "contracting_dims = [2] x [1] : (tensor<1x8x8xf32>, tensor<1x8x8xf32>) -> "
             "tensor<1x8x8xf32>\n" + store("%dst", "%d", "%new", "8x8xf32", 3, "%i"),
             ["%new", "%src"]),
        "the dot_general needs its result",
    ),
    "custom-call": (
        rows('%h = stablehlo.custom_call @opaque(%ar) : (tensor<1x8x16xf32>) -> '
             "tensor<1x8x16xf32>\n" + store("%dst", "%h", "%new", ROW, 3)),
        "the custom_call needs its result",
    ),
    "no-rule": (
        rows("%ax = stablehlo.optimization_barrier %ar : tensor<1x8x16xf32>\n"
             + store("%dst", "%ax", "%new", ROW, 3)),
        "optimization_barrier.* cannot run on stacked values",
    ),
    "padding-that-changes": (
        rows("%c = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>\n"
             "%l = stablehlo.slice %ar [0:1, 0:8, 0:12] : (tensor<1x8x16xf32>) -> "
             "tensor<1x8x12xf32>\n%p = stablehlo.pad %l, %c, low = [0, 0, 0], high = [0, 0, 4], "
             "interior = [0, 0, 0] : (tensor<1x8x12xf32>, tensor<f32>) -> tensor<1x8x16xf32>\n"
             + store("%dst", "%p", "%new", ROW, 3)),
        "the pad.* has a parameter that changes in the loop",
    ),
    "carried-too": (
        loop({"dst": KEEPS, "src": KEEPS, "kept": f"1x{ROW}"},
             reverse(3) + row("%src", "%x", ROW, 3) + SENT + STORED, ["%new", "%src", "%ar"]),
        "the next iteration reads its result, carry 3",
    ),
    "other-rows": (
        loop({"dst": KEEPS, "src": KEEPS, "up": KEEPS},
             reverse(3) + row("%src", "%x", ROW, 3) + SENT + STORED
             + store("%up", "%ar", "%new_up", ROW, 3, "%i"), ["%new", "%src", "%new_up"]),
        "writes other rows than the dynamic_update_slice",
    ),
}  # fmt: skip
REFUSED = {
    **{f"sum-{name}": case for name, case in ACCUMULATED.items()},
    **{f"last-{name}": case for name, case in LAST.items()},
    **{f"batch-{name}": case for name, case in STACKED.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_reasons(name: str):
    text, reason = REFUSED[name]
    (found,) = planned(parsed(text))
    assert isinstance(found, str), found.way
    assert re.search(reason, found), found

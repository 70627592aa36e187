"""Random loops of integers, with collectives that are accumulated, overwritten or stored in rows.

Integers wrap around alike in any order, so that values must be kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from sink_programs import all_reduce, collective, loop, reverse, store

SHAPE = "8x8"
COMBINING = ("add", "maximum", "minimum")  # XLA:CPU reduces integers by no others
TYPES = ("i32", "i8")


@dataclass
class Body:
    """A loop's body in the making: its lines, and the values there are, by element type."""

    draw: st.DrawFn
    lines: list[str] = field(default_factory=list[str])
    values: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    made: int = 0

    def pick(self, element: str) -> str:
        """A value, the newest rather than another."""
        known = self.values[element]
        return known[-1 - self.draw(st.integers(0, min(3, len(known) - 1)))]

    def line(self, text: str, element: str | None = None) -> str:
        name = f"%v{self.made}"
        self.made += 1
        self.lines.append(f"{name} = {text}")
        if element is not None:
            self.values[element].append(name)
        return name


def kind(element: str) -> str:
    return f"{SHAPE}x{element}"


def unary(body: Body, value: str, element: str, op: str) -> str:
    """One op of a chain, which leaves the type as it is."""
    taken = kind(element)
    given = f"tensor<{taken}>"
    if op == "transpose":
        return body.line(f"stablehlo.transpose {value}, dims = [1, 0] : ({given}) -> {given}")
    if op == "reverse":
        return body.line(f"stablehlo.reverse {value}, dims = [1] : {given}")
    if op == "scaled":
        factor = body.line(f"stablehlo.constant dense<3> : {given}")
        return body.line(f"stablehlo.multiply {factor}, {value} : {given}")
    if op in ("negate", "abs"):
        return body.line(f"stablehlo.{op} {value} : {given}")
    if op == "permute":
        return body.line(collective("collective_permute", value, taken, taken))
    if op == "scattered":
        some = f"8x1x{element}"
        along = "scatter_dimension = 1 : i64"
        part = body.line(collective("reduce_scatter", value, taken, some, along))
        along = "all_gather_dim = 1 : i64"
        return body.line(collective("all_gather", part, some, taken, along))
    return body.line(all_reduce(value, taken, op, fours=body.draw(st.booleans())))


CHAIN = ("transpose", "reverse", "negate", "scaled", "permute", "scattered", *COMBINING)
LINEAR = tuple(op for op in CHAIN if op not in COMBINING[1:])


def chain(body: Body, value: str, element: str, kinds: tuple[str, ...]) -> str:
    """A collective, and what follows it."""
    for op in body.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)):
        value = unary(body, value, element, op)
    return value


def accumulated(body: Body, carry: str, element: str) -> str:
    """A carry with some terms added to it, those that a chain makes among them."""
    op = body.draw(st.sampled_from(COMBINING))
    kinds = LINEAR if op == "add" else ("transpose", "reverse", op)
    total = f"%{carry}"
    for _ in range(body.draw(st.integers(1, 3))):
        term = body.pick(element)
        if body.draw(st.integers(0, 3)):
            term = chain(body, term, element, kinds)
        widened = element == "i32" and body.draw(st.integers(0, 4)) == 0
        if widened:
            narrow = body.pick("i8")
            if body.draw(st.booleans()):
                narrow = chain(body, narrow, "i8", kinds)
            types = f"(tensor<{kind('i8')}>) -> tensor<{kind('i32')}>"
            term = body.line(f"stablehlo.convert {narrow} : {types}")
        used = "subtract" if op == "add" and body.draw(st.integers(0, 4)) == 0 else op
        sides = (total, term) if used == "subtract" or body.draw(st.booleans()) else (term, total)
        total = body.line(f"stablehlo.{used} {sides[0]}, {sides[1]} : tensor<{kind(element)}>")
    if body.draw(st.integers(0, 5)) == 0:
        body.values[element].append(total)  # another may read it
    return total


def stored(body: Body, carry: str, trips: int) -> str:
    """A carry of rows with one of them overwritten."""
    value = chain(body, body.pick("i32"), "i32", (*CHAIN, "abs"))
    if body.draw(st.booleans()):
        other = body.pick("i32")
        value = body.line(f"stablehlo.add {value}, {other} : tensor<{kind('i32')}>")
    if body.draw(st.integers(0, 5)) == 0:
        body.values["i32"].append(value)
    types = f"(tensor<{kind('i32')}>) -> tensor<1x{kind('i32')}>"
    row = body.line(f"stablehlo.reshape {value} : {types}")
    at = body.draw(st.sampled_from(("%i", "%i", "%idx", "%idx", "%c1")))
    name = f"%v{body.made}"
    body.made += 1
    body.lines.append(store(f"%{carry}", row, name, kind("i32"), trips, at))
    return name


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, int | None]:
    """A program, and what to give it for its bound, if it takes one."""
    trips = draw(st.integers(0, 9))
    unknown = draw(st.integers(0, 3)) == 0
    rows = max(trips, 1)
    carries = {"x": kind("i32"), "y": kind("i32"), "z": kind("i8")}
    sums = {f"sum{n}": draw(st.sampled_from(TYPES)) for n in range(draw(st.integers(0, 3)))}
    lasts = {f"last{n}": "i32" for n in range(draw(st.integers(0, 2)))}
    stores = {f"rows{n}": f"{rows}x{kind('i32')}" for n in range(draw(st.integers(0, 2)))}
    carries |= {name: kind(element) for name, element in (sums | lasts).items()} | stores
    body = Body(draw, values={"i32": ["%y", "%x"], "i8": ["%z"]})
    body.lines.append(reverse(rows))
    if draw(st.booleans()):
        given = f"tensor<{kind('i32')}>"
        body.line(f"stablehlo.multiply %x, %y : {given}", "i32")
    ends: dict[str, str] = {}
    for name, element in sums.items():
        ends[name] = accumulated(body, name, element)
    for name in lasts:
        ends[name] = chain(body, body.pick("i32"), "i32", (*CHAIN, "abs"))
        if draw(st.integers(0, 3)) == 0:
            body.values["i32"].append(ends[name])
    for name in stores:
        ends[name] = stored(body, name, rows)
    ends["x"], ends["y"] = body.pick("i32"), draw(st.sampled_from(["%x", "%y"]))
    ends["z"] = unary(body, "%z", "i8", draw(st.sampled_from(("negate", "scaled", "transpose"))))
    if draw(st.integers(0, 5)) == 0 and "last0" in ends:
        ends["y"] = "%last0"
    text = "\n".join(body.lines)
    listed = [ends[name] for name in carries]
    return loop(carries, text, listed, trips=None if unknown else trips), trips if unknown else None

"""Random loops with collectives for virtual devices, as text.

Matrices of 8 x 4 are whole numbers, or floats that are only added, compared and moved, so that no
compiler rounds them in another way. Whatever draws the numbers, Hypothesis too, is a `Random`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from loop_steps import Scope, stack_kind

DIRECTIONS = ("LT", "LE", "GT", "GE", "NE")
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
FORMS = ("plain", "plain", "plain", "if", "called", "manual")


@dataclass(frozen=True)
class Count:
    """How a loop counts: `trips` iterations from `start` by `step`, until `direction` `bound`."""

    kind: str
    start: int
    step: int
    direction: str
    bound: int
    trips: int


@dataclass
class Carry:
    """A position of a loop: its name in the loop, its type, what it starts and ends as."""

    name: str
    kind: str
    start: str
    end: str = ""


@dataclass
class Loop:
    """A loop in the making, around the scope of its body."""

    scope: Scope
    count: Count
    carries: list[Carry] = field(default_factory=list[Carry])

    def carry(self, kind: str, start: str) -> Carry:
        """A further position."""
        self.carries.append(Carry(self.scope.fresh(), kind, start))
        return self.carries[-1]


def random_count(chosen: random.Random, most: int) -> Count:
    """A counter that does not wrap around."""
    kind = chosen.choice(["i32", "i32", "i64", "ui32", "i8"])
    trips = chosen.randrange(most + 1)
    amount = chosen.choice([1, 1, 1, 2, 3])
    direction = chosen.choice(DIRECTIONS)
    up = direction in ("LT", "LE") or (direction == "NE" and chosen.random() < 0.5)
    start = chosen.choice([0, 0, 1, 2, 5]) if up else amount * trips + chosen.choice([1, 1, 3, 6])
    if kind != "ui32":
        start += chosen.choice([0, 0, 0, -3, -1])
    step = amount if up else -amount
    last = start + step * trips
    slack = chosen.randrange(amount) if trips and direction != "NE" else 0
    bound = last - slack if up else last + slack
    if direction in ("LE", "GE"):
        bound += -1 if up else 1
    if kind == "ui32" and bound < 0:  # a loop that never runs cannot end below zero
        return Count(kind, 1, 1, "LT", 1, 0)
    return Count(kind, start, step, direction, bound, trips)


def random_loop_program(chosen: random.Random, most_trips: int = 9) -> str:
    """A module with a loop, or one in another, and collectives in both."""
    devices = chosen.choice([4, 8])
    element = chosen.choice(["i32", "i32", "f32"])
    scope = Scope(chosen, devices, element)
    scope.values = ["%x", "%y"]
    scope.stacks = ["%w", "%u"]
    form = chosen.choice(FORMS)
    scope.variadic = form != "manual"  # XLA ends on a sharding of several results
    matrix, stack = scope.matrix, stack_kind(element)
    in_branch = form == "if"
    results = _in_branch(scope, most_trips) if in_branch else _write_loop(scope, most_trips, 0)
    shown = [chosen.choice(results) for _ in range(3)] if chosen.random() < 0.3 else results
    names = ", ".join(name for name, _ in shown)
    kinds = ", ".join(kind for _, kind in shown)
    body = "\n".join(scope.lines)
    taken = f"%x: {matrix}, %y: {matrix}, %w: {stack}, %u: {stack}"
    main = f"func.func @main({taken}) -> ({kinds}) {{\n{body}\nreturn {names} : {kinds}\n}}"
    if form == "called":
        main = _outlined(main, kinds, len(shown), matrix, stack)
    if form == "manual":
        main = _manual(body, [n for n, _ in shown], [k for _, k in shown], scope)
    return (
        f"module attributes {{mhlo.num_replicas = 1 : i32, mhlo.num_partitions = {devices} : i32}}"
        f' {{\nsdy.mesh @mesh = <["d"={devices}]>\n{main}\n' + "\n".join(scope.functions) + "\n}\n"
    )


def _outlined(main: str, kinds: str, count: int, matrix: str, stack: str) -> str:
    """The program behind a call, as jax writes a remat or a custom derivative."""
    inner = main.replace("func.func @main", "func.func private @closed_call")
    names = ", ".join(f"%r#{i}" for i in range(count)) if count > 1 else "%r"
    taken = f"{matrix}, {matrix}, {stack}, {stack}"
    result = f"%r:{count}" if count > 1 else "%r"
    return (
        f"func.func @main(%x: {matrix}, %y: {matrix}, %w: {stack}, %u: {stack}) -> ({kinds}) {{\n"
        f"{result} = func.call @closed_call(%x, %y, %w, %u) : ({taken}) -> ({kinds})\n"
        f"return {names} : {kinds}\n}}\n{inner}"
    )


def _manual(body: str, names: list[str], kinds: list[str], scope: Scope) -> str:
    """The program in a manual computation in which nothing is sharded."""
    given = [scope.matrix, scope.matrix, *[stack_kind(scope.element)] * 2]

    def whole(each: list[str]) -> str:
        dims = [", ".join(["{}"] * kind.split("<")[1].count("x")) for kind in each]
        return "[" + ", ".join(f"<@mesh, [{dim}]>" for dim in dims) + "]"

    count = f":{len(names)}" if len(names) > 1 else ""
    returned = ", ".join(f"%r#{i}" for i in range(len(names))) if count else "%r"
    taken = ", ".join(f"%{n}: {k}" for n, k in zip(("p0", "p1", "p2", "p3"), given, strict=True))
    inner = ", ".join(f"%{n}: {k}" for n, k in zip("xywu", given, strict=True))
    outer, out = ", ".join(given), ", ".join(kinds)
    return (
        f"func.func @main({taken}) -> ({out}) {{\n%r{count} = sdy.manual_computation(%p0, %p1, "
        f'%p2, %p3) in_shardings={whole(given)} out_shardings={whole(kinds)} manual_axes={{"d"}} '
        f"({inner}) {{\n{body}\nsdy.return {', '.join(names)} : {out}\n}} : ({outer}) -> ({out})\n"
        f"return {returned} : {out}\n}}"
    )


def _in_branch(scope: Scope, most_trips: int) -> list[tuple[str, str]]:
    """The loop in one side of a branch that all devices take, or leave, together."""
    inner = scope.inside()
    results = _write_loop(inner, most_trips, 0)
    matrices = [(name, kind) for name, kind in results if kind == scope.matrix][:3]
    if not matrices:
        matrices = [("%x", scope.matrix)]
    flag = scope.line(
        f"stablehlo.constant dense<{scope.chosen.choice(['true'] * 4 + ['false'])}> : tensor<i1>"
    )
    kinds = ", ".join(kind for _, kind in matrices)
    other = ", ".join(["%y"] * len(matrices))
    names = ", ".join(name for name, _ in matrices)
    made = scope.fresh()
    count = f":{len(matrices)}" if len(matrices) > 1 else ""
    scope.lines.append(
        f'{made}{count} = "stablehlo.if"({flag}) ({{\n' + "\n".join(inner.lines) + f"\n"
        f'"stablehlo.return"({names}) : ({kinds}) -> ()\n}}, {{\n"stablehlo.return"({other}) : '
        f"({kinds}) -> ()\n}}) : (tensor<i1>) -> ({kinds})"
    )
    parts = [f"{made}#{i}" for i in range(len(matrices))] if count else [made]
    return [(part, scope.matrix) for part in parts]


def _write_loop(around: Scope, most_trips: int, depth: int) -> list[tuple[str, str]]:
    """Writes a loop into a scope: what it makes, and the types."""
    chosen = around.chosen
    for _ in range(chosen.randrange(3)):
        around.step()
    loop = Loop(around.inside(), random_count(chosen, most_trips))
    count, body = loop.count, loop.scope
    scalar = f"tensor<{count.kind}>"
    counter = loop.carry(scalar, around.constant(count.start, count.kind))
    body.counters.insert(0, (counter.name, count.kind))
    body.span = (count.start, count.start + count.step * count.trips)
    body.step_by = count.step
    ends = _choose_carries(loop, around)
    for _ in range(chosen.randrange(2, 9)):
        body.step()
    if depth < 1 and chosen.random() < 0.2:
        inner = _write_loop(body, 4, depth + 1)
        body.values += [name for name, kind in inner if kind == body.matrix]
        for _ in range(chosen.randrange(3)):
            body.step()
    counter.end = _advance(body, counter.name, count.kind, count.step)
    for end in ends:
        end()
    return _printed(loop, around, counter)


def _advance(body: Scope, name: str, kind: str, step: int) -> str:
    """A counter's next value, in one of the ways to write it."""
    scalar = f"tensor<{kind}>"
    if step < 0:
        amount = body.constant(-step, kind)
        return body.line(f"stablehlo.subtract {name}, {amount} : {scalar}")
    amount = body.constant(step, kind)
    sides = [name, amount]
    body.chosen.shuffle(sides)
    return body.line(f"stablehlo.add {sides[0]}, {sides[1]} : {scalar}")


def _choose_carries(loop: Loop, around: Scope) -> list[Callable[[], None]]:
    """Positions of all kinds; what says, once the body is written, what they end as."""
    chosen = around.chosen
    later: list[Callable[[], None]] = []
    for _ in range(chosen.randrange(1, 6)):
        role = chosen.choice(
            [
                "state",
                "state",
                "sum",
                "sum",
                "rows",
                "rows",
                "swap",
                "constant",
                "indexed",
                "kept",
                "counter",
                "late",
                "stack",
            ]
        )
        later.append(_ROLES[role](loop, around))
    return later


def _state(loop: Loop, around: Scope) -> Callable[[], None]:
    carry = loop.carry(around.matrix, around.value())
    loop.scope.values.append(carry.name)

    def end() -> None:
        carry.end = loop.scope.value()

    return end


def _late(loop: Loop, around: Scope) -> Callable[[], None]:
    """What nobody in the loop reads."""
    carry = loop.carry(around.matrix, around.value())

    def end() -> None:
        carry.end = loop.scope.collective(loop.scope.value())

    return end


def _sum(loop: Loop, around: Scope) -> Callable[[], None]:
    carry = loop.carry(around.matrix, around.value())
    if loop.scope.chosen.random() < 0.2:
        loop.scope.values.append(carry.name)

    def end() -> None:
        scope = loop.scope
        term = scope.value()
        if scope.chosen.random() < 0.7:
            term = scope.formatted(scope.collective(term))
        sides = [carry.name, term]
        scope.chosen.shuffle(sides)
        name = scope.chosen.choice(["add", "add", "maximum"])
        carry.end = scope.line(f"stablehlo.{name} {sides[0]}, {sides[1]} : {scope.matrix}")

    return end


def _rows(loop: Loop, around: Scope) -> Callable[[], None]:
    carry = loop.carry(stack_kind(around.element), around.chosen.choice(["%w", "%u"]))
    if loop.scope.chosen.random() < 0.2:
        loop.scope.stacks.append(carry.name)

    def end() -> None:
        scope = loop.scope
        value = scope.value()
        if scope.chosen.random() < 0.7:
            value = scope.formatted(scope.collective(value))
        carry.end = scope.stored(carry.name, value)
        if scope.chosen.random() < 0.15:
            carry.end = scope.stored(carry.end, scope.value())

    return end


def _swap(loop: Loop, around: Scope) -> Callable[[], None]:
    """Carries that are handed on in a ring, or along a chain that ends in it."""
    size = loop.scope.chosen.randrange(1, 4)
    ring = [loop.carry(around.matrix, around.value()) for _ in range(size)]
    loop.scope.values.append(ring[0].name)
    feeds = loop.scope.chosen.random() < 0.5

    def end() -> None:
        for one, following in pairwise(ring):
            one.end = following.name
        ring[-1].end = loop.scope.value() if feeds else ring[0].name

    return end


def _constant(loop: Loop, around: Scope) -> Callable[[], None]:
    carry = loop.carry(around.matrix, around.value())
    loop.scope.values.append(carry.name)
    outside = around.value()

    def end() -> None:
        carry.end = outside

    return end


def _indexed(loop: Loop, around: Scope) -> Callable[[], None]:
    carry = loop.carry(around.matrix, around.value())
    loop.scope.values.append(carry.name)

    def end() -> None:
        carry.end = loop.scope.sliced()

    return end


def _kept(loop: Loop, around: Scope) -> Callable[[], None]:
    carry = loop.carry(around.matrix, around.value())
    loop.scope.values.append(carry.name)

    def end() -> None:
        carry.end = carry.name

    return end


def _counter(loop: Loop, around: Scope) -> Callable[[], None]:
    kind = around.chosen.choice(["i32", "i32", "i8", "ui32"])
    start, step = around.chosen.choice([0, 2, 7, 120]), around.chosen.choice([1, -1, 2, 50])
    carry = loop.carry(f"tensor<{kind}>", around.constant(start, kind))
    loop.scope.counters.append((carry.name, kind))

    def end() -> None:
        carry.end = _advance(loop.scope, carry.name, kind, step)

    return end


def _stack(loop: Loop, around: Scope) -> Callable[[], None]:
    """Stacked weights that the loop carries along, or puts others in the place of."""
    carry = loop.carry(stack_kind(around.element), around.chosen.choice(["%w", "%u"]))
    loop.scope.stacks.append(carry.name)
    replaced = around.chosen.random() < 0.2

    def end() -> None:
        carry.end = loop.scope.chosen.choice(["%w", "%u"]) if replaced else carry.name

    return end


_ROLES = {
    "state": _state,
    "sum": _sum,
    "rows": _rows,
    "swap": _swap,
    "constant": _constant,
    "indexed": _indexed,
    "kept": _kept,
    "counter": _counter,
    "late": _late,
    "stack": _stack,
}


def _printed(loop: Loop, around: Scope, counter: Carry) -> list[tuple[str, str]]:
    chosen, count = around.chosen, loop.count
    chosen.shuffle(loop.carries)
    bound, condition = "", ""
    scalar = f"tensor<{count.kind}>"
    place = chosen.choice(["inside", "outside", "carried"])
    if place == "inside":
        bound = around.fresh()
        condition = f"{bound} = stablehlo.constant dense<{count.bound}> : {scalar}\n"
    else:
        bound = around.constant(count.bound, count.kind)
    if place == "carried":
        carry = loop.carry(scalar, bound)
        carry.end = bound = carry.name
    left, right, direction = counter.name, bound, count.direction
    if chosen.random() < 0.25:
        left, right, direction = right, left, MIRRORED[direction]
    name, flag = around.fresh(), around.fresh()
    kinds = ", ".join(carry.kind for carry in loop.carries)
    starts = ", ".join(f"{carry.name} = {carry.start}" for carry in loop.carries)
    ends = ", ".join(carry.end for carry in loop.carries)
    size = len(loop.carries)
    around.lines.append(
        f"{name}{f':{size}' if size > 1 else ''} = stablehlo.while({starts}) : {kinds}\ncond {{\n"
        f"{condition}{flag} = stablehlo.compare {direction}, {left}, {right} : ({scalar}, "
        f"{scalar}) -> tensor<i1>\nstablehlo.return {flag} : tensor<i1>\n}} do {{\n"
        + "\n".join(loop.scope.lines)
        + f"\nstablehlo.return {ends} : {kinds}\n}}"
    )
    parts = [f"{name}#{i}" for i in range(size)] if size > 1 else [name]
    return [(part, carry.kind) for part, carry in zip(parts, loop.carries, strict=True)]

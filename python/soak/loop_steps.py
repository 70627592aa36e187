"""The ops of random loops: collectives of all kinds, what formats, slices, and stores rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

STACK_ROWS = 6
ROWS, COLUMNS = 8, 4


def stack_kind(element: str) -> str:
    """The type of stacked matrices."""
    return f"tensor<{STACK_ROWS}x{ROWS}x{COLUMNS}x{element}>"


@dataclass
class Scope:
    """A region in the making, and what the next op in it can read."""

    chosen: random.Random
    devices: int
    element: str
    lines: list[str] = field(default_factory=list[str])
    functions: list[str] = field(default_factory=list[str])
    values: list[str] = field(default_factory=list[str])
    stacks: list[str] = field(default_factory=list[str])
    counters: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    numbers: list[int] = field(default_factory=lambda: [0])
    span: tuple[int, int] = (0, 1)  # where the counter starts and what is next to its last
    step_by: int = 1
    variadic: bool = True  # whether an op may have several results

    @property
    def matrix(self) -> str:
        return f"tensor<{ROWS}x{COLUMNS}x{self.element}>"

    def inside(self) -> Scope:
        """The scope of a region in this one."""
        return Scope(
            self.chosen,
            self.devices,
            self.element,
            [],
            self.functions,
            list(self.values),
            list(self.stacks),
            list(self.counters),
            self.numbers,
            self.span,
            self.step_by,
            self.variadic,
        )

    def fresh(self) -> str:
        self.numbers[0] += 1
        return f"%v{self.numbers[0]}"

    def line(self, text: str) -> str:
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return name

    def constant(self, number: int, kind: str) -> str:
        return self.line(f"stablehlo.constant dense<{number}> : tensor<{kind}>")

    def value(self) -> str:
        """A matrix that is there, more often one of the last."""
        recent = self.values[-3:] if self.chosen.random() < 0.6 else self.values
        return self.chosen.choice(recent)

    def step(self) -> None:
        """A random op, or a few."""
        make = self.chosen.choice(_STEPS)
        self.values.append(make(self))

    def flag(self, number: str, kind: str) -> str:
        bound = self.constant(self.chosen.randrange(4), kind)
        way = self.chosen.choice(["LT", "EQ", "GE"])
        return self.line(
            f"stablehlo.compare {way}, {number}, {bound} : (tensor<{kind}>, tensor<{kind}>) -> "
            "tensor<i1>"
        )

    def index(self) -> str:
        """An i32 that follows from a counter: as it is, from the end, or further on."""
        if not self.counters:
            return self.constant(self.chosen.randrange(STACK_ROWS), "i32")
        name, kind = (
            self.counters[0] if self.chosen.random() < 0.7 else self.chosen.choice(self.counters)
        )
        number = name
        if kind != "i32":
            number = self.line(f"stablehlo.convert {name} : (tensor<{kind}>) -> tensor<i32>")
        how = self.chosen.randrange(6)
        if how < 2:
            return number
        if how == 2:
            return self._reversed(number)
        if how == 3:  # from zero, whatever the start
            start = self.constant(self.span[0], "i32")
            away = self.line(f"stablehlo.subtract {number}, {start} : tensor<i32>")
            step = self.constant(self.step_by, "i32")
            return self.line(f"stablehlo.divide {away}, {step} : tensor<i32>")
        if how == 4:
            amount = self.constant(self.chosen.choice([1, 2, -1]), "i32")
            return self.line(f"stablehlo.add {number}, {amount} : tensor<i32>")
        return self.constant(self.chosen.randrange(STACK_ROWS), "i32")

    def _reversed(self, number: str) -> str:
        """The index counted from the end, spelled as jnp's negative indices are."""
        total = self.constant(self.chosen.choice([STACK_ROWS, self.span[1], 3]), "i32")
        back = self.line(f"stablehlo.subtract {total}, {number} : tensor<i32>")
        one = self.constant(-1, "i32")
        first = self.line(f"stablehlo.add {back}, {one} : tensor<i32>")
        size = self.constant(STACK_ROWS - 1, "i32")
        second = self.line(f"stablehlo.add {back}, {size} : tensor<i32>")
        zero = self.constant(0, "i32")
        below = self.line(
            f"stablehlo.compare LT, {first}, {zero} : (tensor<i32>, tensor<i32>) -> tensor<i1>"
        )
        return self.line(f"stablehlo.select {below}, {second}, {first} : tensor<i1>, tensor<i32>")

    def sliced(self, rows: int = ROWS) -> str:
        """A matrix, or its first rows, of a stack."""
        at, zero = self.index(), self.constant(0, "i32")
        part, row = f"tensor<1x{rows}x{COLUMNS}x{self.element}>", self.kind(rows)
        found = self.line(
            f"stablehlo.dynamic_slice {self.chosen.choice(self.stacks)}, {at}, {zero}, {zero}, "
            f"sizes = [1, {rows}, {COLUMNS}] : ({stack_kind(self.element)}, tensor<i32>, "
            f"tensor<i32>, tensor<i32>) -> {part}"
        )
        return self.line(f"stablehlo.reshape {found} : ({part}) -> {row}")

    def stored(self, stack: str, value: str) -> str:
        """A stack with a matrix in one of its places."""
        part, kind = f"tensor<1x{ROWS}x{COLUMNS}x{self.element}>", stack_kind(self.element)
        one = self.line(f"stablehlo.reshape {value} : ({self.matrix}) -> {part}")
        at, zero = self.index(), self.constant(0, "i32")
        return self.line(
            f"stablehlo.dynamic_update_slice {stack}, {one}, {at}, {zero}, {zero} : ({kind}, "
            f"{part}, tensor<i32>, tensor<i32>, tensor<i32>) -> {kind}"
        )

    def kind(self, rows: int) -> str:
        return f"tensor<{rows}x{COLUMNS}x{self.element}>"

    def groups(self) -> tuple[str, int]:
        """Groups of all devices or of some, and their size."""
        size = self.chosen.choice([self.devices, self.devices, 2])
        rows = [list(range(i, i + size)) for i in range(0, self.devices, size)]
        return f"replica_groups = dense<{rows}> : tensor<{len(rows)}x{size}xi64>", size

    def reducer(self) -> str:
        scalar = f"tensor<{self.element}>"
        name = self.chosen.choice(["add", "maximum"])
        return (
            f"({{\n^bb0(%l: {scalar}, %r: {scalar}):\n%c = stablehlo.{name} %l, %r : {scalar}\n"
            f"stablehlo.return %c : {scalar}\n}})"
        )

    def collective(self, operand: str) -> str:
        """A collective of a matrix that gives a matrix, or a chain of two."""
        make = self.chosen.choice(
            [
                _all_reduce,
                _all_reduce,
                _permute,
                _all_to_all,
                _scattered,
                _scattered,
                _gathered,
                _two_all_reduces,
            ]
        )
        return make(self, operand)

    def formatted(self, value: str) -> str:
        """The value in another form, of the same type."""
        how = self.chosen.randrange(6)
        if how == 0:
            return self.line(f"stablehlo.reverse {value}, dims = [0] : {self.matrix}")
        if how == 1:
            turned = f"tensor<{COLUMNS}x{ROWS}x{self.element}>"
            one = self.line(
                f"stablehlo.transpose {value}, dims = [1, 0] : ({self.matrix}) -> {turned}"
            )
            return self.line(f"stablehlo.reshape {one} : ({turned}) -> {self.matrix}")
        if how == 2:
            half = self.kind(ROWS // 2)
            one = self.line(
                f"stablehlo.slice {value} [0:{ROWS // 2}, 0:{COLUMNS}] : ({self.matrix}) -> {half}"
            )
            return self.line(
                f"stablehlo.concatenate {one}, {one}, dim = 0 : ({half}, {half}) -> {self.matrix}"
            )
        if how == 3:
            return self.line(f"stablehlo.negate {value} : {self.matrix}")
        return value


CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"


def _all_reduce(scope: Scope, operand: str) -> str:
    groups, _ = scope.groups()
    return scope.line(
        f'"stablehlo.all_reduce"({operand}) {scope.reducer()} {{{groups}, {CHANNEL}, '
        f"use_global_device_ids}} : ({scope.matrix}) -> {scope.matrix}"
    )


def _two_all_reduces(scope: Scope, operand: str) -> str:
    if not scope.variadic:
        return _all_reduce(scope, operand)
    groups, _ = scope.groups()
    name, pair = scope.fresh(), f"({scope.matrix}, {scope.matrix})"
    scope.lines.append(
        f'{name}:2 = "stablehlo.all_reduce"({operand}, {scope.value()}) {scope.reducer()} '
        f"{{{groups}, {CHANNEL}, use_global_device_ids}} : {pair} -> {pair}"
    )
    if scope.chosen.random() < 0.5:
        scope.values.append(f"{name}#1")
    return f"{name}#0"


def _permute(scope: Scope, operand: str) -> str:
    size = scope.devices
    by = scope.chosen.randrange(1, size)
    pairs = [[i, (i + by) % size] for i in range(size)]
    if scope.chosen.random() < 0.3:
        pairs = pairs[:-1]
    return scope.line(
        f'"stablehlo.collective_permute"({operand}) {{{CHANNEL}, source_target_pairs = '
        f"dense<{pairs}> : tensor<{len(pairs)}x2xi64>}} : ({scope.matrix}) -> {scope.matrix}"
    )


def _all_to_all(scope: Scope, operand: str) -> str:
    groups, size = scope.groups()
    return scope.line(
        f'"stablehlo.all_to_all"({operand}) {{split_dimension = 0 : i64, concat_dimension = 0 : '
        f"i64, split_count = {size} : i64, {groups}, {CHANNEL}}} : ({scope.matrix}) -> "
        f"{scope.matrix}"
    )


def _gather(scope: Scope, part: str, groups: str, rows: int) -> str:
    return scope.line(
        f'"stablehlo.all_gather"({part}) {{all_gather_dim = 0 : i64, {groups}, {CHANNEL}, '
        f"use_global_device_ids}} : ({scope.kind(rows)}) -> {scope.matrix}"
    )


def _gathered(scope: Scope, operand: str) -> str:
    groups, size = scope.groups()
    rows = ROWS // size
    part = scope.line(
        f"stablehlo.slice {operand} [0:{rows}, 0:{COLUMNS}] : ({scope.matrix}) -> "
        f"{scope.kind(rows)}"
    )
    return _gather(scope, part, groups, rows)


def _weights(scope: Scope) -> str:
    """A gather of a slice of stacked weights: what FSDP does."""
    groups, size = scope.groups()
    part = scope.sliced(ROWS // size)
    return _gather(scope, part, groups, ROWS // size)


def _scattered(scope: Scope, operand: str) -> str:
    groups, size = scope.groups()
    rows = ROWS // size
    part = scope.line(
        f'"stablehlo.reduce_scatter"({operand}) {scope.reducer()} {{scatter_dimension = 0 : i64, '
        f"{groups}, {CHANNEL}, use_global_device_ids}} : ({scope.matrix}) -> {scope.kind(rows)}"
    )
    if scope.chosen.random() < 0.5:
        return _gather(scope, part, groups, rows)
    zero = (
        scope.constant(0, scope.element)
        if scope.element == "i32"
        else scope.line("stablehlo.constant dense<0.0> : tensor<f32>")
    )
    return scope.line(
        f"stablehlo.pad {part}, {zero}, low = [0, 0], high = [{ROWS - rows}, 0], interior = "
        f"[0, 0] : ({scope.kind(rows)}, tensor<{scope.element}>) -> {scope.matrix}"
    )


def _collective(scope: Scope) -> str:
    return scope.collective(scope.value())


def _sent_slice(scope: Scope) -> str:
    return scope.collective(scope.sliced())


def _formatted(scope: Scope) -> str:
    return scope.formatted(scope.value())


def _arithmetic(scope: Scope) -> str:
    names = ["add", "subtract", "maximum", *(["multiply", "xor"] if scope.element == "i32" else [])]
    name = scope.chosen.choice(names)
    return scope.line(f"stablehlo.{name} {scope.value()}, {scope.value()} : {scope.matrix}")


def _dot(scope: Scope) -> str:
    if scope.element != "i32":
        return _arithmetic(scope)
    turned = f"tensor<{COLUMNS}x{COLUMNS}xi32>"
    one = scope.line(
        f"stablehlo.dot_general {scope.value()}, {scope.value()}, contracting_dims = [0] x [0] : "
        f"({scope.matrix}, {scope.matrix}) -> {turned}"
    )
    return scope.line(
        f"stablehlo.concatenate {one}, {one}, dim = 0 : ({turned}, {turned}) -> {scope.matrix}"
    )


def _barrier(scope: Scope) -> str:
    count = scope.chosen.randrange(1, 4)
    values = [scope.value() for _ in range(count)]
    if scope.chosen.random() < 0.5:
        values[0] = scope.sliced()
    kinds = ", ".join([scope.matrix] * count)
    name = scope.fresh()
    scope.lines.append(
        f"{name}{f':{count}' if count > 1 else ''} = stablehlo.optimization_barrier "
        f"{', '.join(values)} : {kinds}"
    )
    if count == 1:
        return name
    scope.values += [f"{name}#{i}" for i in range(1, count)]
    return f"{name}#0"


def _chosen_by_counter(scope: Scope) -> str:
    if not scope.counters:
        return _arithmetic(scope)
    flag = scope.flag(*scope.chosen.choice(scope.counters))
    return scope.line(
        f"stablehlo.select {flag}, {scope.value()}, {scope.value()} : tensor<i1>, {scope.matrix}"
    )


def _branch(scope: Scope) -> str:
    """An `if` that all devices take alike, with a collective on one side."""
    if not scope.counters:
        return _arithmetic(scope)
    flag = scope.flag(*scope.chosen.choice(scope.counters))
    inner = scope.inside()
    made = inner.collective(inner.value())
    lines = "\n".join(inner.lines)
    return scope.line(
        f'"stablehlo.if"({flag}) ({{\n{lines}\n"stablehlo.return"({made}) : ({scope.matrix}) -> '
        f'()\n}}, {{\n"stablehlo.return"({scope.value()}) : ({scope.matrix}) -> ()\n}}) : '
        f"(tensor<i1>) -> {scope.matrix}"
    )


def _called(scope: Scope) -> str:
    """A collective and what formats it in a function of its own."""
    inner = Scope(
        scope.chosen, scope.devices, scope.element, numbers=scope.numbers, variadic=scope.variadic
    )
    inner.values = ["%p"]
    made = inner.formatted(inner.collective("%p"))
    name = f"@closed_call_{scope.numbers[0]}"
    lines = "\n".join(inner.lines)
    scope.functions.append(
        f"func.func private {name}(%p: {scope.matrix}) -> {scope.matrix} {{\n{lines}\nreturn "
        f"{made} : {scope.matrix}\n}}"
    )
    return scope.line(f"func.call {name}({scope.value()}) : ({scope.matrix}) -> {scope.matrix}")


_STEPS = (
    _collective,
    _collective,
    _collective,
    _weights,
    _weights,
    _sent_slice,
    Scope.sliced,
    _formatted,
    _arithmetic,
    _dot,
    _barrier,
    _chosen_by_counter,
    _branch,
    _called,
)

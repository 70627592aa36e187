"""Random programs whose collectives only dataflow orders, through ops that tempt a simplifier.

A program runs on four devices, and every collective is over all of them, but for some on groups
of one. Values are tensors of 8 f32 or i32; most ops continue the value made last, so that many
programs are one chain, and many chains are broken by an identity that XLA knows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

DEVICES = 4
_F, _I, _P = "f32", "i32", "i1"
_CONSTANTS = {
    _F: ("0.0", "-0.0", "1.0", "-1.0", "2.0", "0.5", "0x7F800000", "0xFF800000", "0x7FC00000"),
    _I: ("0", "1", "-1", "2", "3", "65536", "2147483647", "-2147483648"),
}
_UNARY = {
    _F: (
        *("abs", "cbrt", "ceil", "cosine", "exponential", "exponential_minus_one", "floor", "log"),
        *("log_plus_one", "logistic", "negate", "round_nearest_afz", "round_nearest_even"),
        *("rsqrt", "sign", "sine", "sqrt", "tan", "tanh"),
    ),
    _I: ("abs", "count_leading_zeros", "negate", "not", "popcnt", "sign"),
}
_BINARY = {
    _F: (
        *("add", "atan2", "divide", "maximum", "minimum", "multiply", "power", "remainder"),
        "subtract",
    ),
    _I: (
        *("add", "and", "divide", "maximum", "minimum", "multiply", "or", "power", "remainder"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical", "subtract", "xor"),
    ),
}
_WHOLE = "[[0, 1, 2, 3]]"
_ALONE = "[[0], [1], [2], [3]]"
_PAIRS = (
    "[[0, 1], [1, 2], [2, 3], [3, 0]]",
    "[[0, 0], [1, 1], [2, 2], [3, 3]]",
    "[[0, 1], [1, 0], [2, 3], [3, 2]]",
    "[[0, 2]]",
)


def kind(element: str, size: int = 8) -> str:
    """The type of `size` elements."""
    return f"tensor<{size}x{element}>"


@dataclass(frozen=True)
class Value:
    """An SSA value of 8 elements."""

    name: str
    element: str

    @property
    def kind(self) -> str:
        """Its type."""
        return kind(self.element)


@dataclass
class Scope:
    """Where ops are written, and the values in sight."""

    lines: list[str]
    values: list[Value]
    depth: int = 0


@dataclass
class Builder:
    """Draws a program."""

    rng: random.Random
    replicas: bool  # of one partition each; else partitions of one replica
    simple: float = 0.4  # the share of links that nothing tempts to cut
    numbers: int = 0
    lines: list[str] = field(default_factory=list[str])

    def name(self) -> str:
        """A fresh SSA name."""
        self.numbers += 1
        return f"%v{self.numbers}"

    def emit(self, scope: Scope, element: str, text: str) -> Value:
        """Writes an op of one result of 8 elements."""
        value = Value(self.name(), element)
        scope.lines.append(f"{value.name} = {text}")
        return value

    def raw(self, scope: Scope, text: str) -> str:
        """Writes an op of any result; returns its name."""
        name = self.name()
        scope.lines.append(f"{name} = {text}")
        return name

    def constant(self, scope: Scope, element: str, text: str | None = None) -> Value:
        """A splat, an iota, or a list of several numbers."""
        chance = self.rng.random()
        if text is None and chance < 0.2:
            return self.emit(scope, element, f"stablehlo.iota dim = 0 : {kind(element)}")
        if text is None and chance < 0.3:
            several = ", ".join(self.rng.choice(_CONSTANTS[element]) for _ in range(8))
            return self.emit(
                scope, element, f"stablehlo.constant dense<[{several}]> : {kind(element)}"
            )
        text = text or self.rng.choice(_CONSTANTS[element])
        return self.emit(scope, element, f"stablehlo.constant dense<{text}> : {kind(element)}")

    def scalar(self, scope: Scope, element: str, text: str) -> str:
        """A constant of one element."""
        return self.raw(scope, f"stablehlo.constant dense<{text}> : tensor<{element}>")

    def as_element(self, scope: Scope, value: Value, element: str) -> Value:
        """The value, converted if it is of another element type."""
        if value.element == element:
            return value
        name = self.rng.choice(("convert", "bitcast_convert"))
        return self.emit(
            scope, element, f"stablehlo.{name} {value.name} : ({value.kind}) -> {kind(element)}"
        )

    def other(self, scope: Scope, value: Value) -> Value:
        """A second operand: the same, a constant, any value in sight."""
        chance = self.rng.random()
        if chance < 0.15:
            return value
        if chance < 0.55:
            return self.constant(scope, value.element)
        return self.as_element(scope, self.rng.choice(scope.values), value.element)

    def pair(self, scope: Scope, value: Value) -> list[Value]:
        """The value and a second operand, in either order."""
        return self.shuffled(value, self.other(scope, value))

    def shuffled(self, *values: Value) -> list[Value]:
        """The values in any order."""
        listed = list(values)
        self.rng.shuffle(listed)
        return listed

    def reshape(self, scope: Scope, name: str, source: str, target: str) -> str:
        """A value of one type as one of another."""
        return self.raw(scope, f"stablehlo.reshape {name} : ({source}) -> {target}")

    def predicate(self, scope: Scope, value: Value) -> str:
        """Eight booleans."""
        chance = self.rng.random()
        if chance < 0.2:
            text = self.rng.choice(("true", "false", "[true, false, true, false, 1, 1, 0, 0]"))
            text = text.replace("1, 1, 0, 0", "true, true, false, false")
            return self.raw(scope, f"stablehlo.constant dense<{text}> : tensor<8xi1>")
        one = self.as_element(scope, self.rng.choice([value, *scope.values]), value.element)
        if chance < 0.35 and one.element == _F:
            return self.raw(scope, f"stablehlo.is_finite {one.name} : ({one.kind}) -> tensor<8xi1>")
        other = self.other(scope, one)
        direction = self.rng.choice(("EQ", "NE", "LT", "LE", "GT", "GE"))
        return self.raw(
            scope,
            f"stablehlo.compare {direction}, {one.name}, {other.name} : "
            f"({one.kind}, {one.kind}) -> tensor<8xi1>",
        )

    # Ops that continue a value.

    def unary(self, scope: Scope, value: Value) -> Value:
        """One operand."""
        name = self.rng.choice(_UNARY[value.element])
        return self.emit(scope, value.element, f"stablehlo.{name} {value.name} : {value.kind}")

    def binary(self, scope: Scope, value: Value) -> Value:
        """Two operands, in either order."""
        name = self.rng.choice(_BINARY[value.element])
        pair = self.pair(scope, value)
        return self.emit(
            scope, value.element, f"stablehlo.{name} {pair[0].name}, {pair[1].name} : {value.kind}"
        )

    def select(self, scope: Scope, value: Value) -> Value:
        """A select between the value and another."""
        pair = self.pair(scope, value)
        chosen = self.predicate(scope, value)
        return self.emit(
            scope,
            value.element,
            f"stablehlo.select {chosen}, {pair[0].name}, {pair[1].name} : "
            f"tensor<8xi1>, {value.kind}",
        )

    def compare(self, scope: Scope, value: Value) -> Value:
        """A comparison, converted."""
        chosen = self.predicate(scope, value)
        return self.emit(
            scope, value.element, f"stablehlo.convert {chosen} : (tensor<8xi1>) -> {value.kind}"
        )

    def clamp(self, scope: Scope, value: Value) -> Value:
        """Between two bounds."""
        low, high = self.other(scope, value), self.other(scope, value)
        parts = [low, value, high]
        if self.rng.random() < 0.2:
            self.rng.shuffle(parts)
        names = ", ".join(part.name for part in parts)
        return self.emit(scope, value.element, f"stablehlo.clamp {names} : {value.kind}")

    def convert(self, scope: Scope, value: Value) -> Value:
        """To the other type, or there and back through a narrow one."""
        if self.rng.random() < 0.5:
            return self.as_element(scope, value, _I if value.element == _F else _F)
        narrow = self.rng.choice(("bf16", "i8", "ui32", "i1", "f16"))
        inner = self.raw(
            scope, f"stablehlo.convert {value.name} : ({value.kind}) -> {kind(narrow)}"
        )
        return self.emit(
            scope, value.element, f"stablehlo.convert {inner} : ({kind(narrow)}) -> {value.kind}"
        )

    def concatenate(self, scope: Scope, value: Value) -> Value:
        """A slice of a concatenation."""
        pair = self.pair(scope, value)
        wide = kind(value.element, 16)
        joined = self.raw(
            scope,
            f"stablehlo.concatenate {pair[0].name}, {pair[1].name}, dim = 0 : "
            f"({value.kind}, {value.kind}) -> {wide}",
        )
        if self.rng.random() < 0.3:
            joined = self.raw(scope, f"stablehlo.reverse {joined}, dims = [0] : {wide}")
        if self.rng.random() < 0.3:
            start = self.start(scope, value)
            return self.emit(
                scope,
                value.element,
                f"stablehlo.dynamic_slice {joined}, {start}, sizes = [8] : "
                f"({wide}, tensor<i32>) -> {value.kind}",
            )
        start = self.rng.choice((0, 4, 8))
        step = 2 if not start and self.rng.random() < 0.3 else 1
        bounds = f"{start}:{start + 8 * step}:{step}"
        return self.emit(
            scope, value.element, f"stablehlo.slice {joined} [{bounds}] : ({wide}) -> {value.kind}"
        )

    def start(self, scope: Scope, value: Value) -> str:
        """An index: a constant, one computed from the value, or the device's number."""
        chance = self.rng.random()
        if chance < 0.4:
            return self.scalar(scope, _I, self.rng.choice(("0", "4", "8", "100")))
        if chance < 0.7:
            inner = self.as_element(scope, value, _I)
            return self.corner(scope, inner)
        return self.device(scope)

    def device(self, scope: Scope) -> str:
        """The device's number."""
        op = "replica_id" if self.replicas else "partition_id"
        number = self.raw(scope, f"stablehlo.{op} : tensor<ui32>")
        return self.raw(scope, f"stablehlo.convert {number} : (tensor<ui32>) -> tensor<i32>")

    def corner(self, scope: Scope, value: Value) -> str:
        """The first element, as a scalar."""
        inner = self.raw(
            scope,
            f"stablehlo.slice {value.name} [0:1] : ({value.kind}) -> {kind(value.element, 1)}",
        )
        return self.raw(
            scope,
            f"stablehlo.reshape {inner} : ({kind(value.element, 1)}) -> tensor<{value.element}>",
        )

    def pad(self, scope: Scope, value: Value) -> Value:
        """Padding with a constant or an element; what is cropped, is lost."""
        low = self.rng.choice((-8, -4, 0, 4, 8))
        if self.rng.random() < 0.5:
            filling = self.scalar(scope, value.element, self.rng.choice(_CONSTANTS[value.element]))
        else:
            filling = self.corner(scope, self.other(scope, value))
        return self.emit(
            scope,
            value.element,
            f"stablehlo.pad {value.name}, {filling}, low = [{low}], high = [{-low}], "
            f"interior = [0] : ({value.kind}, tensor<{value.element}>) -> {value.kind}",
        )

    def update(self, scope: Scope, value: Value) -> Value:
        """A dynamic_update_slice."""
        pair = self.pair(scope, value)
        start = self.start(scope, value)
        size = self.rng.choice((4, 8))
        part, inner = pair[1].name, value.kind
        if size == 4:
            inner = kind(value.element, 4)
            part = self.raw(scope, f"stablehlo.slice {part} [0:4] : ({value.kind}) -> {inner}")
        return self.emit(
            scope,
            value.element,
            f"stablehlo.dynamic_update_slice {pair[0].name}, {part}, {start} : "
            f"({value.kind}, {inner}, tensor<i32>) -> {value.kind}",
        )

    def broadcast(self, scope: Scope, name: str, element: str) -> Value:
        """A scalar, 8 times."""
        return self.emit(
            scope,
            element,
            f"stablehlo.broadcast_in_dim {name}, dims = [] : "
            f"(tensor<{element}>) -> {kind(element)}",
        )

    def reduce(self, scope: Scope, value: Value) -> Value:
        """A reduction to a scalar, broadcast; sometimes one of no elements."""
        names = ["add", "maximum", "minimum", "multiply"]
        if value.element == _I:
            names += ["and", "or", "xor"]
        name, element = self.rng.choice(names), value.element
        source, inner = value.name, value.kind
        if self.rng.random() < 0.15:
            inner = kind(element, 0)
            source = self.raw(scope, f"stablehlo.slice {source} [0:0] : ({value.kind}) -> {inner}")
        initial = self.scalar(scope, element, self.rng.choice(_CONSTANTS[element]))
        if self.rng.random() < 0.3:
            initial = self.corner(scope, self.other(scope, value))
        reduced = self.raw(
            scope,
            f"stablehlo.reduce({source} init: {initial}) applies stablehlo.{name} across "
            f"dimensions = [0] : ({inner}, tensor<{element}>) -> tensor<{element}>",
        )
        return self.broadcast(scope, reduced, element)

    def dot(self, scope: Scope, value: Value) -> Value:
        """A dot product, broadcast."""
        other = self.other(scope, value)
        product = self.raw(
            scope,
            f"stablehlo.dot_general {value.name}, {other.name}, contracting_dims = [0] x [0] : "
            f"({value.kind}, {value.kind}) -> tensor<{value.element}>",
        )
        return self.broadcast(scope, product, value.element)

    def gather(self, scope: Scope, value: Value) -> Value:
        """Rows picked by constants or by a computed index; either may be what continues."""
        picked = value
        if self.rng.random() < 0.3:
            index = self.as_element(scope, value, _I)
            picked = self.other(scope, value)
        elif self.rng.random() < 0.5:
            index = self.constant(scope, _I)
        else:
            index = self.as_element(scope, self.rng.choice(scope.values), _I)
        rows = self.reshape(scope, index.name, "tensor<8xi32>", "tensor<8x1xi32>")
        return self.emit(
            scope,
            picked.element,
            f'"stablehlo.gather"({picked.name}, {rows}) <{{dimension_numbers = #stablehlo.gather<'
            "collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, "
            f"slice_sizes = array<i64: 1>}}> : ({picked.kind}, tensor<8x1xi32>) -> {picked.kind}",
        )

    def scatter(self, scope: Scope, value: Value) -> Value:
        """A scatter that adds or overwrites."""
        pair = self.pair(scope, value)
        index = self.constant(scope, _I)
        if self.rng.random() < 0.3:
            index = self.as_element(scope, self.rng.choice(scope.values), _I)
        rows = self.reshape(scope, index.name, "tensor<8xi32>", "tensor<8x1xi32>")
        element = value.element
        combined = f"%c = stablehlo.add %l, %r : tensor<{element}>\nstablehlo.return %c"
        overwritten = self.rng.choice(("stablehlo.return %r", "stablehlo.return %l"))
        body = self.rng.choice((combined, overwritten))
        return self.emit(
            scope,
            element,
            f'"stablehlo.scatter"({pair[0].name}, {rows}, {pair[1].name}) <{{'
            "scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], "
            "scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({\n"
            f"^bb0(%l: tensor<{element}>, %r: tensor<{element}>):\n{body} : tensor<{element}>\n}}) "
            f": ({value.kind}, tensor<8x1xi32>, {value.kind}) -> {value.kind}",
        )

    def shape(self, scope: Scope, value: Value) -> Value:
        """Reshapes, transposes and reversals."""
        element = value.element
        if self.rng.random() < 0.4:
            return self.emit(
                scope, element, f"stablehlo.reverse {value.name}, dims = [0] : {value.kind}"
            )
        square = self.reshape(scope, value.name, value.kind, f"tensor<2x4x{element}>")
        turned = self.raw(
            scope,
            f"stablehlo.transpose {square}, dims = [1, 0] : "
            f"(tensor<2x4x{element}>) -> tensor<4x2x{element}>",
        )
        return self.emit(
            scope, element, f"stablehlo.reshape {turned} : (tensor<4x2x{element}>) -> {value.kind}"
        )

    def barrier(self, scope: Scope, value: Value) -> Value:
        """A barrier on two values; one result goes on, the other may stay unused."""
        other = self.rng.choice(scope.values)
        pair = [value, other]
        self.rng.shuffle(pair)
        name = self.name()
        kinds = ", ".join(part.kind for part in pair)
        scope.lines.append(
            f"{name}:2 = stablehlo.optimization_barrier {pair[0].name}, {pair[1].name} : {kinds}"
        )
        position = pair.index(value)
        if self.rng.random() < 0.5:
            scope.values.append(Value(f"{name}#{1 - position}", other.element))
        if self.rng.random() < 0.3:
            position = 1 - position
        return Value(f"{name}#{position}", pair[position].element)

    def complex(self, scope: Scope, value: Value) -> Value:
        """The real or imaginary part of a complex number, or of a real one."""
        inner = self.as_element(scope, value, _F)
        part = self.rng.choice(("real", "imag"))
        if self.rng.random() < 0.2:
            return self.emit(
                scope, _F, f"stablehlo.{part} {inner.name} : ({inner.kind}) -> {inner.kind}"
            )
        pair = self.pair(scope, inner)
        wide = "tensor<8xcomplex<f32>>"
        made = self.raw(scope, f"stablehlo.complex {pair[0].name}, {pair[1].name} : {wide}")
        if self.rng.random() < 0.3:
            made = self.raw(scope, f"stablehlo.multiply {made}, {made} : {wide}")
        return self.emit(scope, _F, f"stablehlo.{part} {made} : ({wide}) -> {inner.kind}")

    def sort(self, scope: Scope, value: Value) -> Value:
        """Sorted, alone or beside another, by itself or by the other."""
        element = value.element
        beside = self.rng.random() < 0.5
        listed = [value, self.other(scope, value)] if beside else [value]
        arguments = [f"%s{i}" for i in range(2 * len(listed))]
        first = self.rng.choice(range(len(listed))) * 2
        name = self.name()
        kinds = ", ".join([value.kind] * len(listed))
        scope.lines.append(
            f'{name}:{len(listed)} = "stablehlo.sort"({", ".join(v.name for v in listed)}) '
            "<{dimension = 0 : i64}> ({\n^bb0("
            + ", ".join(f"{a}: tensor<{element}>" for a in arguments)
            + f"):\n%p = stablehlo.compare LT, {arguments[first]}, {arguments[first + 1]} : "
            f"(tensor<{element}>, tensor<{element}>) -> tensor<i1>\n"
            f"stablehlo.return %p : tensor<i1>\n}}) : ({kinds}) -> ({kinds})"
        )
        return Value(f"{name}#{self.rng.choice(range(len(listed)))}", element)

    def window(self, scope: Scope, value: Value) -> Value:
        """A running sum or maximum, cropped or not."""
        element = value.element
        low = self.rng.choice((7, 0, 3))
        initial = self.scalar(scope, element, "0" if element == _I else "0.0")
        name = self.rng.choice(("add", "maximum"))
        return self.emit(
            scope,
            element,
            f'"stablehlo.reduce_window"({value.name}, {initial}) <{{window_dimensions = '
            f"array<i64: 8>, padding = dense<[[{low}, {7 - low}]]> : tensor<1x2xi64>}}> ({{\n"
            f"^bb0(%l: tensor<{element}>, %r: tensor<{element}>):\n"
            f"%c = stablehlo.{name} %l, %r : tensor<{element}>\n"
            f"stablehlo.return %c : tensor<{element}>\n}}) : "
            f"({value.kind}, tensor<{element}>) -> {value.kind}",
        )

    def plain(self, scope: Scope, value: Value) -> Value:
        """An op that nothing takes away."""
        if value.element == _F:
            name = self.rng.choice(("tanh", "cosine", "negate", "add"))
            if name != "add":
                return self.emit(scope, _F, f"stablehlo.{name} {value.name} : {value.kind}")
            other = self.as_element(scope, self.rng.choice(scope.values), _F)
            return self.emit(scope, _F, f"stablehlo.add {value.name}, {other.name} : {value.kind}")
        three = self.constant(scope, _I, "3")
        name = self.rng.choice(("add", "multiply", "maximum"))
        return self.emit(scope, _I, f"stablehlo.{name} {value.name}, {three.name} : {value.kind}")

    def makers(self) -> list[Callable[[Scope, Value], Value]]:
        """What continues a value: those listed twice are drawn twice as often."""
        return [
            self.unary,
            self.binary,
            self.binary,
            self.binary,
            self.select,
            self.select,
            self.compare,
            self.clamp,
            self.convert,
            self.concatenate,
            self.pad,
            self.update,
            self.reduce,
            self.dot,
            self.gather,
            self.scatter,
            self.shape,
            self.barrier,
            self.complex,
            self.sort,
            self.window,
        ]

    def step(self, scope: Scope, value: Value) -> Value:
        """Some op that continues the value."""
        if self.rng.random() < self.simple:
            return self.plain(scope, value)
        return self.rng.choice(self.makers())(scope, value)

    # Collectives.

    def attributes(self, groups: str = _WHOLE) -> str:
        """Replica groups, by replica or by global device id."""
        rows = groups.count("], [") + 1
        text = f"replica_groups = dense<{groups}> : tensor<{rows}x{DEVICES // rows}xi64>"
        if self.replicas:
            return text
        return f"{text}, {_CHANNEL}, use_global_device_ids"

    def region(self, element: str) -> str:
        """What a reduction does."""
        # Of bitwise reductions of integers, XLA:CPU refuses some, and XLA:GPU ends the process.
        names = ("add", "add", "maximum", "minimum", "multiply")
        return (
            f"({{\n^bb0(%l: tensor<{element}>, %r: tensor<{element}>):\n"
            f"%c = stablehlo.{self.rng.choice(names)} %l, %r : tensor<{element}>\n"
            f"stablehlo.return %c : tensor<{element}>\n}})"
        )

    def all_reduce(self, scope: Scope, value: Value, groups: str = _WHOLE) -> Value:
        """A reduction over all devices."""
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.all_reduce"({value.name}) <{{{self.attributes(groups)}}}> '
            f"{self.region(value.element)} : ({value.kind}) -> {value.kind}",
        )

    def all_gather(self, scope: Scope, value: Value) -> Value:
        """A gather, of which one part is kept, or the sum, or the device's own part."""
        wide = kind(value.element, 32)
        gathered = self.raw(
            scope,
            f'"stablehlo.all_gather"({value.name}) <{{all_gather_dim = 0 : i64, '
            f"{self.attributes()}}}> : ({value.kind}) -> {wide}",
        )
        chance = self.rng.random()
        if chance < 0.5:
            start = self.rng.choice((0, 8, 12))
            text = f"stablehlo.slice {gathered} [{start}:{start + 8}] : ({wide}) -> {value.kind}"
            return self.emit(scope, value.element, text)
        start = self.start(scope, value)
        if chance < 0.75:
            eight = self.scalar(scope, _I, "8")
            number = self.device(scope)
            start = self.raw(scope, f"stablehlo.multiply {number}, {eight} : tensor<i32>")
        return self.emit(
            scope,
            value.element,
            f"stablehlo.dynamic_slice {gathered}, {start}, sizes = [8] : "
            f"({wide}, tensor<i32>) -> {value.kind}",
        )

    def reduce_scatter(self, scope: Scope, value: Value) -> Value:
        """A reduce_scatter of several values."""
        parts = [value] + [
            self.as_element(scope, self.rng.choice([value, *scope.values]), value.element)
            for _ in range(3)
        ]
        self.rng.shuffle(parts)
        wide = kind(value.element, 32)
        joined = self.raw(
            scope,
            f"stablehlo.concatenate {', '.join(p.name for p in parts)}, dim = 0 : "
            f"({', '.join([value.kind] * 4)}) -> {wide}",
        )
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.reduce_scatter"({joined}) <{{scatter_dimension = 0 : i64, '
            f"{self.attributes()}}}> {self.region(value.element)} : ({wide}) -> {value.kind}",
        )

    def all_to_all(self, scope: Scope, value: Value) -> Value:
        """An exchange of quarters."""
        attributes = f"replica_groups = dense<{_WHOLE}> : tensor<1x4xi64>"
        if not self.replicas:
            attributes += f", {_CHANNEL}"
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.all_to_all"({value.name}) <{{split_dimension = 0 : i64, '
            f"concat_dimension = 0 : i64, split_count = 4 : i64, {attributes}}}> : "
            f"({value.kind}) -> {value.kind}",
        )

    def permute(self, scope: Scope, value: Value) -> Value:
        """A permutation, the identity among them."""
        pairs = self.rng.choice(_PAIRS)
        count = pairs.count("], [") + 1
        attributes = f"source_target_pairs = dense<{pairs}> : tensor<{count}x2xi64>"
        if not self.replicas:
            attributes += f", {_CHANNEL}"
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.collective_permute"({value.name}) <{{{attributes}}}> : '
            f"({value.kind}) -> {value.kind}",
        )

    def collective(self, scope: Scope, value: Value) -> Value:
        """Any collective; now and then one whose groups are of one device."""
        if self.rng.random() < 0.1:
            return self.all_reduce(scope, value, _ALONE)
        makers = (
            self.all_reduce,
            self.all_gather,
            self.reduce_scatter,
            self.all_to_all,
            self.permute,
        )
        return self.rng.choice(makers)(scope, value)

    # Control flow.

    def loop(self, scope: Scope, value: Value) -> Value:
        """A loop of known or reduced length, whose body is a chain, joined to the carry or not."""
        rng = self.rng
        trips = rng.choice((0, 1, 1, 2, 2, 5))
        is_known = rng.random() < 0.6
        if not is_known:  # as long as this says
            value = self.all_reduce(scope, value)
            scope.values.append(value)
        counter, carry, beside = (self.name() for _ in range(3))
        second = rng.choice([value, *scope.values])
        zero = self.scalar(scope, _I, "0")
        limit, one = self.scalar(scope, _I, str(trips)), self.scalar(scope, _I, "1")
        if not is_known:
            limit = self.corner(scope, self.as_element(scope, value, _I))
        inner = Scope(
            [], [Value(carry, value.element), Value(beside, second.element)], scope.depth + 1
        )
        if rng.random() < 0.3:
            inner.values += scope.values
        start = inner.values[0 if rng.random() < 0.6 else 1]
        last = self.chain(inner, start, rng.randint(1, 2))
        last = self.as_element(inner, last, value.element)
        if start.name != carry:  # what is gathered of the other carry, which may never change
            text = f"stablehlo.add {last.name}, {carry} : {value.kind}"
            last = self.emit(inner, value.element, text)
        other = rng.choice([inner.values[1], inner.values[1], *inner.values])
        other = self.as_element(inner, other, second.element)
        result, following, tested = (self.name() for _ in range(3))
        kinds = f"tensor<i32>, {value.kind}, {second.kind}"
        scope.lines += [
            f"{result}:3 = stablehlo.while({counter} = {zero}, {carry} = {value.name}, "
            f"{beside} = {second.name}) : {kinds}\ncond {{",
            f"{tested} = stablehlo.compare LT, {counter}, {limit} : "
            "(tensor<i32>, tensor<i32>) -> tensor<i1>",
            f"stablehlo.return {tested} : tensor<i1>",
            "} do {",
            *inner.lines,
            f"{following} = stablehlo.add {counter}, {one} : tensor<i32>",
            f"stablehlo.return {following}, {last.name}, {other.name} : {kinds}\n}}",
        ]
        scope.values.append(Value(f"{result}#2", second.element))
        return Value(f"{result}#1", value.element)

    def branch(self, scope: Scope, value: Value) -> Value:
        """An if on a constant, on a flag, or on the result of a collective."""
        rng = self.rng
        chance = rng.random()
        if chance < 0.3:
            flag = self.scalar(scope, _P, rng.choice(("true", "false")))
        elif chance < 0.4:
            flag = "%flag"
        else:
            reduced = self.all_reduce(scope, value)
            flag = self.raw(
                scope,
                f"stablehlo.compare GT, {self.corner(scope, reduced)}, "
                f"{self.scalar(scope, value.element, '1' if value.element == _I else '1.0')} : "
                f"(tensor<{value.element}>, tensor<{value.element}>) -> tensor<i1>",
            )
        sides: list[str] = []
        for _ in range(2):
            inner = Scope([], list(scope.values), scope.depth + 1)
            last = value if rng.random() < 0.2 else self.chain(inner, value, rng.randint(0, 2))
            last = self.as_element(inner, last, value.element)
            inner.lines.append(f"stablehlo.return {last.name} : {value.kind}")
            sides.append("\n".join(inner.lines))
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.if"({flag}) ({{\n{sides[0]}\n}}, {{\n{sides[1]}\n}}) : '
            f"(tensor<i1>) -> {value.kind}",
        )

    def chain(self, scope: Scope, value: Value, length: int) -> Value:
        """Collectives, each on what some ops make of the one before; returns the last value."""
        for _ in range(length):
            for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
                value = self.step(scope, value)
                scope.values.append(value)
            chance = self.rng.random()
            if scope.depth < 2 and chance < 0.12:
                value = self.loop(scope, value)
            elif scope.depth < 2 and chance < 0.2:
                value = self.branch(scope, value)
            else:
                value = self.collective(scope, value)
            scope.values.append(value)
        for _ in range(self.rng.choice((0, 1, 2))):
            value = self.step(scope, value)
            scope.values.append(value)
        return value

    def module(self, *, more: bool = False) -> str:
        """The whole module; one value more is returned than without `more`, and all else alike."""
        scope = Scope([], [Value("%a", _F), Value("%b", _I)])
        last = self.chain(scope, self.rng.choice(scope.values), self.rng.randint(2, 4))
        returned = [last]
        if self.rng.random() < 0.3:
            returned.append(self.rng.choice(scope.values))
        beside = self.rng.choice(scope.values)
        returned += [beside] if more else []
        body = "\n".join(scope.lines)
        names = ", ".join(value.name for value in returned)
        kinds = ", ".join(value.kind for value in returned)
        grid = (DEVICES, 1) if self.replicas else (1, DEVICES)
        head = (
            f"module @tempting attributes {{mhlo.num_replicas = {grid[0]} : i32, "
            f"mhlo.num_partitions = {grid[1]} : i32}} {{\n"
        )
        arguments = f"%a: {kind(_F)}, %b: {kind(_I)}, %flag: tensor<i1>"
        return (
            f"{head}func.func public @main({arguments}) -> ({kinds}) {{\n{body}\n"
            f"return {names} : {kinds}\n}}\n}}\n"
        )


_SPLAT = re.compile(r"stablehlo.constant (dense<[^\[>]+>) : tensor<8x(f32|i32)>")
_CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"


def tempting_program(seed: str, *, more: bool = False) -> str:
    """A module as text, of four devices; with `more`, one value more is returned."""
    rng = random.Random(seed)
    simple = rng.choice((0.2, 0.5, 0.8))
    return Builder(rng, replicas=rng.random() < 0.6, simple=simple).module(more=more)


def with_other_constant(text: str, seed: str) -> str:
    """The program with another number in one of its constants, if it has a splat."""
    rng = random.Random(seed)
    lines = text.splitlines()
    found = [
        (i, match)
        for i, line in enumerate(lines)
        if (match := _SPLAT.search(line)) and "tensor<8x" in line
    ]
    if found:
        i, match = rng.choice(found)
        number = rng.choice(_CONSTANTS[match.group(2)])
        lines[i] = lines[i].replace(match.group(1), f"dense<{number}>")
    return "\n".join(lines)

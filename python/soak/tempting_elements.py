"""Ops that overwrite, put together and take apart, and identities that take a value away whole."""

from __future__ import annotations

from collections.abc import Callable

from tempting_programs import Builder, Scope, Value, kind

_F, _I = "f32", "i32"
_PARTS = ((0, 8, 1), (8, 16, 1), (0, 16, 2), (1, 16, 2), (4, 12, 1), (7, 15, 1))


class ElementBuilder(Builder):
    """Draws programs in which parts of values are lost."""

    def makers(self) -> list[Callable[[Scope, Value], Value]]:
        """Two of three times one of those here."""
        own: list[Callable[[Scope, Value], Value]] = [
            self.overwrite,
            self.overwrite,
            self.combine,
            self.taken_apart,
            self.taken_apart,
            self.padded_and_sliced,
            self.masked,
            self.masked,
            self.parts_of_complex,
            self.rows,
            self.identity,
            self.identity,
            self.bounded,
            self.bounded,
            self.partly_reduced,
            self.repeated_sum,
            self.sparse_window,
            self.bytes,
            self.nested_select,
            self.carried,
            self.chosen,
            self.dotted,
        ]
        return [*super().makers(), *own, *own]

    def whole(self, scope: Scope, value: Value) -> Value:
        """A second operand that is no constant."""
        return self.as_element(scope, self.rng.choice(scope.values), value.element)

    def row(self, scope: Scope, numbers: list[int]) -> str:
        """Constant indices."""
        text = ", ".join(map(str, numbers))
        return self.raw(scope, f"stablehlo.constant dense<[{text}]> : tensor<{len(numbers)}xi32>")

    def overwrite(self, scope: Scope, value: Value) -> Value:
        """`x.at[a:b].set(y)`, all of it or a part, at a place that is known or not."""
        pair = self.shuffled(value, self.whole(scope, value))
        size = self.rng.choice((8, 8, 8, 4, 7))
        part, inner = pair[1].name, kind(value.element, size)
        if size < 8:
            part = self.raw(scope, f"stablehlo.slice {part} [0:{size}] : ({value.kind}) -> {inner}")
        if self.rng.random() < 0.7:
            index = self.row(scope, [self.rng.choice((0, 0, 0, 1, 4, -1, 9))])
        else:
            start = self.start(scope, value)
            index = self.reshape(scope, start, "tensor<i32>", "tensor<1xi32>")
        return self.scattered(
            scope, value, (pair[0].name, index, part), "tensor<1xi32>", inner, "[0]"
        )

    def combine(self, scope: Scope, value: Value) -> Value:
        """A scatter of single elements, all of them or half, at constant places or others."""
        pair = self.shuffled(value, self.whole(scope, value))
        count = self.rng.choice((8, 8, 4))
        places = self.rng.choice(
            (list(range(count)), list(range(count))[::-1], [7 - 2 * (i % 4) for i in range(count)])
        )
        index = self.row(scope, places)
        if count == 8 and self.rng.random() < 0.3:
            index = self.as_element(scope, self.rng.choice(scope.values), _I).name
        rows = self.reshape(scope, index, f"tensor<{count}xi32>", f"tensor<{count}x1xi32>")
        part, inner = pair[1].name, kind(value.element, count)
        if count < 8:
            part = self.raw(
                scope, f"stablehlo.slice {part} [0:{count}] : ({value.kind}) -> {inner}"
            )
        table = f"tensor<{count}x1xi32>"
        return self.scattered(scope, value, (pair[0].name, rows, part), table, inner, "")

    def scattered(
        self,
        scope: Scope,
        value: Value,
        operands: tuple[str, str, str],
        table: str,
        update: str,
        window: str,
    ) -> Value:
        """A scatter of a window, or of single elements."""
        element = value.element
        numbers = (
            f"update_window_dims = {window}, scatter_dims_to_operand_dims = [0]"
            if window
            else "inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], "
            "index_vector_dim = 1"
        )
        body = self.rng.choice(
            ("return %r", "return %r", "return %r", "return %l", "add", "multiply", "maximum")
        )
        lines = f"stablehlo.{body}"
        if not body.startswith("return"):
            lines = f"%c = stablehlo.{body} %l, %r : tensor<{element}>\nstablehlo.return %c"
        return self.emit(
            scope,
            element,
            f'"stablehlo.scatter"({", ".join(operands)}) <{{'
            f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>}}> ({{\n"
            f"^bb0(%l: tensor<{element}>, %r: tensor<{element}>):\n{lines} : tensor<{element}>\n}})"
            f" : ({value.kind}, {table}, {update}) -> {value.kind}",
        )

    def laid_out(self, scope: Scope, name: str, element: str, size: int) -> str:
        """Elements in another order and back in a row: reversed, turned, spread."""
        flat = kind(element, size)
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            if self.rng.random() < 0.4:
                name = self.raw(scope, f"stablehlo.reverse {name}, dims = [0] : {flat}")
                continue
            rows = self.rng.choice((2, 4))
            square = f"tensor<{rows}x{size // rows}x{element}>"
            turned = f"tensor<{size // rows}x{rows}x{element}>"
            name = self.reshape(scope, name, flat, square)
            if self.rng.random() < 0.3:
                side = self.rng.choice((0, 1))
                name = self.raw(scope, f"stablehlo.reverse {name}, dims = [{side}] : {square}")
            name = self.raw(
                scope, f"stablehlo.transpose {name}, dims = [1, 0] : ({square}) -> {turned}"
            )
            name = self.reshape(scope, name, turned, flat)
        return name

    def taken_apart(self, scope: Scope, value: Value) -> Value:
        """A part of what is put together of two, in another order."""
        pair = self.pair(scope, value)
        wide = kind(value.element, 16)
        joined = self.raw(
            scope,
            f"stablehlo.concatenate {pair[0].name}, {pair[1].name}, dim = 0 : "
            f"({value.kind}, {value.kind}) -> {wide}",
        )
        joined = self.laid_out(scope, joined, value.element, 16)
        if self.rng.random() < 0.3:
            negated = self.rng.choice(("negate", "abs"))
            joined = self.raw(scope, f"stablehlo.{negated} {joined} : {wide}")
        start, stop, step = self.rng.choice(_PARTS)
        if step == 1 and self.rng.random() < 0.3:
            index = self.scalar(scope, _I, str(self.rng.choice((start, 100))))
            return self.emit(
                scope,
                value.element,
                f"stablehlo.dynamic_slice {joined}, {index}, sizes = [8] : "
                f"({wide}, tensor<i32>) -> {value.kind}",
            )
        return self.emit(
            scope,
            value.element,
            f"stablehlo.slice {joined} [{start}:{stop}:{step}] : ({wide}) -> {value.kind}",
        )

    def padded_and_sliced(self, scope: Scope, value: Value) -> Value:
        """Of a value between others, every second, the ends or the middle."""
        element = value.element
        filling = self.corner(scope, self.other(scope, value))
        if self.rng.random() < 0.5:
            filling = self.scalar(scope, element, "1" if element == _I else "1.0")
        low, high, inside = self.rng.choice(((8, 0, 0), (0, 8, 0), (4, 4, 0), (0, 1, 1), (1, 0, 1)))
        wide = kind(element, 16)
        padded = self.raw(
            scope,
            f"stablehlo.pad {value.name}, {filling}, low = [{low}], high = [{high}], "
            f"interior = [{inside}] : ({value.kind}, tensor<{element}>) -> {wide}",
        )
        padded = self.laid_out(scope, padded, element, 16)
        start, stop, step = self.rng.choice(_PARTS)
        return self.emit(
            scope,
            element,
            f"stablehlo.slice {padded} [{start}:{stop}:{step}] : ({wide}) -> {value.kind}",
        )

    def masked(self, scope: Scope, value: Value) -> Value:
        """A select by where an element stands, and perhaps a part of it."""
        places = self.raw(scope, "stablehlo.iota dim = 0 : tensor<8xi32>")
        bound = self.rng.choice(("0", "4", "8", "-1"))
        limit = self.raw(scope, f"stablehlo.constant dense<{bound}> : tensor<8xi32>")
        direction = self.rng.choice(("LT", "GE", "EQ", "NE"))
        mask = self.raw(
            scope,
            f"stablehlo.compare {direction}, {places}, {limit} : "
            "(tensor<8xi32>, tensor<8xi32>) -> tensor<8xi1>",
        )
        pair = self.pair(scope, value)
        made = self.emit(
            scope,
            value.element,
            f"stablehlo.select {mask}, {pair[0].name}, {pair[1].name} : tensor<8xi1>, {value.kind}",
        )
        if self.rng.random() < 0.4:
            return made
        half = kind(value.element, 4)
        start = self.rng.choice((0, 4))
        part = self.raw(
            scope, f"stablehlo.slice {made.name} [{start}:{start + 4}] : ({value.kind}) -> {half}"
        )
        return self.emit(
            scope,
            value.element,
            f"stablehlo.concatenate {part}, {part}, dim = 0 : ({half}, {half}) -> {value.kind}",
        )

    def parts_of_complex(self, scope: Scope, value: Value) -> Value:
        """One part of a complex number that was moved about."""
        inner = self.as_element(scope, value, _F)
        pair = self.pair(scope, inner)
        wide = "tensor<8xcomplex<f32>>"
        made = self.raw(scope, f"stablehlo.complex {pair[0].name}, {pair[1].name} : {wide}")
        chance = self.rng.random()
        if chance < 0.3:
            made = self.raw(scope, f"stablehlo.reverse {made}, dims = [0] : {wide}")
        elif chance < 0.5:
            made = self.raw(scope, f"stablehlo.negate {made} : {wide}")
        elif chance < 0.7:
            other = self.raw(scope, f"stablehlo.complex {pair[1].name}, {pair[0].name} : {wide}")
            made = self.raw(scope, f"stablehlo.add {made}, {other} : {wide}")
        part = self.rng.choice(("real", "imag"))
        return self.emit(scope, _F, f"stablehlo.{part} {made} : ({wide}) -> {inner.kind}")

    def rows(self, scope: Scope, value: Value) -> Value:
        """Elements of two, picked by constants."""
        wide = kind(value.element, 16)
        other = self.other(scope, value)
        joined = self.raw(
            scope,
            f"stablehlo.concatenate {value.name}, {other.name}, dim = 0 : "
            f"({value.kind}, {value.kind}) -> {wide}",
        )
        first = self.rng.choice((0, 8, 4, 100))
        table = self.row(scope, [first + i for i in range(8)])
        rows = self.reshape(scope, table, "tensor<8xi32>", "tensor<8x1xi32>")
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.gather"({joined}, {rows}) <{{dimension_numbers = #stablehlo.gather<'
            "collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, "
            f"slice_sizes = array<i64: 1>}}> : ({wide}, tensor<8x1xi32>) -> {value.kind}",
        )

    def identity(self, scope: Scope, value: Value) -> Value:
        """What leaves an integer as it is, or nothing of it."""
        inner = self.as_element(scope, value, _I)
        names = {
            "multiply": ("1", "0", "65536", "3"),
            "add": ("0", "1"),
            "and": ("-1", "0", "1", "65535"),
            "or": ("-1", "0"),
            "xor": ("0", "-1"),
            "divide": ("1", "65536", "-1", "2"),
            "remainder": ("1", "2", "65536"),
            "shift_left": ("31", "32", "16", "0"),
            "shift_right_logical": ("31", "32", "16"),
            "shift_right_arithmetic": ("31", "40"),
            "maximum": ("2147483647", "-2147483648"),
            "minimum": ("-2147483648", "2147483647"),
            "power": ("0", "1"),
        }
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            name = self.rng.choice(sorted(names))
            constant = self.constant(scope, _I, self.rng.choice(names[name]))
            inner = self.emit(
                scope, _I, f"stablehlo.{name} {inner.name}, {constant.name} : {inner.kind}"
            )
        if self.rng.random() < 0.3:
            name = self.rng.choice(("subtract", "xor", "add", "and"))
            again = self.rng.choice(scope.values)
            if again.element == _I:
                inner = self.emit(
                    scope, _I, f"stablehlo.{name} {inner.name}, {again.name} : {inner.kind}"
                )
        return inner

    def bounded(self, scope: Scope, value: Value) -> Value:
        """Minima of maxima, by constants or by what is in them already."""
        names = ["maximum", "minimum"]
        for _ in range(self.rng.choice((1, 2, 2, 3))):
            self.rng.shuffle(names)
            if self.rng.random() < 0.3:
                other = self.rng.choice(scope.values)
                other = other if other.element == value.element else value
            else:
                numbers = ("0", "5", "3") if value.element == _I else ("0.0", "5.0", "3.0")
                other = self.constant(scope, value.element, self.rng.choice(numbers))
            scope.values.append(value)
            value = self.emit(
                scope,
                value.element,
                f"stablehlo.{names[0]} {value.name}, {other.name} : {value.kind}",
            )
        if self.rng.random() < 0.2:
            other = self.whole(scope, value)
            names_of = f"{other.name}, {value.name}, {other.name}"
            return self.emit(scope, value.element, f"stablehlo.clamp {names_of} : {value.kind}")
        return value

    def partly_reduced(self, scope: Scope, value: Value) -> Value:
        """A reduction of two beside each other, with an end that may be known beforehand."""
        element = value.element
        other = self.other(scope, value)
        names = ["add", "maximum", "minimum", "multiply"]
        names += ["and", "or"] if element == _I else []
        name = self.rng.choice(names)
        pair = f"tensor<2x8x{element}>"
        one = f"tensor<1x8x{element}>"
        made: list[str] = []
        for part in (value, other):
            made.append(self.reshape(scope, part.name, value.kind, one))
        if self.rng.random() < 0.4:
            joined, source = made[0], one
        else:
            self.rng.shuffle(made)
            joined = self.raw(
                scope,
                f"stablehlo.concatenate {made[0]}, {made[1]}, dim = 0 : ({one}, {one}) -> {pair}",
            )
            source = pair
        initial = self.scalar(
            scope,
            element,
            self.rng.choice(
                ("0", "1", "-1", "2147483647", "-2147483648")
                if element == _I
                else ("0.0", "1.0", "0x7F800000", "0xFF800000")
            ),
        )
        return self.emit(
            scope,
            element,
            f"stablehlo.reduce({joined} init: {initial}) applies stablehlo.{name} across "
            f"dimensions = [0] : ({source}, tensor<{element}>) -> {value.kind}",
        )

    def repeated_sum(self, scope: Scope, value: Value) -> Value:
        """The sum of one and the same, so many times."""
        element, count = value.element, self.rng.choice((2, 65536))
        wide = f"tensor<{count}x8x{element}>"
        spread = self.raw(
            scope, f"stablehlo.broadcast_in_dim {value.name}, dims = [1] : ({value.kind}) -> {wide}"
        )
        initial = self.scalar(scope, element, "0" if element == _I else "0.0")
        return self.emit(
            scope,
            element,
            f"stablehlo.reduce({spread} init: {initial}) applies stablehlo.add across "
            f"dimensions = [0] : ({wide}, tensor<{element}>) -> {value.kind}",
        )

    def sparse_window(self, scope: Scope, value: Value) -> Value:
        """Windows that leave elements out, or lie in the padding."""
        element = value.element
        size, stride, low, high = self.rng.choice(
            ((1, 2, 0, 7), (2, 2, 8, 0), (1, 1, 8, -8), (1, 1, -8, 8), (2, 1, 4, -3), (1, 2, 1, 7))
        )
        initial = self.scalar(scope, element, "0" if element == _I else "0.0")
        count = (8 + low + high - size) // stride + 1
        name = self.rng.choice(("add", "maximum"))
        inner = kind(element, count)
        made = self.raw(
            scope,
            f'"stablehlo.reduce_window"({value.name}, {initial}) <{{window_dimensions = '
            f"array<i64: {size}>, window_strides = array<i64: {stride}>, "
            f"padding = dense<[[{low}, {high}]]> : tensor<1x2xi64>}}> ({{\n"
            f"^bb0(%l: tensor<{element}>, %r: tensor<{element}>):\n"
            f"%c = stablehlo.{name} %l, %r : tensor<{element}>\n"
            f"stablehlo.return %c : tensor<{element}>\n}}) : "
            f"({value.kind}, tensor<{element}>) -> {inner}",
        )
        start = self.rng.choice((0, count - 1, count // 2))
        corner = self.raw(
            scope, f"stablehlo.slice {made} [{start}:{start + 1}] : ({inner}) -> {kind(element, 1)}"
        )
        scalar = self.raw(
            scope, f"stablehlo.reshape {corner} : ({kind(element, 1)}) -> tensor<{element}>"
        )
        return self.broadcast(scope, scalar, element)

    def bytes(self, scope: Scope, value: Value) -> Value:
        """One byte of what was narrow once."""
        inner = self.as_element(scope, value, _I)
        if self.rng.random() < 0.6:
            narrow = self.rng.choice(("ui8", "i1", "i8"))
            made = self.raw(
                scope, f"stablehlo.convert {inner.name} : ({inner.kind}) -> {kind(narrow)}"
            )
            inner = self.emit(
                scope, _I, f"stablehlo.convert {made} : ({kind(narrow)}) -> {inner.kind}"
            )
        split = self.raw(
            scope, f"stablehlo.bitcast_convert {inner.name} : ({inner.kind}) -> tensor<8x4xi8>"
        )
        start = self.rng.choice((0, 3))
        taken = self.raw(
            scope,
            f"stablehlo.slice {split} [0:8, {start}:{start + 1}] : "
            "(tensor<8x4xi8>) -> tensor<8x1xi8>",
        )
        row = self.reshape(scope, taken, "tensor<8x1xi8>", "tensor<8xi8>")
        return self.emit(scope, _I, f"stablehlo.convert {row} : (tensor<8xi8>) -> {inner.kind}")

    def nested_select(self, scope: Scope, value: Value) -> Value:
        """A select in a select by the same predicate, turned, negated or in another shape."""
        chosen = self.predicate(scope, value)
        other, last = self.whole(scope, value), self.other(scope, value)
        inner_kind, flags, again = value.kind, "tensor<8xi1>", chosen
        names = [value.name, other.name]
        self.rng.shuffle(names)
        is_square = self.rng.random() < 0.5
        if is_square:
            inner_kind, flags = f"tensor<2x4x{value.element}>", "tensor<2x4xi1>"
            again = self.reshape(scope, again, "tensor<8xi1>", flags)
            names = [self.reshape(scope, name, value.kind, inner_kind) for name in names]
        if self.rng.random() < 0.3:
            again = self.raw(scope, f"stablehlo.not {again} : {flags}")
        made = self.raw(
            scope, f"stablehlo.select {again}, {names[0]}, {names[1]} : {flags}, {inner_kind}"
        )
        if self.rng.random() < 0.3:
            made = self.raw(scope, f"stablehlo.negate {made} : {inner_kind}")
        if is_square:
            made = self.reshape(scope, made, inner_kind, value.kind)
        sides = [made, last.name]
        self.rng.shuffle(sides)
        return self.emit(
            scope,
            value.element,
            f"stablehlo.select {chosen}, {sides[0]}, {sides[1]} : tensor<8xi1>, {value.kind}",
        )

    def carried(self, scope: Scope, value: Value) -> Value:
        """A carry that is overwritten, handed on, or changes in the text alone."""
        other = self.whole(scope, value)
        trips = self.rng.choice((0, 1, 3))
        counter, one, two = (self.name() for _ in range(3))
        result, following, tested, last = (self.name() for _ in range(4))
        kinds = f"tensor<i32>, {value.kind}, {value.kind}"
        inner = Scope([], [Value(one, value.element), Value(two, value.element)], scope.depth + 1)
        unit = self.constant(inner, value.element, "1" if value.element == _I else "1.0")
        ends = self.rng.choice(((two, two), (two, one), (last, two), (last, last), (one, last)))
        chance = self.rng.random()
        if chance < 0.5:
            text = f"stablehlo.multiply {one}, {unit.name} : {value.kind}"
        elif chance < 0.8:
            text = f"stablehlo.add {two}, {unit.name} : {value.kind}"
        else:
            text = f"stablehlo.add {one}, {two} : {value.kind}"
        zero, step = self.scalar(scope, _I, "0"), self.scalar(scope, _I, "1")
        limit = self.scalar(scope, _I, str(trips))
        if self.rng.random() < 0.3:
            limit = self.corner(scope, Value("%b", _I))
        scope.lines += [
            f"{result}:3 = stablehlo.while({counter} = {zero}, {one} = {value.name}, "
            f"{two} = {other.name}) : {kinds}\ncond {{",
            f"{tested} = stablehlo.compare LT, {counter}, {limit} : "
            "(tensor<i32>, tensor<i32>) -> tensor<i1>",
            f"stablehlo.return {tested} : tensor<i1>",
            "} do {",
            *inner.lines,
            f"{last} = {text}",
            f"{following} = stablehlo.add {counter}, {step} : tensor<i32>",
            f"stablehlo.return {following}, {ends[0]}, {ends[1]} : {kinds}\n}}",
        ]
        return Value(f"{result}#{self.rng.choice((1, 1, 2))}", value.element)

    def chosen(self, scope: Scope, value: Value) -> Value:
        """A branch that ignores the value, or returns it on both sides."""
        other = self.whole(scope, value)
        flag = self.rng.choice(
            ("%flag", self.scalar(scope, "i1", self.rng.choice(("true", "false"))))
        )
        first, second = self.name(), self.name()
        sides = self.rng.choice(
            (
                (value.name, other.name),
                (other.name, other.name),
                (first, second),
                (first, other.name),
            )
        )
        texts = [
            f"{first} = stablehlo.negate {value.name} : {value.kind}\n"
            f"stablehlo.return {sides[0]} : {value.kind}",
            f"{second} = stablehlo.abs {value.name} : {value.kind}\n"
            f"stablehlo.return {sides[1]} : {value.kind}",
        ]
        return self.emit(
            scope,
            value.element,
            f'"stablehlo.if"({flag}) ({{\n{texts[0]}\n}}, {{\n{texts[1]}\n}}) : '
            f"(tensor<i1>) -> {value.kind}",
        )

    def dotted(self, scope: Scope, value: Value) -> Value:
        """A product with what is partly constant, sliced afterwards."""
        other = self.other(scope, value)
        square = f"tensor<2x4x{value.element}>"
        names = [self.reshape(scope, part.name, value.kind, square) for part in (value, other)]
        self.rng.shuffle(names)
        result = f"tensor<2x2x{value.element}>"
        made = self.raw(
            scope,
            f"stablehlo.dot_general {names[0]}, {names[1]}, contracting_dims = [1] x [1] : "
            f"({square}, {square}) -> {result}",
        )
        corner = self.raw(
            scope, f"stablehlo.slice {made} [1:2, 0:1] : ({result}) -> tensor<1x1x{value.element}>"
        )
        scalar = self.raw(
            scope,
            f"stablehlo.reshape {corner} : "
            f"(tensor<1x1x{value.element}>) -> tensor<{value.element}>",
        )
        return self.broadcast(scope, scalar, value.element)

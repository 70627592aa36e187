"""Random programs with collectives in nested control flow, for Hypothesis.

A program runs on four devices, a 2 x 2 mesh. Every value is a tensor<4x8xf32> of a device, so that
any value can feed any op. Predicates are the same on every device: branches and trip counts come
from a replicated argument or a loop counter, as in every program that does not deadlock by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck
from hypothesis import strategies as st

DEVICES = 4
VALUE = "tensor<4x8xf32>"
GLOBAL = "tensor<16x8xf32>"
_ALL = "[[0, 1, 2, 3]]"
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_GROUPS = (_ALL, "[[3, 1, 0, 2]]", "[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]", "[[3, 0], [2, 1]]")
_AXES = {'"x"': 2, '"y"': 2, '"x", "y"': 4, '"y", "x"': 4}
_PAIRS = (
    ((0, 1), (1, 2), (2, 3), (3, 0)),
    ((0, 1), (1, 0), (2, 3), (3, 2)),
    ((3, 0),),
    ((0, 0), (1, 3), (2, 1)),
)
_CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"
_UNARY = ("tanh", "negate", "cosine", "logistic")
_BINARY = ("add", "subtract", "multiply", "maximum")


@dataclass
class Scope:
    """Where ops are written: lines, values that can be read, scalars that are uniform."""

    lines: list[str]
    values: list[str]
    flags: list[str]
    selectors: list[str]
    depth: int = 0

    def inner(self, extra: list[str]) -> Scope:
        """A region that sees this scope's values and some of its own."""
        return Scope([], [*self.values, *extra], self.flags, self.selectors, self.depth + 1)


@dataclass
class ProgramBuilder:
    """Draws a program; `functions` holds private functions written so far."""

    draw: st.DrawFn
    max_depth: int
    max_ops: int
    variadic: bool
    counter: int = 0
    functions: list[str] = field(default_factory=list[str])
    callees: list[str] = field(default_factory=list[str])

    def name(self, stem: str) -> str:
        """A fresh SSA or symbol name, without its sigil."""
        self.counter += 1
        return f"{stem}{self.counter}"

    def pick[T](self, options: tuple[T, ...] | list[T]) -> T:
        """One of several."""
        return self.draw(st.sampled_from(options))

    def block(self, scope: Scope) -> str:
        """Writes random ops; returns a value that depends on some of what was made."""
        made = [self.op(scope) for _ in range(self.draw(st.integers(1, self.max_ops)))]
        kept = [value for value in made if self.draw(st.integers(0, 9))] or made[:1]
        total = kept[0]
        for value in kept[1:]:
            total = self.elementwise(scope, f"stablehlo.add {total}, {value}")
        return self.elementwise(scope, f"stablehlo.tanh {total}")

    def op(self, scope: Scope) -> str:
        """One random op, or a region op with a random block in each region."""
        makers = [self.compute, self.collective, self.collective, self.collective]
        if scope.depth < self.max_depth:
            makers += [self.loop, self.branch, self.switch, self.call]
        value = self.pick(makers)(scope)
        scope.values.append(value)
        return value

    def elementwise(self, scope: Scope, text: str) -> str:
        """Writes an op on values of the one type."""
        result = f"%{self.name('v')}"
        scope.lines.append(f"{result} = {text} : {VALUE}")
        return result

    def compute(self, scope: Scope) -> str:
        """A unary or binary elementwise op."""
        if self.draw(st.booleans()):
            return self.elementwise(scope, f"stablehlo.{self.pick(_UNARY)} {self.read(scope)}")
        text = f"stablehlo.{self.pick(_BINARY)} {self.read(scope)}, {self.read(scope)}"
        return self.elementwise(scope, text)

    def read(self, scope: Scope) -> str:
        """Any value in sight."""
        return self.pick(scope.values)

    def collective(self, scope: Scope) -> str:
        """A collective of any kind, with what brings its result back to the one type."""
        kinds = (
            self.all_gather,
            self.all_reduce,
            self.reduce_scatter,
            self.all_to_all,
            self.collective_permute,
        )
        return self.pick((*kinds, self.variadic_all_reduce) if self.variadic else kinds)(scope)

    def groups(self) -> tuple[str, int]:
        """Replica groups in dense or mesh-axes form, and the size of one."""
        if self.draw(st.booleans()):
            text = self.pick(_GROUPS)
            rows = text.count("], [") + 1
            size = DEVICES // rows
            return f"replica_groups = dense<{text}> : tensor<{rows}x{size}xi64>", size
        axes = self.pick(tuple(_AXES))
        refs = ", ".join(f"#stablehlo.axis_ref<name = {axis}>" for axis in axes.split(", "))
        mesh = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{refs}]>"
        return f"replica_groups = {mesh}", _AXES[axes]

    def all_gather(self, scope: Scope) -> str:
        """Gathers rows, then keeps one participant's."""
        groups, size = self.groups()
        gathered, result = f"%{self.name('g')}", f"%{self.name('v')}"
        wide = f"tensor<{4 * size}x8xf32>"
        scope.lines.append(
            f'{gathered} = "stablehlo.all_gather"({self.read(scope)}) <{{all_gather_dim = 0 : i64, '
            f"{groups}, {_CHANNEL}, use_global_device_ids}}> : ({VALUE}) -> {wide}"
        )
        start = 4 * self.draw(st.integers(0, size - 1))
        scope.lines.append(
            f"{result} = stablehlo.slice {gathered} [{start}:{start + 4}, 0:8] : "
            f"({wide}) -> {VALUE}"
        )
        return result

    def reduction(self, result: str, name: str, operands: list[str], attributes: str) -> str:
        """A reducing collective's text up to its types."""
        kind = self.pick(("add", "maximum"))
        return (
            f'{result} = "stablehlo.{name}"({", ".join(operands)}) <{{{attributes}}}> ({{\n'
            f"^bb0(%l: tensor<f32>, %r: tensor<f32>):\n"
            f"%s = stablehlo.{kind} %l, %r : tensor<f32>\n"
            f"stablehlo.return %s : tensor<f32>\n}})"
        )

    def all_reduce(self, scope: Scope) -> str:
        """An all_reduce of one operand."""
        groups, _ = self.groups()
        result = f"%{self.name('v')}"
        attributes = f"{groups}, {_CHANNEL}, use_global_device_ids"
        text = self.reduction(result, "all_reduce", [self.read(scope)], attributes)
        scope.lines.append(f"{text} : ({VALUE}) -> {VALUE}")
        return result

    def variadic_all_reduce(self, scope: Scope) -> str:
        """An all_reduce of two operands, whose second result may stay unused."""
        groups, _ = self.groups()
        pair = f"%{self.name('v')}"
        attributes = f"{groups}, {_CHANNEL}, use_global_device_ids"
        operands = [self.read(scope), self.read(scope)]
        text = self.reduction(f"{pair}:2", "all_reduce", operands, attributes)
        scope.lines.append(f"{text} : ({VALUE}, {VALUE}) -> ({VALUE}, {VALUE})")
        scope.values.append(f"{pair}#1")
        return f"{pair}#0"

    def reduce_scatter(self, scope: Scope) -> str:
        """A reduce_scatter of a value repeated as often as the group is large."""
        groups, size = self.groups()
        wide, result = f"%{self.name('c')}", f"%{self.name('v')}"
        rows = f"tensor<{4 * size}x8xf32>"
        parts = [self.read(scope) for _ in range(size)]
        scope.lines.append(
            f"{wide} = stablehlo.concatenate {', '.join(parts)}, dim = 0 : "
            f"({', '.join([VALUE] * size)}) -> {rows}"
        )
        attributes = f"scatter_dimension = 0 : i64, {groups}, {_CHANNEL}, use_global_device_ids"
        text = self.reduction(result, "reduce_scatter", [wide], attributes)
        scope.lines.append(f"{text} : ({rows}) -> {VALUE}")
        return result

    def all_to_all(self, scope: Scope) -> str:
        """An all_to_all that splits rows and joins columns, reshaped back."""
        rows = self.pick(_GROUPS)
        count = rows.count("], [") + 1
        size = DEVICES // count
        exchanged, result = f"%{self.name('x')}", f"%{self.name('v')}"
        shape = f"tensor<{4 // size}x{8 * size}xf32>"
        scope.lines.append(
            f'{exchanged} = "stablehlo.all_to_all"({self.read(scope)}) <{{'
            f"split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = {size} : i64, "
            f"replica_groups = dense<{rows}> : tensor<{count}x{size}xi64>, {_CHANNEL}}}> : "
            f"({VALUE}) -> {shape}"
        )
        scope.lines.append(f"{result} = stablehlo.reshape {exchanged} : ({shape}) -> {VALUE}")
        return result

    def collective_permute(self, scope: Scope) -> str:
        """A permute along one of a few patterns, partial ones included."""
        pairs = self.pick(_PAIRS)
        rows = ", ".join(f"[{source}, {target}]" for source, target in pairs)
        result = f"%{self.name('v')}"
        scope.lines.append(
            f'{result} = "stablehlo.collective_permute"({self.read(scope)}) <{{'
            f"source_target_pairs = dense<[{rows}]> : tensor<{len(pairs)}x2xi64>, {_CHANNEL}}}> : "
            f"({VALUE}) -> {VALUE}"
        )
        return result

    def loop(self, scope: Scope) -> str:
        """A while with a counter and one carry; sometimes it communicates in its condition."""
        counter, carry, result = (f"%{self.name(stem)}" for stem in ("i", "a", "w"))
        zero, limit, one = (f"%{self.name('k')}" for _ in range(3))
        trips = self.draw(st.integers(0, 3))
        for constant, value in ((zero, 0), (limit, trips), (one, 1)):
            scope.lines.append(f"{constant} = stablehlo.constant dense<{value}> : tensor<i32>")
        body = scope.inner([carry])
        body.selectors = [*scope.selectors, counter]
        last = self.block(body)
        following, tested = f"%{self.name('n')}", f"%{self.name('p')}"
        scope.lines.append(
            f"{result}:2 = stablehlo.while({counter} = {zero}, {carry} = {self.read(scope)}) : "
            f"tensor<i32>, {VALUE}\ncond {{"
        )
        scope.lines += self._condition(carry, counter, limit, tested)
        scope.lines += ["} do {", *body.lines]
        scope.lines.append(f"{following} = stablehlo.add {counter}, {one} : tensor<i32>")
        scope.lines.append(f"stablehlo.return {following}, {last} : tensor<i32>, {VALUE}\n}}")
        return f"{result}#1"

    def _condition(self, carry: str, counter: str, limit: str, tested: str) -> list[str]:
        compare = (
            f"{tested} = stablehlo.compare LT, {counter}, {limit} : "
            "(tensor<i32>, tensor<i32>) -> tensor<i1>"
        )
        if self.draw(st.integers(0, 3)):
            return [compare, f"stablehlo.return {tested} : tensor<i1>"]
        # A reduction over all devices, the same everywhere, that never ends the loop early.
        inner = Scope([], [carry], [], [])
        reduced = f"%{self.name('v')}"
        text = self.reduction(
            reduced,
            "all_reduce",
            [carry],
            f"replica_groups = dense<{_ALL}> : tensor<1x4xi64>, {_CHANNEL}, use_global_device_ids",
        )
        inner.lines.append(f"{text} : ({VALUE}) -> {VALUE}")
        corner, flat, huge, small, both = (f"%{self.name('q')}" for _ in range(5))
        return [
            *inner.lines,
            f"{corner} = stablehlo.slice {reduced} [0:1, 0:1] : ({VALUE}) -> tensor<1x1xf32>",
            f"{flat} = stablehlo.reshape {corner} : (tensor<1x1xf32>) -> tensor<f32>",
            f"{huge} = stablehlo.constant dense<1.0e9> : tensor<f32>",
            f"{small} = stablehlo.compare LT, {flat}, {huge} : "
            "(tensor<f32>, tensor<f32>) -> tensor<i1>",
            compare,
            f"{both} = stablehlo.and {tested}, {small} : tensor<i1>",
            f"stablehlo.return {both} : tensor<i1>",
        ]

    def branch(self, scope: Scope) -> str:
        """An if on a replicated flag; one branch may only hand a value on."""
        result = f"%{self.name('b')}"
        regions = [self.region(scope) for _ in range(2)]
        scope.lines.append(
            f'{result} = "stablehlo.if"({self.pick(scope.flags)}) ({{\n{regions[0]}\n}}, '
            f"{{\n{regions[1]}\n}}) : (tensor<i1>) -> {VALUE}"
        )
        return result

    def switch(self, scope: Scope) -> str:
        """A case of one to three branches on a uniform index."""
        result = f"%{self.name('b')}"
        regions = [self.region(scope) for _ in range(self.draw(st.integers(1, 3)))]
        joined = "}, {\n".join(f"{region}\n" for region in regions)
        scope.lines.append(
            f'{result} = "stablehlo.case"({self.pick(scope.selectors)}) ({{\n{joined}}}) : '
            f"(tensor<i32>) -> {VALUE}"
        )
        return result

    def region(self, scope: Scope) -> str:
        """A branch: a block, or nothing but a value from outside."""
        inner = scope.inner([])
        if self.draw(st.integers(0, 2)):
            inner.lines.append(f"stablehlo.return {self.block(inner)} : {VALUE}")
        else:
            inner.lines.append(f"stablehlo.return {self.read(scope)} : {VALUE}")
        return "\n".join(inner.lines)

    def call(self, scope: Scope) -> str:
        """A call of a new function or of one that is called already."""
        if not self.callees or self.draw(st.booleans()):
            self.function(scope.depth)
        result = f"%{self.name('v')}"
        scope.lines.append(
            f"{result} = func.call @{self.pick(self.callees)}({self.read(scope)}, "
            f"{scope.flags[0]}, {scope.selectors[0]}) : "
            f"({VALUE}, tensor<i1>, tensor<i32>) -> {VALUE}"
        )
        return result

    def function(self, depth: int) -> None:
        """Writes a private function of one value and the two uniform scalars."""
        symbol = self.name("f")
        value, flag, selector = (f"%{self.name('arg')}" for _ in range(3))
        scope = Scope([], [value], [flag], [selector], depth + 1)
        scope.lines.append(f"return {self.block(scope)} : {VALUE}")
        body = "\n".join(scope.lines)
        self.functions.append(
            f"func.func private @{symbol}({value}: {VALUE}, {flag}: tensor<i1>, "
            f"{selector}: tensor<i32>) -> {VALUE} {{\n{body}\n}}"
        )
        self.callees.append(symbol)

    def module(self) -> str:
        """The whole module: one manual computation, or two with values crossing between."""
        parts: list[str] = []
        value = "%whole"
        for number in range(self.draw(st.integers(1, 2))):
            scope = Scope([], ["%mine"], ["%flag"], ["%selector"])
            last = self.block(scope)
            body = "\n".join(scope.lines)
            parts.append(
                f"%out{number} = sdy.manual_computation({value}, %p, %k) in_shardings=[<@mesh, "
                f'[{{"x", "y"}}, {{}}]>, <@mesh, []>, <@mesh, []>] out_shardings=[<@mesh, '
                f'[{{"x", "y"}}, {{}}]>] manual_axes={{"x", "y"}} (%mine: {VALUE}, '
                f"%flag: tensor<i1>, %selector: tensor<i32>) {{\n{body}\n"
                f"sdy.return {last} : {VALUE}\n}} : ({GLOBAL}, tensor<i1>, tensor<i32>) -> {GLOBAL}"
            )
            value = f"%out{number}"
        sharding = 'sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>'
        return "\n".join(
            [
                "module @random attributes "
                f"{{mhlo.num_partitions = {DEVICES} : i32, mhlo.num_replicas = 1 : i32}} {{",
                'sdy.mesh @mesh = <["x"=2, "y"=2]>',
                *self.functions,
                f"func.func public @main(%whole: {GLOBAL} {{{sharding}}}, %p: tensor<i1>, "
                f"%k: tensor<i32>) -> ({GLOBAL} {{{sharding}}}) {{",
                *parts,
                f"return {value} : {GLOBAL}\n}}\n}}",
            ]
        )


@st.composite
def programs(draw: st.DrawFn, max_depth: int = 3, max_ops: int = 4, variadic: bool = False) -> str:
    """Modules as text, each a function of ([16, 8] f32 sharded by rows, i1, i32).

    `variadic` admits collectives of several operands, which XLA's importer refuses inside a
    manual computation: for tests that do not compile.
    """
    return ProgramBuilder(draw, max_depth, max_ops, variadic).module()

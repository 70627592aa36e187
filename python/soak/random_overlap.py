"""Random programs for eight replicas in which `schedule-overlap` finds something to write.

Values are matrices of 8 x 8 small whole numbers as floats: dots, sums and remainders of them are
exact, so that the same program gives the same bits however XLA fuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEVICES = 8
MATRIX = "tensor<8x8xf32>"
ROW = "tensor<1x8xf32>"
NUMBER = "tensor<f32>"
_GROUPS = (
    "dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>",
    "dense<[[7, 6, 5, 4, 3, 2, 1, 0]]> : tensor<1x8xi64>",
)
_PAIRS = (
    "source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 0]]>"
    " : tensor<8x2xi64>"
)
_MOST_DEEP = 2  # regions in regions

type _Maker = Callable[[Program], str]


@dataclass
class Program:
    """A program in the making: its lines, and the matrices that the next line can read."""

    rng: np.random.Generator
    runs: bool = True  # whether XLA:CPU can run it
    lines: list[str] = field(default_factory=list[str])
    values: list[str] = field(default_factory=list[str])
    depth: int = 0
    names: int = 0

    def pick[T](self, options: Sequence[T]) -> T:
        return options[int(self.rng.integers(len(options)))]

    def value(self) -> str:
        """A matrix that is there, more often one of the last."""
        near = self.values[-4:] if self.rng.random() < 0.7 else self.values
        return self.pick(near)

    def fresh(self) -> str:
        self.names += 1
        return f"%v{self.names}"

    def line(self, text: str) -> str:
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return name

    def small(self, value: str) -> str:
        """A matrix in which nothing grows."""
        seven = self.line(f"stablehlo.constant dense<7.0> : {MATRIX}")
        return self.line(f"stablehlo.remainder {value}, {seven} : {MATRIX}")

    def body(self, values: Sequence[str], count: int) -> tuple[list[str], str]:
        """The lines of a region that may read these values and all around, and its result."""
        lines, around = self.lines, list(self.values)
        self.lines, self.values = [], [*around, *values]
        self.depth += 1
        self.fill(count)
        self.depth -= 1
        made, result = self.lines, self.values[-1]
        self.lines, self.values = lines, around
        return made, result

    def fill(self, count: int) -> None:
        """Adds so many steps."""
        kinds = [*_STEPS, *(_REGIONS if self.depth < _MOST_DEEP else ())]
        shares = np.array([share for _, share in kinds], dtype=float)
        for _ in range(count):
            step = kinds[int(self.rng.choice(len(kinds), p=shares / shares.sum()))][0]
            self.values.append(step(self))

    def text(self, arguments: int) -> str:
        """The module; it returns a few of its values, the last among them."""
        kept = [self.values[-1], *(self.pick(self.values) for _ in range(3))]
        taken = ", ".join(f"%a{i}: {MATRIX}" for i in range(arguments))
        kinds = ", ".join([MATRIX] * len(kept))
        body = "\n".join(self.lines)
        return (
            f"module attributes {{mhlo.num_replicas = {DEVICES} : i32, "
            f"mhlo.num_partitions = 1 : i32}} {{\nfunc.func @main({taken}) -> ({kinds}) {{\n"
            f"{body}\nreturn {', '.join(kept)} : {kinds}\n}}\n}}\n"
        )


def _dot(program: Program) -> str:
    one, other = program.value(), program.value()
    dot = program.line(
        f"stablehlo.dot_general {one}, {other}, contracting_dims = [1] x [0] : "
        f"({MATRIX}, {MATRIX}) -> {MATRIX}"
    )
    return program.small(dot)


def _elementwise(program: Program) -> str:
    op = program.pick(("add", "subtract", "maximum", "multiply"))
    made = program.line(f"stablehlo.{op} {program.value()}, {program.value()} : {MATRIX}")
    return program.small(made)


def _row(program: Program) -> str:
    at = int(program.rng.integers(8))
    return program.line(
        f"stablehlo.slice {program.value()} [{at}:{at + 1}, 0:8] : ({MATRIX}) -> {ROW}"
    )


def _groups(program: Program) -> str:
    return f"replica_groups = {program.pick(_GROUPS)}"


def _gathered(program: Program, row: str) -> str:
    return program.line(
        f'"stablehlo.all_gather"({row}) {{all_gather_dim = 0 : i64, {_groups(program)}}} : '
        f"({ROW}) -> {MATRIX}"
    )


def _gather(program: Program) -> str:
    return _gathered(program, _row(program))


def _gather_twice(program: Program) -> str:
    row = _row(program)
    one, other = _gathered(program, row), _gathered(program, row)
    program.values.append(one)
    return other


def _gather_several(program: Program) -> str:
    one, other = _row(program), _row(program)
    name = program.fresh()
    program.lines.append(
        f'{name}:2 = "stablehlo.all_gather"({one}, {other}) {{all_gather_dim = 0 : i64, '
        f"{_groups(program)}}} : ({ROW}, {ROW}) -> ({MATRIX}, {MATRIX})"
    )
    program.values.append(f"{name}#0")
    return f"{name}#1"


def _region() -> str:
    return (
        f"({{\n^bb0(%l: {NUMBER}, %r: {NUMBER}):\n%s = stablehlo.add %l, %r : {NUMBER}\n"
        f"stablehlo.return %s : {NUMBER}\n}})"
    )


def _all_reduce(program: Program) -> str:
    made = program.line(
        f'"stablehlo.all_reduce"({program.value()}) {_region()} {{{_groups(program)}}} : '
        f"({MATRIX}) -> {MATRIX}"
    )
    return program.small(made)


def _all_reduce_several(program: Program) -> str:
    name = program.fresh()
    program.lines.append(
        f'{name}:2 = "stablehlo.all_reduce"({program.value()}, {program.value()}) {_region()} '
        f"{{{_groups(program)}}} : ({MATRIX}, {MATRIX}) -> ({MATRIX}, {MATRIX})"
    )
    program.values.append(program.small(f"{name}#0"))
    return program.small(f"{name}#1")


def _reduce_scatter(program: Program) -> str:
    row = program.line(
        f'"stablehlo.reduce_scatter"({program.value()}) {_region()} {{scatter_dimension = 0 : i64, '
        f"{_groups(program)}}} : ({MATRIX}) -> {ROW}"
    )
    spread = program.line(f"stablehlo.broadcast_in_dim {row}, dims = [0, 1] : ({ROW}) -> {MATRIX}")
    return program.small(spread)


def _all_to_all(program: Program) -> str:
    return program.line(
        f'"stablehlo.all_to_all"({program.value()}) {{split_dimension = 0 : i64, '
        f"concat_dimension = 0 : i64, split_count = 8 : i64, {_groups(program)}}} : "
        f"({MATRIX}) -> {MATRIX}"
    )


def _permute(program: Program) -> str:
    return program.line(
        f'"stablehlo.collective_permute"({program.value()}) {{{_PAIRS}}} : ({MATRIX}) -> {MATRIX}'
    )


def _async(program: Program) -> str:
    row = _row(program)
    start = program.line(
        f'"stablehlo.async_start"({row}) ({{\n^bb0(%p: {ROW}):\n'
        f'%q = "stablehlo.all_gather"(%p) {{all_gather_dim = 0 : i64, {_groups(program)}}} : '
        f"({ROW}) -> {MATRIX}\nstablehlo.return %q : {MATRIX}\n}}) : "
        f"({ROW}) -> !stablehlo.future<{MATRIX}>"
    )
    program.fill(int(program.rng.integers(3)))
    return program.line(
        f'"stablehlo.async_done"({start}) : (!stablehlo.future<{MATRIX}>) -> {MATRIX}'
    )


def _rows_sum(program: Program) -> str:
    zero = program.line(f"stablehlo.constant dense<0.0> : {NUMBER}")
    value = program.value()
    dims = program.pick(("[1]", "[0, 1]"))
    kind = "tensor<8xf32>" if dims == "[1]" else NUMBER
    total = program.line(
        f"stablehlo.reduce({value} init: {zero}) applies stablehlo.add across dimensions = {dims} "
        f": ({MATRIX}, {NUMBER}) -> {kind}"
    )
    over = "[0]" if dims == "[1]" else "[]"
    spread = program.line(
        f"stablehlo.broadcast_in_dim {total}, dims = {over} : ({kind}) -> {MATRIX}"
    )
    return program.small(spread)


def _convolution(program: Program) -> str:
    image, window = "tensor<1x8x8x1xf32>", "tensor<3x3x1x1xf32>"
    one = program.line(f"stablehlo.reshape {program.value()} : ({MATRIX}) -> {image}")
    corner = program.line(
        f"stablehlo.slice {program.value()} [0:3, 0:3] : ({MATRIX}) -> tensor<3x3xf32>"
    )
    other = program.line(f"stablehlo.reshape {corner} : (tensor<3x3xf32>) -> {window}")
    made = program.line(
        f"stablehlo.convolution({one}, {other}) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->"
        "[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, "
        f"feature_group_count = 1 : i64}} : ({image}, {window}) -> {image}"
    )
    return program.small(program.line(f"stablehlo.reshape {made} : ({image}) -> {MATRIX}"))


def _custom_call(program: Program) -> str:
    program.runs = False
    effect = program.pick(("true", "false"))
    return program.line(
        f"stablehlo.custom_call @kernel({program.value()}, {program.value()}) "
        f"{{has_side_effect = {effect}}} : ({MATRIX}, {MATRIX}) -> {MATRIX}"
    )


def _effect_alone(program: Program) -> str:
    program.runs = False
    one, other = program.value(), program.value()
    program.lines.append(
        f"stablehlo.custom_call @print({one}, {other}) {{has_side_effect = true}} : "
        f"({MATRIX}, {MATRIX}) -> ()"
    )
    return one


def _dead(program: Program) -> str:
    _gather(program)
    return program.value()


def _loop(program: Program) -> str:
    carried, other = program.value(), program.value()
    count, one, trips = (
        program.line(f"stablehlo.constant dense<{number}> : tensor<i32>")
        for number in (0, 1, int(program.rng.integers(1, 4)))
    )
    i, x, y, name = (program.fresh() for _ in range(4))
    lines, result = program.body([x, y], int(program.rng.integers(2, 6)))
    kinds = f"tensor<i32>, {MATRIX}, {MATRIX}"
    program.lines.append(
        f"{name}:3 = stablehlo.while({i} = {count}, {x} = {carried}, {y} = {other}) : {kinds}\n"
        f"cond {{\n%c = stablehlo.compare LT, {i}, {trips} : "
        "(tensor<i32>, tensor<i32>) -> tensor<i1>\nstablehlo.return %c : tensor<i1>\n} do {\n"
        + "\n".join(lines)
        + f"\n%n = stablehlo.add {i}, {one} : tensor<i32>\n"
        f"stablehlo.return %n, {result}, {program.pick((x, y))} : {kinds}\n}}"
    )
    program.values.append(f"{name}#2")
    return f"{name}#1"


def _condition(program: Program) -> str:
    """A branch that every device takes: what it hangs on is summed over all of them."""
    zero = program.line(f"stablehlo.constant dense<0.0> : {NUMBER}")
    number = program.line(
        f"stablehlo.reduce({_all_reduce(program)} init: {zero}) applies stablehlo.add across "
        f"dimensions = [0, 1] : ({MATRIX}, {NUMBER}) -> {NUMBER}"
    )
    chosen = program.line(
        f"stablehlo.compare GT, {number}, {zero} : ({NUMBER}, {NUMBER}) -> tensor<i1>"
    )
    bodies = [program.body([], int(program.rng.integers(1, 5))) for _ in range(2)]
    regions = ", ".join(
        "{\n" + "\n".join(lines) + f"\nstablehlo.return {result} : {MATRIX}\n}}"
        for lines, result in bodies
    )
    return program.line(f'"stablehlo.if"({chosen}) ({regions}) : (tensor<i1>) -> {MATRIX}')


_STEPS: tuple[tuple[_Maker, float], ...] = (
    (_dot, 8),
    (_elementwise, 2),
    (_gather, 4),
    (_gather_twice, 0.5),
    (_gather_several, 0.7),
    (_all_reduce, 1.5),
    (_all_reduce_several, 0.7),
    (_reduce_scatter, 1.5),
    (_all_to_all, 1),
    (_permute, 1.5),
    (_async, 0.4),
    (_rows_sum, 2),
    (_convolution, 0.6),
    (_custom_call, 0.15),
    (_effect_alone, 0.15),
    (_dead, 0.3),
)
_REGIONS: tuple[tuple[_Maker, float], ...] = ((_loop, 0.8), (_condition, 0.7))


def random_program(seed: int, size: int | None = None) -> tuple[str, bool]:
    """The text of a program, and whether XLA:CPU can run it."""
    rng = np.random.default_rng(seed)
    arguments = int(rng.integers(1, 5))
    program = Program(rng, values=[f"%a{i}" for i in range(arguments)])
    program.fill(int(rng.integers(8, 40)) if size is None else size)
    return program.text(arguments), program.runs


def random_arguments(text: str, seed: int) -> list[list[Any]]:
    """`[argument][device]`: small whole numbers."""
    rng = np.random.default_rng(seed)
    count = text.split("@main(", 1)[1].split(")", 1)[0].count("%")
    return [
        [rng.integers(-3, 4, (8, 8)).astype(np.float32) for _ in range(DEVICES)]
        for _ in range(count)
    ]

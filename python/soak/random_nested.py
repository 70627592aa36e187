"""Random programs of four devices that run layers in a loop in a loop over microbatches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

GROUPS = {"all": "[[0, 1, 2, 3]]", "near": "[[0, 1], [2, 3]]", "far": "[[0, 2], [1, 3]]"}
SIZES = {"all": 4, "near": 2, "far": 2}
_CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"


def tensor(shape: list[int], element: str = "f32") -> str:
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


@dataclass
class Text:
    """Ops as they are written."""

    lines: list[str] = field(default_factory=list[str])
    count: int = 0

    def add(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"%v{self.count} = {text}")
        return f"%v{self.count}"

    def gather(self, value: str, shape: list[int], dim: int, groups: str) -> tuple[str, list[int]]:
        whole = [size * SIZES[groups] if i == dim else size for i, size in enumerate(shape)]
        text = (
            f'"stablehlo.all_gather"({value}) {{all_gather_dim = {dim} : i64, {_CHANNEL}, '
            f"replica_groups = {dense(groups)}, use_global_device_ids}} : "
            f"({tensor(shape)}) -> {tensor(whole)}"
        )
        return self.add(text), whole

    def reduce(self, value: str, shape: list[int], scatter: int | None, groups: str) -> str:
        part = [s // SIZES[groups] if i == scatter else s for i, s in enumerate(shape)]
        name = "all_reduce" if scatter is None else "reduce_scatter"
        where = "" if scatter is None else f"scatter_dimension = {scatter} : i64, "
        text = (
            f'"stablehlo.{name}"({value}) ({{\n^bb0(%l: tensor<f32>, %r: tensor<f32>):\n'
            f"%s = stablehlo.add %l, %r : tensor<f32>\nstablehlo.return %s : tensor<f32>\n}}) "
            f"{{{where}{_CHANNEL}, replica_groups = {dense(groups)}, use_global_device_ids}} : "
            f"({tensor(shape)}) -> {tensor(part)}"
        )
        return self.add(text)

    def unary(self, name: str, value: str, shape: list[int]) -> str:
        return self.add(f"stablehlo.{name} {value} : {tensor(shape)}")

    def binary(self, name: str, one: str, other: str, shape: list[int]) -> str:
        return self.add(f"stablehlo.{name} {one}, {other} : {tensor(shape)}")

    def reshape(self, value: str, shape: list[int], new: list[int]) -> str:
        return self.add(f"stablehlo.reshape {value} : ({tensor(shape)}) -> {tensor(new)}")

    def splat(self, number: float, shape: list[int]) -> str:
        return self.add(f"stablehlo.constant dense<{number:.1f}> : {tensor(shape)}")

    def row(self, value: str, shape: list[int], starts: list[str], sizes: list[int]) -> str:
        types = ", ".join([tensor(shape), *["tensor<i32>"] * len(starts)])
        return self.add(
            f"stablehlo.dynamic_slice {value}, {', '.join(starts)}, sizes = {sizes} : "
            f"({types}) -> {tensor(sizes)}"
        )

    def update(
        self, value: str, shape: list[int], part: str, starts: list[str], sizes: list[int]
    ) -> str:
        types = ", ".join([tensor(shape), tensor(sizes), *["tensor<i32>"] * len(starts)])
        return self.add(
            f"stablehlo.dynamic_update_slice {value}, {part}, {', '.join(starts)} : "
            f"({types}) -> {tensor(shape)}"
        )

    def entry(self, table: str, shape: list[int], starts: list[str]) -> str:
        """A scalar of a table of integers."""
        types = ", ".join([tensor(shape, "i32"), *["tensor<i32>"] * len(starts)])
        ones = [1] * len(shape)
        cell = self.add(
            f"stablehlo.dynamic_slice {table}, {', '.join(starts)}, sizes = {ones} : "
            f"({types}) -> {tensor(ones, 'i32')}"
        )
        return self.add(f"stablehlo.reshape {cell} : ({tensor(ones, 'i32')}) -> tensor<i32>")


def dense(groups: str) -> str:
    rows = GROUPS[groups]
    count = rows.count("[") - 1
    return f"dense<{rows}> : tensor<{count}x{SIZES[groups]}xi64>"


def halves(numbers: list[int]) -> list[list[int]]:
    """A table of two rows."""
    return [numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]]


def random_nested_program(chosen: random.Random) -> str:
    """Weights of chunks of layers are gathered, gradients reduced and added to rows or to sums."""
    chunks, layers, times = chosen.choice([1, 2]), chosen.choice([2, 3]), chosen.choice([2, 3, 5])
    groups = chosen.choice(list(GROUPS))
    by_table = chosen.random() < 0.6
    part = [2, 4 // SIZES[groups]]
    stack = [chunks, layers, *part]
    scatter = chosen.choice([None, 0, 1])
    whole = [4, 4]
    grad = [s // SIZES[groups] if i == scatter else s for i, s in enumerate(whole)]
    scaled, flipped = chosen.random() < 0.4, chosen.random() < 0.4
    sums = [chunks, layers, *grad]
    t = Text()
    entries = [chosen.randrange(chunks) for _ in range(2 * times)]
    valid = [chosen.randrange(2) for _ in range(2 * times)]
    head = [
        "%zero = stablehlo.constant dense<0> : tensor<i32>",
        "%one = stablehlo.constant dense<1> : tensor<i32>",
        "%two = stablehlo.constant dense<2> : tensor<i32>",
        f"%times = stablehlo.constant dense<{times}> : tensor<i32>",
        f"%layers = stablehlo.constant dense<{layers}> : tensor<i32>",
        f"%last = stablehlo.constant dense<{layers - 1}> : tensor<i32>",
        f"%chunks = stablehlo.constant dense<{halves(entries)}> : tensor<2x{times}xi32>",
        f"%work = stablehlo.constant dense<{halves(valid)}> : tensor<2x{times}xi32>",
        "%id = stablehlo.partition_id : tensor<ui32>",
        "%device = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>",
        "%stage = stablehlo.divide %device, %two : tensor<i32>",
        f"%none = stablehlo.constant dense<0.0> : {tensor(sums)}",
    ]
    # In the loop over layers.
    index = "%i"
    if chosen.random() < 0.5:
        index = t.add("stablehlo.subtract %last, %i : tensor<i32>")
    row = t.row("%w", stack, ["%chunk", index, "%zero", "%zero"], [1, 1, *part])
    weight = t.reshape(row, [1, 1, *part], part)
    if scaled:
        weight = t.binary("multiply", weight, t.splat(2, part), part)
    if chosen.random() < 0.3:
        weight = t.unary("optimization_barrier", weight, part)
    gathered, full = t.gather(weight, part, 1, groups)  # 2 x 4
    product = t.add(
        f"stablehlo.dot_general %h, {gathered}, contracting_dims = [1] x [1] : "
        f"({tensor([4, 4])}, {tensor(full)}) -> {tensor([4, 2])}"
    )
    twice = t.add(
        f"stablehlo.concatenate {product}, {product}, dim = 1 : "
        f"({tensor([4, 2])}, {tensor([4, 2])}) -> {tensor([4, 4])}"
    )
    low, high = t.splat(-3, [4, 4]), t.splat(3, [4, 4])
    h = t.add(f"stablehlo.clamp {low}, {twice}, {high} : {tensor([4, 4])}")
    gradient = t.add(
        f"stablehlo.dot_general %h, {h}, contracting_dims = [0] x [0] : "
        f"({tensor([4, 4])}, {tensor([4, 4])}) -> {tensor([4, 4])}"
    )
    reduced = t.reduce(gradient, whole, scatter, groups)
    if flipped:
        reduced = t.unary("negate", reduced, grad)
    term = t.reshape(reduced, grad, [1, 1, *grad])
    starts = ["%chunk", index, "%zero", "%zero"]
    old = t.row("%g", sums, starts, [1, 1, *grad])
    new = t.binary("add", old, term, [1, 1, *grad])
    if chosen.random() < 0.6:
        new = t.add(f"stablehlo.select %valid, {new}, {old} : tensor<i1>, {tensor([1, 1, *grad])}")
    added = t.update("%g", sums, new, starts, [1, 1, *grad])
    following = t.add("stablehlo.add %i, %one : tensor<i32>")
    inner, t.lines = t.lines, []
    # In the loop over microbatches.
    chunk = t.entry("%chunks", [2, times], ["%stage", "%m"])
    work = t.entry("%work", [2, times], ["%stage", "%m"])
    named = [
        f"%chunk = stablehlo.add {chunk if by_table else '%zero'}, %zero : tensor<i32>",
        f"%valid = stablehlo.compare EQ, {work}, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>",
    ]
    middle = [*t.lines, *named]
    h_type, g_type = tensor([4, 4]), tensor(sums)
    start = chosen.choice(["%none", "%sums"])
    carried = chosen.random() < 0.6
    inner_start = "%sums" if carried else "%none"
    out = "%sums_next = stablehlo.add %sums, %y#2 : " + g_type
    return "\n".join(
        [
            "module @nested attributes "
            "{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {",
            f"func.func @main(%x: {h_type}, %w: {tensor(stack)}, %given: {g_type}) -> "
            f"({h_type}, {g_type}) {{",
            *head,
            f"%z:3 = stablehlo.while(%m = %zero, %hidden = %x, %sums = "
            f"{'%none' if start == '%none' else '%given'}) : tensor<i32>, {h_type}, {g_type}",
            "cond {",
            "%more = stablehlo.compare LT, %m, %times : (tensor<i32>, tensor<i32>) -> tensor<i1>",
            "stablehlo.return %more : tensor<i1>",
            "} do {",
            *middle,
            f"%y:3 = stablehlo.while(%i = %zero, %h = %hidden, %g = {inner_start}) : tensor<i32>, "
            f"{h_type}, {g_type}",
            "cond {",
            "%more = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>",
            "stablehlo.return %more : tensor<i1>",
            "} do {",
            *inner,
            f"stablehlo.return {following}, {h}, {added} : tensor<i32>, {h_type}, {g_type}",
            "}",
            *([] if carried else [out]),
            "%next = stablehlo.add %m, %one : tensor<i32>",
            f"stablehlo.return %next, %y#1, {'%y#2' if carried else '%sums_next'} : tensor<i32>, "
            f"{h_type}, {g_type}",
            "}",
            f"return %z#1, %z#2 : {h_type}, {g_type}",
            "}",
            "}",
        ]
    )

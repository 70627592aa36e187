"""Random programs of four devices with a loop in which a branch gathers, reduces and adds up."""

from __future__ import annotations

import random

from random_nested import GROUPS, SIZES, Text, halves, tensor

_WHOLE = [4, 4]


def random_branching_program(chosen: random.Random) -> str:
    """In some iterations weights are gathered, and a product of them is reduced and added to a sum.

    The iterations are the same for all devices, or for the two of a group. What is gathered may
    follow from the iteration, the sum may be read besides, or be kept otherwise in the other
    branch; what is between the collective and the sum may be linear or not.
    """
    by_stage = chosen.random() < 0.3
    groups = "near" if by_stage else chosen.choice(list(GROUPS))
    times = chosen.choice([1, 2, 3, 5])
    part = [4, 4 // SIZES[groups]]
    scatter = chosen.choice([None, None, 0, 1])
    sums = [s // SIZES[groups] if i == scatter else s for i, s in enumerate(_WHOLE)]
    moving, read, otherwise = (chosen.random() < odds for odds in (0.3, 0.15, 0.15))
    t = Text()
    weight = t.binary("add", "%w", "%m_all", part) if moving else "%w"
    if chosen.random() < 0.4:
        weight = t.binary("multiply", weight, t.splat(2, part), part)
    gathered, whole = t.gather(weight, part, 1, groups)
    product = t.add(
        f"stablehlo.dot_general %h, {gathered}, contracting_dims = [1] x [0] : "
        f"({tensor(_WHOLE)}, {tensor(whole)}) -> {tensor(_WHOLE)}"
    )
    low, high = t.splat(-3, _WHOLE), t.splat(3, _WHOLE)
    h = t.add(f"stablehlo.clamp {low}, {product}, {high} : {tensor(_WHOLE)}")
    value = t.reduce(h, _WHOLE, scatter, groups)
    change = chosen.choice(["negate", "double", "abs", "none", "none"])
    if change == "double":
        value = t.binary("multiply", value, t.splat(2, sums), sums)
    elif change != "none":
        value = t.unary(change, value, sums)
    operands = ["%sum", value]
    chosen.shuffle(operands)
    total = t.binary("add", operands[0], operands[1], sums)
    inside, t.lines = t.lines, []
    kept = t.binary("add", "%sum", "%sum", sums) if otherwise else "%sum"
    other, t.lines = t.lines, []
    h_type, w_type, s_type = tensor(_WHOLE), tensor(part), tensor(sums)
    work = t.entry("%work", [2, times], ["%stage" if by_stage else "%zero", "%m"])
    table = halves([chosen.randrange(2) for _ in range(2 * times)])
    low, high = t.splat(-3, sums), t.splat(3, sums)
    seen = t.add(f"stablehlo.clamp {low}, %sum, {high} : {s_type}") if read else None
    start = chosen.choice(["%none", "%given"])
    return "\n".join(
        [
            "module @branching attributes "
            "{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {",
            f"func.func @main(%x: {h_type}, %w: {w_type}, %given: {s_type}) -> "
            f"({h_type}, {s_type}, {s_type}) {{",
            "%zero = stablehlo.constant dense<0> : tensor<i32>",
            "%one = stablehlo.constant dense<1> : tensor<i32>",
            "%two = stablehlo.constant dense<2> : tensor<i32>",
            f"%times = stablehlo.constant dense<{times}> : tensor<i32>",
            f"%work = stablehlo.constant dense<{table}> : tensor<2x{times}xi32>",
            "%id = stablehlo.partition_id : tensor<ui32>",
            "%device = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>",
            "%stage = stablehlo.divide %device, %two : tensor<i32>",
            f"%none = stablehlo.constant dense<0.0> : {s_type}",
            f"%z:4 = stablehlo.while(%m = %zero, %h = %x, %sum = {start}, %seen = %none) : "
            f"tensor<i32>, {h_type}, {s_type}, {s_type}",
            "cond {",
            "%more = stablehlo.compare LT, %m, %times : (tensor<i32>, tensor<i32>) -> tensor<i1>",
            "stablehlo.return %more : tensor<i1>",
            "} do {",
            *t.lines,
            "%number = stablehlo.convert %m : (tensor<i32>) -> tensor<f32>",
            f"%m_all = stablehlo.broadcast_in_dim %number, dims = [] : (tensor<f32>) -> {w_type}",
            f"%due = stablehlo.compare EQ, {work}, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>",
            '%y:2 = "stablehlo.if"(%due) ({',
            *inside,
            f"stablehlo.return {h}, {total} : {h_type}, {s_type}",
            "}, {",
            *other,
            f"stablehlo.return %h, {kept} : {h_type}, {s_type}",
            f"}}) : (tensor<i1>) -> ({h_type}, {s_type})",
            "%next = stablehlo.add %m, %one : tensor<i32>",
            f"stablehlo.return %next, %y#0, %y#1, {seen or '%seen'} : "
            f"tensor<i32>, {h_type}, {s_type}, {s_type}",
            "}",
            f"return %z#1, %z#2, %z#3 : {h_type}, {s_type}, {s_type}",
            "}",
            "}",
        ]
    )

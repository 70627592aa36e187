"""Random training steps with random choices: bit for bit the same, in the reference interpreter."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from dimension_cases import run
from random_steps import random_step
from soaking import first

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.dialect.device_placement import placement
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.walk import entry_function, walk
from stablehlo_tools.transforms.parts.offload.rows_to_host import movable, move
from stablehlo_tools.transforms.parts.rematerialize.memory_price import (
    PlanSetting,
    RematerializationSearch,
    prepare,
)
from stablehlo_tools.transforms.parts.rematerialize.recomputation_prices import (
    RecomputationPrices,
    forget_numbers,
)


def inputs(module: ir.Module, seed: int) -> list[np.ndarray]:
    """Random arguments of a program."""
    draw = np.random.default_rng(seed)
    types = [str(a.type) for a in entry_function(module).regions[0].blocks[0].arguments]
    arrays: list[np.ndarray] = []
    for type_ in types:
        *shape, element = re.findall(r"\w+", type_)[1].split("x")
        sizes = [int(size) for size in shape]
        is_key = element == "i32"
        numbers = draw.integers(0, 1 << 31, sizes) if is_key else draw.normal(size=sizes)
        arrays.append(numbers.astype(np.int32 if is_key else np.float32))
    return arrays


def _move_all(module: ir.Module) -> None:
    """Moves all rows to the host's memory and back; without the annotations, which the interpreter
    does not know."""
    for rows in movable(module):
        move(rows)
    placed: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if placement(op) is not None:
            placed.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for op in placed:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


@pytest.mark.parametrize("seed", first(6, range(1000)))
def test_values_are_bitwise_the_same(seed: int):
    draw = random.Random(seed)
    hardware = load_hardware("h100")
    module = artifact.from_exported(random_step(seed)).module
    arguments = inputs(module, seed)
    expected = run(module, arguments)
    draft = copy_module(module)
    prepare(draft)
    prices = RecomputationPrices.from_module(draft, hardware)
    choice = RematerializationSearch(draft, prices, hardware, lambda m: m)
    settings = [level.setting for of_stride in choice.settings() for level in of_stride]
    some = {settings[0], settings[-1], draw.choice(settings)} if settings else set[PlanSetting]()
    for setting in some:  # none of a step whose layers come out constant
        copy = choice.apply_setting(setting)
        if draw.random() < 0.5:
            _move_all(copy)
        forget_numbers(copy)
        copy.operation.verify()
        for one, other in zip(expected, run(copy, arguments), strict=True):
            np.testing.assert_array_equal(one, other)

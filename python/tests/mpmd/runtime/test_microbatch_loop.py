"""The program of a single rank, with its calls in a loop over microbatches."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from mpmd_steps import Step

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.dialect.names import CALL
from stablehlo_tools.ir.clone import copy_module
from stablehlo_tools.ir.walk import callee_name, entry_function, ops_named
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.manifest import phase_of
from stablehlo_tools.mpmd.runtime.microbatch_loop import in_a_loop

STEP = Step(microbatches=5)


def program(schedule: str, ranks: int = 1, step: Step = STEP) -> ir.Module:
    request = ExpansionRequest(schedule, ranks, load_hardware("h100"))
    return expand_mpmd(from_exported(step.export()), request).modules[0]


def called(module: ir.Module) -> list[str]:
    """The phases that are called, in the order of the text."""
    names = [callee_name(call) for call in ops_named(entry_function(module), {CALL})]
    return [name for name in names if phase_of(name)]


def outputs(module: ir.Module, arguments: list[np.ndarray]) -> list[np.ndarray]:
    compiled = bindings.compile_kept(bindings.write_bytecode(module), jax.devices()[:1])
    results = compiled.execute_sharded([jax.device_put(value) for value in arguments])
    return [np.asarray(parts[0]) for parts in results.disassemble_into_single_device_arrays()]


def random_arguments(module: ir.Module) -> list[np.ndarray]:
    random, values = np.random.default_rng(0), list[np.ndarray]()
    for argument in entry_function(module).regions[0].blocks[0].arguments:
        type_ = ir.RankedTensorType(argument.type)
        if isinstance(type_.element_type, ir.FloatType):
            values.append(random.uniform(0.1, 0.5, type_.shape).astype(np.float32))
        else:
            values.append(random.integers(0, STEP.words, type_.shape).astype(np.int32))
    return values


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_microbatches_one_after_the_other_are_a_loop_with_the_same_values(schedule: str):
    module = program(schedule)
    before = str(module)
    looped = in_a_loop(copy_module(module))
    assert looped is not None
    assert looped.operation.verify()
    assert len(called(module)) == STEP.microbatches * len(called(looped))
    arguments = random_arguments(module)
    for one, other in zip(outputs(module, arguments), outputs(looped, arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert str(module) == before


def test_a_rank_of_several_devices_has_a_loop_in_its_manual_computation():
    module = program("1f1b", step=Step(microbatches=4, devices=2))
    looped = in_a_loop(module)
    assert looped is not None
    assert looped.operation.verify()
    assert len(ops_named(looped.operation, {CALL})) < len(ops_named(module.operation, {CALL}))


def test_other_orders_and_other_ranks_are_no_loop():
    assert in_a_loop(program("gpipe")) is None  # all forwards first
    assert in_a_loop(program("1f1b", ranks=2)) is None

"""shard-optimizer on steps with optax's optimizers: values, where state lies, and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from exact_comparison import assert_identical
from models.devices import mesh
from optimizer_steps import OPTIMIZERS, data_parallel_step
from soaking import first

import stablehlo_tools
from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.transforms.shard_optimizer import ShardOptimizerPass

DIVIDED = ("adamw", "lion", "momentum")
PARAMETERS = 4
ON = mesh(data=4, model=2)
ONE_EACH = [("adamw", False), ("adafactor", False)]  # divided, and not
OTHERS = [(n, scan) for scan in (False, True) for n in OPTIMIZERS if (n, scan) not in ONE_EACH]


@pytest.mark.parametrize("case", first(2, ONE_EACH + OTHERS), ids=str)
def test_values(case: tuple[str, bool]):
    name, scan = case
    before = artifact.from_exported(data_parallel_step(name, scan=scan))
    after = before.copy()
    ShardOptimizerPass().run(after.module, Diagnostics())
    assert_identical(before, after)


@pytest.mark.parametrize("name", DIVIDED)
def test_state_is_put_where_it_is_used(name: str):
    """The shardings of the artifact say so, of arguments and results; those of parameters stay."""
    before = data_parallel_step(name)
    after = stablehlo_tools.transform(before, "shard-optimizer")
    places = zip(
        before.in_avals,
        specs(before.in_shardings_jax()),
        specs(after.in_shardings_jax()),
        strict=True,
    )
    changed = [aval.shape for aval, one, other in places if one != other]
    moments = [aval.shape for aval in before.in_avals[PARAMETERS:-2] if len(aval.shape) == 2]
    assert changed == moments
    results = zip(
        specs(before.out_shardings_jax(ON)), specs(after.out_shardings_jax(ON)), strict=True
    )
    assert sum(one != other for one, other in results) == len(moments)


def specs(shardings: Sequence[Any]) -> list[str]:
    """How each array is divided."""
    return [str(each.spec) for each in shardings]


@pytest.mark.parametrize("scan", [False, True])
def test_gradients_are_reduced_to_parts(scan: bool):
    """At a real size: no gradient is summed whole, and a device needs less memory."""
    hardware = load_hardware("h100")
    step = data_parallel_step("adamw", width=2048, scan=scan, batch=16_384)
    steps = "partition{hardware=h100},create-reduce-scatter"
    before = artifact.from_exported(stablehlo_tools.transform(step, steps))
    after = artifact.from_exported(stablehlo_tools.transform(step, f"shard-optimizer,{steps}"))
    facts = ModuleFacts.from_module(after.module)
    large = [c for c in find_collectives(after.module) if (c.bytes_in or 0) > 1 << 20]
    over_data = [c.kind for c in large if (0, 2, 4, 6) in (facts.groups(c) or ())]
    assert "reduce_scatter" in over_data
    assert "all_reduce" not in over_data
    sizes = [expected_run(each.module, hardware).peak_bytes for each in (before, after)]
    assert sizes[1] < 0.9 * sizes[0]


def test_what_products_depend_on_stays():
    """The momentum of Muon goes through products, which no part of it has the update of."""
    before = data_parallel_step("muon")
    with pytest.raises(ToolError, match=r"\(P3\)"):
        stablehlo_tools.transform(before, "shard-optimizer")


def test_names_what_it_divides():
    diagnostics = Diagnostics()
    program = artifact.from_exported(data_parallel_step("lion"))
    ShardOptimizerPass(axis="data", explain=True).run(program.module, diagnostics)
    texts = [each.message for each in diagnostics.collected]
    assert "4 arguments that are state are divided over 'data'" in texts[0]
    assert any(text.startswith("state[1][") for text in texts[1:])


def test_an_axis_that_nothing_is_whole_along_is_refused():
    once = stablehlo_tools.transform(data_parallel_step("adamw"), "shard-optimizer{axis=data}")
    with pytest.raises(ToolError, match=r"no state of an optimizer is whole along 'data'.*\(P3\)"):
        stablehlo_tools.transform(once, "shard-optimizer{axis=data}")
    with pytest.raises(
        ToolError, match=r"an axis 'layers' .*\(P2\): there are data of 4, model of 2"
    ):
        stablehlo_tools.transform(once, "shard-optimizer{axis=layers}")

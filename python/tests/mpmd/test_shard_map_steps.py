"""`expand-mpmd` of steps whose layers stand in a shard_map over other axes than the stages'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shard_map_steps import (  # first: sets up the devices
    BOTH,
    MEGATRON,
    Form,
    mean_over,
    shard_map_step,
)
from soaking import first

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set

REQUEST = ExpansionRequest("zb-h1", 2, load_hardware("h100"), None, 4, axis="stage")


FORMS = {
    "accumulated": Form(checks=False, joined=mean_over("data"), microbatches=2),
    "megatron": Form(axes=BOTH, tensor="model", specs=MEGATRON, checks=False),
    "data": Form(),
}


@pytest.mark.parametrize("name", first(1, FORMS))
def test_a_step_is_laid_along_the_stages(name: str, tmp_path: Path):
    given = artifact.from_exported(shard_map_step(FORMS[name]).exported)
    asked = REQUEST if FORMS[name].microbatches == 1 else replace(REQUEST, microbatches=None)
    found = expand_mpmd(given, asked)
    write(tmp_path, found.manifest, found.modules)
    ranks = load(tmp_path)
    assert prove(ranks).is_proven
    assert run_set(ranks, given, SetOptions()).same


def test_what_one_program_does_not_compute_is_refused():
    form = Form(checks=False, joined=lambda value, gradients: (value * value, gradients))
    given = artifact.from_exported(shard_map_step(form).exported)
    with pytest.raises(ToolError, match=r'expand-mpmd: .+ axis "data" cannot be left .+ \(P8\)'):
        expand_mpmd(given, REQUEST)

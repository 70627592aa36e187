"""Compiles random programs, threaded, with one compiler in one process, and reads their order back.

    python random_order.py cpu|gpu|tpu COUNT SEED

Prints one line of JSON: how many programs and collectives were tried, and how many of the programs
the compiler had reordered before threading. Exits 1 at the first program that is out of order.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, seed, settings
from hypothesis import strategies as st
from random_programs import SLOW, programs

from stablehlo_tools.targets.topologies import Target, environment, topology

DEVICES = 4
PIPELINES = (
    "thread-tokens",
    "thread-tokens{form=composite}",
    "thread-tokens{minimal}",
    "thread-tokens{scope=group}",
)


def run(target: Target, count: int, number: int) -> dict[str, Any]:
    """Tries `count` random programs, the pipelines in turn; raises AssertionError on disorder."""
    from stablehlo_tools.analysis.collectives import find_collectives
    from stablehlo_tools.api import transforming
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.passes.pipeline import Pipeline

    devices = _devices(target)
    pipelines = [Pipeline.parse(text) for text in PIPELINES]
    totals = {"programs": 0, "collectives": 0, "reordered_before": 0, "deleted": 0}

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=SLOW)
    @given(programs(), st.sampled_from(pipelines))
    def check(text: str, pipeline: Pipeline) -> None:
        plain = artifact.parse(text.encode())
        threaded = plain.copy()
        transforming.run_pipeline(threaded, pipeline)
        after = _order(threaded, target, devices)
        assert after.same_order, after.difference
        totals["programs"] += 1
        totals["collectives"] += len(find_collectives(plain.module))
        totals["reordered_before"] += not _keeps_order(plain, target, devices)
        totals["deleted"] += len(after.deleted)

    check()
    return {"target": target.value, **totals}


def _devices(target: Target) -> list[Any]:
    from stablehlo_tools import bindings

    if target is Target.CPU:
        import jax

        return jax.devices()[:DEVICES]
    machine = topology(target, DEVICES)
    return bindings.described_devices(target.platform, machine.name, machine.config)


def _keeps_order(program: Any, target: Target, devices: list[Any]) -> bool:
    """Whether the plain program keeps its order; one that the compiler fails on does not."""
    import jax

    try:
        return _order(program, target, devices).same_order
    except jax.errors.JaxRuntimeError:  # seen: RET_CHECK failures of XLA:TPU on plain programs
        return False


def _order(program: Any, target: Target, devices: list[Any]) -> Any:
    from stablehlo_tools import bindings
    from stablehlo_tools.targets.preparation import prepare
    from stablehlo_tools.targets.schedule_order import compare_order
    from stablehlo_tools.targets.scheduled_hlo import parse_schedule

    prepared = prepare(program, target)
    module = bindings.parse_module(prepared.bytecode, bindings.new_context())
    text, _ = bindings.compile_ahead_of_time(module, 1, DEVICES, devices, tuple_arguments=False)
    return compare_order(prepared.program, parse_schedule(text))


if __name__ == "__main__":
    chosen = Target(sys.argv[1])
    with tempfile.TemporaryDirectory() as dump:
        os.environ.update(environment(topology(chosen, DEVICES), os.environ, Path(dump)))
        print(json.dumps(run(chosen, int(sys.argv[2]), int(sys.argv[3]))))

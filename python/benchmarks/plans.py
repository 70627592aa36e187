"""What `plan` makes of steps without shardings, against the shardings that their authors chose.

    python python/benchmarks/plans.py [PROGRAM ...] [--target gpu tpu] [--budget SECONDS]
                                      [--json FILE]

PROGRAM: a model of the zoo, at full size on 64 devices, or the file of an artifact on its own
devices; without one, training steps of the zoo. No device is needed. All shardings are dropped
before the step is planned. Then `optimize` gets the same budget for the authors' shardings and for
the plan.

    export          ms of the authors' export, as the target's compiler schedules it; * does not fit
    authors, plan   ms after `optimize`; * does not fit the device
    ratio           plan / authors; the last row is the geometric mean
    of export       plan / export
    planning        seconds without compilations
    gap             how far the plan is at most from the best one, by the model
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from optimize import named

from stablehlo_tools.analysis.collectives import meshes_of, stated_grid
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.optimization.figures import Figures
from stablehlo_tools.optimization.optimizer import OptimizationRequest, Optimum, optimize
from stablehlo_tools.optimization.plan_request import PlanRequest, mesh_text
from stablehlo_tools.optimization.planning import drop_plan, plan

STEPS = ("decoder-fsdp-step", "decoder-tp-step", "decoder-2d-scan-step", "moe-step", "vit-step")
HARDWARE = {"gpu": "h100", "tpu": "tpu-v5e"}
COLUMNS = (
    "program",
    "target",
    "devices",
    "authors' mesh",
    "export",
    "authors",
    "plan's mesh",
    "plan",
    "ratio",
    "of export",
    "planning",
    "gap",
)
_FORM = "{:38s} {:6s} {:>7} {:24s} {:>9} {:>9} {:24s} {:>9} {:>6} {:>9} {:>8} {:>6}"


def main() -> None:
    """Prints a row for each program and target as it is found, and the means."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    parser.add_argument("--target", nargs="+", choices=tuple(HARDWARE), default=["gpu"])
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=120.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to a file")
    arguments = parser.parse_args()
    print(_FORM.format(*COLUMNS))
    ratios: list[float] = []
    for name in arguments.programs or STEPS:
        for target in arguments.target:
            row = compare(named(name, full=True), Path(name).stem, target, arguments.budget)
            print(_FORM.format(*(row.get(column, "") for column in COLUMNS)), flush=True)
            if row.get("why"):
                print(f"  {row['why']}", flush=True)
            if "ratio" in row:
                ratios.append(row["ratio"])
            if arguments.json:
                rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
                arguments.json.write_text(json.dumps([*rows, row], indent=1))
    if ratios:
        print(f"geometric mean: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


def compare(given: Artifact, name: str, target: str, budget: float) -> dict[str, Any]:
    """Returns a row: the authors' shardings and the plan, each optimized for a target."""
    grid = stated_grid(given.module)
    meshes = meshes_of(given.module)
    assert grid is not None, f"{name} has a mesh"
    row: dict[str, Any] = {
        "program": name,
        "target": target,
        "devices": grid.size,
        "authors' mesh": mesh_text(next(iter(meshes.values())).axes),
    }
    hardware = load_hardware(HARDWARE[target])
    request = OptimizationRequest(target, hardware.name, budget=budget, try_options=False)
    try:
        bare = drop_plan(given)
        began = time.monotonic()
        by_model = plan(bare, PlanRequest(hardware, grid.size))
        row["planning"] = round(time.monotonic() - began, 1)
        found = plan(bare, PlanRequest(hardware, grid.size, target=target, budget=budget))
        row["plan's mesh"] = mesh_text(found.best.whole_mesh)
        row["gap"] = f"{100 * by_model.gap:.1f} %"
        theirs = optimize(given, request)
        ours = optimize(found.artifact, request)
    except ToolError as error:
        return row | {"why": str(error)}
    row["export"] = _ms(theirs, theirs.before)
    row["authors"] = _ms(theirs, theirs.after)
    row["plan"] = _ms(ours, ours.after)
    row["pipelines"] = [theirs.pipeline, ours.pipeline]
    row["peaks"] = [theirs.before.peak_bytes, theirs.after.peak_bytes, ours.after.peak_bytes]
    if ours.fits(ours.after) or not theirs.fits(theirs.after):
        row["ratio"] = round(ours.after.total_ns / theirs.after.total_ns, 3)
        row["of export"] = round(ours.after.total_ns / theirs.before.total_ns, 3)
    return row


def _ms(optimum: Optimum, figures: Figures) -> str:
    return f"{figures.total_ns / 1e6:.2f}" + ("" if optimum.fits(figures) else "*")


if __name__ == "__main__":
    main()

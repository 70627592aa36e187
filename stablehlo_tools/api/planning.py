"""Plans an `Exported` for many devices: the mesh, and the sharding of each argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.artifacts.exported import argument_leaves
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.optimization import plan_report
from stablehlo_tools.optimization.plan_request import BUDGET, PASSES, PlanRequest, parse_specs
from stablehlo_tools.optimization.planning import DevicePlan, drop_plan
from stablehlo_tools.optimization.planning import plan as find_plan

if TYPE_CHECKING:
    from jax.export import Exported


@dataclass(frozen=True)
class Planned:
    """A step for many devices. `str` of it prints the plan.

    `exported`: the step with its mesh and shardings, after the passes. `mesh`: the sizes of its
    axes, slowest first. `specs`: a PartitionSpec for each argument, as (positional arguments,
    keyword arguments).
    """

    exported: Exported
    mesh: dict[str, int]
    specs: Any
    plan: DevicePlan

    def __str__(self) -> str:
        return plan_report.to_text(self.plan)

    def to_json(self) -> dict[str, Any]:
        """The object that `stablehlo-tools plan --json` prints."""
        return plan_report.to_json(self.plan)


def plan(
    exported: Exported,
    hardware: str,
    devices: int,
    *,
    target: str | None = None,
    budget: float = BUDGET,
    memory_limit: float | None = None,
    axes: Mapping[str, int] | None = None,
    keep: Sequence[str] = (),
    pipeline: Literal["never", "auto", "always"] = "never",
    passes: str = PASSES,
    replan: bool = False,
    executor: Executor | None = None,
) -> Planned:
    """Chooses the mesh and the shardings of a step that was exported for one device.

    `hardware`: the name or the file of a profile. `target`, "gpu" or "tpu": whose compiler decides
    within `budget` seconds, by default the hardware's; if it is missing, or the budget 0, the model
    decides. `memory_limit`: GiB of a device, by default all that it has. `axes`: the only mesh to
    consider, slowest axis first. `keep`: divisions of arguments over these axes, as in
    "batch=P('data')". `pipeline`: whether layers may be divided into stages. `passes` are run on
    the divided step; "" keeps the global view. A mesh and shardings that the export has for these
    devices stay; `replan` drops them. `executor`: whose workers compile, as for `optimize`. Raises
    ToolError if the step is for other devices, or if no plan fits.
    """
    import jax
    from jax.sharding import PartitionSpec

    given = from_exported(exported)
    if replan:
        given = drop_plan(given)
    mesh = tuple((axes or {}).items())
    request = PlanRequest(
        load_hardware(hardware),
        devices,
        hardware,
        memory=None if memory_limit is None else memory_limit * 2**30,
        axes=mesh,
        keep=parse_specs(keep, mesh),
        target=target or "",
        budget=budget,
        pipeline=pipeline,
        passes=passes,
        executor=executor,
    )
    found = find_plan(given, request)
    leaves = [PartitionSpec()] * len(exported.in_avals)
    of_leaf = argument_leaves(exported, entry_function(given.module))
    for number, leaf in of_leaf.items():
        dims = found.arguments[number].dims[: exported.in_avals[leaf].ndim]
        parts = [tuple(axis.name for axis in each) for each in dims]
        leaves[leaf] = PartitionSpec(
            *(each if len(each) > 1 else (each or (None,))[0] for each in parts)
        )
    specs = jax.tree.unflatten(exported.in_tree, leaves)
    return Planned(found.artifact.to_exported(), dict(found.best.whole_mesh), specs, found)

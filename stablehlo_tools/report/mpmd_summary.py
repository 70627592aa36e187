"""What a set of rank programs is, in a few lines."""

from __future__ import annotations

from typing import Any

from stablehlo_tools.diagnostics import size
from stablehlo_tools.mpmd.manifest import Manifest
from stablehlo_tools.schedules.simulator import simulate

_MILLI = 1e3


def summary(manifest: Manifest, alone: float) -> dict[str, Any]:
    """Plain data: counts, predicted times in seconds, bytes for each rank. `alone`: the seconds of
    the step on one rank as it is."""
    timeline = simulate(manifest.table, manifest.costs)
    return {
        "schedule": manifest.table.name,
        "microbatches": manifest.table.microbatches,
        "devices": manifest.devices,
        "hardware": manifest.hardware,
        "makespan": timeline.makespan,
        "one_rank": alone,
        "bubble": timeline.bubble,
        "messages": sum(transfer.is_scheduled for transfer in manifest.transfers),
        "finish_messages": sum(not transfer.is_scheduled for transfer in manifest.transfers),
        "ranks": [
            {
                "program": rank.program,
                "stages": [manifest.stages[stage].what for stage in rank.stages],
                "busy": busy,
                "bytes": peak,
            }
            for rank, busy, peak in zip(
                manifest.ranks, timeline.busy, timeline.peak_bytes, strict=True
            )
        ],
    }


def summary_text(facts: dict[str, Any]) -> str:
    """The summary as lines to read."""
    lines = [
        f"{facts['schedule']}: {len(facts['ranks'])} ranks, {facts['microbatches']} microbatches, "
        f"{facts['messages']} tensors sent, {facts['finish_messages']} more at the end",
        f"predicted on {facts['hardware']}: {facts['makespan'] * _MILLI:.3f} ms a step, "
        f"{facts['bubble']:.1%} of it idle; {facts['one_rank'] * _MILLI:.3f} ms on one rank",
    ]
    for rank in facts["ranks"]:
        lines.append(
            f"  {rank['program']}: {size(rank['bytes'])}, {rank['busy'] * _MILLI:.3f} ms of work"
        )
        lines += [f"    {what}" for what in rank["stages"]]
    return "\n".join(lines)

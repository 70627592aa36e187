"""Every schedule's predicted time for one training step, cut for each as it would be.

Schedules with more stages cut the step anew: what a stage costs is not what its parts would.
"""

from __future__ import annotations

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.mpmd.expansion import Request, prepare, time_stages
from stablehlo_tools.schedules.catalogue import (
    Candidate,
    Comparison,
    Refusal,
    candidate_of,
    order,
)
from stablehlo_tools.schedules.generators.named import MOST_CHUNKS, buildable
from stablehlo_tools.schedules.setting import Setting


def compare_schedules(
    artifact: Artifact, request: Request, limit: float | None = None
) -> Comparison:
    """The schedules of a training step, best first; times in seconds, memory in bytes.

    `limit` is the most bytes that a rank may hold. Raises a located ToolError for a step that
    cannot be cut for one stage on each rank.
    """
    with naming(artifact.name):
        candidates: dict[tuple[str, int], Candidate] = {}
        why: dict[str, str] = {}
        setting: Setting | None = None
        prepared = prepare(artifact, request)
        for chunks in _chunks(request):
            try:
                timed = time_stages(prepared, request, chunks * request.ranks)
            except ToolError as error:
                if setting is None:
                    raise
                why.setdefault(f"{chunks} stages a rank", error.diagnostic.message)
                continue
            each = Setting(request.ranks, timed.microbatches, timed.costs, request.chunks, limit)
            setting = setting or each
            for entry, built in buildable(each, MOST_CHUNKS):
                if isinstance(built, ToolError):
                    why.setdefault(entry.name, built.diagnostic.message)
                elif built.stages == timed.costs.stages:
                    candidates[entry.name, chunks] = candidate_of(entry.name, built, each)
    assert setting is not None, "one stage a rank is tried first"
    there = {name for name, _ in candidates}
    refusals = tuple(Refusal(name, reason) for name, reason in why.items() if name not in there)
    return Comparison(setting, tuple(sorted(candidates.values(), key=order)), refusals, None)


def _chunks(request: Request) -> list[int]:
    """The stages on a rank that schedules are tried with."""
    return [request.chunks] if request.chunks is not None else [1, 2, MOST_CHUNKS]

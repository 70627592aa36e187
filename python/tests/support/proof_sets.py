"""Sets written by hand, whole or with one program changed, and what a proof says of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rank_sets import write_set

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.mpmd.manifest import NAME, decode_manifest
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule
from stablehlo_tools.mpmd.proof.proving import SetProof
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.setting import ScheduleSetting, unit_costs

# A schedule, its ranks, microbatches and chunks.
Case = tuple[str, int, int, int | None]
SCHEDULES: list[Case] = [
    ("1f1b", 2, 3, None),
    ("zb-v", 2, 4, None),
    ("dualpipe", 2, 4, None),
    ("interleaved-1f1b", 2, 4, 2),
    ("zb-h1", 3, 4, None),
    ("gpipe", 2, 3, None),
    ("dualpipe-v", 2, 4, None),
    ("looped-bfs", 2, 4, 2),
    ("v-min", 2, 4, None),
    ("1f1b", 2, 1, None),
    ("dualpipe", 4, 8, None),
]


def name_of(case: object) -> str | None:
    """The identifier of a case."""
    if not isinstance(case, tuple):
        return None
    name, ranks, microbatches, _ = case  # pyright: ignore[reportUnknownVariableType]
    return f"{name}-{ranks}x{microbatches}"


@cache
def files(case: Case, devices: int = 1) -> dict[str, str]:
    """The files of a set that is written by hand."""
    name, ranks, microbatches, chunks = case
    table = build(name, ScheduleSetting(ranks, microbatches, unit_costs(ranks), chunks=chunks))
    with TemporaryDirectory() as room:
        write_set(Path(room), table, devices)
        return {path.name: path.read_text() for path in sorted(Path(room).iterdir())}


def by_hand(
    case: Case, devices: int = 1, change: Callable[[str], str] | None = None, rank: int = 0
) -> RankSet:
    """Such a set, the program of a rank changed."""
    texts = dict(files(case, devices))
    manifest = decode_manifest(texts.pop(NAME))
    if change is not None:
        name = f"rank_{rank}.mlir"
        changed = change(texts[name])
        assert changed != texts[name]
        texts[name] = changed
    programs = [artifact.parse(text.encode(), name) for name, text in texts.items()]
    return RankSet("by hand", manifest, tuple(programs))


def findings(proof: SetProof, rule: ProofRule) -> list[str]:
    """What is wrong by a rule."""
    return [str(finding) for finding in proof.findings if finding.rule is rule]

"""What others publish of their schedules, and ours at the same settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tree import FIXTURES

from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.generators.by_rule import (
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
)
from stablehlo_tools.schedules.generators.v_shaped import zb_v
from stablehlo_tools.schedules.setting import Costs, ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import Table

Record = dict[str, Any]

_FIXTURES = FIXTURES / "schedules"
TORCH: list[Record] = json.loads((_FIXTURES / "torch_2_13.json").read_text())["records"]
RATES: list[Record] = json.loads((_FIXTURES / "zero_bubble.json").read_text())["records"]

BY_TORCH: dict[str, Callable[[int, int, int], Table]] = {
    "ScheduleGPipe": lambda p, m, _: gpipe(p, m),
    "Schedule1F1B": lambda p, m, _: one_f_one_b(p, m),
    "ScheduleInterleaved1F1B": interleaved_one_f_one_b,
    "ScheduleLoopedBFS": looped_bfs,
    "ScheduleInterleavedZeroBubble": zb_h1,
    "ScheduleZBVZeroBubble": lambda p, m, _: zb_v(p, m, unit_costs(2 * p)),
    "ScheduleDualPipeV": lambda p, m, _: dualpipe_v(p, m, overlapped=False),
}


def like_torchs(record: Record) -> Table:
    """Our schedule for the setting of one of PyTorch's."""
    return BY_TORCH[record["schedule"]](record["p"], record["m"], record["v"])


def at_record(name: str, record: Record, kept: float | None = None) -> tuple[Table, Costs]:
    """A named schedule, and its costs, at a setting of the zero-bubble paper's tables."""
    *times, hop = record["times"]
    share = record["kept"] if kept is None else kept
    slices = costs(record["p"], *times, communication=hop, kept=share)
    chunks = record["chunks"] if name == "interleaved-1f1b" else None
    setting = ScheduleSetting(record["p"], record["m"], slices, chunks)
    table = build(name, setting)
    return table, setting.costs(table.stages)

"""Writes schedules in the neutral JSON form of the overlap peers, and reads them again.

    {"order": [every task id once], "buckets": [[collective starts], ...]}

The starts of a bucket stand together in the order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.json_text import read_json


def encode_schedule(order: Sequence[int], buckets: Sequence[Sequence[int]]) -> bytes:
    """The bytes of a schedule's file."""
    content = {"order": list(order), "buckets": [list(bucket) for bucket in buckets]}
    return json.dumps(content).encode() + b"\n"


def read_schedule(path: str | Path) -> tuple[list[int], list[list[int]]]:
    """The order and the buckets in a file. Raises ToolError naming what is wrong."""
    with naming(str(path)):
        return _schedule(read_json(path))


def _schedule(read: object) -> tuple[list[int], list[list[int]]]:
    content: Any = read
    if not isinstance(content, dict) or not _is_list_of_ids(content.get("order")):
        raise ToolError("this is no schedule: it needs an order, a list of task ids")
    buckets: Any = content.get("buckets", [])
    if not isinstance(buckets, list) or not all(_is_list_of_ids(bucket) for bucket in buckets):
        raise ToolError("this is no schedule: its buckets are no lists of task ids")
    return content["order"], buckets


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(task) is int and task >= 0 for task in value)

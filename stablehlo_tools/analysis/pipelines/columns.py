"""The columns of a pipeline's table: what a rank does in a tick, in integers."""

from __future__ import annotations

import enum


class Column(enum.IntEnum):
    """Where each integer stands in a row.

    `RUNS`, `ENDS` and `RECEIVED` are flags: the rank has work; it is the last chunk of the
    direction; the input is taken from a receive slot. `CHUNK`, `MICROBATCH`, `SOURCE` and `KEPT`
    are those of a `schedules.lockstep.Cell`, never below 0. `DELIVERY` is the slot for what arrives
    at the end of the tick. `FIRST` is the first layer of the chunk, `LAYERS` how many it has.
    """

    RUNS = 0
    ENDS = 1
    RECEIVED = 2
    CHUNK = 3
    MICROBATCH = 4
    SOURCE = 5
    KEPT = 6
    DELIVERY = 7
    FIRST = 8
    LAYERS = 9

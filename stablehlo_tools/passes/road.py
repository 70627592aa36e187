"""Defines the stages of `optimize`'s search, and the options of a pass that it tries.

A pass joins the search by one declaration in its class:

    milestone: ClassVar = Milestone(Stage.SPLIT, ("parts=2", "parts=4"))

The search uses at most one choice of each stage, in the order of the stages. It fills in the
options that depend on the machine (`hardware`, `memory-limit`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.IntEnum):
    """The stages of the search, in order. Numbers leave room for others between them."""

    FOLD = 10  # global view: a program that is pipelined already becomes a loop
    MICROBATCHES = 20  # global view: less memory
    STATE = 25  # global view: the sharding of an optimizer's state
    PIPELINE = 30  # global view: layers over a mesh axis, before the loop over them is cut
    CONSTRAINTS = 35  # global view: shardings that a partitioner would have to guess
    PARTITION = 40  # makes collectives explicit, which all later stages rewrite
    RECOMPUTE = 45  # the residuals to keep, now that times and bytes are those of a device
    SMALLER = 50  # collectives that move less
    HIERARCHY = 60  # collectives over fewer devices each
    SPLIT = 80  # independent parts: the compute of one hides collectives of another
    LOOPS = 90  # collectives in another iteration than their own
    MERGE = 100  # fewer and larger collectives, after the stages that move them
    HOLD = 102  # sums that a compiler would move and join stay in place
    LINKS = 105  # collectives of several links in flight together
    ORDER = 110  # the order of issue: last, as other passes would undo it


class When(enum.Enum):
    """The programs for which a stage is tried."""

    ALWAYS = "always"
    TOO_LARGE = "where the export does not fit the device's memory"
    ASKED = "where a mesh axis is given for it"


@dataclass(frozen=True)
class Milestone:
    """The stage of a pass in the search, and the options to try.

    `options`: texts of options in pipeline syntax, "" for none. `{axis}` in one is replaced by the
    mesh axis that is free for a pipeline. `slow`: further options that take about as long as a
    compilation, and are tried after the first candidates have been compiled.
    """

    stage: Stage
    options: tuple[str, ...] = ("",)
    when: When = When.ALWAYS
    slow: tuple[str, ...] = ()

"""Where on the road of `optimize` a pass stands, and which of its options are worth trying.

A pass joins the search by one declaration in its class:

    milestone: ClassVar = Milestone(Stage.SPLIT, ("parts=2", "parts=4"))

The search takes at most one choice of each stage, in the order of the stages. Options that every
pass of the kind has (`hardware`, `memory-limit`) are filled in for the machine that is asked for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.IntEnum):
    """The stages of the road, in order. Numbers leave room for others between them."""

    FOLD = 10  # global view: what is a pipeline already, back to a loop
    MICROBATCHES = 20  # global view: less memory
    STATE = 25  # global view: where an optimizer's state lies
    PIPELINE = 30  # global view: layers over a mesh axis, while the loop over them is whole
    CONSTRAINTS = 35  # global view: what a partitioner would have to guess
    PARTITION = 40  # collectives become explicit; all below rewrites them
    RECOMPUTE = 45  # what the backward keeps, once its times and bytes are those of a device
    SMALLER = 50  # collectives that move less
    HIERARCHY = 60  # collectives over fewer devices each
    SPLIT = 80  # independent parts: one's compute hides another's collectives
    LOOPS = 90  # collectives in another iteration than their own
    MERGE = 100  # fewer and larger collectives, once their places are known
    HOLD = 102  # sums in their place, where a compiler would move and join them
    LINKS = 105  # collectives of several links in flight together
    ORDER = 110  # what is issued when: last, as all else would undo it


class When(enum.Enum):
    """For which programs a stage is tried."""

    ALWAYS = "always"
    TOO_LARGE = "where the export does not fit the device's memory"
    ASKED = "where a mesh axis is given for it"


@dataclass(frozen=True)
class Milestone:
    """A pass's place on the road.

    `options`: each a text of options as a pipeline has them, "" for none. `{axis}` in one stands
    for the mesh axis that is free for a pipeline. `slow`: further ones that take about as long as a
    compiler does, and are tried after the first candidates have been compiled.
    """

    stage: Stage
    options: tuple[str, ...] = ("",)
    when: When = When.ALWAYS
    slow: tuple[str, ...] = ()

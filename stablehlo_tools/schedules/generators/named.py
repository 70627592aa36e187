"""The named schedules and their builders, except `auto`, whose search chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.generators.by_rule import (
    chimera,
    circular,
    dualpipe,
    dualpipe_v,
    eager_one_f_one_b,
    fastest,
    gpipe,
    gpipe_but_1f1b_for_the_last,
    hanayo,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    seq1f1b,
    slimpipe,
    zb_h1,
    zb_h2,
)
from stablehlo_tools.schedules.setting import ScheduleSetting
from stablehlo_tools.schedules.table import Table, loop

AUTO = "auto"  # the name of the search's result; catalogue.py lists it with the others
MOST_CHUNKS = 4  # the most that are tried if the setting gives no number
_USUAL_CHUNKS = 2  # default of a schedule that exists for any number of chunks


@dataclass(frozen=True)
class NamedSchedule:
    """A named schedule: a short summary, and the function that builds it for a setting.

    `build` raises ToolError if the schedule does not exist for the setting, and names settings for
    which it does. `chunks` is the number of stages per rank, None for any number; then the numbers
    in `tried` are compared. `sliced` schedules cut the sequences of microbatches into as many
    slices as the setting states.
    """

    name: str
    summary: str
    build: Callable[[ScheduleSetting], Table]
    chunks: int | None = 1
    training: bool = True
    tried: tuple[int, ...] = (_USUAL_CHUNKS,)
    sliced: bool = False

    def table(self, setting: ScheduleSetting) -> Table:
        """Returns the schedule for a setting. Raises ToolError if there is none."""
        if self.chunks is not None and setting.chunks not in (None, self.chunks):
            plural = "s" * (self.chunks != 1)
            raise ToolError(
                f"{self.name} has {self.chunks} chunk{plural} a rank, not {setting.chunks}",
                instead=(f"chunks={setting.chunks}", f"chunks={self.chunks}"),
            )
        if self.sliced and setting.sequence_slices is None:
            raise ToolError(
                f"{self.name}: it cuts sequences and needs --slices K, the slices of a microbatch",
                hint=f"stablehlo-tools schedule {self.name} --stages {setting.ranks} "
                f"--microbatches {setting.microbatches} --slices {setting.ranks}",
            )
        return self.build(setting)


def buildable(
    setting: ScheduleSetting, most_chunks: int = MOST_CHUNKS
) -> Iterator[tuple[NamedSchedule, Table | ToolError]]:
    """Yields every named training schedule for a setting, or the error if it does not exist.

    Schedules for any number of chunks are built for a few numbers, up to `most_chunks`, unless the
    setting states one. `auto` is left out, because it chooses among these.
    """
    for entry in NAMED:
        if not entry.training:
            continue
        if entry.chunks is not None or setting.chunks is not None:
            choices = (setting.chunks,)
        else:
            tried = (*entry.tried, MOST_CHUNKS)
            choices = [chunks for chunks in tried if chunks <= most_chunks] or [most_chunks]
        for chunks in choices:
            try:
                table = entry.table(replace(setting, chunks=chunks))
                # Raises if the figures of the setting do not fit the stages of the schedule.
                setting.costs_of(table)
                yield entry, table
            except ToolError as error:
                yield entry, error


def _one_a_rank(write: Callable[[int, int], Table]) -> Callable[[ScheduleSetting], Table]:
    """Returns a builder of a schedule with one stage per rank."""
    return lambda setting: write(setting.ranks, setting.microbatches)


def _chunked_builder(
    write: Callable[[int, int, int], Table], usual: int = _USUAL_CHUNKS
) -> Callable[[ScheduleSetting], Table]:
    """Returns a builder for any number of chunks; `usual` is the default number."""
    return lambda setting: write(
        setting.ranks, setting.microbatches, usual if setting.chunks is None else setting.chunks
    )


def _zero_bubble_within(name: str, times: int) -> Callable[[ScheduleSetting], Table]:
    """Returns a builder of the best schedule within p or 2p activations and the setting's limit."""

    def build(setting: ScheduleSetting) -> Table:
        # The search is imported only if needed: most commands write one named schedule.
        from stablehlo_tools.schedules.search.zero_bubble import best_within

        ranks, costs = setting.ranks, setting.costs(setting.ranks)
        asked = (times * ranks * activation for activation in costs.activation)
        room = [*map(min, asked, setting.room(loop(ranks)))]
        return best_within(name, ranks, setting.microbatches, costs, room)

    return build


def _v_shaped(name: str) -> Callable[[ScheduleSetting], Table]:
    """Returns a builder of `zb_v`, `v_half` or `v_min`, which search for an order."""

    def build(setting: ScheduleSetting) -> Table:
        from stablehlo_tools.schedules.generators.v_shaped import v_half, v_min, zb_v

        write = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min}[name]
        return write(setting.ranks, setting.microbatches, setting.costs(2 * setting.ranks))

    return build


def _two_ways(
    write: Callable[[int, int, bool], Table], chunks: int
) -> Callable[[ScheduleSetting], Table]:
    """Returns a builder of `dualpipe` or `dualpipe_v` that chooses the faster form, see `fastest`.

    `chunks` is the number of stages per rank.
    """
    return lambda setting: fastest(
        write, setting.ranks, setting.microbatches, setting.costs(chunks * setting.ranks)
    )


# In the order in which `compare` breaks ties.
NAMED = (
    NamedSchedule("gpipe", "all forwards, then all backwards", _one_a_rank(gpipe)),
    NamedSchedule(
        "gpipe-1f1b-last",
        "GPipe whose last rank alternates",
        _one_a_rank(gpipe_but_1f1b_for_the_last),
    ),
    NamedSchedule("1f1b", "forward and backward in turn", _one_a_rank(one_f_one_b)),
    NamedSchedule(
        "eager-1f1b", "1F1B, forwards ahead to hide hops", _one_a_rank(eager_one_f_one_b)
    ),
    NamedSchedule(
        "interleaved-1f1b",
        "1F1B on several chunks a rank",
        _chunked_builder(interleaved_one_f_one_b),
        None,
    ),
    NamedSchedule(
        "looped-bfs",
        "a chunk for all microbatches, then the next",
        _chunked_builder(looped_bfs),
        None,
    ),
    NamedSchedule("circular", "one SPMD loop, differentiated", _chunked_builder(circular), None),
    NamedSchedule(
        "circular-forward",
        "one SPMD loop, no backward",
        _chunked_builder(partial(circular, training=False)),
        None,
        False,
    ),
    NamedSchedule(
        "zb-h1",
        "1F1B with weight gradients put off; the memory of 1F1B",
        _chunked_builder(zb_h1, 1),
        None,
        True,
        (1, 2),
    ),
    NamedSchedule("zb-h2", "the same, twice as far ahead", _one_a_rank(zb_h2)),
    NamedSchedule(
        "zb-1p", "the best weight gradients in the memory of 1F1B", _zero_bubble_within("zb-1p", 1)
    ),
    NamedSchedule(
        "zb-2p", "the best weight gradients in twice that memory", _zero_bubble_within("zb-2p", 2)
    ),
    NamedSchedule("zb-v", "no bubble by span, down the ranks and up again", _v_shaped("zb-v"), 2),
    NamedSchedule("v-half", "half the memory and half the bubble of 1F1B", _v_shaped("v-half"), 2),
    NamedSchedule(
        "v-min", "a third of the memory, two thirds of the bubble", _v_shaped("v-min"), 2
    ),
    NamedSchedule("dualpipe", "two pipelines in opposite directions", _two_ways(dualpipe, 1), 2),
    NamedSchedule(
        "dualpipe-v", "the same, folded: half the ranks, one copy", _two_ways(dualpipe_v, 2), 2
    ),
    NamedSchedule("chimera", "1F1B in opposite directions, two copies", _one_a_rank(chimera), 2),
    NamedSchedule(
        "hanayo",
        "down the ranks and up again, a wave of two chunks",
        _chunked_builder(hanayo),
        None,
    ),
    NamedSchedule(
        "seq1f1b",
        "1F1B of slices of sequences",
        lambda setting: seq1f1b(setting.ranks, setting.microbatches, setting.sequence_slices or 1),
        sliced=True,
    ),
    NamedSchedule(
        "slimpipe",
        "the same on any number of chunks, further ahead",
        lambda setting: slimpipe(
            setting.ranks, setting.microbatches, setting.sequence_slices or 1, setting.chunks or 1
        ),
        None,
        tried=(1, 2),
        sliced=True,
    ),
)

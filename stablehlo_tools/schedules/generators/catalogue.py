"""The schedules by the names that the command line knows them by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.placement import loop
from stablehlo_tools.schedules.setting import Setting
from stablehlo_tools.schedules.table import Table

AUTO = "auto"
MOST_CHUNKS = 4  # that are tried, where none are asked for
_USUAL_CHUNKS = 2  # of a schedule that takes any number of them, where none is asked for


@dataclass(frozen=True)
class Entry:
    """A named schedule: what it is in a few words, and what writes it for a setting.

    `build` raises ToolError where the schedule does not exist, saying where it does. `chunks` is
    how many stages it puts on a rank, None for any number; of those a few are `tried`.
    """

    name: str
    summary: str
    build: Callable[[Setting], Table]
    chunks: int | None = 1
    training: bool = True
    tried: tuple[int, ...] = (_USUAL_CHUNKS,)


def entries() -> tuple[Entry, ...]:
    """Every named schedule, in the order in which `compare` breaks ties."""
    return _ENTRIES


def build(name: str, setting: Setting) -> Table:
    """The named schedule for a setting. Raises ToolError for an unknown name or setting."""
    found = {entry.name: entry for entry in _ENTRIES}.get(name)
    if found is None:
        known = ", ".join(entry.name for entry in _ENTRIES)
        raise ToolError(f"no schedule is called {name!r}; there are: {known}")
    if found.chunks is not None and setting.chunks not in (None, found.chunks):
        plural = "s" * (found.chunks != 1)
        raise ToolError(f"{name} has {found.chunks} chunk{plural} a rank, not {setting.chunks}")
    return found.build(setting)


def buildable(
    setting: Setting, most_chunks: int = MOST_CHUNKS
) -> Iterator[tuple[Entry, Table | ToolError]]:
    """Every named schedule of a training step for a setting, or why there is none.

    Those that take any number of chunks come with a few numbers, up to `most_chunks`, unless
    the setting says how many. Without `auto`, which chooses among these.
    """
    for entry in _ENTRIES:
        if not entry.training or entry.name == AUTO:
            continue
        for chunks in _choices(entry, setting, most_chunks):
            try:
                table = build(entry.name, replace(setting, chunks=chunks))
                setting.costs(table.stages)
                yield entry, table
            except ToolError as error:
                yield entry, error


def _choices(entry: Entry, setting: Setting, most_chunks: int) -> tuple[int | None, ...]:
    if entry.chunks is not None or setting.chunks is not None:
        return (setting.chunks,)
    choices = (*entry.tried, MOST_CHUNKS)
    return tuple(chunks for chunks in choices if chunks <= most_chunks) or (most_chunks,)


def _gpipe(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.gpipe import gpipe

    return gpipe(setting.ranks, setting.microbatches)


def _gpipe_last(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.gpipe import gpipe_but_1f1b_for_the_last

    return gpipe_but_1f1b_for_the_last(setting.ranks, setting.microbatches)


def _one_f_one_b(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.one_f_one_b import one_f_one_b

    return one_f_one_b(setting.ranks, setting.microbatches)


def _eager(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.one_f_one_b import eager_one_f_one_b

    return eager_one_f_one_b(setting.ranks, setting.microbatches)


def _interleaved(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.interleaved import interleaved_one_f_one_b

    return interleaved_one_f_one_b(setting.ranks, setting.microbatches, _chunks(setting))


def _looped_bfs(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.breadth_first import looped_bfs

    return looped_bfs(setting.ranks, setting.microbatches, _chunks(setting))


def _circular(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.breadth_first import circular

    return circular(setting.ranks, setting.microbatches, _chunks(setting))


def _circular_forward(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.breadth_first import circular

    return circular(setting.ranks, setting.microbatches, _chunks(setting), training=False)


def _zb_h1(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.zero_bubble import zb_h1

    return zb_h1(setting.ranks, setting.microbatches, setting.chunks or 1)


def _zb_h2(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.zero_bubble import zb_h2

    return zb_h2(setting.ranks, setting.microbatches)


def _zb_1p(setting: Setting) -> Table:
    return _zero_bubble_within("zb-1p", setting, 1)


def _zb_2p(setting: Setting) -> Table:
    return _zero_bubble_within("zb-2p", setting, 2)


def _zero_bubble_within(name: str, setting: Setting, times: int) -> Table:
    """The best within p or 2p activations of a rank, and within the setting's limit."""
    from stablehlo_tools.schedules.search.zero_bubble import best_within

    ranks, costs = setting.ranks, setting.costs(setting.ranks)
    asked = (times * ranks * activation for activation in costs.activation)
    room = [*map(min, asked, setting.room(loop(ranks)))]
    return best_within(name, ranks, setting.microbatches, costs, room)


def _zb_v(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.v_shaped import zb_v

    return zb_v(setting.ranks, setting.microbatches, setting.costs(2 * setting.ranks))


def _v_half(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.v_shaped import v_half

    return v_half(setting.ranks, setting.microbatches, setting.costs(2 * setting.ranks))


def _v_min(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.v_shaped import v_min

    return v_min(setting.ranks, setting.microbatches, setting.costs(2 * setting.ranks))


def _dualpipe(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.dualpipe import dualpipe, fastest

    costs = setting.costs(setting.ranks)
    return fastest(dualpipe, setting.ranks, setting.microbatches, costs)


def _dualpipe_v(setting: Setting) -> Table:
    from stablehlo_tools.schedules.generators.dualpipe import dualpipe_v, fastest

    costs = setting.costs(2 * setting.ranks)
    return fastest(dualpipe_v, setting.ranks, setting.microbatches, costs)


def _auto(setting: Setting) -> Table:
    from stablehlo_tools.schedules.search.auto import find_best

    return find_best(setting).table


def _chunks(setting: Setting) -> int:
    return _USUAL_CHUNKS if setting.chunks is None else setting.chunks


_ENTRIES = (
    Entry("gpipe", "all forwards, then all backwards", _gpipe),
    Entry("gpipe-1f1b-last", "GPipe whose last rank alternates", _gpipe_last),
    Entry("1f1b", "forward and backward in turn", _one_f_one_b),
    Entry("eager-1f1b", "1F1B, forwards ahead to hide hops", _eager),
    Entry("interleaved-1f1b", "1F1B on several chunks a rank", _interleaved, None),
    Entry("looped-bfs", "a chunk for all microbatches, then the next", _looped_bfs, None),
    Entry("circular", "one SPMD loop, differentiated", _circular, None),
    Entry("circular-forward", "one SPMD loop, no backward", _circular_forward, None, False),
    Entry(
        "zb-h1",
        "1F1B with weight gradients put off; the memory of 1F1B",
        _zb_h1,
        None,
        True,
        (1, 2),
    ),
    Entry("zb-h2", "the same, twice as far ahead", _zb_h2),
    Entry("zb-1p", "the best weight gradients in the memory of 1F1B", _zb_1p),
    Entry("zb-2p", "the best weight gradients in twice that memory", _zb_2p),
    Entry("zb-v", "no bubble by span, down the ranks and up again", _zb_v, 2),
    Entry("v-half", "half the memory and half the bubble of 1F1B", _v_half, 2),
    Entry("v-min", "a third of the memory, two thirds of the bubble", _v_min, 2),
    Entry("dualpipe", "two pipelines in opposite directions", _dualpipe, 2),
    Entry("dualpipe-v", "the same, folded: half the ranks, one copy", _dualpipe_v, 2),
    Entry(AUTO, "the best that a search finds", _auto, None),
)

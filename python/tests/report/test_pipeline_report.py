"""What `inspect` and `report` say of pipelines: read back from what `expand-pipeline` made.

The tables are held against the schedules they were made from, the figures against those of a model
small enough to count by hand. Programs that only look like a pipeline must not be taken for one.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import report_documents
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from stablehlo_tools import transform
from stablehlo_tools.analysis.pipelines.pipeline_loops import (
    CUSTOM,
    LEAST_OF_BOTH,
    LEAST_OF_ONE,
    bubble_of,
    find_pipelines,
    is_together,
    schedule_name,
)
from stablehlo_tools.analysis.pipelines.rank_tables import Column, is_consistent
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.report.document import Document
from stablehlo_tools.report.exposure import Question, exposure
from stablehlo_tools.report.html import render_page
from stablehlo_tools.report.pipeline_report import PipelineReport
from stablehlo_tools.report.pipeline_rows import pipeline_report
from stablehlo_tools.schedules.lockstep import (
    Direction,
    Lockstep,
    backward_lockstep,
    forward_lockstep,
    training_lockstep,
)
from stablehlo_tools.transforms.parts.expand_pipeline.ticks import TickRow

LAYERS, BATCH, WIDTH, HIDDEN = 8, 8, 16, 32
MICROBATCHES = 4
FLOAT = 4  # bytes
FLOW = BATCH // MICROBATCHES * WIDTH * FLOAT
WEIGHTS = 2 * LAYERS * WIDTH * HIDDEN * FLOAT
TABLE = re.compile(r'dense<"0x([0-9A-F]+)"> : tensor<(\d+)x(\d+)x(\d+)xi32>')
GRID = list(
    itertools.product(range(2, 6), range(1, 4), range(1, 10))
)  # ranks, chunks, microbatches

Tensor = Any
Entries = NDArray[np.int32]  # [ranks, ticks, columns]


def layer(h: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return h + jnp.tanh(h @ weights["up"]) @ weights["down"]


def forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0]


def step(weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients."""
    return jax.value_and_grad(lambda w: jnp.mean(forward(w, x) ** 2))(weights)


@functools.cache
def exported(function: Callable[..., Any], stage: int = 4, data: int = 1) -> Exported:
    """A model of eight layers on a mesh of `stage` by `data`."""
    mesh = AbstractMesh((stage, data), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)

    def of(shape: Sequence[int], *axes: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=sharding)

    weights = {"up": of((LAYERS, WIDTH, HIDDEN)), "down": of((LAYERS, HIDDEN, WIDTH))}
    return export.export(jax.jit(function))(weights, of((BATCH, WIDTH), "data"))


@functools.cache
def expanded(function: Callable[..., Any], options: str, **mesh: int) -> Exported:
    pipeline = f"expand-pipeline{{microbatches={MICROBATCHES} {options}}}"
    return transform(exported(function, **mesh), pipeline)


def reports(program: Exported) -> list[PipelineReport]:
    found = artifact.from_exported(program)
    return [pipeline_report(each, "model") for each in find_pipelines(found.module)]


def same_work(one: Lockstep, other: Lockstep) -> bool:
    return replace(one, name="") == replace(other, name="")


def lockstep_schedules(ranks: int, chunks: int, microbatches: int) -> list[Lockstep]:
    return [
        forward_lockstep(ranks, microbatches, chunks),
        backward_lockstep(ranks, microbatches, chunks),
        training_lockstep(ranks, microbatches, chunks, together=False),
        training_lockstep(ranks, microbatches, chunks, together=True),
    ]


def test_columns_are_those_that_the_pass_writes() -> None:
    assert tuple(column.name.lower() for column in Column) == TickRow._fields


# What schedules are called, and their bubbles.


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), GRID)
def test_closed_form_is_the_least_bubble(
    ranks: int, chunks: int, microbatches: int, skips: bool
) -> None:
    for schedule in lockstep_schedules(ranks, chunks, microbatches):
        bubble = bubble_of(schedule, skips=skips)
        assert bubble.share > bubble.closed_form - 1e-12
        if chunks == 1 or microbatches % ranks == 0:
            assert bubble.share == pytest.approx(bubble.closed_form)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), GRID)
def test_schedules_are_named_by_their_tables(ranks: int, chunks: int, microbatches: int) -> None:
    schedules = lockstep_schedules(ranks, chunks, microbatches)
    names = [schedule_name(each) for each in schedules]
    one = "gpipe" if chunks == 1 else "circular"
    in_turn = "1f1b" if chunks == 1 else "interleaved-1f1b"
    eager = in_turn.replace("1f1b", "eager-1f1b") if is_together(schedules[-1]) else in_turn
    assert names == [one, one, in_turn, eager]


def test_bubbles_of_published_settings() -> None:
    """GPipe on 4 ranks with 4 M = 32 microbatches; interleaving by 2 nearly halves a bubble."""
    gpipe = bubble_of(forward_lockstep(8, 32, 1), skips=False)
    assert (gpipe.cells, gpipe.run, gpipe.formula) == (8 * 39, 8 * 32, LEAST_OF_ONE)
    assert gpipe.share == pytest.approx(7 / 39)
    interleaved = bubble_of(training_lockstep(8, 32, 2, together=False), skips=True)
    assert interleaved.share == pytest.approx(7 / 71)
    together = bubble_of(training_lockstep(4, 8, 1, together=True), skips=False)
    assert (together.cells, together.formula) == (2 * 4 * 14, LEAST_OF_BOTH)
    assert together.share == pytest.approx(6 / 14)
    eager = bubble_of(training_lockstep(4, 8, 1, together=True), skips=True)
    assert (eager.cells, eager.formula) == (2 * 4 * 11, LEAST_OF_ONE)
    assert eager.share == pytest.approx(3 / 11)


def test_forwards_before_backwards_are_not_1f1b() -> None:
    """GPipe's training in one loop: all forwards, and then all backwards."""
    ahead, back = forward_lockstep(3, 4, 1), backward_lockstep(3, 4, 1)
    assert ahead.forward is not None
    assert back.backward is not None
    idle = ((None,) * 3,) * 6
    zeros = ((0,) * 3,) * 6
    one, other = ahead.forward, back.backward
    both = Lockstep(
        "",
        3,
        1,
        4,
        Direction(one.cells + idle, one.deliveries + zeros, one.slots),
        Direction(idle + other.cells, zeros + other.deliveries, other.slots),
        4,
    )
    assert schedule_name(both) == CUSTOM


# Playing tables.


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), GRID[::3])
def test_schedules_play(ranks: int, chunks: int, microbatches: int) -> None:
    for schedule in lockstep_schedules(ranks, chunks, microbatches):
        assert is_consistent(schedule)


@pytest.mark.parametrize("together", [False, True])
def test_no_field_of_a_cell_can_change(together: bool) -> None:
    """Any other chunk, microbatch, source or kept slot in one cell, and some value goes astray."""
    schedule = training_lockstep(3, 4, 2, together=together)
    assert schedule.backward is not None
    back = schedule.backward
    changed = 0
    for tick, rank in itertools.product(range(schedule.ticks), range(3)):
        cell = back.cells[tick][rank]
        if cell is None:
            continue
        for field in ("microbatch", "chunk", "kept"):
            other = cell._replace(**{field: (getattr(cell, field) + 1) % 2})
            cells = [list(column) for column in back.cells]
            cells[tick][rank] = other
            direction = replace(back, cells=tuple(map(tuple, cells)))
            if other != cell:
                assert not is_consistent(replace(schedule, backward=direction))
                changed += 1
    assert changed > 50


def test_a_delivery_to_the_wrong_slot_shows() -> None:
    schedule = training_lockstep(4, 8, 1, together=False)
    assert schedule.forward is not None
    ahead = schedule.forward
    assert ahead.slots == 2
    swapped = tuple(tuple(1 - slot for slot in column) for column in ahead.deliveries)
    assert not is_consistent(replace(schedule, forward=replace(ahead, deliveries=swapped)))


# Reading programs.

CASES = {
    "gpipe": ("schedule=gpipe", 1, [False, True]),
    "circular": ("schedule=circular repeats=2", 2, [False, True]),
    "1f1b": ("schedule=1f1b", 1, [None]),
    "interleaved-1f1b": ("schedule=1f1b repeats=2", 2, [None]),
    "eager-1f1b": ("schedule=eager-1f1b", 1, [None]),
}


@pytest.mark.parametrize("partitioned", [False, True], ids=["as-written", "partitioned"])
@pytest.mark.parametrize("stage", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_schedules_are_read_back(name: str, stage: int, partitioned: bool) -> None:
    options, chunks, ways = CASES[name]
    program = expanded(step, options, stage=stage, data=2)
    if partitioned:
        program = transform(program, "partition")
    found = reports(program)
    made = [
        training_lockstep(stage, MICROBATCHES, chunks, together="eager" in name)
        if back is None
        else (backward_lockstep if back else forward_lockstep)(stage, MICROBATCHES, chunks)
        for back in ways
    ]
    assert [each.kind for each in found] == [name] * len(made)
    for each, schedule in zip(found, made, strict=True):
        assert same_work(each.schedule, schedule)
        assert each.axis == "stage"
        assert each.devices == (1 if partitioned else 2)
        assert each.layers == (LAYERS // stage // chunks,) * (stage * chunks)
        assert each.skips == name.endswith("1f1b")


def test_uneven_chunks_and_both_in_a_tick() -> None:
    (found,) = reports(expanded(step, "schedule=1f1b skip=false repeats=3", stage=2))
    assert found.layers == (2, 2, 1, 1, 1, 1)
    assert same_work(found.schedule, training_lockstep(2, MICROBATCHES, 3, together=True))
    assert not found.skips
    assert found.formula == LEAST_OF_BOTH


def test_skipping_is_read_from_the_program() -> None:
    (kept,) = reports(expanded(forward, "skip=false"))
    (skipped,) = reports(expanded(forward, "skip=true"))
    assert (kept.skips, skipped.skips) == (False, True)


def test_a_program_without_a_pipeline_has_none() -> None:
    assert reports(exported(step)) == []
    assert reports(transform(exported(step), "partition")) == []


# Figures, counted by hand: the flow of a microbatch is [2, 16], a layer has two weights and leaves
# what its gradient needs: its input, and of the hidden values two.


def test_figures_of_gpipe() -> None:
    ahead, back = reports(expanded(step, "schedule=gpipe"))
    ticks = MICROBATCHES + 3
    assert (ahead.cells, ahead.run) == (4 * ticks, 4 * MICROBATCHES)
    assert ahead.permuted_bytes == ticks * FLOW
    assert ahead.permuted_read == pytest.approx(3 * MICROBATCHES / (4 * ticks))
    assert (ahead.weights_bytes, back.weights_bytes) == (WEIGHTS // 4, WEIGHTS // 4)
    (row,), (other,) = ahead.directions, back.directions
    assert (row.direction, other.direction) == ("forward", "backward")
    assert (row.sent_bytes, row.receive_slots, row.received_bytes) == (FLOW, 1, FLOW)
    residuals = LAYERS // 4 * BATCH * (WIDTH + 2 * HIDDEN) * FLOAT
    assert row.written_bytes == residuals
    assert other.read_bytes == residuals
    assert other.written_bytes == WEIGHTS // 4
    assert (row.read_bytes, ahead.kept_bytes, ahead.schedule.kept_slots) == (0, 0, 0)
    assert (ahead.reductions, ahead.reduced_bytes) == (1, BATCH * WIDTH * FLOAT)


def test_figures_of_1f1b() -> None:
    (found,) = reports(expanded(step, "schedule=1f1b"))
    ticks = 2 * (MICROBATCHES + 3)
    assert (found.cells, found.run) == (4 * ticks, 2 * 4 * MICROBATCHES)
    assert found.permuted_bytes == ticks * 2 * FLOW
    assert found.permuted_read == pytest.approx(3 * MICROBATCHES / (4 * ticks))
    assert found.weights_bytes == WEIGHTS // 4
    sample = LAYERS // 4 * (WIDTH + 2 * HIDDEN) * FLOAT
    kept = found.schedule.kept_slots
    assert kept == 4
    assert found.kept_bytes == kept * BATCH // MICROBATCHES * sample
    ahead, back = found.directions
    assert ahead.received_bytes == ahead.receive_slots * FLOW
    assert back.written_bytes == WEIGHTS // 4
    assert (found.reductions, found.reduced_bytes) == (1, FLOAT)  # the loss


def test_partitioning_halves_what_the_data_axis_divides() -> None:
    program = expanded(step, "schedule=1f1b", stage=4, data=2)
    (whole,), (part,) = reports(program), reports(transform(program, "partition"))
    assert (whole.devices, part.devices) == (2, 1)
    assert 2 * part.permuted_bytes == whole.permuted_bytes
    assert 2 * part.kept_bytes == whole.kept_bytes
    assert part.weights_bytes == whole.weights_bytes


# Programs that look like pipelines.


def changed(program: Exported, change: Callable[[str], str]) -> Artifact:
    text = artifact.to_text(artifact.from_exported(program).module)
    after = change(text)
    assert after != text
    return artifact.parse(after.encode())


def table_changed(change: Callable[[Entries], None]) -> Callable[[str], str]:
    """The first table of a program with other integers."""

    def changed_text(text: str) -> str:
        found = TABLE.search(text)
        assert found is not None
        entries: Entries = np.frombuffer(bytes.fromhex(found[1]), np.int32)
        entries = entries.reshape([int(size) for size in found.groups()[1:]]).copy()
        change(entries)
        return text.replace(found[1], entries.tobytes().hex().upper())

    return changed_text


def entry_changed(column: Column, by: int) -> Callable[[str], str]:
    """The second cell that runs has another integer in a column."""

    def change(entries: Entries) -> None:
        rank, tick = np.argwhere(entries[:, :, Column.RUNS])[1]
        entries[rank, tick, column] += by

    return table_changed(change)


def swap_two_cells(entries: Entries) -> None:
    """The last rank runs its first two microbatches the other way round."""
    one, other = np.flatnonzero(entries[-1, :, Column.RUNS])[:2]
    for column in (Column.MICROBATCH, Column.KEPT):
        entries[-1, [one, other], column] = entries[-1, [other, one], column]


def deliver_elsewhere(entries: Entries) -> None:
    """What the second rank receives lies in the other slot."""
    entries[1, :, Column.DELIVERY] = 1 - entries[1, :, Column.DELIVERY]


CHANGES = {
    "runs": entry_changed(Column.RUNS, -1),
    "ends": entry_changed(Column.ENDS, 1),
    "received": entry_changed(Column.RECEIVED, 1),
    "chunk": entry_changed(Column.CHUNK, 1),
    "microbatch": entry_changed(Column.MICROBATCH, 1),
    "source": entry_changed(Column.SOURCE, 100),
    "kept": entry_changed(Column.KEPT, 1),
    "first": entry_changed(Column.FIRST, 1),
    "layers": entry_changed(Column.LAYERS, 1),
    "order": table_changed(swap_two_cells),
    "deliveries": table_changed(deliver_elsewhere),
    "negative": entry_changed(Column.MICROBATCH, -5),
    "ring": lambda text: text.replace("[[0, 1], [1, 2]", "[[0, 2], [1, 1]"),
    "all but the last": lambda text: text.replace(", [3, 0]]> : tensor<4x2", "]> : tensor<3x2"),
    "ticks": lambda text: text.replace("dense<14> : tensor<i32>", "dense<13> : tensor<i32>"),
    "other choice": lambda text: text.replace("[2:3]", "[1:2]", 1),
    "other limit": lambda text: text.replace("[9:10]", "[8:9]", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_looks_like_a_pipeline_is_not_taken_for_one(name: str) -> None:
    program = expanded(step, "schedule=1f1b")
    assert len(reports(program)) == 1
    found = changed(program, CHANGES[name])
    assert find_pipelines(found.module) == []


def test_only_the_changed_pipeline_is_lost() -> None:
    program = expanded(step, "schedule=gpipe")
    found = changed(program, entry_changed(Column.MICROBATCH, 1))
    assert len(find_pipelines(found.module)) == 1


# Times.


def timed(program: Exported) -> PipelineReport:
    question = Question(load_hardware("h100"), with_timeline=False)
    (found,) = exposure([artifact.from_exported(program)], question)
    return found.pipelines[0]


def reference_total(found: PipelineReport) -> float:
    """Rank by rank and tick by tick, from the figures that are shown."""
    schedule, times = found.schedule, found.times
    assert times is not None
    ranks = schedule.ranks
    rows = zip(schedule.directions, times.layer_ns, times.permute_ns, strict=True)
    directions = list(rows)
    ready = [0.0] * ranks
    for tick in range(schedule.ticks):
        ends = list(ready)
        for rank in range(ranks):
            ends[rank] += times.rest_ns
            for direction, layer_ns, _ in directions:
                cell = direction.cells[tick][rank]
                if cell is not None or not found.skips:
                    p = (0 if cell is None else cell.chunk) * ranks + rank
                    ends[rank] += layer_ns * found.layers[p]
                if direction is schedule.backward and cell is not None and cell.source < 0:
                    ends[rank] += times.head_ns * (len(directions) == 2)
        ready = list(ends)
        for direction, _, send in directions:
            step = 1 if direction is schedule.forward else -1
            for rank in range(ranks):
                ready[rank] = max(ready[rank], ends[(rank - step) % ranks] + send)
    return max(ready)


@pytest.mark.parametrize(
    "options", ["schedule=gpipe", "schedule=1f1b repeats=2", "schedule=eager-1f1b"]
)
def test_predicted_time(options: str) -> None:
    found = timed(expanded(step, options))
    times = found.times
    assert times is not None
    assert min(*times.layer_ns, *times.permute_ns, times.rest_ns) > 0
    assert times.total_ns == pytest.approx(reference_total(found))
    work = (
        sum(ns * MICROBATCHES * LAYERS / found.schedule.ranks for ns in times.layer_ns)
        + times.head_ns * MICROBATCHES / found.schedule.ranks
    )
    assert times.bubble == pytest.approx(1 - work / times.total_ns)
    assert found.bubble < times.bubble < 1


@pytest.mark.parametrize("options", ["schedule=1f1b", "schedule=eager-1f1b"])
def test_a_program_takes_as_long_as_its_pipeline(options: str) -> None:
    """Loops whose limit stands in a table are timed as often as the slowest rank runs them."""
    question = Question(load_hardware("h100"), with_timeline=False)
    (found,) = exposure([artifact.from_exported(expanded(step, options))], question)
    times = found.pipelines[0].times
    assert times is not None
    assert not any("how often this loop runs is not known" in note for note in found.notes)
    assert found.total_ns == pytest.approx(times.total_ns, rel=0.2)
    assert found.total_ns > 0.95 * times.total_ns


def test_ranks_alike_take_their_ticks_in_turn() -> None:
    """Where every rank runs a chunk in every tick, the loop is as long as its program says."""
    found = timed(expanded(forward, "schedule=gpipe"))
    times = found.times
    assert times is not None
    tick = times.rest_ns + times.layer_ns[0] * LAYERS / 4 + times.permute_ns[0]
    assert times.total_ns == pytest.approx(found.schedule.ticks * tick)


# Views.


def written(program: Exported, folder: Path) -> str:
    path = folder / "model.jax_export"
    path.write_bytes(program.serialize())
    return str(path)


def test_json_of_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(expanded(step, "schedule=1f1b"), tmp_path)
    assert main(["inspect", "--json", name]) == 0
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert (found["kind"], found["ranks"], found["chunks"], found["ticks"]) == ("1f1b", 4, 1, 14)
    assert found["bubble"] == pytest.approx(found["closed_form"])
    assert found["times"] is None
    assert found["timeline"][3][3:7] == ["3F0", "3B0", "3F1", "3B1"]
    assert sum(bool(cell) for row in found["timeline"] for cell in row) == found["run"]
    assert main(["inspect", "--json", "--hardware", "h100", name]) == 0
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    (other,) = program["pipelines"]
    assert other["times"]["total_ns"] > 0
    assert {**other, "times": None, "place": ""} == {**found, "place": ""}


def test_json_without_pipelines_has_no_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = written(exported(step), tmp_path)
    assert main(["inspect", "--json", name]) == 0
    assert "pipelines" not in json.loads(capsys.readouterr().out)
    assert main(["inspect", "--json", "--hardware", "h100", name]) == 0
    assert "pipelines" not in json.loads(capsys.readouterr().out)["programs"][0]


def test_text_of_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(expanded(step, "schedule=1f1b repeats=2 skip=false", stage=2), tmp_path)
    assert main(["inspect", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [at for at, line in enumerate(lines) if line.startswith("pipeline over")]
    assert lines[head].startswith(
        'pipeline over "stage": interleaved-eager-1f1b, 2 ranks of 2 chunks of 2 layers, '
        "4 microbatches; "
    )
    assert lines[head + 1] == (
        "  bubble    33.3 %: 16 of 48 forward and backward cells in 12 ticks have no work; closed "
        f"form {LEAST_OF_BOTH} = 33.3 %"
    )
    assert lines[head + 2] == "  garbage   computed in cells without work"
    chart = [line for line in lines if re.match(r"  r\d ", line)]
    assert len(chart) == 2
    # A tick of four columns has room for a forward and a backward.
    assert chart[1] == ("  r1 ....F0--F1--f0b0f1b1F2B0F3B1f2b2f3b3B2==B3==....")


def document(*programs: Exported) -> Document:
    question = Question(load_hardware("h100"))
    found = exposure([artifact.from_exported(each) for each in programs], question)
    return Document("steps", "0", tuple(found))


def test_page_draws_every_cell() -> None:
    program = expanded(step, "schedule=1f1b")
    page = render_page(document(program))
    section = page[page.index('<section id="pipelines-section"') :]
    section = section[: section.index("</section>")]
    assert section.count('<div class="rank">') == 4
    drawn = re.findall(r'<i class="([FB]) c0" style="left:[\d.]+%;width:([\d.]+)%" title', section)
    assert [kind for kind, _ in drawn].count("F") == 4 * MICROBATCHES
    assert len(drawn) == 2 * 4 * MICROBATCHES
    assert {width for _, width in drawn} == {f"{100 / 14:.4f}"}
    assert "42.9 %" in section


def test_page_tells_programs_apart() -> None:
    page = render_page(document(expanded(forward, "schedule=gpipe"), exported(forward)))
    assert page.count('<div class="chart"') == 1
    assert "as written: gpipe over stage" in page


def test_page_without_pipelines_has_no_section() -> None:
    page = render_page(report_documents.before_after())
    assert "pipeline" not in page
    assert ".steps" not in page


def test_page_in_a_browser(opened: Any) -> None:
    """The fixture looks for errors; the chart is as wide as its ticks need."""
    page = opened(document(expanded(step, "schedule=1f1b repeats=2"))).page
    assert page.locator("#pipelines-section .rank:not(.axis)").count() == 4
    box = page.locator("#pipelines-section .wide").bounding_box()
    assert box["width"] >= 26 * 22

"""Scheduled HLO text as a task graph: control flow, storages, names, what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hlo_graphs import DEVICES, GPU, PAIRS, body_of, graph, hlo, named, shown

from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.hlo_input.shapes import Array, parse_shape
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

LOOP = (
    """body: %t = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
    %i = s32[] get-tuple-element(%t), index=0
    %x = f32[64]{0} get-tuple-element(%t), index=1
    %w = f32[64]{0} get-tuple-element(%t), index=2
    %one = s32[] constant(1)
    %next = s32[] add(%i, %one)
    %y = f32[64]{0} multiply(%x, %w)
    ROOT %r = (s32[], f32[64]{0}, f32[64]{0}) tuple(%next, %y, %w)""",
    """condition: %t.1 = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
    %j = s32[] get-tuple-element(%t.1), index=0
    %end = s32[] constant(7)
    ROOT %less = pred[] compare(%j, %end), direction=LT""",
)
LOOP_ENTRY = """%p = f32[64]{0} parameter(0)
    %zero = s32[] constant(0)
    %c = f32[64]{0} copy(%p)
    %init = (s32[], f32[64]{0}, f32[64]{0}) tuple(%zero, %c, %p)
    %loop = (s32[], f32[64]{0}, f32[64]{0}) while(%init), condition=%condition, body=%bodyCONFIG
    ROOT %out = f32[64]{0} get-tuple-element(%loop), index=1"""


def test_a_while_is_a_loop_of_its_body_whose_results_replace_its_inputs():
    entry = LOOP_ENTRY.replace("CONFIG", ', backend_config={"known_trip_count":{"n":"5"}}')
    task_graph = graph(entry, *LOOP)
    loop = body_of(named(task_graph, "loop"))
    assert loop.trips == 5
    assert shown(loop.body) == ["input t"] * 3 + ["compute next", "compute y"]
    assert loop.carries == ((0, 3), (1, 4))
    assert loop.body.tasks[4].storages == loop.body.tasks[1].storages  # in the loop's tuple
    assert not loop.body.tasks[4].allocs
    (out,) = task_graph.tasks[-1].deps
    assert task_graph.tasks[out].storages == named(task_graph, "c").storages
    assert memory_profile(task_graph).peak_bytes == 512


def test_trips_that_xla_did_not_write_down_are_counted():
    assert body_of(named(graph(LOOP_ENTRY.replace("CONFIG", ""), *LOOP), "loop")).trips == 7


def test_a_loop_that_runs_differently_often_is_timed_in_the_mean():
    known = ', frontend_attributes={stablehlo_tools_mean_runs="2.5"}'
    unknown = (LOOP[0], LOOP[1].replace("LT", "EQ"))
    loop = body_of(named(graph(LOOP_ENTRY.replace("CONFIG", known), *unknown), "loop"))
    once = body_of(named(graph(LOOP_ENTRY.replace("CONFIG", ""), *unknown), "loop"))
    assert (loop.trips, once.trips) == (3, None)
    whole = 3 * sum(task.ns for task in loop.body.tasks)
    assert whole == pytest.approx(2.5 * sum(task.ns for task in once.body.tasks))


@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        ("compare(%j, %end), direction=LE", 8),
        ("compare(%end, %j), direction=GT", 7),
        ("compare(%j, %end), direction=NE", 7),
        ("compare(%j, %end), direction=GT", 0),
        ("compare(%j, %end), direction=EQ", None),
    ],
)
def test_trips_by_the_comparison(condition: str, trips: int | None):
    changed = LOOP[1].replace("compare(%j, %end), direction=LT", condition)
    loop = body_of(named(graph(LOOP_ENTRY.replace("CONFIG", ""), LOOP[0], changed), "loop"))
    assert loop.trips == trips
    assert ("less" in shown(loop.body)[-1]) == (trips is None)  # then the condition is a kernel


def test_a_start_of_one_iteration_that_the_next_one_waits_for():
    start = f"all-gather-start(%P), {PAIRS}, dimensions={{0}}"
    task_graph = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %first = (f32[64]{{0}}, f32[128]{{0}}) {start.replace("P", "p")}
        %init = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) tuple(%first, %p)
        %loop = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) while(%init), condition=%cond,
            .. body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
        %last = (f32[64]{{0}}, f32[128]{{0}}) get-tuple-element(%loop), index=0
        ROOT %done = f32[128]{{0}} all-gather-done(%last)""",
        f"""body: %t = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) parameter(0)
        %flying = (f32[64]{{0}}, f32[128]{{0}}) get-tuple-element(%t), index=0
        %x = f32[64]{{0}} get-tuple-element(%t), index=1
        %d = f32[128]{{0}} all-gather-done(%flying)
        %y = f32[64]{{0}} slice(%d), slice={{[0:64]}}
        %s = (f32[64]{{0}}, f32[128]{{0}}) {start.replace("P", "x")}
        ROOT %r = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) tuple(%s, %y)""",
        """cond: %u = ((f32[64]{0}, f32[128]{0}), f32[64]{0}) parameter(0)
        ROOT %c = pred[] constant(true)""",
    )
    loop = body_of(named(task_graph, "loop"))
    start_task, wait = named(loop.body, "s"), named(loop.body, "d")
    assert loop.carried == {start_task.id}
    assert wait.start == start_task.id
    assert named(task_graph, "done").start == named(task_graph, "first").id
    assert simulate(task_graph).total_ns > 4 * GPU.launch_ns


def test_the_dearest_branch_stands_for_a_conditional():
    task_graph = graph(
        """%p = f32[1024,1024]{1,0} parameter(0)
        %b = pred[] parameter(1)
        ROOT %c = f32[1024,1024]{1,0} conditional(%b, %p, %p), true_computation=%cheap,
            .. false_computation=%dear""",
        "cheap: ROOT %q = f32[1024,1024]{1,0} parameter(0)",
        """dear: %q.1 = f32[1024,1024]{1,0} parameter(0)
        ROOT %n = f32[1024,1024]{1,0} negate(%q.1)""",
    )
    assert shown(task_graph) == ["input p", "input b", "compute n", "output output"]


def test_a_call_is_opened():
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        ROOT %c = f32[64]{0} call(%p), to_apply=%called""",
        """called: %q = f32[64]{0} parameter(0)
        ROOT %n = f32[64]{0} negate(%q)""",
    )
    assert shown(task_graph) == ["input p", "compute n", "output output"]


# Storages


def test_a_donated_input_is_updated_in_place():
    entry = """%p = f32[64,64]{1,0} parameter(0)
        %u = f32[1,64]{1,0} parameter(1)
        %i = s32[] constant(0)
        ROOT %r = f32[64,64]{1,0} dynamic-update-slice(%p, %u, %i, %i)"""
    task_graph = graph(entry, header=", input_output_alias={ {}: (0, {}, may-alias) }")
    assert not named(task_graph, "p").persistent
    assert named(task_graph, "u").persistent
    assert named(task_graph, "r").storages == named(task_graph, "p").storages
    assert memory_profile(task_graph).peak_bytes == 64 * 64 * 4 + 64 * 4


def test_an_output_of_its_own_is_written_where_the_donated_input_is():
    entry = """%p = f32[64]{0} parameter(0)
        %n = f32[64]{0} negate(%p)
        ROOT %t = (f32[64]{0}) tuple(%n)"""
    donated = graph(entry, header=", input_output_alias={ {0}: (0, {}, may-alias) }")
    assert (memory_profile(donated).peak_bytes, memory_profile(graph(entry)).peak_bytes) == (
        256,
        512,
    )


def test_tiles_fill_up_device_memory_and_the_vector_memory_holds_none_of_it():
    tiled = parse_shape("f32[3,5]{1,0:T(8,128)}")
    assert isinstance(tiled, Array)
    assert (tiled.bytes, tiled.padded_bytes) == (60, 4096)
    packed = parse_shape("bf16[16,3,200]{2,0,1:T(8,128)(2,1)S(1)}")
    assert isinstance(packed, Array)
    assert (packed.padded, packed.space) == ((3, 16, 256), 1)


# Names, places, measured times


TABLES = """FileNames
1 "/home/me/model.py"

FunctionNames
1 "step"

FileLocations
7 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=4 end_column=9}

StackFrames
3 {file_location_id=7 parent_frame_id=1}
"""


def test_a_task_says_where_it_comes_from():
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        %a = f32[64]{0} negate(%p), metadata={op_name="jit(step)/layer/neg" stack_frame_id=3}
        ROOT %b = f32[64]{0} negate(%a),
            .. metadata={op_name="jit(step)/neg" source_file="/x/old.py" source_line=9}""",
        tables=TABLES,
    )
    negated = named(task_graph, "a")
    assert (negated.op, negated.place) == ("neg", "model.py:42 (jit(step)/layer/neg)")
    assert named(task_graph, "b").place == "old.py:9 (jit(step)/neg)"
    assert named(task_graph, "p").op == "parameter"


def test_a_collective_without_a_source_line_has_the_nearest() -> None:
    reduced = """f32[4]{0} all-reduce(%NAME), channel_id=1, use_global_device_ids=true,
            .. replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"""
    found = graph(
        f"""%p = f32[4]{{0}} parameter(0)
        %of_argument = {reduced.replace("NAME", "p")}, metadata={{op_name="w['up']"}}
        %a = f32[4]{{0}} negate(%of_argument), metadata={{source_file="m.py" source_line=4}}
        %b = f32[4]{{0}} copy(%a)
        %behind = {reduced.replace("NAME", "b")}
        %first = {reduced.replace("NAME", "p")}
        %c = f32[4]{{0}} add(%first, %behind), metadata={{source_file="m.py" source_line=7}}
        ROOT %d = f32[4]{{0}} negate(%c)""",
        "add: %q = f32[] parameter(0)\nROOT %r = f32[] add(%q, %q)",
    )
    places = {name: named(found, name).place for name in ("of_argument", "behind", "first")}
    assert places == {"of_argument": "w['up']", "behind": "near m.py:4", "first": "near m.py:7"}


class Measured:
    """Knows the time of some names."""

    def __init__(self, **known: float) -> None:
        self.known = known
        self.asked: list[Sequence[str]] = []

    def ns(self, names: Sequence[str]) -> float | None:
        self.asked.append(names)
        return next((self.known[name] for name in names if name in self.known), None)


def test_measured_times_go_before_the_model():
    text = hlo(
        f"""%p = f32[64]{{0}} parameter(0)
        %a = f32[64]{{0}} negate(%p), metadata={{op_name="jit(step)/neg"}}
        %g = f32[128]{{0}} all-gather(%a), {PAIRS}, dimensions={{0}}
        ROOT %i = ((f32[4]{{0}}), token[]) infeed(%a)"""
    )
    measured = Measured(a=1234.0, g=5e6, i=77.0)
    task_graph = hlo_task_graph(text, GPU, DEVICES, measured)
    assert ["a", "jit(step)/neg"] in measured.asked
    times = {task.name: task.ns for task in task_graph.tasks if task.ns}
    assert times == {"a": 1234.0, "g": 5e6, "i": 77.0}


# What is not understood


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "f32[4]{0} quantum-leap(%p)",
            r"instruction x \(quantum-leap\): the time of this opcode is unknown",
        ),
        ("((f32[4]{0}), token[]) infeed(%p)", r"instruction x \(infeed\): .* the host is unknown"),
        (
            "(f32[4]{0}, u32[], token[]) send(%p), channel_id=1, is_host_transfer=true",
            r"instruction x \(send\): .* the host is unknown",
        ),
        (
            "(f32[4]{0}, u32[], token[]) send(%p), channel_id=1",
            r"instruction x \(send\): it does not state its source and target devices",
        ),
        ("f32[4]{0} all-gather-done(%p)", r"instruction x .*waits for an op that was not started"),
        ("f32[4]{0} teleport-start(%p)", r"instruction x .*an unknown asynchronous form"),
        ("f32[4]{0} fusion(%p), calls=%gone", r"instruction x \(fusion\): .*no computation 'gone'"),
        (
            'f32[4]{0} custom-call(%p, %p), custom_call_target="__cublas$gemm"',
            r"instruction x \(custom-call\): a library product without dot_dimension_numbers",
        ),
        ("f32[4]{0} convolution(%p, %p), window={}", r"a convolution without dim_labels"),
    ],
)
def test_what_is_not_known_is_refused_by_name(line: str, message: str):
    with pytest.raises(ToolError, match=message):
        graph(f"%p = f32[4]{{0}} parameter(0)\nROOT %x = {line}")


@pytest.mark.parametrize("text", ["", "HloModule m\n", "HloModule m, is_scheduled=true\n"])
def test_text_that_is_no_schedule_is_refused(text: str):
    with pytest.raises(ToolError):
        hlo_task_graph(text, GPU, DEVICES)


COPIED = """
  %p = f32[4096] parameter(0)
  %away = (f32[4096]{0:S(5)}, f32[4096]{0}, u32[]) copy-start(%p)
  %there = f32[4096]{0:S(5)} copy-done(%away)
  %back = (f32[4096]{0}, f32[4096]{0:S(5)}, u32[]) copy-start(%there)
  ROOT %here = f32[4096]{0} copy-done(%back)
"""


def test_copies_between_memories_take_the_link_to_the_host():
    task_graph = graph(COPIED)
    away, back = (named(task_graph, name) for name in ("away", "back"))
    for task, stream in ((away, "to host"), (back, "to device")):
        assert task.communication is not None
        assert (task.communication.stream, task.communication.bytes) == (stream, 16384)
        assert task.ns == pytest.approx(16384 / 52)
    assert not any(task_graph.storages[s] for s in away.allocs)  # it takes none of the device's


def test_a_copy_over_a_link_that_nothing_is_known_of_is_refused():
    message = r"instruction away \(copy-start\): .* the host is unknown"
    with pytest.raises(ToolError, match=message):
        hlo_task_graph(hlo(COPIED), load_hardware("tpu-v5p"), DEVICES)

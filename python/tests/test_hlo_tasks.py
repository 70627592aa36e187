"""Scheduled HLO text as a task graph: each form by hand, and the schedules of real models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from models.zoo import ZOO

from stablehlo_tools import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.cost.work import Matmul, Work, WorkKind
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.overlap.task_graph import Communication, Loop, Task, TaskGraph, TaskKind
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.collectives import parse_groups
from stablehlo_tools.targets.hlo.module import Computation, HloModule, parse_module
from stablehlo_tools.targets.hlo.shapes import Array, parse_shape
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph
from stablehlo_tools.targets.hlo.trip_counts import trip_count
from stablehlo_tools.targets.hlo.work import FREE, work
from stablehlo_tools.targets.scheduled_hlo import Choice, Node, parse_schedule
from stablehlo_tools.targets.scheduled_hlo import Loop as ScheduledLoop
from stablehlo_tools.targets.topologies import Target, missing_package

DEVICES = 8
GPU, TPU = load_hardware("h100"), load_hardware("tpu-v5e")
PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, channel_id=1"
ADD = """add: %a = f32[] parameter(0)
    %b = f32[] parameter(1)
    ROOT %s = f32[] add(%a, %b)"""
NETWORK = {
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
}


def hlo(entry: str, *computations: str, header: str = "", tables: str = "") -> str:
    """A scheduled module; each computation is `name: instructions`, one a line."""
    text = f"HloModule jit_step, is_scheduled=true, num_partitions=8{header}\n\n{tables}\n"
    for part in computations:
        name, _, body = part.partition(":")
        text += f"\n%{name.strip()} (q: f32[4]) -> f32[4] {{\n{_indented(body)}\n}}\n"
    return f"{text}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{_indented(entry)}\n}}\n"


def _indented(body: str) -> str:
    """Instructions one a line; a line that begins with `..` goes on from the one before."""
    whole = re.sub(r"\s*\n\s*\.\.\s*", " ", body.strip())
    return "\n".join(f"  {line.strip()}" for line in whole.splitlines())


def graph(entry: str, *computations: str, header: str = "", tables: str = "") -> TaskGraph:
    return hlo_task_graph(hlo(entry, *computations, header=header, tables=tables), GPU, DEVICES)


def shown(found: TaskGraph) -> list[str]:
    """The tasks that are no views and no memory of a result, as `kind name`, a wait with the start
    it waits for."""
    lines: list[str] = []
    for task in found.tasks:
        waits = f" of {found.tasks[task.start].name}" if task.start is not None else ""
        if task.kind is not TaskKind.VIEW and task.op != "result":
            lines.append(f"{task.kind.value} {task.name}{waits}")
    return lines


def named(found: TaskGraph, name: str) -> Task:
    return next(task for task in found.tasks if task.name == name)


def sent(found: TaskGraph, name: str) -> Communication:
    communication = named(found, name).communication
    assert communication is not None
    return communication


def body_of(task: Task) -> Loop:
    assert task.loop is not None
    return task.loop


# Communication


def test_a_synchronous_collective_is_a_start_and_its_wait():
    found = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %g = f32[128]{{0}} all-gather(%p), {PAIRS}, dimensions={{0}}
        ROOT %r = f32[128]{{0}} negate(%g)"""
    )
    assert shown(found) == [
        "input p",
        "collective_start g",
        "wait g of g",
        "compute r",
        "output output",
    ]
    communication = sent(found, "g")
    assert (communication.kind, communication.bytes) == ("all_gather", 512)
    assert communication.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert communication.links
    assert communication.stream == "+".join(communication.links)
    assert communication.dtype == "f32"
    assert named(found, "g").ns > communication.latency_ns > 0


@pytest.mark.parametrize(
    ("instruction", "kind", "size"),
    [
        (f"f32[128]{{0}} all-to-all(%p), {PAIRS}, dimensions={{0}}", "all_to_all", 512),
        (f"f32[128]{{0}} all-reduce(%p), {PAIRS}, to_apply=%add", "all_reduce", 512),
        (f"f32[64]{{0}} reduce-scatter(%p), {PAIRS}, to_apply=%add", "reduce_scatter", 512),
        (
            "f32[128]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}",
            "collective_permute",
            512,
        ),
        (
            "f32[128]{0} collective-broadcast(%p), replica_groups={{0,1}}, channel_id=1",
            "collective_broadcast",
            512,
        ),
    ],
)
def test_bytes_are_nccls_sizes(instruction: str, kind: str, size: int):
    found = graph(f"%p = f32[128]{{0}} parameter(0)\nROOT %x = {instruction}", ADD)
    assert (sent(found, "x").kind, sent(found, "x").bytes) == (kind, size)
    assert sent(found, "x").reduction == ("add" if "to_apply" in instruction else None)


def test_start_and_done_with_compute_between():
    found = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %s = (f32[64]{{0}}, f32[128]{{0}}) all-gather-start(%p), {PAIRS}, dimensions={{0}}
        %c = f32[64]{{0}} negate(%p)
        %d = f32[128]{{0}} all-gather-done(%s)
        ROOT %t = (f32[64]{{0}}, f32[128]{{0}}) tuple(%c, %d)"""
    )
    assert shown(found)[1:4] == ["collective_start s", "compute c", "wait d of s"]
    assert sent(found, "s").bytes == 512
    start, wait = named(found, "s"), named(found, "d")
    assert start.storages == wait.storages == named(found, "result{1}").allocs
    assert not start.allocs + wait.allocs  # what is returned has its memory from the start


@pytest.mark.parametrize(
    ("shape", "opcode", "result"),
    [
        ("((f32[64]{0}, f32[64]{0}), (f32[128]{0}, f32[128]{0}))", "all-gather", 1024),
        ("((f32[64]{0}, f32[64]{0}), (f32[64]{0}, f32[64]{0}), u32[])", "all-to-all", 512),
        ("((f32[64]{0}, f32[64]{0}), (f32[32]{0}, f32[32]{0}))", "reduce-scatter", 256),
        ("(f32[64]{0}, f32[64]{0})", "all-reduce", 512),
    ],
)
def test_a_start_of_several_holds_their_results(shape: str, opcode: str, result: int):
    each = result // 2 // 4
    found = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %s = {shape} {opcode}-start(%p, %p), {PAIRS}, dimensions={{0}}
        %d = (f32[{each}]{{0}}, f32[{each}]{{0}}) {opcode}-done(%s)
        %one = f32[{each}]{{0}} get-tuple-element(%d), index=1
        ROOT %r = f32[{each}]{{0}} negate(%one)"""
    )
    assert sum(found.storages[s] for s in named(found, "s").allocs) == result
    (read,) = named(found, "r").deps
    assert found.tasks[read].kind is TaskKind.VIEW  # it holds one result, not both
    assert found.tasks[read].storages == named(found, "s").storages[1:]


def test_an_async_wrapper_and_its_updates():
    found = graph(
        """%p = f32[64]{0} parameter(0)
        %s = ((f32[64]{0}), f32[128]{0}, u32[]) async-start(%p), calls=%wrapped
        %u = ((f32[64]{0}), f32[128]{0}, u32[]) async-update(%s)
        %c = f32[64]{0} negate(%p)
        %d = f32[128]{0} async-done(%u)
        ROOT %t = (f32[64]{0}, f32[128]{0}) tuple(%c, %d)""",
        f"""wrapped: %q = f32[64]{{0}} parameter(0)
        ROOT %g = f32[128]{{0}} all-gather(%q), {PAIRS}, dimensions={{0}}""",
    )
    assert shown(found)[1:4] == ["collective_start s", "compute c", "wait d of s"]
    assert (sent(found, "s").kind, sent(found, "s").bytes) == ("all_gather", 512)


def test_several_collectives_in_one_wrapper_are_several_starts():
    found = graph(
        """%p = f32[64]{0} parameter(0)
        %s = ((f32[64]{0}), (f32[128]{0}, f32[64]{0})) async-start(%p), calls=%wrapped
        ROOT %d = (f32[128]{0}, f32[64]{0}) async-done(%s)""",
        f"""wrapped: %q = f32[64]{{0}} parameter(0)
        %g = f32[128]{{0}} all-gather(%q), {PAIRS}, dimensions={{0}}
        %a = f32[64]{{0}} all-reduce(%q), {PAIRS}, to_apply=%add
        ROOT %t = (f32[128]{{0}}, f32[64]{{0}}) tuple(%g, %a)""",
        ADD,
    )
    kinds = [t.communication.kind for t in found.tasks if t.communication]
    assert kinds == ["all_gather", "all_reduce"]
    waited = [task.start for task in found.tasks if task.kind is TaskKind.WAIT]
    assert waited == [named(found, "s").id, named(found, "s").id + 1]


def test_send_and_recv_are_the_two_sides_of_one_transfer():
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
    found = graph(
        f"""%p = f32[1048576]{{0}} parameter(0)
        %t = token[] after-all()
        %r = (f32[1048576]{{0}}, u32[], token[]) recv(%t), channel_id=1, {pairs}
        %s = (f32[1048576]{{0}}, u32[], token[]) send(%p, %t), channel_id=1, {pairs}
        %rd = (f32[1048576]{{0}}, token[]) recv-done(%r), channel_id=1
        %sd = token[] send-done(%s), channel_id=1
        ROOT %x = f32[1048576]{{0}} get-tuple-element(%rd), index=0"""
    )
    assert shown(found)[1:5] == [
        "collective_start r",
        "collective_start s",
        "wait rd of r",
        "wait sd of s",
    ]
    assert (sent(found, "s").kind, sent(found, "s").groups) == ("send", ((0, 1), (1, 2)))
    assert named(found, "s").ns == named(found, "r").ns
    assert not sent(found, "r").links  # a link carries both directions
    assert sent(found, "s").links


CHAIN = """frontend_attributes={chain_id="0"}"""
CHAINED = (
    f"""begin: %q = bf16[8,128]{{1,0}} parameter(0)
    %g = bf16[16,128]{{1,0}} all-gather(%q), {PAIRS}, dimensions={{0}}, {CHAIN}
    ROOT %c = (bf16[8,128]{{1,0}}, bf16[16,128]{{1,0}}) custom-call(%g),
        custom_call_target="AsyncCollectiveStart" """.replace(",\n        custom", ", custom"),
    f"""step: %q = bf16[8,128]{{1,0}} parameter(0)
    %o = bf16[16,128]{{1,0}} parameter(1)
    %x = f32[4096,1024]{{1,0}} parameter(2)
    %n = f32[4096,1024]{{1,0}} negate(%x)
    %g = bf16[16,128]{{1,0}} all-gather(%q), {PAIRS}, dimensions={{0}}, {CHAIN}
    ROOT %t = (f32[4096,1024]{{1,0}}, bf16[8,128]{{1,0}}, bf16[16,128]{{1,0}}) tuple(%n, %q, %g)""",
    f"""finish: %q = bf16[8,128]{{1,0}} parameter(0)
    %o = bf16[16,128]{{1,0}} parameter(1)
    %g = bf16[16,128]{{1,0}} all-gather(%q), {PAIRS}, dimensions={{0}}, {CHAIN}
    ROOT %c = bf16[16,128]{{1,0}} custom-call(%q, %o, %g),
        .. custom_call_target="AsyncCollectiveDone" """,
)


def test_a_collective_that_xla_tpu_chains_through_fusions():
    found = graph(
        """%p = bf16[8,128]{1,0} parameter(0)
        %x = f32[4096,1024]{1,0} parameter(1)
        %b = (bf16[8,128]{1,0}, bf16[16,128]{1,0}) fusion(%p), kind=kCustom, calls=%begin
        %p1 = bf16[8,128]{1,0} get-tuple-element(%b), index=0
        %o1 = bf16[16,128]{1,0} get-tuple-element(%b), index=1
        %s = (f32[4096,1024]{1,0}, bf16[8,128]{1,0}, bf16[16,128]{1,0}) fusion(%p1, %o1, %x),
            .. calls=%step
        %n = f32[4096,1024]{1,0} get-tuple-element(%s), index=0
        %p2 = bf16[8,128]{1,0} get-tuple-element(%s), index=1
        %o2 = bf16[16,128]{1,0} get-tuple-element(%s), index=2
        %f = bf16[16,128]{1,0} fusion(%p2, %o2), kind=kCustom, calls=%finish
        ROOT %t = (f32[4096,1024]{1,0}, bf16[16,128]{1,0}) tuple(%n, %f)""",
        *CHAINED,
    )
    assert shown(found)[2:5] == ["collective_start b", "compute s", "wait f of b"]
    assert (sent(found, "b").kind, sent(found, "b").bytes) == ("all_gather", 4096)
    step = named(found, "s")
    assert step.ns == pytest.approx(2 * 16 * 2**20 / (GPU.memory_bandwidth * GPU.memory_efficiency))


def test_a_done_of_a_chain_without_a_start_is_refused():
    with pytest.raises(ToolError, match=r"instruction f \(fusion\): it finishes g.*not started"):
        graph(
            """%p = bf16[8,128]{1,0} parameter(0)
            %o = bf16[16,128]{1,0} parameter(1)
            ROOT %f = bf16[16,128]{1,0} fusion(%p, %o), kind=kCustom, calls=%finish""",
            CHAINED[2],
        )


def test_an_all_reduce_of_which_a_fusion_keeps_a_slice_is_a_reduce_scatter():
    found = graph(
        """%p = f32[64]{0} parameter(0)
        ROOT %f = f32[32]{0} fusion(%p), kind=kCustom, calls=%scatter""",
        f"""scatter: %q = f32[64]{{0}} parameter(0)
        %a = f32[64]{{0}} all-reduce(%q), {PAIRS}, to_apply=%add
        %i = u32[] constant(0)
        ROOT %s = f32[32]{{0}} dynamic-slice(%a, %i), dynamic_slice_sizes={{32}}""",
        ADD,
    )
    assert shown(found)[1:3] == ["collective_start f", "wait f of f"]
    assert (sent(found, "f").kind, sent(found, "f").bytes) == ("reduce_scatter", 256)
    assert found.storages[named(found, "f").storages[0]] == 128


def test_prefetches_to_the_vector_memory_are_on_a_stream_of_their_own():
    text = hlo(
        """%p = f32[1024,1024]{1,0:T(8,128)} parameter(0)
        %s = (f32[1024,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)},
            .. u32[]{:S(2)}) copy-start(%p)
        %t = ((f32[1024,1024]{1,0:T(8,128)}), f32[256,1024]{1,0:T(8,128)S(1)},
            .. s32[]{:S(2)}) slice-start(%p), slice={[0:256], [0:1024]}
        %d = f32[1024,1024]{1,0:T(8,128)S(1)} copy-done(%s)
        %e = f32[256,1024]{1,0:T(8,128)S(1)} slice-done(%t)
        %n = f32[1024,1024]{1,0:T(8,128)} negate(%d)
        %m = f32[256,1024]{1,0:T(8,128)} negate(%e)
        ROOT %r = (f32[1024,1024], f32[256,1024]) tuple(%n, %m)"""
    )
    found = hlo_task_graph(text, TPU, 8)
    assert shown(found)[1:5] == [
        "collective_start s",
        "collective_start t",
        "wait d of s",
        "wait e of t",
    ]
    assert {sent(found, "s").stream, sent(found, "t").stream} == {"dma"}
    assert (sent(found, "s").bytes, sent(found, "t").bytes) == (4 * 2**20, 2**20)
    assert named(found, "s").ns == 4 * named(found, "t").ns > 0
    assert [found.storages[s] for s in named(found, "s").storages] == [0]  # not device memory


def test_a_kernel_that_xla_gpu_runs_asynchronously():
    found = graph(
        """%p = f32[64,64]{1,0} parameter(0)
        %i = s32[] constant(3)
        %s = ((f32[64,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%p, %i), calls=%slice
        ROOT %d = f32[1,64]{1,0} fusion-done(%s)""",
        """slice: %q = f32[64,64]{1,0} parameter(0)
        %i = s32[] parameter(1)
        ROOT %s = f32[1,64]{1,0} dynamic-slice(%q, %i, %i), dynamic_slice_sizes={1,64}""",
    )
    assert shown(found)[1:3] == ["collective_start s", "wait d of s"]
    assert (sent(found, "s").kind, sent(found, "s").stream) == ("copy", "dma")
    assert named(found, "s").ns == GPU.launch_ns


def test_an_asynchronous_update_writes_in_place():
    found = graph(
        """%p = f32[64,64]{1,0} parameter(0)
        %c = f32[64,64]{1,0} copy(%p)
        %u = f32[1,64]{1,0} parameter(1)
        %s = ((f32[64,64]{1,0}, f32[1,64]{1,0}), f32[64,64]{1,0}, u32[]) fusion-start(%c, %u),
            .. calls=%update
        ROOT %d = f32[64,64]{1,0} fusion-done(%s)""",
        """update: %q = f32[64,64]{1,0} parameter(0)
        %v = f32[1,64]{1,0} parameter(1)
        %i = s32[] constant(0)
        ROOT %w = f32[64,64]{1,0} dynamic-update-slice(%q, %v, %i, %i)""",
    )
    assert named(found, "d").storages == named(found, "c").storages
    assert not named(found, "s").allocs


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        ("{}", None),
        ("", None),
    ],
)
def test_every_spelling_of_replica_groups(text: str, groups: list[list[int]] | None):
    assert parse_groups(text) == groups


def test_groups_in_another_spelling_are_refused():
    with pytest.raises(ToolError, match=r"instruction g \(all-gather\): replica groups in a form"):
        graph(
            """%p = f32[64]{0} parameter(0)
            ROOT %g = f32[128]{0} all-gather(%p), replica_groups=V3[0:8], dimensions={0}"""
        )


def test_no_groups_are_all_devices_and_meshes_name_their_axes():
    found = graph(
        """%p = f32[64]{0} parameter(0)
        %g = f32[512]{0} all-gather(%p), replica_groups={}, channel_id=1, use_global_device_ids=true
        ROOT %h = f32[128]{0} all-gather(%p), replica_groups=mesh['x'=4,'y'=2] {'y'},
            .. channel_id=1, use_global_device_ids=true"""
    )
    assert sent(found, "g").groups == (tuple(range(8)),)
    assert sent(found, "h").axes == ("y",)


# Control flow


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
    found = graph(entry, *LOOP)
    loop = body_of(named(found, "loop"))
    assert loop.trips == 5
    assert shown(loop.body) == ["input t"] * 3 + ["compute next", "compute y"]
    assert loop.carries == ((0, 3), (1, 4))
    assert loop.body.tasks[4].storages == loop.body.tasks[1].storages  # in the loop's tuple
    assert not loop.body.tasks[4].allocs
    (out,) = found.tasks[-1].deps
    assert found.tasks[out].storages == named(found, "c").storages
    assert memory_profile(found).peak_bytes == 512


def test_trips_that_xla_did_not_write_down_are_counted():
    assert body_of(named(graph(LOOP_ENTRY.replace("CONFIG", ""), *LOOP), "loop")).trips == 7


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
    found = body_of(named(graph(LOOP_ENTRY.replace("CONFIG", ""), LOOP[0], changed), "loop"))
    assert found.trips == trips
    assert ("less" in shown(found.body)[-1]) == (trips is None)  # then the condition is a kernel


def test_a_start_of_one_iteration_that_the_next_one_waits_for():
    start = f"all-gather-start(%P), {PAIRS}, dimensions={{0}}"
    found = graph(
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
    loop = body_of(named(found, "loop"))
    start_task, wait = named(loop.body, "s"), named(loop.body, "d")
    assert loop.carried == {start_task.id}
    assert wait.start == start_task.id
    assert named(found, "done").start == named(found, "first").id
    assert simulate(found).total_ns > 4 * GPU.launch_ns


def test_the_dearest_branch_stands_for_a_conditional():
    found = graph(
        """%p = f32[1024,1024]{1,0} parameter(0)
        %b = pred[] parameter(1)
        ROOT %c = f32[1024,1024]{1,0} conditional(%b, %p, %p), true_computation=%cheap,
            .. false_computation=%dear""",
        "cheap: ROOT %q = f32[1024,1024]{1,0} parameter(0)",
        """dear: %q.1 = f32[1024,1024]{1,0} parameter(0)
        ROOT %n = f32[1024,1024]{1,0} negate(%q.1)""",
    )
    assert shown(found) == ["input p", "input b", "compute n", "output output"]


def test_a_call_is_opened():
    found = graph(
        """%p = f32[64]{0} parameter(0)
        ROOT %c = f32[64]{0} call(%p), to_apply=%called""",
        """called: %q = f32[64]{0} parameter(0)
        ROOT %n = f32[64]{0} negate(%q)""",
    )
    assert shown(found) == ["input p", "compute n", "output output"]


# Storages


def test_a_donated_input_is_updated_in_place():
    entry = """%p = f32[64,64]{1,0} parameter(0)
        %u = f32[1,64]{1,0} parameter(1)
        %i = s32[] constant(0)
        ROOT %r = f32[64,64]{1,0} dynamic-update-slice(%p, %u, %i, %i)"""
    found = graph(entry, header=", input_output_alias={ {}: (0, {}, may-alias) }")
    assert not named(found, "p").persistent
    assert named(found, "u").persistent
    assert named(found, "r").storages == named(found, "p").storages
    assert memory_profile(found).peak_bytes == 64 * 64 * 4 + 64 * 4


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
    found = graph(
        """%p = f32[64]{0} parameter(0)
        %a = f32[64]{0} negate(%p), metadata={op_name="jit(step)/layer/neg" stack_frame_id=3}
        ROOT %b = f32[64]{0} negate(%a),
            .. metadata={op_name="jit(step)/neg" source_file="/x/old.py" source_line=9}""",
        tables=TABLES,
    )
    assert (named(found, "a").op, named(found, "a").place) == ("neg", "model.py:42")
    assert named(found, "b").place == "old.py:9"
    assert named(found, "p").op == "parameter"


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
    found = hlo_task_graph(text, GPU, DEVICES, measured)
    assert ["a", "jit(step)/neg"] in measured.asked
    times = {task.name: task.ns for task in found.tasks if task.ns}
    assert times == {"a": 1234.0, "g": 5e6, "i": 77.0}


# What is not understood


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("f32[4]{0} quantum-leap(%p)", r"instruction x \(quantum-leap\): no time is known"),
        (
            "((f32[4]{0}), token[]) infeed(%p)",
            r"instruction x \(infeed\): .* the host is not known",
        ),
        (
            "(f32[4]{0}, u32[], token[]) send(%p), channel_id=1, is_host_transfer=true",
            r"instruction x \(send\): .* the host is not known",
        ),
        (
            "(f32[4]{0}, u32[], token[]) send(%p), channel_id=1",
            r"instruction x \(send\): it does not say between which devices it sends",
        ),
        ("f32[4]{0} all-gather-done(%p)", r"instruction x .*waits for what was not started"),
        ("f32[4]{0} teleport-start(%p)", r"instruction x .*asynchronous form that is not known"),
        (
            "(f32[4]{0:S(5)}, f32[4]{0}, u32[]) copy-start(%p)",
            r"instruction x \(copy-start\): .* the host is not known",
        ),
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


# Work


def work_of(name: str, entry: str, *computations: str) -> Work:
    module = parse_module(hlo(entry, *computations))
    return work(module.entry.by_name[name], module.entry, module)


def test_a_fusion_pays_its_boundary_and_reads_of_a_slice_what_it_takes():
    found = work_of(
        "f",
        """%p = f32[64,64]{1,0} parameter(0)
        %q = f32[64]{0} parameter(1)
        %i = s32[] parameter(2)
        ROOT %f = f32[1,64]{1,0} fusion(%p, %q, %i), kind=kLoop, calls=%sliced""",
        """sliced: %a = f32[64,64]{1,0} parameter(0)
        %b = f32[64]{0} parameter(1)
        %i = s32[] parameter(2)
        %s = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}
        %v = f32[1,64]{1,0} bitcast(%b)
        ROOT %m = f32[1,64]{1,0} multiply(%s, %v)""",
    )
    assert found == Work(WorkKind.ELEMENTWISE, 3 * 256 + 4, 128, (), "f32")


def test_an_update_in_place_writes_the_update():
    found = work_of(
        "f",
        """%p = f32[64,64]{1,0} parameter(0)
        %q = f32[1,64]{1,0} parameter(1)
        ROOT %f = f32[64,64]{1,0} fusion(%p, %q), kind=kLoop, calls=%updated""",
        """updated: %a = f32[64,64]{1,0} parameter(0)
        %b = f32[1,64]{1,0} parameter(1)
        %i = s32[] constant(0)
        ROOT %u = f32[64,64]{1,0} dynamic-update-slice(%a, %b, %i, %i)""",
    )
    assert found.bytes == 2 * 256


@pytest.mark.parametrize(
    "line",
    [
        "f32[8,8]{1,0} bitcast(%p)",
        "(f32[64]{0}) tuple(%p)",
        'f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "s32[]{:T(128)} add(%i, %i)",  # on XLA:TPU's scalar core
    ],
)
def test_views_are_free(line: str):
    entry = f"""%p = f32[64]{{0}} parameter(0)
        %i = s32[]{{:T(128)}} parameter(1)
        ROOT %x = {line}"""
    assert work_of("x", entry) is FREE


def test_a_scalar_is_a_kernel_on_a_gpu():
    assert work_of("x", "%i = s32[] parameter(0)\nROOT %x = s32[] add(%i, %i)").bytes == 12


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "window", "expected"),
    [
        # an image convolution, its padding not counted
        ("8,32,32,16", "3,3,16,64", "8,32,32,64",
         "{size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", Matmul(1, 8 * 32 * 32, 64, 138)),
        # XLA:TPU's dots: a batch dimension, a contraction over a window, an outer product
        ("6,64,32", "6,32,16", "6,64,16", "{size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf",
         Matmul(6, 64, 16, 32)),
        ("5,64,32", "5,32,16", "64,16,1", "{size=5}, dim_labels=0bf_0io->bf0",
         Matmul(1, 64, 16, 160)),
        ("64,32,1", "32,16,8", "64,16,8",
         "{size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_io0->bf0", Matmul(1, 64, 128, 32)),
        # the gradient of a filter: images are the depth
        ("32,32,8,16", "32,32,8,64", "1,1,16,64", "{size=32x32}, dim_labels=01fb_01io->01bf",
         Matmul(1, 16, 64, 8 * 32 * 32)),
    ],
)  # fmt: skip
def test_the_product_that_a_convolution_is(
    lhs: str, rhs: str, out: str, window: str, expected: Matmul
):
    def shape(dims: str) -> str:
        order = ",".join(str(d) for d in reversed(range(dims.count(",") + 1)))
        return f"bf16[{dims}]{{{order}}}"

    found = work_of(
        "c",
        f"""%a = {shape(lhs)} parameter(0)
        %b = {shape(rhs)} parameter(1)
        ROOT %c = {shape(out)} convolution(%a, %b), window={window}""",
    )
    assert found.matmuls == (expected,)
    assert found.dtype == "bf16"


def test_a_depthwise_convolution_has_a_product_for_each_group():
    found = work_of(
        "c",
        """%a = bf16[4,100,64]{2,1,0} parameter(0)
        %b = bf16[4,1,64]{2,1,0} parameter(1)
        ROOT %c = bf16[4,97,64]{2,1,0} convolution(%a, %b), window={size=4},
            .. dim_labels=b0f_0io->b0f, feature_group_count=64""",
    )
    assert found.matmuls == (Matmul(64, 4 * 97, 1, 4),)


def test_products_in_library_calls_and_in_fusions():
    dims = (
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
        '"rhs_batch_dimensions":["0"]}'
    )
    expected = (Matmul(4, 64, 16, 32),)
    arguments = """%a = bf16[4,64,32]{2,1,0} parameter(0)
        %b = bf16[4,32,16]{2,1,0} parameter(1)"""
    for target in ("__cublas$gemm", "__cublas$lt$matmul"):
        gemm = f"""{arguments}
            ROOT %c = (bf16[4,64,16]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b),
                .. custom_call_target="{target}",
                .. backend_config={{"gemm_backend_config":{{{dims}}}}}"""
        assert work_of("c", gemm).matmuls == expected
    fusion = f"""{arguments}
        ROOT %c = bf16[4,64,16]{{2,1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm,
            .. backend_config={{"kind":"__triton_gemm"}}"""
    dot = f"""gemm: {arguments}
        ROOT %d = bf16[4,64,16]{{2,1,0}} dot(%a, %b), lhs_batch_dims={{0}},
            .. lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}"""
    found = work_of("c", fusion, dot)
    assert found.matmuls == expected
    assert found.bytes == 2 * (4 * 64 * 32 + 4 * 32 * 16 + 4 * 64 * 16)


@pytest.mark.parametrize(
    ("target", "a", "b", "c"),
    [
        ("__cudnn$convForward", "8,32,32,16", "3,3,16,64", "8,32,32,64"),
        ("__cudnn$convBackwardInput", "8,32,32,64", "3,3,16,64", "8,32,32,16"),
        ("__cudnn$convBackwardFilter", "8,32,32,16", "8,32,32,64", "3,3,16,64"),
    ],
)
def test_cudnns_gradients_are_as_much_work_as_its_convolution(target: str, a: str, b: str, c: str):
    found = work_of(
        "x",
        f"""%a = f32[{a}]{{3,2,1,0}} parameter(0)
        %b = f32[{b}]{{3,2,1,0}} parameter(1)
        ROOT %x = (f32[{c}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b),
            .. window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f,
            .. custom_call_target="{target}" """,
    )
    assert found.flops == 2 * 8 * 32 * 32 * 16 * 64 * 9


# Real schedules


def _needs(target: Target) -> pytest.MarkDecorator:
    package = missing_package(target)
    return pytest.mark.skipif(package is not None, reason=f"{package} is not installed")


def _loops(nodes: Sequence[Node]) -> list[int | None]:
    found: list[int | None] = []
    for node in nodes:
        if isinstance(node, ScheduledLoop):
            found += [node.trip_count, *_loops(node.condition), *_loops(node.body)]
        elif isinstance(node, Choice):
            found += [count for branch in node.branches for count in _loops(branch)]
    return found


def _flops(module: HloModule, computation: Computation) -> float:
    """Of all products, loops as often as they run."""
    total = 0.0
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            body = module.called(instruction, "body")
            trips = trip_count(instruction, computation, module)
            total += (trips or 0) * _flops(module, body)
        elif instruction.opcode in ("fusion", "custom-call", "dot", "convolution"):
            done = work(instruction, computation, module)
            total += sum(product.flops for product in done.matmuls)
    return total


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("decoder-2d-scan-step", Target.GPU, marks=_needs(Target.GPU)),
        pytest.param("decoder-2d-step", Target.TPU, marks=_needs(Target.TPU)),
        pytest.param("decoder-2d-step", Target.CPU),
    ],
)
def test_a_real_schedule_is_read_whole(name: str, target: Target):
    model = ZOO[name]
    exported = model.build()
    assert not isinstance(exported, str)
    compiled = compile_artifact(artifact.from_exported(exported, name), target)
    hardware = TPU if target is Target.TPU else GPU
    found = hlo_task_graph(compiled.text, hardware, DEVICES)

    # every collective of the schedule is a start, and has its wait
    issued = [event for event in parse_schedule(compiled.text).events if event.issues]
    starts = [
        task.communication.kind
        for inner in found.walk()
        for task in inner.tasks
        if task.communication is not None and task.communication.kind in NETWORK
    ]
    waits = [
        start.communication.kind
        for inner in found.walk()
        for task in inner.tasks
        if task.kind is TaskKind.WAIT and task.start is not None
        for start in [inner.tasks[task.start]]
        if start.communication is not None and start.communication.kind in NETWORK
    ]
    assert Counter(starts) == Counter(waits)
    assert len(starts) == len(issued)
    kinds = Counter(event.kind.replace("-", "_") for event in issued)
    for kind in ("all_gather", "all_to_all", "collective_permute"):
        assert Counter(starts)[kind] == kinds[kind]

    # loops run as often as the schedule says
    known = sorted(trips for trips in _loops(compiled.schedule.nodes) if trips is not None)
    loops = [t.loop.trips for inner in found.walk() for t in inner.tasks if t.loop is not None]
    assert None not in loops
    assert Counter(known) <= Counter(loops)

    # as many operations as the model has: per token 6 for each weight, and those of attention
    # over all pairs, forward and twice backward
    tokens, sequence, width = 8 * 32, 32, 64
    weights = 2 * (2 * width * 64 + 2 * width * 32 + 3 * width * 128) + width * 128
    attention = 2 * 3 * 4 * tokens * sequence * 64
    expected = (6 * tokens * weights + attention) / DEVICES
    module = parse_module(compiled.text)
    assert _flops(module, module.entry) == pytest.approx(expected, rel=0.02)

    # every task reads what is before it, and needs memory of the compiler's size
    for inner in found.walk():
        assert all(dep < task.id for task in inner.tasks for dep in task.deps)
        assert all(task.place for task in inner.tasks if task.op == "dot_general")
    assert simulate(found).total_ns > 0
    peak, memory = memory_profile(found).peak_bytes, compiled.memory
    assert peak > memory.argument_bytes
    if target is Target.GPU:  # the others' temporaries hold more than the program's arrays
        assert 0.75 * memory.total_bytes < peak < 1.25 * memory.total_bytes

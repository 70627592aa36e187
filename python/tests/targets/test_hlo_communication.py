"""Each form of communication in scheduled HLO text, by hand."""

from __future__ import annotations

import pytest
from hlo_graphs import ADD, GPU, PAIRS, TPU, graph, hlo, named, sent, shown

from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.tasks.mesh_axes import with_axes_of
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.targets.hlo.hlo_collectives import parse_groups
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph


def test_a_synchronous_collective_is_a_start_and_its_wait():
    task_graph = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %g = f32[128]{{0}} all-gather(%p), {PAIRS}, dimensions={{0}}
        ROOT %r = f32[128]{{0}} negate(%g)"""
    )
    assert shown(task_graph) == [
        "input p",
        "collective_start g",
        "wait g of g",
        "compute r",
        "output output",
    ]
    communication = sent(task_graph, "g")
    assert (communication.kind, communication.bytes) == ("all_gather", 512)
    assert communication.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert communication.links
    assert communication.stream == "+".join(communication.links)
    assert communication.dtype == "f32"
    assert named(task_graph, "g").ns > communication.latency_ns > 0


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
    task_graph = graph(f"%p = f32[128]{{0}} parameter(0)\nROOT %x = {instruction}", ADD)
    assert (sent(task_graph, "x").kind, sent(task_graph, "x").bytes) == (kind, size)
    assert sent(task_graph, "x").reduction == ("add" if "to_apply" in instruction else None)


def test_start_and_done_with_compute_between():
    task_graph = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %s = (f32[64]{{0}}, f32[128]{{0}}) all-gather-start(%p), {PAIRS}, dimensions={{0}}
        %c = f32[64]{{0}} negate(%p)
        %d = f32[128]{{0}} all-gather-done(%s)
        ROOT %t = (f32[64]{{0}}, f32[128]{{0}}) tuple(%c, %d)"""
    )
    assert shown(task_graph)[1:4] == ["collective_start s", "compute c", "wait d of s"]
    assert sent(task_graph, "s").bytes == 512
    start, wait = named(task_graph, "s"), named(task_graph, "d")
    assert start.storages == wait.storages == named(task_graph, "result{1}").allocs
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
    task_graph = graph(
        f"""%p = f32[64]{{0}} parameter(0)
        %s = {shape} {opcode}-start(%p, %p), {PAIRS}, dimensions={{0}}
        %d = (f32[{each}]{{0}}, f32[{each}]{{0}}) {opcode}-done(%s)
        %one = f32[{each}]{{0}} get-tuple-element(%d), index=1
        ROOT %r = f32[{each}]{{0}} negate(%one)"""
    )
    assert sum(task_graph.storages[s] for s in named(task_graph, "s").allocs) == result
    (read,) = named(task_graph, "r").deps
    assert task_graph.tasks[read].kind is TaskKind.VIEW  # it holds one result, not both
    assert task_graph.tasks[read].storages == named(task_graph, "s").storages[1:]


def test_an_async_wrapper_and_its_updates():
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        %s = ((f32[64]{0}), f32[128]{0}, u32[]) async-start(%p), calls=%wrapped
        %u = ((f32[64]{0}), f32[128]{0}, u32[]) async-update(%s)
        %c = f32[64]{0} negate(%p)
        %d = f32[128]{0} async-done(%u)
        ROOT %t = (f32[64]{0}, f32[128]{0}) tuple(%c, %d)""",
        f"""wrapped: %q = f32[64]{{0}} parameter(0)
        ROOT %g = f32[128]{{0}} all-gather(%q), {PAIRS}, dimensions={{0}}""",
    )
    assert shown(task_graph)[1:4] == ["collective_start s", "compute c", "wait d of s"]
    assert (sent(task_graph, "s").kind, sent(task_graph, "s").bytes) == ("all_gather", 512)


def test_several_collectives_in_one_wrapper_are_several_starts():
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        %s = ((f32[64]{0}), (f32[128]{0}, f32[64]{0})) async-start(%p), calls=%wrapped
        ROOT %d = (f32[128]{0}, f32[64]{0}) async-done(%s)""",
        f"""wrapped: %q = f32[64]{{0}} parameter(0)
        %g = f32[128]{{0}} all-gather(%q), {PAIRS}, dimensions={{0}}
        %a = f32[64]{{0}} all-reduce(%q), {PAIRS}, to_apply=%add
        ROOT %t = (f32[128]{{0}}, f32[64]{{0}}) tuple(%g, %a)""",
        ADD,
    )
    kinds = [t.communication.kind for t in task_graph.tasks if t.communication]
    assert kinds == ["all_gather", "all_reduce"]
    waited = [task.start for task in task_graph.tasks if task.kind is TaskKind.WAIT]
    assert waited == [named(task_graph, "s").id, named(task_graph, "s").id + 1]


def test_send_and_recv_are_the_two_sides_of_one_transfer():
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
    task_graph = graph(
        f"""%p = f32[1048576]{{0}} parameter(0)
        %t = token[] after-all()
        %r = (f32[1048576]{{0}}, u32[], token[]) recv(%t), channel_id=1, {pairs}
        %s = (f32[1048576]{{0}}, u32[], token[]) send(%p, %t), channel_id=1, {pairs}
        %rd = (f32[1048576]{{0}}, token[]) recv-done(%r), channel_id=1
        %sd = token[] send-done(%s), channel_id=1
        ROOT %x = f32[1048576]{{0}} get-tuple-element(%rd), index=0"""
    )
    assert shown(task_graph)[1:5] == [
        "collective_start r",
        "collective_start s",
        "wait rd of r",
        "wait sd of s",
    ]
    assert (sent(task_graph, "s").kind, sent(task_graph, "s").groups) == ("send", ((0, 1), (1, 2)))
    assert named(task_graph, "s").ns == named(task_graph, "r").ns
    assert not sent(task_graph, "r").links  # a link carries both directions
    assert sent(task_graph, "s").links


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
    task_graph = graph(
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
    assert shown(task_graph)[2:5] == ["collective_start b", "compute s", "wait f of b"]
    assert (sent(task_graph, "b").kind, sent(task_graph, "b").bytes) == ("all_gather", 4096)
    step = named(task_graph, "s")
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
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        ROOT %f = f32[32]{0} fusion(%p), kind=kCustom, calls=%scatter""",
        f"""scatter: %q = f32[64]{{0}} parameter(0)
        %a = f32[64]{{0}} all-reduce(%q), {PAIRS}, to_apply=%add
        %i = u32[] constant(0)
        ROOT %s = f32[32]{{0}} dynamic-slice(%a, %i), dynamic_slice_sizes={{32}}""",
        ADD,
    )
    assert shown(task_graph)[1:3] == ["collective_start f", "wait f of f"]
    assert (sent(task_graph, "f").kind, sent(task_graph, "f").bytes) == ("reduce_scatter", 256)
    assert task_graph.storages[named(task_graph, "f").storages[0]] == 128


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
    task_graph = hlo_task_graph(text, TPU, 8)
    assert shown(task_graph)[1:5] == [
        "collective_start s",
        "collective_start t",
        "wait d of s",
        "wait e of t",
    ]
    assert {sent(task_graph, "s").stream, sent(task_graph, "t").stream} == {"dma"}
    assert (sent(task_graph, "s").bytes, sent(task_graph, "t").bytes) == (4 * 2**20, 2**20)
    assert named(task_graph, "s").ns == 4 * named(task_graph, "t").ns > 0
    assert [task_graph.storages[s] for s in named(task_graph, "s").storages] == [
        0
    ]  # not device memory


def test_a_kernel_that_xla_gpu_runs_asynchronously():
    task_graph = graph(
        """%p = f32[64,64]{1,0} parameter(0)
        %i = s32[] constant(3)
        %s = ((f32[64,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%p, %i), calls=%slice
        ROOT %d = f32[1,64]{1,0} fusion-done(%s)""",
        """slice: %q = f32[64,64]{1,0} parameter(0)
        %i = s32[] parameter(1)
        ROOT %s = f32[1,64]{1,0} dynamic-slice(%q, %i, %i), dynamic_slice_sizes={1,64}""",
    )
    assert shown(task_graph)[1:3] == ["collective_start s", "wait d of s"]
    assert (sent(task_graph, "s").kind, sent(task_graph, "s").stream) == ("copy", "dma")
    assert named(task_graph, "s").ns == GPU.launch_ns


def test_an_asynchronous_update_writes_in_place():
    task_graph = graph(
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
    assert named(task_graph, "d").storages == named(task_graph, "c").storages
    assert not named(task_graph, "s").allocs


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
    with pytest.raises(
        ToolError, match=r"instruction g \(all-gather\): replica groups in an unknown form"
    ):
        graph(
            """%p = f32[64]{0} parameter(0)
            ROOT %g = f32[128]{0} all-gather(%p), replica_groups=V3[0:8], dimensions={0}"""
        )


def test_no_groups_are_all_devices_and_meshes_name_their_axes():
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        %g = f32[512]{0} all-gather(%p), replica_groups={}, channel_id=1, use_global_device_ids=true
        ROOT %h = f32[128]{0} all-gather(%p), replica_groups=mesh['x'=4,'y'=2] {'y'},
            .. channel_id=1, use_global_device_ids=true"""
    )
    assert sent(task_graph, "g").groups == (tuple(range(8)),)
    assert sent(task_graph, "h").axes == ("y",)


def test_axes_have_the_names_of_the_program():
    """XLA's partitioner numbers those that it divides by, and lists devices over several tiles."""
    task_graph = graph(
        """%p = f32[64]{0} parameter(0)
        %g = f32[128]{0} all-gather(%p), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'},
            .. channel_id=1, use_global_device_ids=true
        %h = f32[256]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), channel_id=2,
            .. use_global_device_ids=true
        ROOT %t = f32[256]{0} all-gather(%p), channel_id=3, use_global_device_ids=true,
            .. replica_groups={{0,1,2,3},{4,5,6,7}}"""
    )
    found = with_axes_of(task_graph, {"mesh": DeviceMesh((("stage", 4), ("model", 2)))})
    assert [sent(found, name).axes for name in "ght"] == [("model",), ("stage",), ()]
    assert with_axes_of(task_graph, {}) == task_graph


def test_a_sparsecore_program_runs_from_where_it_gets_its_operands():
    """As libtpu 0.0.51 schedules a scatter on TPU v5p and v6e: loaded first, launched later."""
    found = graph(
        """
        %x = f32[1048576]{0:T(1024)} parameter(0)
        %i = s32[1048576]{0:T(1024)} parameter(1)
        %load = ((), (), (s32[8192]{0:T(1024)})) custom-call-start(),
            .. async_execution_thread="sparsecore", custom_call_target="TODO(b/522284627)",
            .. output_to_operand_aliasing={{}: (0, {})}, called_computations={%outer}
        %before = f32[1048576]{0:T(1024)} negate(%x)
        %launch = ((f32[1048576]{0:T(1024)}, s32[1048576]{0:T(1024)}),
            .. f32[1048576]{0:T(1024)}, (s32[8192]{0:T(1024)}))
            .. custom-call-update(%load, %before, %i),
            .. output_to_operand_aliasing={{2,0}: (0, {2,0})}
        %after = f32[1048576]{0:T(1024)} negate(%x)
        %done = f32[1048576]{0:T(1024)} custom-call-done(%launch)
        ROOT %y = f32[1048576]{0:T(1024)} add(%done, %after)
        """,
        """inner: %a = f32[1048576]{0:T(1024)} parameter(0)
        %b = s32[1048576]{0:T(1024)} parameter(1)
        ROOT %g = f32[1048576]{0:T(1024)} gather(%a, %b)""",
        """outer: %c = f32[1048576]{0:T(1024)} parameter(0)
        %d = s32[1048576]{0:T(1024)} parameter(1)
        %s = ((f32[1048576]{0:T(1024)}, s32[1048576]{0:T(1024)}), f32[1048576]{0:T(1024)},
            .. u32[]) call-start(%c, %d), async_execution_thread="sparsecore", to_apply=%inner
        ROOT %e = f32[1048576]{0:T(1024)} call-done(%s)""",
    )
    assert shown(found)[2:-1] == [
        "compute before",
        "collective_start launch",
        "compute after",
        "wait done of launch",
        "compute y",
    ]
    assert (sent(found, "launch").stream, sent(found, "launch").kind) == ("async", "gather")
    moved = 3 * 4 * 2**20  # what it gathers, as read and as written, and the indices
    assert named(found, "launch").ns == pytest.approx(moved / (0.5 * GPU.memory_rate))
    (before,) = (task.id for task in found.tasks if task.name == "before")
    assert before in named(found, "launch").deps

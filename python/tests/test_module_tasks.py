"""Modules as task graphs: fusion, bytes, collectives and their waits, loops, storages."""

from __future__ import annotations

import pytest
from module_tasks import kernels, of_kind, tasks_of

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.memory import memory_profile
from stablehlo_tools.overlap.simulator import simulate
from stablehlo_tools.overlap.task_graph import TaskKind

START, WAIT, VIEW, LOOP = (
    TaskKind.COLLECTIVE_START,
    TaskKind.WAIT,
    TaskKind.VIEW,
    TaskKind.LOOP,
)


def test_elementwise_ops_are_one_kernel_that_pays_its_boundary():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>, %y: tensor<1000xf32>) -> tensor<1000xf32> {
        %0 = stablehlo.add %x, %y : tensor<1000xf32>
        %1 = stablehlo.negate %0 : tensor<1000xf32>
        %2 = stablehlo.multiply %1, %x : tensor<1000xf32>
        return %2 : tensor<1000xf32>
      }""")
    assert kernels(graph) == [("multiply fusion of 3", 12_000)]


def test_a_value_of_two_kernels_goes_through_memory():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> (tensor<1000xf32>, tensor<f32>, tensor<f32>) {
        %0 = stablehlo.negate %x : tensor<1000xf32>
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %1 = stablehlo.reduce(%0 init: %z) applies stablehlo.add across dimensions = [0]
             : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
        %2 = stablehlo.reduce(%0 init: %z) applies stablehlo.maximum across dimensions = [0]
             : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
        return %0, %1, %2 : tensor<1000xf32>, tensor<f32>, tensor<f32>
      }""")
    assert kernels(graph) == [("negate", 8000), ("reduce", 4004), ("reduce", 4004)]


def test_a_kernel_may_write_what_the_program_returns_as_well():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> (tensor<1000xf32>, tensor<1000xf32>) {
        %0 = stablehlo.negate %x : tensor<1000xf32>
        %1 = stablehlo.add %0, %x : tensor<1000xf32>
        return %0, %1 : tensor<1000xf32>, tensor<1000xf32>
      }""")
    assert kernels(graph) == [("add fusion of 2", 12_000)]


def test_broadcasts_are_made_anew_where_a_kernel_can_and_written_where_not():
    graph = tasks_of("""
      func.func @main(%x: tensor<100xf32>) -> (tensor<100x100xf32>, tensor<100x100xf32>) {
        %0 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<100xf32>) -> tensor<100x100xf32>
        %1 = stablehlo.negate %0 : tensor<100x100xf32>
        %2 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [0]
             : (tensor<100x100xf32>, tensor<100x100xf32>) -> tensor<100x100xf32>
        return %1, %2 : tensor<100x100xf32>, tensor<100x100xf32>
      }""")
    assert kernels(graph) == [
        ("negate", 40_400),
        ("broadcast_in_dim", 40_400),
        ("dot_general", 80_000),
    ]


def test_a_product_takes_its_operations_or_its_bytes():
    graph = tasks_of("""
      func.func @main(%x: tensor<4x10x3000xbf16>, %y: tensor<4x3000x20xbf16>)
          -> tensor<4x10x20xf32> {
        %0 = stablehlo.dot_general %x, %y, batching_dims = [0] x [0], contracting_dims = [2] x [1]
             : (tensor<4x10x3000xbf16>, tensor<4x3000x20xbf16>) -> tensor<4x10x20xf32>
        return %0 : tensor<4x10x20xf32>
      }""")
    assert kernels(graph) == [("dot_general", 2 * 4 * 3000 * 30 + 4 * 4 * 200)]
    graph = tasks_of("""
      func.func @main(%x: tensor<8000x8000xbf16>) -> tensor<8000x8000xbf16> {
        %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
             : (tensor<8000x8000xbf16>, tensor<8000x8000xbf16>) -> tensor<8000x8000xbf16>
        return %0 : tensor<8000x8000xbf16>
      }""")
    assert kernels(graph) == [("dot_general", 2 * 8000**3 / 1000)]


def test_a_convolution_is_the_product_it_is_lowered_to():
    graph = tasks_of("""
      func.func @main(%x: tensor<64x128x128x256xf32>, %k: tensor<7x7x256x512xf32>)
          -> tensor<64x128x128x512xf32> {
        %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
             window = {pad = [[3, 3], [3, 3]]}
             {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
             : (tensor<64x128x128x256xf32>, tensor<7x7x256x512xf32>) -> tensor<64x128x128x512xf32>
        return %0 : tensor<64x128x128x512xf32>
      }""")
    assert kernels(graph) == [("convolution", 2 * 64 * 128**2 * 512 * 49 * 256 / 1000)]


def test_slices_are_charged_by_what_is_read_and_updates_by_what_is_written():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000x100xf32> {jax.buffer_donor = true}, %i: tensor<i32>)
          -> tensor<1000x100xf32> {
        %z = stablehlo.constant dense<0> : tensor<i32>
        %0 = stablehlo.dynamic_slice %x, %i, %z, sizes = [10, 100]
             : (tensor<1000x100xf32>, tensor<i32>, tensor<i32>) -> tensor<10x100xf32>
        %1 = stablehlo.negate %0 : tensor<10x100xf32>
        %2 = stablehlo.dynamic_update_slice %x, %1, %i, %z
             : (tensor<1000x100xf32>, tensor<10x100xf32>, tensor<i32>, tensor<i32>)
             -> tensor<1000x100xf32>
        return %2 : tensor<1000x100xf32>
      }""")
    assert kernels(graph) == [("dynamic_update_slice fusion of 3", 4000 + 4000 + 4)]
    assert memory_profile(graph).peak_bytes == 400_004  # written in place


def test_a_collective_is_waited_for_where_its_result_is_needed():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> tensor<2000xf32> {
        %0 = "stablehlo.all_gather"(%x) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
        %1 = stablehlo.reshape %0 : (tensor<2000xf32>) -> tensor<20x100xf32>
        %2 = stablehlo.negate %x : tensor<1000xf32>
        %3 = stablehlo.concatenate %2, %2, dim = 0
             : (tensor<1000xf32>, tensor<1000xf32>) -> tensor<2000xf32>
        %4 = stablehlo.reshape %1 : (tensor<20x100xf32>) -> tensor<2000xf32>
        %5 = stablehlo.add %3, %4 : tensor<2000xf32>
        return %5 : tensor<2000xf32>
      }""")
    assert [task.kind for task in graph.tasks][:2] == [TaskKind.INPUT, START]
    (start,), (wait,) = of_kind(graph, START), of_kind(graph, WAIT)
    assert start.communication is not None
    assert start.communication.bytes == 8000
    # One of two shards is sent over, at 10 ns a byte, after 500 ns to begin with.
    assert (start.ns, start.communication.latency_ns) == (4000 * 10 + 500, 500)
    assert wait.start == start.id
    (add,) = of_kind(graph, TaskKind.COMPUTE)
    assert wait.id in add.deps
    assert start.id not in add.deps


def test_a_chain_of_tokens_waits_before_the_next_collective():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>, %y: tensor<1000xf32>)
          -> (tensor<2000xf32>, tensor<2000xf32>) {
        %0 = "stablehlo.all_gather"(%x) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
        %t = stablehlo.create_token : !stablehlo.token
        %1:2 = stablehlo.optimization_barrier %0, %t : tensor<2000xf32>, !stablehlo.token
        %2:2 = stablehlo.optimization_barrier %y, %1#1 : tensor<1000xf32>, !stablehlo.token
        %3 = "stablehlo.all_gather"(%2#0) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
        return %1#0, %3 : tensor<2000xf32>, tensor<2000xf32>
      }""")
    order = [task.kind for task in graph.tasks if task.kind in (START, WAIT)]
    assert order == [START, WAIT, START, WAIT]


def test_an_async_pair_is_waited_for_at_its_done():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> (tensor<2000xf32>, tensor<1000xf32>) {
        %0 = "stablehlo.async_start"(%x) ({
        ^bb0(%a: tensor<1000xf32>):
          %g = "stablehlo.all_gather"(%a) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
          stablehlo.return %g : tensor<2000xf32>
        }) : (tensor<1000xf32>) -> !stablehlo.future<tensor<2000xf32>>
        %1 = stablehlo.negate %x : tensor<1000xf32>
        %2 = "stablehlo.async_done"(%0) : (!stablehlo.future<tensor<2000xf32>>) -> tensor<2000xf32>
        return %2, %1 : tensor<2000xf32>, tensor<1000xf32>
      }""")
    kinds = [t.kind for t in graph.tasks if t.kind not in (TaskKind.INPUT, VIEW, TaskKind.OUTPUT)]
    assert sorted(k.name for k in kinds) == ["COLLECTIVE_START", "COMPUTE", "WAIT"]
    assert kinds[0] is START


LOOPED = """
  func.func @main(%x: tensor<100xf32>, %w: tensor<5x100xf32>) -> tensor<100xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %r:3 = stablehlo.while(%i = %zero, %a = %x, %v = %w)
        : tensor<i32>, tensor<100xf32>, tensor<5x100xf32>
    cond {
      %n = stablehlo.constant dense<5> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %z = stablehlo.constant dense<0> : tensor<i32>
      %j = stablehlo.add %i, %one : tensor<i32>
      %s = stablehlo.dynamic_slice %v, %i, %z, sizes = [1, 100]
           : (tensor<5x100xf32>, tensor<i32>, tensor<i32>) -> tensor<1x100xf32>
      %b = stablehlo.reshape %s : (tensor<1x100xf32>) -> tensor<100xf32>
      %g = "stablehlo.all_gather"(%b) GATHER : (tensor<100xf32>) -> tensor<200xf32>
      %h = stablehlo.slice %g [0:100] : (tensor<200xf32>) -> tensor<100xf32>
      %k = stablehlo.add %a, %h : tensor<100xf32>
      stablehlo.return %j, %k, %v : tensor<i32>, tensor<100xf32>, tensor<5x100xf32>
    }
    return %r#1 : tensor<100xf32>
  }"""


def test_a_loop_is_one_task_with_its_body_and_trip_count():
    graph = tasks_of(LOOPED)
    (loop,) = of_kind(graph, LOOP)
    assert loop.loop is not None
    assert loop.loop.trips == 5
    body = loop.loop.body
    names = [name for name, _ in kernels(body)]
    assert names == ["dynamic_slice", "add fusion of 2", "add"]
    assert len(of_kind(body, START)) == 1
    assert simulate(graph).compute_ns == 5 * (400 + 400 + 4 + 1200 + 8)


def test_a_loop_s_invariant_operands_lie_where_they_lay():
    graph = tasks_of(LOOPED)
    inputs = [task.storages for task in of_kind(graph, TaskKind.INPUT)]
    (loop,) = of_kind(graph, LOOP)
    assert set(inputs[1]) <= set(loop.storages)
    assert set(loop.allocs).isdisjoint(inputs[1])


def test_what_a_loop_captures_is_an_operand_of_it():
    graph = tasks_of("""
      func.func @main(%x: tensor<100xf32>, %w: tensor<100xf32>) -> tensor<100xf32> {
        %big = stablehlo.negate %w : tensor<100xf32>
        %r = stablehlo.while(%a = %x) : tensor<100xf32>
        cond {
          %c = stablehlo.constant dense<true> : tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %k = stablehlo.add %a, %big : tensor<100xf32>
          stablehlo.return %k : tensor<100xf32>
        }
        return %r : tensor<100xf32>
      }""")
    (loop,) = of_kind(graph, LOOP)
    (negate,) = [task for task in of_kind(graph, TaskKind.COMPUTE) if task.op == "negate"]
    assert negate.id in loop.deps
    assert loop.loop is not None
    assert loop.loop.trips is None


def test_the_dearest_branch_is_taken_and_calls_are_entered():
    graph = tasks_of("""
      func.func private @twice(%a: tensor<100xf32>) -> tensor<100xf32> {
        %0 = stablehlo.dot_general %a, %a, batching_dims = [0] x [0], contracting_dims = [] x []
             : (tensor<100xf32>, tensor<100xf32>) -> tensor<100xf32>
        return %0 : tensor<100xf32>
      }
      func.func @main(%x: tensor<100xf32>, %p: tensor<i1>) -> tensor<100xf32> {
        %r = "stablehlo.if"(%p) ({
          stablehlo.return %x : tensor<100xf32>
        }, {
          %0 = func.call @twice(%x) : (tensor<100xf32>) -> tensor<100xf32>
          %1 = func.call @twice(%0) : (tensor<100xf32>) -> tensor<100xf32>
          stablehlo.return %1 : tensor<100xf32>
        }) : (tensor<i1>) -> tensor<100xf32>
        return %r : tensor<100xf32>
      }""")
    assert [name for name, _ in kernels(graph)] == ["dot_general", "dot_general"]


def test_inputs_are_what_one_device_holds_and_donated_ones_are_freed():
    graph = tasks_of("""
      sdy.mesh @mesh = <["x"=2]>
      func.func @main(%x: tensor<2000xf32> {jax.buffer_donor = true}) -> tensor<2000xf32> {
        %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>]
            out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%a: tensor<1000xf32>) {
          %0 = stablehlo.negate %a : tensor<1000xf32>
          %1 = stablehlo.transpose %0, dims = [0] : (tensor<1000xf32>) -> tensor<1000xf32>
          sdy.return %1 : tensor<1000xf32>
        } : (tensor<2000xf32>) -> tensor<2000xf32>
        return %r : tensor<2000xf32>
      }""")
    (argument,) = of_kind(graph, TaskKind.INPUT)
    assert not argument.persistent
    assert memory_profile(graph).peak_bytes == 8000


def test_groups_name_their_axes_and_cross_what_they_cross():
    graph = tasks_of(
        """
      sdy.mesh @mesh = <["data"=2, "model"=4]>
      func.func @main(%x: tensor<1000xf32>) -> (tensor<4000xf32>, tensor<2000xf32>) {
        %0 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64,
             replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>,
             channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
             use_global_device_ids} : (tensor<1000xf32>) -> tensor<4000xf32>
        %1 = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64,
             replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>,
             channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
             use_global_device_ids} : (tensor<1000xf32>) -> tensor<2000xf32>
        return %0, %1 : tensor<4000xf32>, tensor<2000xf32>
      }""",
        devices=8,
    )
    near, far = (task.communication for task in of_kind(graph, START))
    assert near is not None
    assert far is not None
    assert (near.axes, near.links) == (("model",), ("net",))
    assert far.axes == ("data",)
    assert "far" in far.links


def test_communication_that_is_not_understood_is_refused():
    with pytest.raises(ToolError, match="lower it to StableHLO"):
        tasks_of("""
          func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
            %0 = sdy.all_reduce {} %x out_sharding=<@mesh, [{}]> : tensor<8xf32>
            return %0 : tensor<8xf32>
          }
          sdy.mesh @mesh = <["x"=2]>""")


def test_several_slices_of_a_value_add_up():
    graph = tasks_of("""
      func.func @main(%x: tensor<4000xf32>) -> tensor<1000xf32> {
        %0 = stablehlo.slice %x [0:1000] : (tensor<4000xf32>) -> tensor<1000xf32>
        %1 = stablehlo.slice %x [1000:2000] : (tensor<4000xf32>) -> tensor<1000xf32>
        %2 = stablehlo.add %0, %1 : tensor<1000xf32>
        return %2 : tensor<1000xf32>
      }""")
    assert kernels(graph) == [("add fusion of 3", 12_000)]


def test_an_update_copies_what_must_not_be_overwritten():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>, %u: tensor<10xf32>) -> tensor<1000xf32> {
        %z = stablehlo.constant dense<0> : tensor<i32>
        %0 = stablehlo.dynamic_update_slice %x, %u, %z
             : (tensor<1000xf32>, tensor<10xf32>, tensor<i32>) -> tensor<1000xf32>
        return %0 : tensor<1000xf32>
      }""")
    assert kernels(graph) == [("dynamic_update_slice", 4000 + 40 + 4000)]
    assert memory_profile(graph).peak_bytes == 8040


def test_what_a_broadcast_in_memory_is_made_of_is_made_before():
    graph = tasks_of("""
      func.func @main(%x: tensor<100xf32>, %y: tensor<100x100xf32>)
          -> (tensor<100x100xf32>, tensor<100x100xf32>) {
        %0 = stablehlo.exponential %x : tensor<100xf32>
        %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<100xf32>) -> tensor<100x100xf32>
        %2 = stablehlo.add %1, %y : tensor<100x100xf32>
        return %1, %2 : tensor<100x100xf32>, tensor<100x100xf32>
      }""")
    assert [name for name, _ in kernels(graph)] == ["exponential", "add", "broadcast_in_dim"]


def test_constants_are_read_from_memory_unless_they_are_one_number():
    graph = tasks_of(
        """
      func.func @main(%x: tensor<100xf32>) -> tensor<100xf32> {
        %0 = stablehlo.constant dense<2.0> : tensor<100xf32>
        %1 = stablehlo.constant dense<"0xTABLE"> : tensor<100xf32>
        %2 = stablehlo.multiply %x, %0 : tensor<100xf32>
        %3 = stablehlo.add %2, %1 : tensor<100xf32>
        return %3 : tensor<100xf32>
      }""".replace("TABLE", "".join(f"{i:08X}" for i in range(100)))
    )
    assert kernels(graph) == [("add fusion of 2", 1200)]
    assert memory_profile(graph).peak_bytes == 1200


def test_what_nobody_needs_is_left_out():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> tensor<1000xf32> {
        %0 = "stablehlo.all_gather"(%x) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
        %1 = stablehlo.negate %0 : tensor<2000xf32>
        return %x : tensor<1000xf32>
      }""")
    assert not of_kind(graph, START)
    assert not of_kind(graph, TaskKind.COMPUTE)


def test_scalars_that_meet_again_and_again_are_followed_once():
    """Forty doublings: two to the fortieth paths lead from the sum to its first term."""
    doublings = (
        "\n".join(f"%{i + 1} = stablehlo.add %{i}, %{i} : tensor<f32>" for i in range(40))
        .replace("%0,", "%s,")
        .replace("%0 ", "%s ")
    )
    graph = tasks_of(f"""
      func.func @main(%s: tensor<f32>, %x: tensor<100xf32>) -> tensor<100xf32> {{
        {doublings}
        %b = stablehlo.broadcast_in_dim %40, dims = [] : (tensor<f32>) -> tensor<100xf32>
        %r = stablehlo.add %b, %x : tensor<100xf32>
        return %r : tensor<100xf32>
      }}""")
    assert kernels(graph) == [("add", 804)]


def test_nested_branches_are_read_once():
    text = "stablehlo.return %x : tensor<100xf32>"
    for depth in range(60):
        text = f"""
          %v{depth} = "stablehlo.if"(%p) ({{ {text} }}, {{
            stablehlo.return %x : tensor<100xf32>
          }}) : (tensor<i1>) -> tensor<100xf32>
          stablehlo.return %v{depth} : tensor<100xf32>"""
    graph = tasks_of(f"""
      func.func @main(%x: tensor<100xf32>, %p: tensor<i1>) -> tensor<100xf32> {{
        %r = "stablehlo.if"(%p) ({{ {text} }}, {{ stablehlo.return %x : tensor<100xf32> }})
             : (tensor<i1>) -> tensor<100xf32>
        return %r : tensor<100xf32>
      }}""")
    assert kernels(graph) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }",
         "no known size"),
        ("func.func private @main(tensor<8xf32>) -> tensor<8xf32>", "no body"),
        ("""func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
             %0 = func.call @main(%x) : (tensor<8xf32>) -> tensor<8xf32>
             return %0 : tensor<8xf32> }""", "calls itself"),
    ],
)  # fmt: skip
def test_what_cannot_be_timed_is_refused(text: str, message: str):
    with pytest.raises(ToolError, match=message):
        tasks_of(text)


def test_no_pairs_send_nothing():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> tensor<1000xf32> {
        %0 = "stablehlo.collective_permute"(%x) {
          source_target_pairs = dense<> : tensor<0x2xi64>,
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>
        } : (tensor<1000xf32>) -> tensor<1000xf32>
        return %0 : tensor<1000xf32>
      }""")
    assert [task.ns for task in of_kind(graph, START)] == [0]


def test_the_zeros_of_a_dilated_image_are_not_multiplied():
    graph = tasks_of("""
      func.func @main(%x: tensor<8x32x32x256xf32>, %k: tensor<2x2x256x256xf32>)
          -> tensor<8x64x64x256xf32> {
        %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
             window = {pad = [[1, 1], [1, 1]], lhs_dilate = [2, 2]}
             {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
             : (tensor<8x32x32x256xf32>, tensor<2x2x256x256xf32>) -> tensor<8x64x64x256xf32>
        return %0 : tensor<8x64x64x256xf32>
      }""")
    bytes_ = 4 * (8 * 32 * 32 * 256 + 2 * 2 * 256 * 256 + 8 * 64 * 64 * 256)
    assert kernels(graph) == [("convolution", max(bytes_, 2 * 8 * 64 * 64 * 256 * 256 / 1000))]

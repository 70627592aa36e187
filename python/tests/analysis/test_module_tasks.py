"""Modules as task graphs: collectives and their waits, loops, branches, storages."""

from __future__ import annotations

import pytest
from module_tasks import kernels, of_kind, tasks_of

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile
from stablehlo_tools.overlap.task_simulator import simulate

START, WAIT, VIEW, LOOP = (TaskKind.COLLECTIVE_START, TaskKind.WAIT, TaskKind.VIEW, TaskKind.LOOP)


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
    assert simulate(graph).compute_ns == 5 * (400 + 400 + 4 + 1200 + 8) + 2 * 400  # a copy of %x


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


def test_inputs_are_what_one_device_holds_and_results_replace_donated_ones():
    text = """
      sdy.mesh @mesh = <["x"=2]>
      func.func @main(%x: tensor<2000xf32> {jax.buffer_donor = true}) -> tensor<2000xf32> {
        %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>]
            out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%a: tensor<1000xf32>) {
          %0 = stablehlo.negate %a : tensor<1000xf32>
          %1 = stablehlo.transpose %0, dims = [0] : (tensor<1000xf32>) -> tensor<1000xf32>
          sdy.return %1 : tensor<1000xf32>
        } : (tensor<2000xf32>) -> tensor<2000xf32>
        return %r : tensor<2000xf32>
      }"""
    (argument,) = of_kind(tasks_of(text), TaskKind.INPUT)
    assert argument.persistent
    assert memory_profile(tasks_of(text)).peak_bytes == 4000
    kept = tasks_of(text.replace("{jax.buffer_donor = true}", ""))
    argument, result = of_kind(kept, TaskKind.INPUT)
    assert (argument.name, result.name) == ("argument 0", "result 0")
    assert memory_profile(kept).live[0] == 8000  # there before anything runs


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


def test_what_nobody_needs_is_left_out():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> tensor<1000xf32> {
        %0 = "stablehlo.all_gather"(%x) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
        %1 = stablehlo.negate %0 : tensor<2000xf32>
        return %x : tensor<1000xf32>
      }""")
    assert not of_kind(graph, START)
    assert not of_kind(graph, TaskKind.COMPUTE)


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
         "the size of .* is unknown"),
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


def test_a_loop_waits_for_what_decides_on_its_next_iteration():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>) -> tensor<1000xf32> {
        %r = stablehlo.while(%a = %x) : tensor<1000xf32>
        cond {
          %s = stablehlo.slice %a [0:1] : (tensor<1000xf32>) -> tensor<1xf32>
          %g = "stablehlo.all_gather"(%s) GATHER : (tensor<1xf32>) -> tensor<2xf32>
          %t = stablehlo.slice %g [0:1] : (tensor<2xf32>) -> tensor<1xf32>
          %u = stablehlo.reshape %t : (tensor<1xf32>) -> tensor<f32>
          %z = stablehlo.constant dense<0.0> : tensor<f32>
          %c = stablehlo.compare LT, %u, %z : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %k = stablehlo.negate %a : tensor<1000xf32>
          stablehlo.return %k : tensor<1000xf32>
        }
        return %r : tensor<1000xf32>
      }""")
    (loop,) = of_kind(graph, LOOP)
    assert loop.loop is not None
    body = [task for task in loop.loop.body.tasks if task.ns or task.kind is WAIT]
    kinds = [task.op if task.kind is TaskKind.COMPUTE else task.kind.value for task in body]
    start, wait = kinds.index("collective_start"), kinds.index("wait")
    assert start < wait < kinds.index("condition") < kinds.index("negate")


def test_a_carry_that_only_leads_to_itself_is_dropped():
    graph = tasks_of("""
      func.func @main(%x: tensor<1000xf32>, %y: tensor<1000xf32>) -> tensor<1000xf32> {
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %r:3 = stablehlo.while(%i = %zero, %a = %x, %d = %y)
            : tensor<i32>, tensor<1000xf32>, tensor<1000xf32>
        cond {
          %n = stablehlo.constant dense<5> : tensor<i32>
          %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %one = stablehlo.constant dense<1> : tensor<i32>
          %j = stablehlo.add %i, %one : tensor<i32>
          %k = stablehlo.negate %a : tensor<1000xf32>
          %g = "stablehlo.all_gather"(%d) GATHER : (tensor<1000xf32>) -> tensor<2000xf32>
          %s = stablehlo.slice %g [0:1000] : (tensor<2000xf32>) -> tensor<1000xf32>
          stablehlo.return %j, %k, %s : tensor<i32>, tensor<1000xf32>, tensor<1000xf32>
        }
        return %r#1 : tensor<1000xf32>
      }""")
    (loop,) = of_kind(graph, LOOP)
    assert loop.loop is not None
    assert loop.loop.trips == 5
    assert [task.op for task in of_kind(loop.loop.body, TaskKind.COMPUTE)] == ["negate"]
    assert not of_kind(loop.loop.body, START)

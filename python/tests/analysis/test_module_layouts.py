"""What XLA:GPU copies because of the order of dimensions, and what kernels write over."""

from __future__ import annotations

import pytest
from module_tasks import kernels, tasks_of

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.overlap.task_graph import TaskGraph, TaskKind
from stablehlo_tools.overlap.task_memory import memory_profile

MIB = 2.0**20
BIG = "tensor<8x512x1024xf32>"  # 16 MiB


def graph_of(text: str, hardware: str = "h100") -> TaskGraph:
    return tasks_of(text, 1, hardware)


def names(graph: TaskGraph) -> list[str]:
    return [name for name, _ in kernels(graph)]


def product(name: str, left: str, right: str, *, batch_first: bool) -> str:
    """[8, 512, 1024], kept with its batch first, or last by a transpose."""
    if batch_first:
        return f"""
        %{name} = stablehlo.dot_general %{left}, %{right}, batching_dims = [0] x [0],
            contracting_dims = [2] x [1]
            : (tensor<8x512x64xf32>, tensor<8x64x1024xf32>) -> {BIG}"""
    return f"""
        %{name}_ = stablehlo.dot_general %{left}, %{right}, contracting_dims = [1] x [0]
            : (tensor<512x64xf32>, tensor<64x8192xf32>) -> tensor<512x8192xf32>
        %{name}__ = stablehlo.reshape %{name}_ : (tensor<512x8192xf32>) -> tensor<512x8x1024xf32>
        %{name} = stablehlo.transpose %{name}__, dims = [1, 0, 2]
            : (tensor<512x8x1024xf32>) -> {BIG}"""


ARGUMENTS = (
    "%a: tensor<8x512x64xf32>, %b: tensor<8x64x1024xf32>, "
    f"%c: tensor<512x64xf32>, %d: tensor<64x8192xf32>, %x: {BIG}"
)


def read_twice(*, batch_first: bool) -> str:
    """An argument, which lies in row-major order, and a product, read together by two kernels."""
    return f"""
      func.func @main({ARGUMENTS}) -> (tensor<8x512xf32>, tensor<8x512xf32>) {{
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        {product("y", *("ab" if batch_first else "cd"), batch_first=batch_first)}
        %s = stablehlo.add %x, %y : {BIG}
        %r = stablehlo.reduce(%s init: %zero) applies stablehlo.add across dimensions = [2]
            : ({BIG}, tensor<f32>) -> tensor<8x512xf32>
        %m = stablehlo.multiply %x, %y : {BIG}
        %q = stablehlo.reduce(%m init: %zero) applies stablehlo.add across dimensions = [2]
            : ({BIG}, tensor<f32>) -> tensor<8x512xf32>
        return %r, %q : tensor<8x512xf32>, tensor<8x512xf32>
      }}"""


@pytest.mark.parametrize("hardware", ["h100", "tpu-v5p"])
def test_a_product_in_another_order_is_transposed(hardware: str):
    same, other = (
        names(graph_of(read_twice(batch_first=first), hardware)) for first in (True, False)
    )
    assert not any("copy" in name for name in same)
    transposed = any(name.startswith("copy") for name in other)
    assert transposed == (hardware == "h100"), "what is known is XLA:GPU's"


def test_a_kernel_writes_over_an_operand_that_ends_there():
    chain = f"""
      func.func @main(%x: {BIG}, %w: tensor<8x1024x1024xf32>) -> {BIG} {{
        %y = stablehlo.dot_general %x, %w, batching_dims = [0] x [0], contracting_dims = [2] x [1]
            : ({BIG}, tensor<8x1024x1024xf32>) -> {BIG}
        %z = stablehlo.tanh %y : {BIG}
        USE
        return %r : {BIG}
      }}"""
    ends = chain.replace("USE", f"%r = stablehlo.negate %z : {BIG}")
    both = chain.replace(
        "USE",
        f"""%u = stablehlo.dot_general %z, %w, batching_dims = [0] x [0],
            contracting_dims = [2] x [1] : ({BIG}, tensor<8x1024x1024xf32>) -> {BIG}
        %r = stablehlo.add %u, %y : {BIG}""",
    )
    arguments = (16 + 32) * MIB
    assert memory_profile(graph_of(ends)).peak_bytes == arguments + 16 * MIB
    assert memory_profile(graph_of(both)).peak_bytes == arguments + 3 * 16 * MIB


LOOP = """
  func.func @main(%x: tensor<1024x1024xf32>) -> tensor<1024x1024xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %n = stablehlo.constant dense<5> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %half = stablehlo.constant dense<0.5> : tensor<f32>
    %all = stablehlo.broadcast_in_dim %half, dims = [] : (tensor<f32>) -> tensor<1024x1024xf32>
    %y = stablehlo.tanh %x : tensor<1024x1024xf32>
    %r:3 = stablehlo.while(%i = %zero, %a = %y, %k = %all)
        : tensor<i32>, tensor<1024x1024xf32>, tensor<1024x1024xf32>
    cond {
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %b = stablehlo.multiply %a, %k : tensor<1024x1024xf32>
      stablehlo.return %j, %b, %k : tensor<i32>, tensor<1024x1024xf32>, tensor<1024x1024xf32>
    }
    return %r#1 : tensor<1024x1024xf32>
  }"""


def test_a_loop_makes_constants_itself_and_hands_on_in_place():
    graph = graph_of(LOOP)
    assert memory_profile(graph).peak_bytes == pytest.approx(2 * 4 * MIB, abs=16)
    assert not [name for name in names(graph) if "broadcast" in name]


OFFLOADED = """
  func.func @main(%x: tensor<1024x1024xf32>) -> tensor<1024x1024xf32> {
    %y = stablehlo.tanh %x : tensor<1024x1024xf32>
    %h = stablehlo.custom_call @annotate_device_placement(%y) {has_side_effect = true,
        mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}}
        : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
    %d = stablehlo.custom_call @annotate_device_placement(%h) {has_side_effect = true,
        mhlo.frontend_attributes = {_xla_buffer_placement = "device"}}
        : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
    %z = stablehlo.negate %d : tensor<1024x1024xf32>
    return %z : tensor<1024x1024xf32>
  }"""


def test_copies_to_the_host_take_its_link_and_no_memory_of_the_device():
    graph = graph_of(OFFLOADED)
    sent = [task for task in graph.tasks if task.communication is not None]
    streams = [task.communication.stream for task in sent if task.communication]
    assert streams == ["to host", "to device"]
    assert all(task.ns == pytest.approx(4 * MIB / 52) for task in sent)
    assert sum(graph.storages[s] for s in sent[0].allocs) == 0


def test_an_argument_in_the_host_s_memory_takes_none_of_the_device_s():
    text = OFFLOADED.replace(
        "%x: tensor<1024x1024xf32>", '%x: tensor<1024x1024xf32> {mhlo.memory_kind = "pinned_host"}'
    )
    argument, result = [task for task in graph_of(text).tasks if task.kind is TaskKind.INPUT]
    assert result.op == "result"
    assert graph_of(text).storages[argument.allocs[0]] == 0


def test_a_copy_over_an_unknown_link_is_refused():
    with pytest.raises(ToolError, match=r"the profile 'tpu-v5p' has no \[host\]"):
        graph_of(OFFLOADED, "tpu-v5p")

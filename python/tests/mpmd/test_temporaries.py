"""What functions take while they run is read once for those that differ in their numbers alone."""

from __future__ import annotations

import pytest

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.mpmd.proof import rank_memory
from stablehlo_tools.mpmd.proof.rank_memory import Temporaries

PHASE = """
func.func private @phase(%x: tensor<256xf32>, %given: tensor<i32>) -> tensor<256xf32> {{
  %from = stablehlo.constant dense<{begin}> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = {start}, %h = %x) : tensor<i32>, tensor<256xf32>
  cond {{
    %to = stablehlo.constant dense<{end}> : tensor<i32>
    %go = stablehlo.compare LT, %i, %to : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %go : tensor<i1>
  }} do {{
    %next = stablehlo.add %i, %one : tensor<i32>
    %a = stablehlo.cosine %h : tensor<256xf32>
    stablehlo.return %next, %a : tensor<i32>, tensor<256xf32>
  }}
  return %r#1 : tensor<256xf32>
}}
func.func @main(%x: tensor<256xf32>, %n: tensor<i32>) -> tensor<256xf32> {{
  %0 = call @phase(%x, %n) : (tensor<256xf32>, tensor<i32>) -> tensor<256xf32>
  return %0 : tensor<256xf32>
}}
"""


def _bytes(temporaries: Temporaries, begin: int, end: int, start: str = "%from") -> float:
    text = PHASE.format(begin=begin, end=end, start=start)
    return temporaries.function_bytes(artifact.parse(text.encode(), "rank_0.mlir").module, "phase")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that are read, as they are read."""
    names: list[str] = []
    graph = rank_memory.module_task_graph

    def counted(module: object, clock: object, name: str) -> object:
        names.append(name)
        return graph(module, clock, name)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_memory, "module_task_graph", counted)
    return names


def test_loops_of_as_many_iterations_are_read_once(read: list[str]):
    shared = Temporaries()
    assert _bytes(shared, 30, 32) == _bytes(shared, 31, 33) == _bytes(shared, -5, -3)
    assert len(read) == 1
    assert _bytes(shared, 30, 32) == _bytes(Temporaries(), 7, 9) > 0


def test_loops_of_other_numbers_of_iterations_are_read(read: list[str]):
    shared = Temporaries()
    for begin, end in ((30, 32), (30, 33), (5, 5)):
        assert _bytes(shared, begin, end) == _bytes(Temporaries(), begin, end)
    assert len(read) == 6


def test_numbers_count_where_a_loop_is_not_understood(read: list[str]):
    shared = Temporaries()
    for end in (32, 33):
        _bytes(shared, 30, end, start="%given")
    assert len(read) == 2

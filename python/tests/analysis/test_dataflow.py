"""The graph of a block, what control flow hands on in it, and facts that are taken along it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import pytest

from stablehlo_tools.analysis.dataflow import (
    Carry,
    Dataflow,
    Node,
    captured_values,
    carries,
    dependences,
    dependents,
    handed_on,
    inputs_of,
    needed_nodes,
    solve,
    sources_of,
)
from stablehlo_tools.artifacts import artifact

KEPT: list[artifact.Artifact] = []  # modules whose ops tests hold

# Carry 0 counts; carry 1 becomes carry 2 in the next iteration, which becomes carry 3 in the one
# behind that: what goes into carry 1 is in carry 3 after two rounds.
LOOP = """
func.func @main(%n: tensor<i32>, %a: tensor<f32>, %b: tensor<f32>, %out: tensor<f32>)
    -> (tensor<f32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %s:4 = stablehlo.while(%i = %zero, %x = %a, %y = %b, %z = %b)
      : tensor<i32>, tensor<f32>, tensor<f32>, tensor<f32>
  cond {
    %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %t = stablehlo.multiply %x, %out : tensor<f32>
    stablehlo.return %j, %t, %x, %y : tensor<i32>, tensor<f32>, tensor<f32>, tensor<f32>
  }
  %r = stablehlo.negate %s#3 : tensor<f32>
  return %r, %b : tensor<f32>, tensor<f32>
}
"""
CASE = """
func.func @main(%k: tensor<i32>, %a: tensor<f32>, %v: tensor<4xf32>) -> tensor<f32> {
  %r:2 = "stablehlo.case"(%k) ({
    stablehlo.return %a, %a : tensor<f32>, tensor<f32>
  }, {
    %init = stablehlo.constant dense<0.0> : tensor<f32>
    %sum = "stablehlo.reduce"(%v, %init) ({
      ^bb0(%x: tensor<f32>, %y: tensor<f32>):
        %z = stablehlo.add %x, %y : tensor<f32>
        %w = stablehlo.multiply %z, %a : tensor<f32>
        stablehlo.return %w : tensor<f32>
    }) {dimensions = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    stablehlo.return %sum, %a : tensor<f32>, tensor<f32>
  }) : (tensor<i32>) -> (tensor<f32>, tensor<f32>)
  %d = stablehlo.add %r#0, %r#0 : tensor<f32>
  return %d : tensor<f32>
}
"""


def graph(text: str, **options: Collection[str]) -> Dataflow:
    """The graph of a module's only function."""
    program = artifact.parse(text.encode())
    KEPT.append(program)
    (function,) = program.module.body.operations
    return Dataflow.from_block(function.operation.regions[0].blocks[0], **options)


def names(nodes: Iterable[Node]) -> list[str]:
    """Without the dialect."""
    return [node.name.removeprefix("stablehlo.") for node in nodes]


def test_inner_ops_come_first_in_the_graph_and_last_in_a_walk_of_its_bodies():
    flow = graph(LOOP)
    inner = ["compare", "constant", "add", "multiply"]
    assert names(flow.nodes) == ["constant", *inner, "while", "negate"]
    assert names(flow.root.all_nodes()) == ["constant", "while", *inner, "negate"]
    assert [node.index for node in flow.nodes] == list(range(7))


def test_values_have_numbers_and_those_from_outside_new_ones():
    flow = graph(LOOP)
    assert flow.root.arguments == (0, 1, 2, 3)
    assert [flow.values[number] for number in flow.root.arguments] == list(
        flow.root.block.arguments
    )
    inside = Dataflow.from_block(flow.nodes[5].bodies[1].block)
    outside = flow.values[3]
    assert outside in inside.numbers
    assert inside.numbers[outside] not in inside.maker
    assert inside.number(flow.values[0]) == len(inside.values) - 1


def test_every_carry_is_read_once_from_the_loop():
    flow = graph(LOOP)
    loop = flow.nodes[5]
    condition, body = loop.bodies
    of_b = carries(loop)[2]
    assert of_b == Carry(
        loop.operands[2],
        condition.arguments[2],
        body.arguments[2],
        body.arguments[1],
        loop.results[2],
    )
    assert dict(handed_on(loop))[of_b.result] == (of_b.operand, of_b.returned)
    assert dict(handed_on(loop))[of_b.argument] == (of_b.operand, of_b.returned)
    assert of_b.condition not in dict(handed_on(loop))


def test_a_result_of_branches_is_what_any_returns_and_depends_on_the_choice():
    flow = graph(CASE)
    case = next(node for node in flow.nodes if node.name == "stablehlo.case")
    total = flow.maker[case.bodies[1].returned[0]]
    first = case.results[0]
    assert dict(handed_on(case))[first] == (1, total.results[0])
    assert dict(sources_of(case))[first] == (0, 1, total.results[0])
    assert list(handed_on(total)) == []


def test_a_region_that_is_not_opened_captures():
    flow = graph(CASE)
    total = next(node for node in flow.nodes if node.name == "stablehlo.reduce")
    assert (total.captures, total.bodies) == ((1,), ())
    assert captured_values(total.op) == [flow.values[1]]
    whole = graph(CASE, opened=())
    assert names(whole.nodes) == ["case", "add"]
    case, both = whole.nodes
    assert case.captures == (1, 2)
    assert case.inputs == (0, 1, 2)
    assert both.inputs == (case.results[0],)
    assert list(handed_on(case)) == []
    assert dict(sources_of(case)) == dict.fromkeys(case.results, (0, 1, 2))
    assert whole.ancestors(whole.root.returned) == {0, 1}


def test_users_and_makers():
    flow = graph(LOOP)
    loop = flow.nodes[5]
    condition, body = loop.bodies
    assert names(flow.users[body.arguments[1]]) == ["multiply", "while"]
    assert names(flow.users[condition.returned[0]]) == ["while"]
    assert flow.maker[loop.results[0]] is loop
    assert flow.owner[body.arguments[1]] is loop
    assert body.arguments[1] not in flow.maker


def test_what_a_value_needs_takes_a_loop_whole():
    flow = graph(LOOP)
    (returned, _) = flow.root.returned
    assert names(needed_nodes(flow.root.nodes, [returned])) == ["constant", "while", "negate"]
    loop = flow.nodes[5]
    assert names(needed_nodes(flow.root.nodes, [returned], set(loop.results))) == ["negate"]
    assert {0, 1, 2, 3} < inputs_of(loop)


def test_facts_go_round_a_loop_until_nothing_changes():
    flow = graph(LOOP)
    loop = flow.nodes[5]
    reached = solve(flow, {1: True}, dependents)
    assert [number in reached for number in loop.results] == [False, True, True, True]
    assert flow.root.returned[0] in reached
    assert 2 not in reached
    assert [carry.condition in reached for carry in carries(loop)] == [False, True, True, True]


def test_how_often_a_loop_runs_reaches_all_that_it_hands_on():
    flow = graph(LOOP)
    reached = solve(flow, {0: True}, dependents)
    assert set(flow.nodes[5].results) <= reached.keys()


def test_facts_go_backwards_too():
    flow = graph(LOOP)
    sources = solve(flow, {flow.root.returned[0]: True}, dependences, backward=True)
    assert {1, 2, 3} <= sources.keys()  # %a after two rounds, %out in the body
    assert 0 not in sources  # how often it runs is no source of what it hands on


def furthest(node: Node, depths: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """How many ops lie before a value, at most nine."""
    for number, sources in sources_of(node):
        known = [depths[source] for source in sources if source in depths]
        if known:
            yield number, min(max(known) + 1, 9)


@pytest.mark.parametrize("text", [LOOP, CASE])
def test_facts_are_joined_and_a_fixpoint_of_the_transfer(text: str):
    flow = graph(text)
    depths = solve(flow, dict.fromkeys(flow.root.arguments, 0), furthest, max)
    for node in flow.nodes:
        for number, depth in furthest(node, depths):
            assert max(depths[number], depth) == depths[number]
    assert max(depths.values()) == (9 if text == LOOP else 3)


def test_facts_that_come_of_nothing_need_every_node():
    flow = graph(LOOP)

    def constants(node: Node, facts: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
        if node.name == "stablehlo.constant":
            yield node.results[0], True
        yield from dependents(node, facts)

    assert solve(flow, {}, constants) == {}
    reached = solve(flow, {}, constants, everywhere=True)
    assert flow.nodes[5].results[0] in reached
    assert set(flow.nodes[5].results) <= reached.keys()  # the counter decides how often


def test_a_body_without_loops_is_gone_through_once():
    flow = graph(CASE)
    visits: list[int] = []

    def counted(node: Node, facts: Mapping[int, bool]) -> Iterator[tuple[int, bool]]:
        visits.append(node.index)
        yield from dependents(node, facts)

    solve(flow, dict.fromkeys(flow.root.arguments, True), counted)
    assert visits == sorted(set(visits))
    visits.clear()
    solve(flow, {flow.root.returned[0]: True}, counted, backward=True)
    assert visits == sorted(set(visits), reverse=True)

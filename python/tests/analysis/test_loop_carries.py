"""What a loop does with each of its carries, of all kinds in one loop."""

from __future__ import annotations

import pytest

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.loop_carries import (
    ROWS,
    LoopCarries,
    Tree,
    Trees,
    is_accumulated,
    is_sum,
)
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.ir.while_loop import WhileLoop
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import loops_of

KEPT: list[artifact.Artifact] = []  # modules whose loops tests hold
STACK, ROW, I32 = "tensor<6x4xf32>", "tensor<1x4xf32>", "tensor<i32>"
STARTS = f"{I32}, {I32}"
COUNTER, READ, WRITTEN, SUM, FLOW = range(5)
TAKE = f"%row = stablehlo.dynamic_slice %w, %i, %z, sizes = [1, 4] : ({STACK}, {STARTS}) -> {ROW}"
UPDATED = f"({STACK}, {ROW}, {STARTS}) -> {STACK}"
WRITE = f"%o = stablehlo.dynamic_update_slice %out, %row, %i, %z : {UPDATED}"
ADD = f"%s = stablehlo.add %sum, %row : {ROW}"
FLOWS = f"%f = stablehlo.tanh %flow : {ROW}"


def carries_of(
    take: str = TAKE, write: str = WRITE, add: str = ADD, flow: str = FLOWS, trips: int = 6
) -> LoopCarries:
    """A loop that reads rows, writes rows, adds up, and hands on."""
    types = f"{I32}, {STACK}, {STACK}, {ROW}, {ROW}"
    text = f"""
    func.func @main(%weights: {STACK}, %empty: {STACK}, %zero: {ROW}, %x: {ROW}) -> {ROW} {{
      %z = stablehlo.constant dense<0> : {I32}
      %one = stablehlo.constant dense<1> : {I32}
      %last = stablehlo.constant dense<5> : {I32}
      %trips = stablehlo.constant dense<{trips}> : {I32}
      %r:5 = stablehlo.while(%i = %z, %w = %weights, %out = %empty, %sum = %zero, %flow = %x)
        : {types}
      cond {{
        %m = stablehlo.compare LT, %i, %trips : ({I32}, {I32}) -> tensor<i1>
        stablehlo.return %m : tensor<i1>
      }} do {{
        {take}
        {write}
        {add}
        {flow}
        %n = stablehlo.add %i, %one : {I32}
        stablehlo.return %n, %w, %o, %s, %f : {types}
      }}
      return %r#3 : {ROW}
    }}"""
    program = artifact.parse(text.encode())
    KEPT.append(program)
    effects = Effects(functions_by_name(program.module))
    return LoopCarries(LoopBody(loops_of(program.module)[0], effects), trips)


def test_each_carry_is_of_its_kind():
    carries = carries_of()
    assert carries.body.steps == {COUNTER: 1}
    assert carries.body.invariant == {READ}
    assert carries.rows_written(SUM) is carries.rows_written(FLOW) is None
    assert carries.accumulator(FLOW) is None
    assert carries.body.is_read_by_condition(COUNTER)
    assert not carries.body.is_read_by_condition(FLOW)


def test_the_structure_names_carries_by_their_values():
    loop = WhileLoop(carries_of().body.loop)
    assert loop.invariant == {READ}
    assert [loop.argument_number(value) for value in loop.arguments] == list(range(5))
    assert loop.argument_number(loop.ends[SUM]) is None
    assert loop.carries_of(loop.ends[SUM]) == [SUM]


def test_rows_are_read_one_an_iteration():
    rows = carries_of().rows_read(READ)
    assert rows is not None
    assert (rows.first, rows.span, rows.is_reverse) == (0, 1, False)
    assert [(each.offset, each.count) for each in rows.accesses] == [(0, 1)]


def test_rows_are_read_from_the_last_to_the_first():
    index = f"%back = stablehlo.subtract %last, %i : {I32}\n"
    rows = carries_of(take=index + TAKE.replace("%w, %i", "%w, %back")).rows_read(READ)
    assert rows is not None
    assert (rows.first, rows.span, rows.is_reverse) == (0, 1, True)


def test_a_stack_that_something_else_reads_is_not_read_by_rows():
    take = f"{TAKE}\n%all = stablehlo.tanh %w : {STACK}"
    assert carries_of(take=take).rows_read(READ) is None


def test_a_loop_that_runs_once_has_no_rows_in_order():
    assert carries_of(trips=1).rows_read(READ) is None


def test_rows_are_written_after_they_were_read():
    stack = carries_of().rows_written(WRITTEN)
    assert stack is not None
    assert (stack.written.first, stack.written.span, stack.read) == (0, 1, None)
    read = TAKE.replace("%row", "%before").replace("%w,", "%out,")
    stack = carries_of(write=f"{read}\n{WRITE}").rows_written(WRITTEN)
    assert stack is not None
    assert stack.read is not None
    assert (stack.read.first, stack.read.span) == (0, 1)


def test_rows_that_are_written_are_accumulated_too():
    carries = carries_of()
    accumulator = carries.accumulator(WRITTEN)
    assert accumulator is not None
    assert (accumulator.reducer, accumulator.replaced) == (ROWS, True)
    half = carries_of(trips=3).accumulator(WRITTEN)
    assert half is not None
    assert not half.replaced


def test_rows_that_two_iterations_write_are_not_accumulated():
    halved = f"%two = stablehlo.constant dense<2> : {I32}\n%h = stablehlo.divide %i, %two : {I32}\n"
    carries = carries_of(write=halved + WRITE.replace("%row, %i", "%row, %h"))
    assert carries.accumulator(WRITTEN) is carries.rows_written(WRITTEN) is None


@pytest.mark.parametrize(
    ("add", "reducer"),
    [
        (ADD, "add"),
        (f"%s = stablehlo.subtract %sum, %row : {ROW}", "add"),
        (f"%s = stablehlo.subtract %row, %sum : {ROW}", None),
        (f"%s = stablehlo.multiply %row, %sum : {ROW}", "multiply"),
        (f"%s = stablehlo.maximum %row, %sum : {ROW}", "maximum"),
        (f"%t = stablehlo.add %sum, %row : {ROW}\n%s = stablehlo.multiply %t, %row : {ROW}", None),
        (f"%t = stablehlo.add %sum, %row : {ROW}\n%s = stablehlo.add %t, %t : {ROW}", None),
        (f"%s = stablehlo.divide %sum, %row : {ROW}", None),
    ],
)
def test_an_accumulator_is_combined_by_one_reducer(add: str, reducer: str | None):
    accumulator = carries_of(add=add).accumulator(SUM)
    assert (accumulator and accumulator.reducer) == reducer


def test_a_sum_in_a_wider_type_is_accumulated_but_no_sum_of_its_own():
    wide = "tensor<1x4xf64>"
    loop = carries_of(
        add=f"%a = stablehlo.convert %sum : ({ROW}) -> {wide}\n"
        f"%b = stablehlo.convert %row : ({ROW}) -> {wide}\n"
        f"%c = stablehlo.add %a, %b : {wide}\n"
        f"%s = stablehlo.convert %c : ({wide}) -> {ROW}"
    ).body
    assert is_accumulated(loop.ends[SUM], loop.arguments[SUM])
    assert not is_sum(loop.ends[SUM], loop.arguments[SUM])


def tree_of(add: str) -> Tree | str:
    """The tree of the sum's last op."""
    body = carries_of(add=add).body
    root = producer(body.ends[SUM])
    assert root is not None
    return Trees(body).over(root)


def test_a_tree_tells_what_is_added_and_what_is_subtracted():
    tree = tree_of(
        f"%a = stablehlo.tanh %row : {ROW}\n%b = stablehlo.abs %row : {ROW}\n"
        f"%d = stablehlo.subtract %a, %b : {ROW}\n%s = stablehlo.subtract %sum, %d : {ROW}"
    )
    assert isinstance(tree, Tree)
    assert (tree.carry, tree.reducer, len(tree.nodes)) == (SUM, "add", 2)
    makers = [producer(leaf.value) for leaf in tree.leaves]
    signs = {op.name: leaf.negative for op, leaf in zip(makers, tree.leaves, strict=True) if op}
    assert signs == {"stablehlo.tanh": True, "stablehlo.abs": False}


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (f"%s = stablehlo.subtract %row, %sum : {ROW}", "does not add it to carry 3"),
        (f"%s = stablehlo.add %sum, %sum : {ROW}", "does not add it to carry 3"),
        (f"{ADD}\n%t = stablehlo.tanh %sum : {ROW}", "the tanh also reads"),
        (f"{ADD}\n%t = stablehlo.tanh %s : {ROW}", "has other readers than carry 3"),
    ],
)
def test_a_tree_is_refused_where_a_sum_in_between_is_seen(add: str, reason: str):
    tree = tree_of(add)
    assert isinstance(tree, str)
    assert reason in tree

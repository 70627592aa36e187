"""What the programs of all ranks have in common: channels, who sums what up, and the finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staged_steps import TWO_LAYERS, assigned, step_of

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.bindings import ir
from stablehlo_tools.mpmd.manifest import ManifestTransfer
from stablehlo_tools.mpmd.staging.assignment import PhaseWork
from stablehlo_tools.mpmd.writing.fixed import BlockRows
from stablehlo_tools.mpmd.writing.program_plan import EpilogueValue, RankPlan, Returned, Sending
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.generators.by_rule import dualpipe, one_f_one_b, zb_h1
from stablehlo_tools.schedules.table import Action, ActionKind, Table

ACTIVATION = "tensor<2x8xf32>"
# Both gradients are scaled by what is made of both; each reader of the scale has its own.
CLIPPED = TWO_LAYERS.replace(
    "%new0 = stablehlo.subtract %w0, %r#1 : tensor<8x8xf32>",
    """%n0 = stablehlo.reduce(%r#1 init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<8x8xf32>, tensor<f32>) -> tensor<f32>
    %n1 = stablehlo.reduce(%r#2 init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<8x8xf32>, tensor<f32>) -> tensor<f32>
    %norm = stablehlo.add %n0, %n1 : tensor<f32>
    %s0 = stablehlo.broadcast_in_dim %norm, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %s1 = stablehlo.broadcast_in_dim %norm, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %d0 = stablehlo.multiply %r#1, %s0 : tensor<8x8xf32>
    %d1 = stablehlo.multiply %r#2, %s1 : tensor<8x8xf32>
    %new0 = stablehlo.subtract %w0, %d0 : tensor<8x8xf32>""",
).replace("subtract %w1, %r#2", "subtract %w1, %d1")


def _plan(text: str, table: Table) -> tuple[ir.Module, RankPlan]:
    """The plan of a step whose second stage begins at its second product; the module has to live as
    long."""
    module, step = step_of(text)
    with module.context, ir.Location.unknown():
        return module, RankPlan(step, assigned(step, 4), with_communication(table))


def _named(ops: Mapping[tuple[int, int], Sequence[Node]]) -> dict[tuple[int, int], list[str]]:
    return {key: [node.name.removeprefix("stablehlo.") for node in ops[key]] for key in ops}


def test_each_tensor_has_a_channel_of_its_own():
    module, plan = _plan(TWO_LAYERS, one_f_one_b(2, 3))
    sent = [ManifestTransfer(1 + i, f"0SEND_F{i}", 0, 0, 1, ACTIVATION) for i in range(3)]
    back = [ManifestTransfer(4 + i, f"1SEND_B{i}", 0, 1, 0, ACTIVATION) for i in range(3)]
    assert plan.transfers == [*sent, *back]
    send, receive = Action(ActionKind.SEND_FORWARD, 0, 2), Action(ActionKind.RECEIVE_FORWARD, 1, 2)
    assert plan.channels(send) == plan.channels(receive)
    assert [channel.number for channel in plan.channels(send)] == [3]
    assert module is not None


def test_ranks_run_the_phases_of_their_row():
    module, plan = _plan(TWO_LAYERS, one_f_one_b(2, 3))
    assert not plan.table.splits
    phases = [[phase.work for phase in plan.phases_on(rank)] for rank in range(2)]
    assert phases == [
        [PhaseWork(ActionKind.FORWARD, s), PhaseWork(ActionKind.BACKWARD, s)] for s in range(2)
    ]
    split_module, split = _plan(TWO_LAYERS, zb_h1(2, 3))
    assert split.table.splits
    gradients = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    assert [phase.work for phase in split.phases_on(1)] == [
        PhaseWork(kind, 1) for kind in gradients
    ]
    assert module is not None
    assert split_module is not None


def test_each_rank_updates_its_own_weights_without_a_message():
    module, plan = _plan(TWO_LAYERS, one_f_one_b(2, 3))
    assert plan.ranks_of == {1: (0,), 2: (1,), 3: (1,)}  # two gradients and the loss, by carry
    finish = plan.finish
    assert (finish.rounds, finish.sendings, plan.finish_messages) == (1, [], [])
    assert _named(finish.ops) == {(0, 0): ["subtract"], (0, 1): ["subtract"]}
    first, second, loss = finish.returned
    assert [(each.rank, each.rows.argument) for each in (first, second, loss)] == [
        (0, 0),
        (1, 1),
        (1, 2),
    ]
    assert loss == Returned(1, plan.total_of(3), BlockRows(2))
    assert module is not None


def test_a_norm_of_all_gradients_takes_a_round_there_and_one_back():
    """Rank 1 sends what it has of the norm; rank 0 adds it up, and sends the few elements that the
    scale is spread from, which each rank spreads itself."""
    module, plan = _plan(CLIPPED, one_f_one_b(2, 3))
    finish = plan.finish
    assert [(s.round, s.source, s.target) for s in finish.sendings] == [(0, 1, 0), (1, 0, 1)]
    assert _named(finish.ops) == {
        (0, 0): ["reduce"],
        (0, 1): ["reduce"],
        (1, 0): ["add", "broadcast_in_dim", "multiply", "subtract"],
        (2, 1): ["broadcast_in_dim", "multiply", "subtract"],
    }
    types = [str(plan.type_of(sending.value)) for sending in finish.sendings]
    assert types == ["tensor<f32>", "tensor<f32>"]
    channels = [message.channel for message in plan.finish_messages]
    assert channels == [7, 8]
    assert [transfer.action for transfer in plan.transfers[6:]] == ["finish", "finish"]
    assert module is not None


def test_an_op_runs_where_most_of_what_it_reads_lies():
    """The second gradient is 256 bytes on rank 1, the sums of the first one's rows 32 on rank 0."""
    text = TWO_LAYERS.replace(
        "return %new0, %new1, %r#3 : tensor<8x8xf32>",
        """%rows = stablehlo.reduce(%r#1 init: %zero) applies stablehlo.add across dimensions = [1]
      : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
    %both = stablehlo.dot_general %r#2, %rows, contracting_dims = [1] x [0]
      : (tensor<8x8xf32>, tensor<8xf32>) -> tensor<8xf32>
    return %both, %new1, %r#3 : tensor<8xf32>""",
    ).replace(
        "(tensor<8x8xf32>, tensor<8x8xf32>, tensor<f32>) {",
        "(tensor<8xf32>, tensor<8x8xf32>, tensor<f32>) {",
    )
    module, plan = _plan(text, one_f_one_b(2, 3))
    assert _named(plan.finish.ops) == {
        (0, 0): ["reduce"],
        (0, 1): ["subtract"],
        (1, 1): ["dot_general"],
    }
    assert [(s.round, s.source, s.target) for s in plan.finish.sendings] == [(0, 0, 1)]
    assert module is not None


def test_a_stage_on_two_ranks_is_summed_up_on_the_first():
    module, plan = _plan(TWO_LAYERS, dualpipe(2, 4))
    assert plan.ranks_of == dict.fromkeys((1, 2, 3), (0, 1))
    finish = plan.finish
    parts = {
        carry: [EpilogueValue("part", carry, rank) for rank in range(2)] for carry in (1, 2, 3)
    }
    assert finish.totals == {(1, 0): [(carry, parts[carry]) for carry in (1, 2, 3)]}
    assert finish.sendings == [Sending(0, 1, 0, parts[carry][1]) for carry in (1, 2, 3)]
    assert _named(finish.ops) == {(1, 0): ["subtract", "subtract"]}
    assert {returned.rank for returned in finish.returned} == {0}
    assert module is not None

"""What fold-pipeline makes out in a pipeline before it writes anything: loops and ranks, the
integers that steer, where outputs come from, segments, chains of stages, and layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
from tree import LIT_TESTS

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.transforms.parts.fold_pipeline.batch_layout import BatchLayout, batch_stage
from stablehlo_tools.transforms.parts.fold_pipeline.layer_scans import layer_of
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import (
    LoopRegion,
    Ranks,
    manual_around,
)
from stablehlo_tools.transforms.parts.fold_pipeline.recognition import (
    axis_of,
    loops_of,
    may_be_pipeline,
    permutes_of,
    region_of,
    rotations_of,
)
from stablehlo_tools.transforms.parts.fold_pipeline.segments import Scratch, Segments
from stablehlo_tools.transforms.parts.fold_pipeline.stage_chains import (
    ChainFinder,
    Chains,
    StageInputs,
)
from stablehlo_tools.transforms.parts.fold_pipeline.trace_types import (
    Box,
    Computed,
    SourceBox,
    UnresolvedError,
)
from stablehlo_tools.transforms.parts.fold_pipeline.tracing import Tracer

TEXTS = (LIT_TESTS / "transforms" / "fold_pipeline.mlir").read_text().split("// -----")
SHIFTED = next(text for text in TEXTS if "func.func @shifted" in text)
ROLLED = next(text for text in TEXTS if "func.func @rolled" in text)


@dataclass
class Planned:
    """A program with one pipeline, and the objects that its plan is made of."""

    text: str

    @cached_property
    def module(self) -> ir.Module:
        return bindings.parse_module(self.text, bindings.new_context())

    @cached_property
    def loop(self) -> ir.Operation:
        (loop,) = loops_of(entry_function(self.module).regions[0].blocks[0])
        return loop

    @cached_property
    def region(self) -> LoopRegion:
        facts, manual = ModuleFacts.from_module(self.module), manual_around(self.loop)
        ranks = Ranks.single(facts) if manual is None else axis_of(self.loop, manual, facts)
        assert ranks is not None
        region = region_of(self.loop, ranks, DeviceValues(self.module, facts))
        assert isinstance(region, LoopRegion)
        return region

    @cached_property
    def tracer(self) -> Tracer:
        return Tracer(self.region)

    @cached_property
    def scratch(self) -> Scratch:
        return Scratch(self.module)

    def outputs(self) -> list[SourceBox]:
        """What the manual computation's result consists of, or the loop's last."""
        if self.region.manual is None:
            result = self.loop.results[len(self.loop.results) - 1]
            shape = self.region.leaving_shape(len(self.loop.results) - 1)
            return self.tracer.pieces(result, 0, -1, Box.whole(shape))
        value = self.region.yielded_shard(0)
        return self.tracer.pieces(value, 0, -1, Box.whole(self.region.leaving_shape(0)))

    def chains(self) -> Chains:
        ends = [(p.source, p.box) for p in self.outputs() if isinstance(p.source, Computed)]
        segments = Segments(self.region, self.scratch)
        with ir.Location.unknown(self.module.context):
            return ChainFinder(self.tracer, segments, self.scratch).chains(ends)


def value_named(planned: Planned, op: str) -> ir.Value:
    """The result of the first op of a name in the loop's body."""
    ops = [view.operation for view in planned.region.block.operations]
    return next(each.results[0] for each in ops if each.name == f"stablehlo.{op}")


def test_a_loop_that_permutes_may_be_a_pipeline_along_its_axis():
    planned = Planned(SHIFTED)
    assert may_be_pipeline(planned.loop)
    assert [op.name for op in permutes_of(planned.loop)] == ["stablehlo.collective_permute"]
    assert planned.region.ticks == 4
    assert planned.region.ranks == Ranks("stage", (0, 1), (0, 1))


def test_a_loop_that_rotates_its_state_may_be_a_pipeline():
    planned = Planned(ROLLED)
    assert manual_around(planned.loop) is None
    assert rotations_of(planned.loop)
    assert may_be_pipeline(planned.loop)
    assert planned.region.ranks.count == 1


def test_a_loop_that_moves_nothing_is_no_pipeline():
    context = bindings.new_context()
    text = """
      func.func @main(%x: tensor<2xf32>, %i: tensor<i32>) -> tensor<i32> {
        %r:2 = stablehlo.while(%n = %i, %h = %x) : tensor<i32>, tensor<2xf32>
        cond {
          %c = stablehlo.compare LT, %n, %i : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %y = stablehlo.tanh %h : tensor<2xf32>
          stablehlo.return %n, %y : tensor<i32>, tensor<2xf32>
        }
        return %r#0 : tensor<i32>
      }"""
    module = bindings.parse_module(text, context)
    (loop,) = loops_of(entry_function(module).regions[0].blocks[0])
    assert not may_be_pipeline(loop)


def test_integers_that_steer_are_known_by_rank_and_tick():
    planned = Planned(SHIFTED)
    region = planned.region
    (tick,) = (a for a in region.block.arguments if region.has_known_integers(a))
    fed = value_named(planned, "minimum")
    for value, expected in ((tick, [0, 1, 2, 3]), (fed, [0, 1, 2, 2])):
        known = [region.integers_at(value, 1, t) for t in range(4)]
        assert [None if n is None else int(n) for n in known] == expected
        assert region.steady_integers(value) is None
    assert not region.has_known_integers(value_named(planned, "tanh"))


def test_a_select_by_rank_is_known_and_differs():
    planned = Planned(SHIFTED)
    region, select = planned.region, maker_of(value_named(planned, "select"))
    predicate = select.operands[0]
    assert [bool(region.integers_at(predicate, rank, 0)) for rank in (0, 1)] == [True, False]
    assert region.differs(predicate)


def test_outputs_are_what_the_last_rank_computed_of_each_microbatch():
    planned = Planned(SHIFTED)
    pieces = planned.outputs()
    sources = [piece.source for piece in pieces]
    assert all(isinstance(source, Computed) for source in sources)
    assert [(s.rank, s.tick) for s in sources if isinstance(s, Computed)] == [
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    assert [piece.view.target.starts for piece in pieces] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


@pytest.mark.parametrize("text", [SHIFTED, ROLLED], ids=["shifted", "rolled"])
def test_a_segment_starts_from_what_was_moved(text: str):
    planned = Planned(text)
    segments = Segments(planned.region, planned.scratch)
    y = value_named(planned, "tanh")
    with ir.Location.unknown(planned.module.context):
        segment = segments.segment_of([y])
    names = [view.operation.name for view in segment.block.operations]
    assert names[-2:] == ["stablehlo.tanh", "func.return"]
    assert not {"stablehlo.select", "stablehlo.dynamic_slice", "stablehlo.while"} & set(names)
    assert segments.is_within(value_named(planned, "dot_general"), [y])
    planned.scratch.clear()


def test_chains_of_stages_lead_from_rank_to_rank():
    planned = Planned(SHIFTED)
    chains = planned.chains()
    assert (chains.length, len(chains.inputs), len(chains.last)) == (2, 3, 3)
    assert chains.rows.outputs[0] is None
    (handoff,) = chains.handoffs
    assert (handoff.output, handoff.ops) == (0, ())
    inputs = StageInputs.from_chains(chains)
    assert set(inputs.batch) == {handoff.input}
    assert len(inputs.layered) == 1
    assert not inputs.fixed


def test_stages_along_a_dimension_are_rows_of_one_segment():
    planned = Planned(ROLLED)
    chains = planned.chains()
    assert chains.rows.outputs[0] == 0
    assert chains.rows.count == chains.length == 2
    first, last = (chains.box(0, instance) for instance in (chains.last[0], chains.last[-1]))
    assert first == last  # the last stage computes all outputs
    assert first.starts[0] == 1


def test_microbatches_become_one_batch():
    planned = Planned(SHIFTED)
    chains = planned.chains()
    inputs = StageInputs.from_chains(chains)
    block, handoffs = chains.rows.function.regions[0].blocks[0], chains.handoffs
    with ir.Location.unknown(planned.module.context):
        layer = layer_of(block, handoffs, inputs.layered, planned.scratch, reverse=False)
        stage = batch_stage(block, inputs.batch, handoffs, planned.scratch)
    assert layer is None
    assert stage is not None
    assert (set(stage.inputs.values()), stage.outputs) == ({0}, (0,))
    layout = BatchLayout.from_inputs(len(chains.inputs), inputs.batch, stage)
    (number,) = inputs.batch
    assert (layout.samples, layout.minor) == (6, False)
    assert layout.input_shape(number, [2, 4]) == [6, 4]
    assert BatchLayout(3, None, False).input_shape(number, [2, 4]) == [3, 2, 4]


def test_a_sum_of_what_several_ranks_hold_is_refused():
    planned = Planned(SHIFTED.replace("stablehlo.select %last, %ran#3, %none", KEPT_ON_ALL))
    with pytest.raises(UnresolvedError, match="it adds values of several ranks") as error:
        planned.outputs()
    assert error.value.rule == 4


KEPT_ON_ALL = "stablehlo.select %first, %ran#3, %ran#3"

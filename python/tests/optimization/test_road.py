"""What the passes declare, as the choices of the search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.optimization import road as roads
from stablehlo_tools.optimization.road import Circumstances, on_the_road, road
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.passes.registry import PASSES


def test_choices_parse_and_say_what_they_are_compiled_for():
    choices = road(Circumstances("tpu-v5e", memory_limit=12.0))
    assert choices[RoadStage.ORDER][0] == "schedule-overlap{hardware=tpu-v5e memory-limit=12.0}"
    assert choices[RoadStage.PARTITION][0] == "partition{hardware=tpu-v5e}"
    for texts in choices.values():
        for text in texts:
            assert str(Pipeline.parse(text)) == text


def test_microbatches_are_for_what_does_not_fit_and_pipelines_for_who_asks():
    plain = road(Circumstances("h100"))
    assert RoadStage.MICROBATCHES not in plain
    assert RoadStage.PIPELINE not in plain
    assert road(Circumstances("h100", too_large=True))[RoadStage.MICROBATCHES]
    asked = road(Circumstances("h100", axis="stage"))[RoadStage.PIPELINE]
    assert any("schedule=1f1b" in text for text in asked)
    named = road(Circumstances("h100", axis="pp"))[RoadStage.PIPELINE]
    assert all("axis=pp" in text for text in named)


def test_advice_is_for_the_machine_in_the_order_of_the_road_and_together():
    here = Circumstances("tpu-v5e", memory_limit=12.0)
    advice = [
        "partition,create-reduce-scatter,rematerialize{hardware=h100}",
        "constrain-batch,partition,create-reduce-scatter{share-gathers=false}",
        "partition,thread-tokens",  # which the road does not have
        "partition,accumulate-gradients",  # only for what does not fit
    ]
    told = [str(each) for each in on_the_road(advice, road(here), here)]
    remat = "rematerialize{memory-limit=12.0 hardware=tpu-v5e}"
    assert told == [
        f"partition{{hardware=tpu-v5e}},{remat},create-reduce-scatter",
        "constrain-batch,partition{hardware=tpu-v5e},create-reduce-scatter{share-gathers=false}",
        f"constrain-batch,partition{{hardware=tpu-v5e}},{remat},create-reduce-scatter",
    ]
    assert on_the_road([], road(here), here) == []
    assert len(on_the_road(advice[:1], road(here), here)) == 1


def test_a_pass_joins_by_its_declaration_alone(monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class CollectiveMatmulPass(Pass):
        """Stands for one to come."""

        name: ClassVar[str] = "bucket-collectives"  # registered, so that its text parses
        milestone: ClassVar[Milestone | None] = Milestone(RoadStage.SPLIT)
        hardware: str = "h100"

        def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
            """Leaves the module."""

    monkeypatch.setattr(roads, "PASSES", {**PASSES, "collective-matmul": None})
    known = roads.find_pass
    monkeypatch.setattr(
        roads,
        "find_pass",
        lambda name: CollectiveMatmulPass if name == "collective-matmul" else known(name),  # pyright: ignore[reportUnknownLambdaType,reportUnknownArgumentType]
    )
    choices = road(Circumstances("tpu-v5e"))[RoadStage.SPLIT]
    assert "bucket-collectives{hardware=tpu-v5e}" in choices

"""An infeed and an outfeed are known by their kind where XLA dropped their identity."""

import pytest

from stablehlo_tools.targets.tagging import read_host_transfers

TEXT = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %t = token[] after-all()
  %out = token[] outfeed(%p, %t), outfeed_shape=f32[4]{{0}}
  %in = (f32[4]{{0}}, token[]) infeed(%out)
{}  ROOT %r = f32[4]{{0}} get-tuple-element(%in), index=0
}}
"""


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({0: "all_reduce", 1: "outfeed", 2: "infeed"}, {"out": (1,), "in": (2,)}),
        ({1: "outfeed", 2: "outfeed", 3: "infeed"}, {"in": (3,)}),
        ({0: "all_reduce"}, {}),
    ],
)
def test_by_kind(kinds: dict[int, str], expected: dict[str, tuple[int, ...]]):
    assert read_host_transfers(TEXT.format(""), kinds) == expected


def test_two_of_a_kind_in_the_schedule_stay_unknown():
    second = "  %again = (f32[4]{0}, token[]) infeed(%out)\n"
    kinds = {1: "outfeed", 2: "infeed"}
    assert read_host_transfers(TEXT.format(second), kinds) == {"out": (1,)}

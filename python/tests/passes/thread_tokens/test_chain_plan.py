"""The plan of a token chain: which links it needs, before any IR is touched."""

from __future__ import annotations

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.transforms.parts.thread_tokens.chain_plan import ChainStep, plan_chain

_PERMUTE = (
    '"stablehlo.collective_permute"(%{value}) {{source_target_pairs = dense<{pairs}> : '
    "tensor<2x2xi64>}} : (tensor<4xf32>) -> tensor<4xf32>"
)


def _steps(*permutes: tuple[str, str], by_group: bool = False) -> tuple[ChainStep, ...]:
    """The steps of a program of permutes, each of a value (an argument, or an earlier result)."""
    lines = [
        f"  %r{number} = " + _PERMUTE.format(value=value, pairs=pairs)
        for number, (value, pairs) in enumerate(permutes)
    ]
    text = (
        "module attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {\n"
        "func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) {\n"
        + "\n".join(lines)
        + "\n  return\n}\n}"
    )
    module = artifact.parse(text.encode(), module_only=True).module
    (function,) = plan_chain(module, by_group=by_group, minimal=True)
    return function.steps


def test_the_first_is_not_entered_and_the_last_not_left() -> None:
    first, last = _steps(("x", "[[0, 1], [1, 0]]"), ("y", "[[0, 1], [1, 0]]"))
    assert (first.enters, first.leaves) == (False, True)
    assert (last.enters, last.leaves) == (True, False)


def test_no_link_where_the_data_orders() -> None:
    first, second = _steps(("x", "[[0, 1], [1, 0]]"), ("r0", "[[0, 1], [1, 0]]"))
    assert not any((first.enters, first.leaves, second.enters, second.leaves))


def test_a_link_past_what_the_data_orders() -> None:
    """What comes third follows the second in the chain, and is ordered after the first, too."""
    first, second, third = _steps(
        ("x", "[[0, 1], [1, 0]]"), ("r0", "[[0, 1], [1, 0]]"), ("y", "[[0, 1], [1, 0]]")
    )
    assert first.leaves
    assert second.leaves
    assert third.enters
    assert not second.enters


def test_groups_that_never_meet_have_chains_of_their_own() -> None:
    here, there = "[[0, 1], [1, 0]]", "[[2, 3], [3, 2]]"
    steps = _steps(("x", here), ("y", there), ("y", here), by_group=True)
    assert [step.chains for step in steps] == [(0,), (1,), (0,)]
    assert [step.enters for step in steps] == [False, False, True]

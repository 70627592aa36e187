"""XLA:GPU's communicators: which programs compiled apart cannot open theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from order_cases import SUM, copies, main, read, rule, verdict
from order_models import both_orders
from order_oracle import TooManyError, all_open
from order_strategies import (
    FORMS,
    Flavor,
    chain,
    collective,
    each,
    partly,
    program,
    program_sets,
    repeat,
)

from stablehlo_tools.artifacts.program_set import JobOptions
from stablehlo_tools.order.program import (
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    Node,
    ProgramBlock,
    ProgramBranch,
    ProgramLoop,
)
from stablehlo_tools.order.verdict import decide

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
PERMUTE = CollectiveSignature("collective_permute", ("tensor<4xf32>",), "pairs [(0, 1)]")
A, B = [0, 1, 2], [0, 1, 3]  # of one size, two devices in common


def skipped(device: int, *nodes: Node) -> ProgramBranch:
    """A branch that the device does not take, of what it would issue."""
    return ProgramBranch(each({device: 0}), (ProgramBlock(), chain(*nodes)))


def rule_of(*programs: CompiledOrder) -> str:
    return rule(decide(programs))


def with_groups(issue: CollectiveIssue, *groups: Sequence[int]) -> CollectiveIssue:
    """A collective of which programs have a part of the groups."""
    return replace(issue, groups=tuple(map(tuple, groups)))


# One opens what the other does not.


def test_what_is_not_run_is_opened() -> None:
    silent = program([1], chain())
    assert (
        rule_of(program([0], chain(skipped(0, collective([0, 1])))), silent)
        == "communicator-missing"
    )
    assert rule_of(program([0], chain(skipped(0, collective([0])))), silent) == "ordered"
    never = ProgramLoop(each({0: 0}), ProgramBlock(), chain(collective([0, 1])))
    assert rule_of(program([0], chain(never)), silent) == "communicator-missing"


def test_what_compilers_delete_is_not_opened() -> None:
    never = repeat([0], 0, chain(collective([0, 1])))
    assert rule_of(program([0], chain(never)), program([1], chain())) == "ordered"


def test_it_is_enough_that_the_other_opens_it_too() -> None:
    one = program([0], chain(skipped(0, collective([0, 1]))))
    other = program([1], chain(skipped(1, collective([0, 1], form=FORMS[2]))))
    assert rule_of(one, other) == "ordered"


def test_permutes_have_communicators_of_their_own() -> None:
    one = program([0], chain(collective([0, 1]), skipped(0, collective([0, 1], form=PERMUTE))))
    other = program([1], chain(collective([0, 1])))
    assert rule_of(one, other) == "communicator-missing"


def test_one_program_opens_the_same_everywhere() -> None:
    block = chain(ProgramBranch(each({0: 0, 1: 0}), (ProgramBlock(), chain(collective([0, 1])))))
    assert rule_of(program([0, 1], block)) == "ordered"
    assert rule(decide([program([0, 1], block)], strict=True)) == "ordered"


# Two of one size.


def four(first: Sequence[Node], second: Sequence[Node]) -> list[CompiledOrder]:
    """Devices 0 and 1 do something, and then a collective of B and one of A."""
    both = collective(B), collective(A)
    return [
        program([0], chain(*first, *both)),
        program([1], chain(*second, *both)),
        program([2], chain(both[1])),
        program([3], chain(both[0])),
    ]


def test_what_is_not_run_turns_the_order_round() -> None:
    assert rule_of(*four([skipped(0, collective(A))], [])) == "communicator-order"
    assert rule_of(*four([], [skipped(1, collective(A))])) == "communicator-order"


def test_in_one_order() -> None:
    assert rule_of(*four([], [])) == "ordered"
    both = [skipped(0, collective(A))], [skipped(1, collective(A, form=FORMS[1]))]
    assert rule_of(*four(*both)) == "ordered"
    assert rule_of(*four([skipped(0, collective(B))], [])) == "ordered"


def test_of_two_branches_the_first_opens_first() -> None:
    two = ProgramBranch(each({0: 2}), (chain(collective(A)), chain(collective(B)), ProgramBlock()))
    turned = ProgramBranch(
        each({1: 2}), (chain(collective(B)), chain(collective(A)), ProgramBlock())
    )
    same = ProgramBranch(each({1: 2}), (chain(collective(A)), chain(collective(B)), ProgramBlock()))
    assert rule_of(*four([two], [turned])) == "communicator-order"
    assert rule_of(*four([two], [same])) == "ordered"


def test_larger_ones_come_first_wherever_they_stand() -> None:
    large, small = collective([0, 1, 2]), collective([0, 1])
    one = program([0], chain(skipped(0, large), small, large))
    other = program([1], chain(small, large))
    assert rule_of(one, other, program([2], chain(large))) == "ordered"


def test_the_same_devices_for_permutes_and_others() -> None:
    permute, total = collective([0, 1], form=PERMUTE), collective([0, 1])
    plain = program([1], chain(total, permute))
    assert rule_of(program([0], chain(total, permute)), plain) == "ordered"
    assert rule_of(program([0], chain(skipped(0, permute), total, permute)), plain) == (
        "communicator-order"
    )


# Split off a larger one.


def halves(second: Sequence[Node], groups: Sequence[Sequence[int]] = ((0, 1), (2, 3))) -> str:
    """Devices 0 and 1 have a collective of all four and one of halves; 2 and 3 the first."""
    whole = collective([0, 1, 2, 3])
    half = with_groups(collective([0, 1]), *groups)
    return rule_of(program([0, 1], chain(whole, half)), program([2, 3], chain(whole, *second)))


def test_a_split_needs_all_of_the_larger_one() -> None:
    assert halves([]) == "communicator-split"
    assert halves([with_groups(collective([2, 3]), (0, 1), (2, 3))]) == "ordered"
    assert halves([with_groups(collective([2, 3], form=FORMS[2]), (0, 1), (2, 3))]) == "ordered"


def test_groups_that_leave_a_device_out_are_not_split_off() -> None:
    assert halves([], groups=[(0, 1)]) == "ordered"


def test_without_a_larger_one_nothing_is_split() -> None:
    half = with_groups(collective([0, 1]), (0, 1), (2, 3))
    assert rule_of(program([0, 1], chain(half)), program([2, 3], chain())) == "ordered"


# Texts, and what they were exported for.


def text(*groups: str) -> str:
    """Sums over groups, one after the other."""
    kind, last = "tensor<4xf32>", "%a"
    lines: list[str] = []
    for n, listed in enumerate(groups):
        lines.append(
            f'%s{n} = "stablehlo.all_reduce"({last}) <{{replica_groups = {listed}}}> '
            f"{SUM.replace('E', 'f32')} : ({kind}) -> {kind}"
        )
        last = f"%t{n}"
        lines.append(f"{last} = stablehlo.tanh %s{n} : {kind}")
    return main(
        "\n".join([*lines, f"return {last} : {kind}"]),
        arguments=f"%a: {kind}",
        results=kind,
        replicas=4,
    )


WHOLE = "dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>"
HALVES = "dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>"
ONE_HALF = "dense<[[0, 1]]> : tensor<1x2xi64>"


def test_a_split_in_two_texts() -> None:
    decided = verdict(read(text(WHOLE, HALVES), text(WHOLE)))
    assert rule(decided) == "communicator-split"
    assert decided.finding is not None
    assert "xla_gpu_enable_nccl_comm_splitting=false" in decided.finding.message
    assert rule(verdict(read(*[text(WHOLE, HALVES)] * 2))) == "ordered"
    assert rule(verdict(read(text(WHOLE, ONE_HALF), text(WHOLE)))) == "ordered"


@pytest.mark.parametrize("platforms", [["cpu"], ["tpu"], ["cuda"]])
def test_what_is_not_for_gpus_has_no_communicators(platforms: list[str]) -> None:
    (loaded, *_) = copies(both_orders(turned=False), 1)
    assert loaded.exported is not None
    loaded.exported = replace(loaded.exported, platforms=tuple(platforms))
    (judged,) = verdict([loaded], JobOptions()).programs
    assert judged.may_run_on_gpu == ("cuda" in platforms)


# At random.


def check_opens(programs: list[CompiledOrder]) -> None:
    """Every device opens all its communicators where nothing is found; else one does not."""
    decided = decide(programs)
    if rule(decided) in {"ordered", "communicator-missing", "communicator-order"}:
        try:
            assert all_open(decided.programs) == (decided.finding is None)
        except TooManyError:
            assume(False)


KNOWN = Flavor(undecided=False, overlapping=False)
ORDERED = Flavor(is_ordered=True, changes=0, undecided=False)


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
@given(program_sets(KNOWN))
def test_what_is_ordered_opens(programs: list[CompiledOrder]) -> None:
    check_opens(programs)


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
@given(program_sets(ORDERED))
def test_what_is_one_sequence_opens(programs: list[CompiledOrder]) -> None:
    check_opens(programs)


@pytest.mark.soak
@settings(max_examples=20000, deadline=None, suppress_health_check=SLOW)
@given(program_sets(KNOWN))
def test_what_is_ordered_opens_soak(programs: list[CompiledOrder]) -> None:
    check_opens(programs)


def test_a_partial_order_that_leaves_the_first_open() -> None:
    """Nothing orders what is not run with the other: either may be opened first."""
    loose = partly(skipped(0, collective(A)), collective(B), collective(A), pairs=[(1, 2)])
    programs = [program([0], loose), *four([], [])[1:]]
    assert rule_of(*programs) in {"communicator-order", "unordered"}

"""The rules of check-order, one by one, on programs written by hand. Loops: test_order_loops.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from order_oracle import explore, replay
from order_strategies import (
    FORMS,
    TRANSFERS,
    chain,
    collective,
    each,
    partly,
    program,
    recv,
    same,
    send,
)

from stablehlo_tools.order.order_findings import OrderFinding, Verdict
from stablehlo_tools.order.program import (
    CollectiveSignature,
    CompiledOrder,
    Decision,
    ProgramBlock,
    ProgramBranch,
)
from stablehlo_tools.order.verdict import decide

REDUCE = CollectiveSignature("all_reduce", ("tensor<4xf32>", "tensor<4xf32>"), "add")
OTHER = FORMS[1]


def ordered(programs: Sequence[CompiledOrder], *, strict: bool = False) -> None:
    """The verdict is `ordered`, and the oracle agrees."""
    decided = decide(programs, strict=strict)
    assert decided.finding is None
    assert explore(decided.programs).is_good


def broken(programs: Sequence[CompiledOrder], *, strict: bool = False) -> OrderFinding:
    """The finding, which the oracle agrees with: that very choice goes wrong, or else some."""
    decided = decide(programs, strict=strict)
    finding = decided.finding
    assert finding is not None
    report = explore(decided.programs)
    if finding.confirmed:
        report = replay(decided.programs, finding.choice)
    assert not report.is_good
    if finding.confirmed:
        assert (report.hang is None) == (finding.rule == "swapped")
    return finding


def two(first: ProgramBlock, second: ProgramBlock) -> list[CompiledOrder]:
    """A program on device 0 and one on device 1."""
    return [program([0], first), program([1], second)]


def test_one_order_everywhere():
    block = chain(collective([0, 1]), collective([0, 1], form=OTHER))
    ordered(two(block, block))


# Agreement: what all participants of one collective must have alike.


def test_missing_collective():
    both = chain(collective([0, 1]), collective([0, 1], form=OTHER))
    finding = broken(two(both, chain(collective([0, 1]))))
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "missing-collective")
    assert finding.devices == (0, 1)


def test_issued_once_and_twice():
    one = collective([0, 1])
    finding = broken(two(chain(one, one), chain(one)))
    assert finding.rule == "missing-collective"
    assert "2 times" in finding.message
    assert "1 times" in finding.message


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        (CollectiveSignature("all_gather", REDUCE.types, REDUCE.details), "kind"),
        (CollectiveSignature("all_reduce", ("tensor<4xbf16>",) * 2, "add"), "element-type"),
        (CollectiveSignature("all_reduce", ("tensor<8xf32>",) * 2, "add"), "shape"),
        (CollectiveSignature("all_reduce", REDUCE.types, "maximum"), "reduction-or-dimensions"),
    ],
)
def test_signatures_differ(other: CollectiveSignature, rule: str):
    finding = broken(
        two(chain(collective([0, 1], form=REDUCE)), chain(collective([0, 1], form=other)))
    )
    assert (finding.verdict, finding.rule, finding.confirmed) == (Verdict.MISMATCH, rule, True)


def test_groups_differ():
    programs = [
        program([0], chain(collective([0, 1]))),
        program([1], chain(collective([0, 1, 2]))),
        program([2], chain(collective([0, 1, 2]))),
    ]
    assert broken(programs).rule == "groups"


def test_order_of_members_matters():
    finding = broken(two(chain(collective([0, 1])), chain(collective([1, 0]))))
    assert finding.rule == "groups"


def test_dead_collective():
    one = collective([0, 1])
    programs = [program([0], chain(one)), program([1], chain(), dead=[one])]
    finding = broken(programs)
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "dead-collective")
    assert "XLA deletes it" in finding.sentences[-1]


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_device_that_runs_no_program(devices: tuple[int, ...]):
    finding = broken([program(devices, chain(collective([0, 1, 2])))])
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "missing-program")


def test_device_that_runs_no_program_in_a_branch_decided_at_run_time():
    branch = ProgramBranch(Decision({0: 0, 1: 0}), (chain(collective([0, 1, 2])), ProgramBlock()))
    assert broken([program([0, 1], chain(branch))]).rule == "missing-program"


# Order.


def test_conflicting_order():
    one, other = collective([0, 1]), collective([0, 1], form=OTHER)
    finding = broken(two(chain(one, other), chain(other, one)))
    assert (finding.verdict, finding.rule) == (Verdict.MAY_DEADLOCK, "conflicting-order")
    assert finding.confirmed
    assert len(finding.sentences) == 2


def test_cyclic_wait_over_three_devices():
    groups = [collective([0, 1]), collective([1, 2]), collective([0, 2])]
    programs = [
        program([0], chain(groups[0], groups[2])),
        program([1], chain(groups[1], groups[0])),
        program([2], chain(groups[2], groups[1])),
    ]
    finding = broken(programs)
    assert (finding.rule, finding.devices) == ("cyclic-wait", (0, 1, 2))
    programs[2] = program([2], chain(groups[1], groups[2]))
    ordered(programs)


def test_cyclic_wait_that_only_an_unordered_program_allows():
    groups = [collective([0, 1]), collective([1, 2]), collective([0, 2])]
    programs = [
        program([0], chain(groups[0], groups[2])),
        program([1], chain(groups[0], groups[1])),
        program([2], partly(groups[1], groups[2])),
    ]
    ordered(programs)  # 0 before 2 and 1 of the master sequence suits both orders
    programs[1] = program([1], chain(groups[1], groups[0]))
    finding = broken(programs)
    assert (finding.rule, finding.confirmed) == ("cyclic-wait", True)


def test_cyclic_wait_through_what_two_programs_do_by_themselves():
    """Each program's own collective links its two devices."""
    groups = [collective([0, 2]), collective([1, 3])]
    left = program([0, 1], partly(groups[0], collective([0, 1]), groups[1]))
    right = program([2, 3], chain(groups[0], collective([2, 3]), groups[1]))
    finding = broken([left, right])
    assert (finding.rule, finding.confirmed) == ("cyclic-wait", True)
    ordered([left, program([2, 3], chain(*groups))])


def mesh(devices: Sequence[int]) -> CompiledOrder:
    """Two rows and two columns; rows in order, columns in order, rows against columns not."""
    rows, columns = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    groups = [[g for g in side if set(g) & set(devices)] for side in (rows, columns)]
    nodes = [collective(*groups[side], form=form) for side in (0, 1) for form in FORMS[:2]]
    return program(devices, partly(*nodes, pairs=[(0, 1), (2, 3)]))


def test_mesh_of_two_by_two():
    ordered([mesh(range(4))])
    apart = broken([mesh([device]) for device in range(4)])
    strictly = broken([mesh(range(4))], strict=True)
    for finding in (apart, strictly):
        assert (finding.verdict, finding.rule) == (Verdict.MAY_DEADLOCK, "cyclic-wait")
        assert finding.confirmed


def test_unordered_pair_that_shares_two_devices():
    one, other = collective([0, 1]), collective([0, 1], form=OTHER)
    finding = broken(two(partly(one, other), chain(one, other)))
    assert (finding.verdict, finding.rule) == (Verdict.MAY_DEADLOCK, "unordered")
    assert finding.confirmed
    assert [list(order) for order in finding.choice.values()] == [[1, 0]]


def test_unordered_pair_of_one_form():
    one = collective([0, 1])
    finding = broken(two(partly(one, one), chain(one, one)))
    assert (finding.verdict, finding.rule, finding.confirmed) == (Verdict.MISMATCH, "swapped", True)


def test_unordered_pair_that_shares_one_device_only():
    programs = [
        program([0], partly(collective([0, 1]), collective([0, 2]))),
        program([1], chain(collective([0, 1]))),
        program([2], chain(collective([0, 2]))),
    ]
    ordered(programs)


def test_unordered_inside_of_one_program():
    """The devices of one program go in one order, whatever it is."""
    inner = [collective([0, 1], form=form) for form in FORMS]
    left = program([0, 1], partly(*inner, collective([1, 2])))
    ordered([left, program([2], chain(collective([1, 2])))])


def test_many_unordered_collectives_between_transfers():
    def stage(first: int) -> CompiledOrder:
        """Only the transfers are in order; everything else is free and stays in the stage."""
        inner = [collective(range(first, first + 4)) for _ in range(300)]
        come, go = (recv, send) if first else (send, recv)
        nodes = (come(0, 4), *inner, go(4, 0))
        return program(range(first, first + 4), partly(*nodes, pairs=[(0, len(inner) + 1)]))

    assert decide([stage(0), stage(4)]).verdict is Verdict.ORDERED


# Transfers.


def test_transfers_in_one_order():
    ordered(two(chain(send(0, 1), recv(1, 0)), chain(recv(0, 1), send(1, 0))))


def test_unmatched_send():
    finding = broken(two(chain(send(0, 1)), chain()))
    assert (finding.verdict, finding.rule) == (Verdict.MISMATCH, "unmatched-transfer")


def test_both_send_first():
    finding = broken(two(chain(send(0, 1), recv(1, 0)), chain(send(1, 0), recv(0, 1))))
    assert (finding.verdict, finding.rule) == (Verdict.MAY_DEADLOCK, "conflicting-order")


def test_both_send_first_in_one_program():
    nodes = send(0, 1), send(1, 0), recv(0, 1), recv(1, 0)
    assert broken([program([0, 1], chain(*nodes))]).verdict is Verdict.MAY_DEADLOCK
    ordered([program([0, 1], chain(nodes[0], nodes[2], nodes[1], nodes[3]))])


def test_unordered_sends_in_one_program():
    first, second = ((send(0, 1, form), recv(0, 1, form)) for form in TRANSFERS)
    block = partly(first[0], second[0], first[1], second[1], pairs=[(0, 2), (1, 3)])
    assert broken([program([0, 1], block)]).verdict is Verdict.MAY_DEADLOCK


# Branches.


def halves(first: Sequence[int], second: Sequence[int]) -> CompiledOrder:
    """Devices 0 and 1 take one branch, devices 2 and 3 the other; a group in each."""
    branches = chain(collective(first)), chain(collective(second))
    return program(range(4), chain(ProgramBranch(each({0: 0, 1: 0, 2: 1, 3: 1}), branches)))


def test_branch_on_partition_id_that_fits_the_groups():
    ordered([halves([0, 1], [2, 3])])


def test_branch_on_partition_id_across_groups():
    finding = broken([halves([0, 2], [1, 3])])
    assert (finding.verdict, finding.rule) == (Verdict.MAY_DEADLOCK, "divergent-control-flow")


def test_transfer_from_one_branch_to_the_other():
    branch = ProgramBranch(each({0: 0, 1: 1}), (chain(send(0, 1)), chain(recv(0, 1))))
    ordered([program([0, 1], chain(branch))])


def test_branch_decided_at_run_time():
    def choose(*classes: int) -> CompiledOrder:
        decision = Decision(dict(enumerate(classes)))
        return program(
            [0, 1], chain(ProgramBranch(decision, (chain(collective([0, 1])), ProgramBlock())))
        )

    ordered([choose(0, 0)])
    assert broken([choose(0, 1)]).rule == "divergent-control-flow"


def test_branch_decided_at_run_time_around_another_program():
    branch = ProgramBranch(Decision({0: 0}), (chain(collective([0, 1])), ProgramBlock()))
    finding = broken(two(chain(branch), chain(collective([0, 1]))))
    assert finding.rule == "decided-at-run-time"


def test_transfers_in_a_branch_decided_at_run_time():
    decision = Decision({0: 0, 1: 0})
    good = chain(send(0, 1), recv(0, 1))
    ordered([program([0, 1], chain(ProgramBranch(decision, (good, ProgramBlock()))))])
    for bad in (chain(send(0, 1)), chain(send(0, 1), send(1, 0), recv(0, 1), recv(1, 0))):
        finding = broken([program([0, 1], chain(ProgramBranch(decision, (bad, ProgramBlock()))))])
        assert (finding.rule, finding.confirmed) == ("decided-at-run-time", False)


def test_branch_that_nobody_takes():
    one = collective([0, 1])
    never = ProgramBranch(same([0, 1], 1), (partly(one, one), ProgramBlock()))
    ordered(two(chain(never), chain(never)))

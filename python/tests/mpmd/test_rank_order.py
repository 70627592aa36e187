"""The order of ranks (M8) is that which `check-order` reads of their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from proof_sets import SCHEDULES, Case, by_hand, files, findings, name_of

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.mpmd.proof.message_order import issued_messages
from stablehlo_tools.mpmd.proof.proof_findings import ProofRule
from stablehlo_tools.mpmd.proof.proving import prove, read_set
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.order.program import CompiledOrder, issues_of

TANH = "%y = stablehlo.tanh %p : tensor<2x4xf32>"
NORM = "%norm0 = stablehlo.add %n, %part0 : tensor<f32>"
CONVERTED = (
    "%wide = stablehlo.convert %part0 : (tensor<f32>) -> tensor<f64>\n"
    "    %norm0 = stablehlo.convert %wide : (tensor<f64>) -> tensor<f32>"
)


def told(programs: list[CompiledOrder], *, places: bool = True) -> list[object]:
    """All that the verdict is made of."""
    return [
        (
            program.devices,
            program.block.is_total,
            program.dead,
            program.may_run_on_gpu,
            [
                (
                    i.signature,
                    i.rendezvous,
                    i.transfer,
                    i.beside,
                    i.groups,
                    i.place if places else 0,
                )
                for i in issues_of(program.block)
            ],
        )
        for program in programs
    ]


def read_whole(ranks: RankSet) -> list[CompiledOrder]:
    """The programs as `check-order` reads them, functions inlined at each of their calls."""
    copies = tuple(program.copy() for program in ranks.programs)
    return [read.program for read in ProgramJob(copies, JobOptions()).read()]


@pytest.mark.parametrize("change", [None, lambda text: text.replace(NORM, CONVERTED)])
@pytest.mark.parametrize("case", SCHEDULES[:4], ids=name_of)
def test_the_messages_are_what_the_programs_issue(case: Case, change: Callable[[str], str] | None):
    ranks = by_hand(case, 1, change)
    whole = read_whole(ranks)
    assert told(issued_messages(ranks, read_set(ranks), places=True)) == told(whole)
    assert sum(1 for program in whole for _ in issues_of(program.block)) > 8


def test_a_conversion_behind_a_receive_is_what_the_program_has():
    ranks = by_hand(SCHEDULES[0])
    added = "%t = stablehlo.add %a1, %a0 : tensor<f32>"
    converted = (
        "%w1 = stablehlo.convert %a1 : (tensor<f32>) -> tensor<f64>\n"
        "    %n1 = stablehlo.convert %w1 : (tensor<f64>) -> tensor<f32>\n"
        "    %w0 = stablehlo.convert %a0 : (tensor<f32>) -> tensor<f64>\n"
        "    %n0 = stablehlo.convert %w0 : (tensor<f64>) -> tensor<f32>\n"
        "    %t = stablehlo.add %n1, %n0 : tensor<f32>"
    )
    text = files(SCHEDULES[0])["rank_1.mlir"]
    assert text.count(added) == 1
    changed = artifact.parse(text.replace(added, converted).encode(), "rank_1.mlir")
    ranks = replace(ranks, programs=(ranks.programs[0], changed))
    mine = issued_messages(ranks, read_set(ranks), places=True)
    assert told(mine) == told(read_whole(ranks))
    besides = {each.beside for each in issues_of(mine[1].block)}
    assert besides == {"", "converted to f64"}


@pytest.mark.parametrize("case", SCHEDULES[:2], ids=name_of)
def test_a_device_of_each_rank_stands_for_all(case: Case):
    one, two = by_hand(case, 1), by_hand(case, 2)
    ranks = told(issued_messages(one, read_set(one)), places=False)
    assert told(issued_messages(two, read_set(two)), places=False) == ranks


def in_stage(line: str) -> Callable[[str], str]:
    """A change of the forward of rank 0: `%y` is made of `%q` by another op."""
    first = TANH.replace("%y", "%q")
    return lambda text: text.replace(TANH, f"{first}\n    {line}", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            in_stage(
                "%y = stablehlo.custom_call @my_kernel(%q) : (tensor<2x4xf32>) -> tensor<2x4xf32>"
            ),
            "device 0 issues unknown custom_call",
        ),
        (
            in_stage(
                "%y = stablehlo.custom_call @my_kernel(%q) {has_side_effect = true} : "
                "(tensor<2x4xf32>) -> tensor<2x4xf32>"
            ),
            "its participant device 1 never does",
        ),
        (lambda text: text.replace(NORM, CONVERTED), "is of a value converted from f64"),
    ],
    ids=["unknown-call", "side-effect", "conversion"],
)
def test_what_a_function_may_do_to_the_order_is_told(change: Callable[[str], str], said: str):
    found = findings(prove(by_hand(SCHEDULES[0], 1, change)), ProofRule.ORDER)
    assert len(found) == 1
    assert said in found[0]
    assert "rank_0.mlir:" in found[0]


def test_a_custom_call_that_is_known_to_stay_is_none():
    change = in_stage("%y = stablehlo.custom_call @TopK(%q) : (tensor<2x4xf32>) -> tensor<2x4xf32>")
    assert prove(by_hand(SCHEDULES[0], 1, change)).is_proven


def test_a_function_that_calls_main_is_told():
    types = "(tensor<1x4x4xf32>, tensor<3x2x4xf32>) -> tensor<1x4x4xf32>"
    change = in_stage(
        f"%again = func.call @main(%a2, %a1) : {types}\n"
        "    %y = stablehlo.negate %q : tensor<2x4xf32>"
    )
    (found,) = findings(prove(by_hand(SCHEDULES[0], 1, change)), ProofRule.FORM)
    assert found.startswith("rank_0.mlir:48:")
    assert found.endswith(": @stage_0_forward calls @main, which would repeat its messages (M1)")


def test_a_stage_may_be_larger_than_what_unfolds():
    """Inlined at each of its calls, as `check-order` has it, this one would be refused."""
    lines = [f"%y{i + 1} = stablehlo.negate %y{i} : tensor<2x4xf32>" for i in range(1000)]
    last = "%y = stablehlo.negate %y1000 : tensor<2x4xf32>"
    chain = "\n    ".join(["%y0 = stablehlo.negate %q : tensor<2x4xf32>", *lines, last])
    assert prove(by_hand(("1f1b", 2, 40, None), 1, in_stage(chain))).is_proven

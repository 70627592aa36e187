"""What the schedule of a rank holds behind each of its actions, of programs of a few calls.

A tensor between phases has 16 bytes; stage 0 and stage 1 hold 100 bytes of a microbatch from its
forward on, and keep 30 of them for the weight gradient where that is apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.mpmd.manifest import ManifestStage, ManifestTransfer, function_of
from stablehlo_tools.mpmd.proof.labels import Label, MessageLabels
from stablehlo_tools.mpmd.proof.rank_memory import bounds
from stablehlo_tools.mpmd.reading import read_rank
from stablehlo_tools.schedules.forms import step_of
from stablehlo_tools.schedules.table import Action

STAGES = [
    ManifestStage(stage, "", 1.0, 1.0, 1.0, 2.0, 100.0, 30.0, 0.0, 16.0) for stage in range(2)
]
VALUE = "tensor<4xf32>"
HANDLE = "channel_handle = #stablehlo.channel_handle<handle = {}, type = 1>"


def _bounds(said: Sequence[str]) -> list[float]:
    """The bound behind each event, where one is said as `0F1`, or with what it takes, the number of
    an earlier event: `0B1(0)`."""
    lines: list[str] = []
    functions: dict[str, str] = {}
    labels: dict[int, Label] = {}
    token = "%token"
    for index, text in enumerate(said):
        match = re.fullmatch(r"(\w+)(?:\((\d+(?:, \d+)*)\))?", text)
        assert match is not None
        action = step_of(match[1])
        assert isinstance(action, Action)
        taken = [f"%v{number}" for number in (match[2] or "").split(", ") if number]
        if action.kind.is_compute:
            name = function_of(action.kind, action.stage)
            types = ", ".join(["tensor<i32>", *[VALUE] * len(taken)])
            functions[name] = f"func.func private @{name}({types}) -> {VALUE}"
            lines.append(f"%m{index} = stablehlo.constant dense<{action.microbatch}> : tensor<i32>")
            operands = ", ".join([f"%m{index}", *taken])
            lines.append(f"%v{index} = func.call @{name}({operands}) : ({types}) -> {VALUE}")
            continue
        transfer = ManifestTransfer(index + 1, str(action), 0, 0, 1, VALUE)
        labels[index] = Label(action, 0, transfer)
        handle = HANDLE.format(index + 1)
        if action.kind.is_send:
            send = f'"stablehlo.send"({taken[0]}, {token}) <{{{handle}}}>'
            lines.append(f"%t{index} = {send} : ({VALUE}, !stablehlo.token) -> !stablehlo.token")
        else:
            receive = f'"stablehlo.recv"({token}) <{{{handle}}}>'
            types = f"(!stablehlo.token) -> ({VALUE}, !stablehlo.token)"
            lines.append(f"%v{index}, %t{index} = {receive} : {types}")
        token = f"%t{index}"
    body = "\n".join(["%token = stablehlo.after_all : !stablehlo.token", *lines, "return"])
    text = "\n".join([*functions.values(), f"func.func @main() {{\n{body}\n}}"])
    program = artifact.parse(text.encode(), "rank_0.mlir")
    reading = read_rank(program.module, 0, "rank_0.mlir")
    sizes = [[16.0] * len(event.results) for event in reading.events]
    known = MessageLabels({}, {}, {}, {0: labels})
    return bounds(reading, known.actions(reading), STAGES, sizes)


def test_an_activation_is_held_from_the_forward_to_the_backward():
    assert _bounds(["0F0", "0F1", "0B0(0)", "0B1(1)"]) == [100.0, 200.0, 100.0, 0.0]


def test_what_is_kept_is_held_from_the_input_to_the_weight_gradient():
    assert _bounds(["0F0", "0F1", "0I0(0)", "0I1(1)", "0W0(2)", "0W1(3)"]) == [
        *(100.0, 200.0, 130.0, 60.0, 30.0, 0.0)
    ]


def test_without_an_input_gradient_all_is_held_to_the_weight_gradient():
    assert _bounds(["0F0", "0W0(0)"]) == [100.0, 0.0]


def test_a_message_is_held_from_its_receive_to_the_phase_it_is_for():
    events = ["1RECV_F0", "1RECV_F1", "1F0(0)", "1F1(1)", "1B0", "1B1"]
    assert _bounds(events) == [16.0, 32.0, 116.0, 200.0, 100.0, 0.0]


def test_a_message_is_held_from_the_phase_that_makes_it_to_its_send():
    assert _bounds(["0F0", "0SEND_F0(0)", "0B0"]) == [116.0, 100.0, 0.0]
    assert _bounds(["1F0", "1B0", "1SEND_B0(1)"]) == [100.0, 16.0, 0.0]


def test_what_goes_between_stages_of_one_rank_is_held_from_one_to_the_other():
    """Stage 1 takes what stage 0 gives; its own activation counts from its forward on."""
    assert _bounds(["0F0", "1F0(0)", "1B0", "0B0(2)"]) == [116.0, 200.0, 116.0, 0.0]


def test_what_a_stage_keeps_for_its_own_gradient_is_not_counted_twice():
    """The result of the forward goes on to stage 1 and back to its own backward."""
    assert _bounds(["0F0", "1F0(0)", "1B0", "0B0(0, 2)"]) == [100.0, 200.0, 116.0, 0.0]


def test_a_stage_without_a_backward_gives_its_activation_up_as_it_sends():
    assert _bounds(["1F0", "1SEND_B0(0)"]) == [100.0, 0.0]


def test_a_stage_without_a_forward_has_its_activation_as_it_receives():
    assert _bounds(["1RECV_F0", "1B0(0)"]) == [100.0, 0.0]


def test_what_a_lower_stage_keeps_counts_from_its_input_gradient():
    """Its weight gradient takes what stage 1 gives, too, which is part of what it keeps by then."""
    events = ["0F0", "1F0(0)", "1I0", "0I0(2)", "0W0(2)", "1W0"]
    assert _bounds(events) == [116.0, 200.0, 146.0, 60.0, 30.0, 0.0]

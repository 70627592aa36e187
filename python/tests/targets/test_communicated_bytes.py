"""The bytes that a device sends, on small schedules that tell each form apart, and on models."""

from __future__ import annotations

import pytest
from benchmarks.communicated_bytes import group_size, shape_bytes, volume
from models.zoo import ZOO

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.scheduled_hlo import parse_schedule

DEVICES = 8
GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"  # of 4


def sent(entry: str, *computations: str) -> dict[str, int]:
    """The volume of a scheduled module; each computation is `name: instructions`, one a line."""
    text = "HloModule jit_step, is_scheduled=true\n"
    for part in computations:
        name, _, body = part.partition(":")
        text += f"\n%{name.strip()} (q: f32[4]) -> f32[4] {{\n{_indented(body)}\n}}\n"
    text += f"\nENTRY %main (p: f32[4]) -> f32[4] {{\n{_indented(entry)}\n}}\n"
    return dict(volume(parse_schedule(text), DEVICES))


def _indented(body: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())


@pytest.mark.parametrize(
    ("instruction", "kind", "expected"),
    [
        ("f32[64]{0} all-gather(%p), GROUPS, dimensions={0}", "all-gather", 192),
        ("f32[64]{0} all-to-all(%p), GROUPS, dimensions={0}", "all-to-all", 192),
        ("f32[64]{0} all-reduce(%p), GROUPS, to_apply=%sum", "all-reduce", 384),
        ("f32[16]{0} reduce-scatter(%p), GROUPS, to_apply=%sum", "reduce-scatter", 192),
        (
            "f32[64]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            256,
        ),
    ],
)
def test_each_kind_sends_what_a_ring_needs(instruction: str, kind: str, expected: int):
    assert sent(f"ROOT %x = {instruction.replace('GROUPS', GROUPS)}") == {kind: expected}


def test_the_results_of_one_collective_add_up():
    both = "(f32[16]{0:T(128)}, /*index=1*/bf16[8,4]{1,0:T(8,128)(2,1)S(1)})"
    assert sent(f"%x = {both} reduce-scatter(%p, %q), {GROUPS}") == {"reduce-scatter": 384}
    assert sent(f"%x = {both} all-to-all(%p, %q), {GROUPS}") == {"all-to-all": 96}


def test_kinds_are_counted_apart_and_add_up():
    assert sent(f"""%a = f32[64]{{0}} all-gather(%p), {GROUPS}
        %b = f32[64]{{0}} all-gather(%a), {GROUPS}
        %c = f32[64]{{0}} all-reduce(%b), {GROUPS}
    """) == {"all-gather": 384, "all-reduce": 384}


def test_nothing_is_sent_within_groups_of_one():
    assert sent("%a = f32[64]{0} all-reduce(%p), replica_groups={{0},{1}}") == {"all-reduce": 0}


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("", 8),
        ("{}", 8),
        ("{{0,1,2,3,4,5,6,7}}", 8),
        ("{{0},{1}}", 1),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2),
        ("[4,2]<=[8]", 2),
        ("[1,8]<=[8]", 8),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("[2,2,2]<=[2,2,2]T(2,0,1)", 2),
        ("mesh['x'=4,'y'=2] {'x'}", 4),
        ("mesh['x'=4,'y'=2] {'y'}", 2),
        ("mesh['x'=4,'y'=2] {'x','y'}", 8),
        ("mesh['x'=4,'y'=2] {'x':(1)2}", 2),
        ("mesh['x'=8] {'x':(2)4}", 4),
        ("mesh['x'=4,'y'=2] {'x':(2)2,'y'}", 4),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", 4),
    ],
)
def test_groups_are_read_in_every_spelling(groups: str, members: int):
    assert group_size(groups, DEVICES) == members
    given = f"replica_groups={groups}, " if groups else ""
    line = f"%a = f32[64]{{0}} all-reduce(%p), channel_id=1, {given}use_global_device_ids=true"
    assert sent(line) == {"all-reduce": 2 * 256 * (members - 1) // members}


def test_groups_in_another_form_are_not_guessed_at():
    with pytest.raises(ValueError, match="in an unknown form: @later"):
        group_size("@later", DEVICES)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[]", 4),
        ("f32[0]{0}", 0),
        ("u32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30),
        ("f16[3]{0}", 6),
        ("f64[3]{0}", 24),
        ("c64[3]{0}", 24),
        ("pred[7]{0:T(512)(128)(4,1)}", 7),
        ("s4[5]{0:E(4)}", 3),
        ("u2[16]{0}", 4),
        ("f8e4m3fn[10]{0}", 10),
        ("f8e5m2[10]{0}", 10),
        ("f4e2m1fn[10]{0}", 5),
        ("f32[<=8,2]{1,0}", 64),
        ("f32[4,8]{1,0:T(8,128)S(1)}", 128),
        ("(f32[4]{0}, /*index=1*/s8[3]{0}, token[])", 19),
        ("((f32[4]{0}, bf16[2]{0}), pred[])", 21),
    ],
)
def test_shapes_are_counted_in_bytes(shape: str, expected: int):
    assert shape_bytes(shape) == expected


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("all-gather", "(f32[16]{0}, f32[64]{0:T(128)S(1)})", 192),
        ("all-gather", "((f32[16], s8[4]), (f32[64], s8[16]))", 204),
        ("all-gather", "((f32[16]{0}), f32[64]{0})", 192),
        ("all-reduce", "f32[64]{0}", 384),
        ("all-reduce", "(f32[64]{0}, f32[64]{0})", 768),
        ("reduce-scatter", "((f32[64]{0}), f32[16]{0})", 192),
        ("reduce-scatter", "((f32[64], f32[8]), (f32[16], f32[2]), u32[])", 216),
        ("all-to-all", "((f32[64]{0}), f32[64]{0}, u32[], u32[])", 192),
        ("all-to-all", "((f32[32], f32[32]), (f32[32], /*index=1*/f32[32]), u32[])", 192),
        ("collective-permute", "(f32[16]{0}, f32[16]{0})", 64),
        ("collective-permute", "(f32[16]{0}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)})", 64),
        ("collective-permute", "((f32[16], f32[2]), (f32[16], f32[2]), u32[])", 72),
    ],
)
def test_of_a_start_only_the_results_count_and_of_a_done_nothing(
    kind: str, shape: str, expected: int
):
    groups = "source_target_pairs={{0,1}}" if kind == "collective-permute" else GROUPS
    assert sent(f"""%s = {shape} {kind}-start(%p), {groups}
        %d = f32[64]{{0}} {kind}-done(%s)
    """) == {kind: expected}


@pytest.mark.parametrize(
    ("wrapped", "kind", "expected"),
    [
        ("f32[64]{0} all-to-all(%q), GROUPS", "all-to-all", 192),
        ("f32[16]{0} reduce-scatter(%q), GROUPS", "reduce-scatter", 192),
        ("(f32[64]{0}, f32[64]{0}) all-gather(%q, %q), GROUPS", "all-gather", 384),
        ("(f32[32]{0}, f32[32]{0}) all-to-all(%q, %q), GROUPS", "all-to-all", 192),
    ],
)
def test_of_an_asynchronous_call_the_collective_within_counts_once(
    wrapped: str, kind: str, expected: int
):
    entry = """%s = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped
        %u = ((f32[4]{0}), f32[4]{0}, u32[]) async-update(%s)
        %d = f32[4]{0} async-done(%u)
    """
    assert sent(entry, f"wrapped: ROOT %x = {wrapped.replace('GROUPS', GROUPS)}") == {
        kind: expected
    }


KNOWN = 'backend_config={"known_trip_count":{"n":"5"}}'
BODY = f"%b = f32[64]{{0}} all-gather(%q), {GROUPS}"


def test_loops_count_as_often_as_they_run():
    loop = "%w = (s32[], f32[4]{0}) while(%t), condition=%cond, body=%body"
    condition = f"cond: %c = f32[64]{{0}} all-reduce(%q), {GROUPS}"
    assert sent(f"{loop}, {KNOWN}", condition, f"body: {BODY}") == {
        "all-reduce": 6 * 384,
        "all-gather": 5 * 192,
    }
    unknown = sent(loop, condition, f"body: {BODY}")
    assert unknown == {"all-reduce": 2 * 384, "all-gather": 192}


def test_loops_in_loops_multiply():
    inner = f"%v = (s32[]) while(%t), condition=%none, body=%inner, {KNOWN}"
    outer = f"%w = (s32[]) while(%t), condition=%none, body=%outer, {KNOWN}"
    parts = ("none: %n = pred[] compare(%q, %q)", f"inner: {BODY}", f"outer: {inner}")
    assert sent(outer, *parts) == {"all-gather": 25 * 192}


def test_of_branches_the_dearest_counts():
    small = f"small: %b = f32[8]{{0}} all-reduce(%q), {GROUPS}"
    choice = "%c = f32[4]{0} conditional(%i, %p, %p), branch_computations={%small, %big, %none}"
    none = "none: %n = f32[4]{0} negate(%q)"
    assert sent(choice, small, f"big: {BODY}", none) == {"all-gather": 192}


def test_what_is_no_collective_sends_nothing_but_a_send():
    assert (
        sum(
            sent("""%c = f32[64]{0} custom-call(%p), custom_call_has_side_effect=true
            %k = f32[64]{0} custom-call(%p), custom_call_target="x", has_side_effect=true
            %i = ((f32[64]{0}), token[]) infeed(%t)
            %r = (f32[64]{0}, u32[], token[]) recv(%t), channel_id=1
            %d = (f32[64]{0}, token[]) recv-done(%r), channel_id=1
            """).values()
        )
        == 0
    )
    assert sent("""%s = (f32[64]{0}, u32[], token[]) send(%p, %t), channel_id=1
        %d = token[] send-done(%s), channel_id=1
    """) == {"send": 256}


SENT = ["decoder-tp-forward", "vit-forward", pytest.param("moe-forward", marks=pytest.mark.soak)]


@pytest.mark.parametrize("name", SENT)
def test_partitioned_models_send_no_more_than_xla_would(name: str):
    model = ZOO[name]
    exported = model.build()
    assert not isinstance(exported, str)
    before = artifact.from_exported(exported, name)
    after = stablehlo_tools.transform(before, "partition,create-reduce-scatter,thread-tokens")
    assert _total(after, model.devices) <= 1.05 * _total(before, model.devices)


def _total(program: Artifact, devices: int) -> int:
    return volume(compile_artifact(program, "cpu").schedule, devices).total()

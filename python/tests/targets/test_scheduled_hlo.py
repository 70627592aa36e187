"""The parser of scheduled HLO text, on a small module for each form that a compiler writes."""

from __future__ import annotations

import pytest

from stablehlo_tools.hlo_input.instructions import parse_computations
from stablehlo_tools.targets.scheduled_hlo import (
    Conditional,
    HloSchedule,
    ScheduledLoop,
    parse_schedule,
)
from stablehlo_tools.targets.tagging import add_merged


def hlo(entry: str, *computations: str) -> str:
    """A scheduled module; each computation is `name: instructions`, one a line."""
    text = "HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]}\n"
    for part in computations:
        name, _, body = part.partition(":")
        text += f"\n%{name.strip()} (p.1: f32[4]) -> f32[4] {{\n{_indented(body)}\n}}\n"
    return f"{text}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{_indented(entry)}\n}}\n"


def tag(ids: str, op_name: str = "") -> str:
    """The attributes of a tagged collective."""
    metadata = f', metadata={{op_name="{op_name}" stack_frame_id=1}}' if op_name else ""
    return f'frontend_attributes={{other="x",stablehlo_tools_id="{ids}"}}{metadata}'


def shown(schedule: HloSchedule) -> list[str]:
    """The events as `phase kind ids`, the nesting before them."""
    return [
        "/".join((*event.nesting, f"{event.phase.value} {event.kind} {list(event.ids)}"))
        for event in schedule.events
    ]


def _indented(body: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())


def test_sync_collectives_stand_in_text_order() -> None:
    schedule = parse_schedule(
        hlo(f"""%p = f32[4]{{0}} parameter(0)
            %b = f32[8]{{0:T(8,128)S(1)}} all-gather(%p), replica_groups={{{{0,1}}}}, {tag("7")}
            ROOT %a = (f32[4]{{0}}, /*index=1*/f32[4]{{0}}) all-reduce(%p, %p), {tag("2")}
        """)
    )
    assert shown(schedule) == ["sync all-gather [7]", "sync all-reduce [2]"]
    first, second = schedule.events
    assert (first.shape, first.groups) == ("f32[8]{0:T(8,128)S(1)}", "{{0,1}}")
    assert second.shape == "(f32[4]{0}, /*index=1*/f32[4]{0})"
    assert [event.position for event in schedule.events] == [0, 1]


def test_start_and_done_are_paired() -> None:
    schedule = parse_schedule(
        hlo(f"""%s = (f32[4]{{0}}, f32[8]{{0}}) all-gather-start(%p), {tag("1")}
            %t = (f32[4]{{0}}, f32[4]{{0}}) collective-permute-start(%p), {tag("2")}
            %e = f32[8]{{0}} all-gather-done(%s)
            %d = f32[4]{{0}} collective-permute-done(%t)
        """)
    )
    assert shown(schedule) == [
        "start all-gather [1]",
        "start collective-permute [2]",
        "done all-gather [1]",
        "done collective-permute [2]",
    ]
    assert schedule.done_positions() == {0: 2, 1: 3}


def test_async_wrapper_takes_the_collective_of_its_computation() -> None:
    schedule = parse_schedule(
        hlo(
            """%s = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped
            %u = ((f32[4]{0}), f32[4]{0}, u32[]) async-update(%s)
            %d = f32[4]{0} async-done(%u)
            """,
            f"wrapped: ROOT %x = f32[4]{{0}} all-to-all(%p.1), {tag('5')}",
        )
    )
    assert shown(schedule) == ["start all-to-all [5]", "done all-to-all [5]"]
    assert schedule.events[0].computation == "wrapped"


def test_async_wrapper_may_carry_the_tag_itself() -> None:
    schedule = parse_schedule(
        hlo(
            f"%s = ((f32[4]{{0}}), f32[4]{{0}}) async-start(%p), calls=%wrapped, {tag('5')}",
            "wrapped: ROOT %x = f32[4]{0} all-to-all(%p.1)",
        )
    )
    assert shown(schedule) == ["start all-to-all [5]"]


def test_group_of_collectives_in_one_async_call_starts_together() -> None:
    schedule = parse_schedule(
        hlo(
            """%s = ((f32[4]{0}), f32[4]{0}) call-start(%p), to_apply=%group
            %d = f32[4]{0} call-done(%s)
            """,
            f"""group: %x = f32[8]{{0}} all-gather(%p.1), {tag("1")}
            %y = f32[2]{{0}} reduce-scatter(%p.1), {tag("2")}
            """,
        )
    )
    assert shown(schedule) == [
        "start all-gather [1]",
        "start reduce-scatter [2]",
        "done all-gather [1]",
        "done reduce-scatter [2]",
    ]


def test_while_holds_condition_and_body() -> None:
    config = 'backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0"}}'
    schedule = parse_schedule(
        hlo(
            f"%w = (s32[], f32[4]{{0}}) while(%t), condition=%cond, body=%body, {config}",
            f"cond: %c = f32[4]{{0}} all-reduce(%p.1), {tag('1')}",
            f"body: %b = f32[8]{{0}} all-gather(%p.1), {tag('2')}",
        )
    )
    assert shown(schedule) == [
        "while condition/sync all-reduce [1]",
        "while body/sync all-gather [2]",
    ]
    (loop,) = schedule.nodes
    assert isinstance(loop, ScheduledLoop)
    assert (len(loop.condition), len(loop.body), loop.trip_count) == (1, 1, 4)


def test_silent_while_is_no_node() -> None:
    schedule = parse_schedule(
        hlo(
            "%w = s32[] while(%t), condition=%c, body=%b",
            "c: %x = pred[] compare(%p.1, %p.1)",
            "b: %y = s32[] add(%p.1, %p.1)",
        )
    )
    assert schedule.nodes == ()


@pytest.mark.parametrize(
    "names", ["branch_computations={%f, %g}", "true_computation=%f, false_computation=%g"]
)
def test_conditional_holds_its_branches(names: str) -> None:
    schedule = parse_schedule(
        hlo(
            f"%c = f32[4]{{0}} conditional(%i, %p, %p), {names}",
            f"f: %x = f32[4]{{0}} all-reduce(%p.1), {tag('1')}",
            "g: %y = f32[4]{0} negate(%p.1)",
        )
    )
    assert shown(schedule) == ["branch 0/sync all-reduce [1]"]
    (choice,) = schedule.nodes
    assert isinstance(choice, Conditional)
    assert [len(branch) for branch in choice.branches] == [1, 0]


def test_calls_and_fusions_stand_where_they_are_called() -> None:
    schedule = parse_schedule(
        hlo(
            f"""%c = f32[4]{{0}} call(%p), to_apply=%callee
            %a = f32[8]{{0}} all-gather(%c), {tag("2")}
            %f = f32[2]{{0}} fusion(%c), kind=kCustom, calls=%all-reduce-scatter
            """,
            f"callee: %x = f32[4]{{0}} collective-permute(%p.1), {tag('1')}",
            f"all-reduce-scatter: %y = f32[4]{{0}} all-reduce(%p.1), {tag('3')}",
        )
    )
    assert shown(schedule) == [
        "sync collective-permute [1]",
        "sync all-gather [2]",
        "sync all-reduce [3]",
    ]


def test_tpu_async_fusions_are_one_start_and_one_done() -> None:
    chain = 'frontend_attributes={chain_id="0"}, metadata={op_name="step/all_gather#id4"}'
    schedule = parse_schedule(
        hlo(
            f"""%async-collective-start = (f32[4]{{0}}, u32[]) fusion(%p), calls=%first, {tag("9")}
            %fusion.1 = f32[8]{{0}} fusion(%async-collective-start), calls=%middle
            %async-collective-done = f32[8]{{0}} fusion(%fusion.1), calls=%last, {tag("4")}
            """,
            f"""first: %x = f32[8]{{0}} all-gather(%p.1), {chain}
            ROOT %s = (f32[4]{{0}}) custom-call(%x), custom_call_target="AsyncCollectiveStart"
            """,
            f"middle: %y = f32[8]{{0}} all-gather(%p.1), {chain}",
            f"""last: %z = f32[8]{{0}} all-gather(%p.1), {chain}
            ROOT %d = f32[8]{{0}} custom-call(%p.1, %z), custom_call_target="AsyncCollectiveDone"
            """,
        )
    )
    assert shown(schedule) == ["start all-gather [4]", "done all-gather [4]"]
    assert schedule.events[0].op_name == "step/all_gather"
    assert schedule.done_positions() == {0: 1}


def test_send_and_recv() -> None:
    pairs = "_xla_send_recv_source_target_pairs={{0,1}}"
    schedule = parse_schedule(
        hlo(f"""%s = (f32[4]{{0}}, u32[], token[]) send(%p, %t), channel_id=7,
              frontend_attributes={{{pairs}}}
            %r = (f32[4]{{0}}, u32[], token[]) recv(%t), {tag("2")}
            %e = (f32[4]{{0}}, token[]) recv-done(%r), channel_id=7
            %d = token[] send-done(%gte), channel_id=7, {tag("1")}
        """)
    )
    assert shown(schedule) == ["start send []", "start recv [2]", "done recv [2]", "done send [1]"]
    assert schedule.events[3].start is None  # begun in the iteration before


def test_merged_collectives_have_all_ids() -> None:
    schedule = parse_schedule(hlo(f"%a = f32[9]{{0}} all-reduce(%c), {tag('1,10,2')}"))
    assert shown(schedule) == ["sync all-reduce [1, 10, 2]"]


def test_op_name_stands_in_for_a_lost_tag() -> None:
    marked = 'metadata={op_name="while/body/psum#id3"}'
    (one,) = parse_schedule(hlo(f"%a = f32[4]{{0}} all-reduce(%p), {marked}")).events
    assert (one.ids, one.partial, one.op_name) == ((3,), False, "while/body/psum")
    (several,) = parse_schedule(hlo(f"%a = f32[4]{{0}} all-reduce(%p, %q), {marked}")).events
    assert (several.ids, several.partial) == ((3,), True)


def test_what_xla_adds_around_a_collective_has_no_id() -> None:
    schedule = parse_schedule(
        hlo(f"""%x = f32[8]{{0}} all-gather(%p), metadata={{op_name="psum#id3"}}
            %a = f32[4]{{0}} all-reduce(%x), {tag("3", "psum#id3")}
            %s = f32[2]{{0}} slice(%a), slice={{[0:2]}}, {tag("3", "psum#id3")}
        """)
    )
    assert shown(schedule) == ["sync all-gather []", "sync all-reduce [3]"]


def test_custom_calls_count_with_a_side_effect_or_a_tag() -> None:
    schedule = parse_schedule(
        hlo(f"""%b = f32[4]{{0}} custom-call(), custom_call_target="AllocateBuffer"
            %x = () custom-call(%p), custom_call_target="f", custom_call_has_side_effect=true
            %y = f32[4]{{0}} custom-call(%p), custom_call_target="g", {tag("1")}
            %i = ((f32[4]{{0}}), token[]) infeed(%t)
        """)
    )
    assert shown(schedule) == ["sync custom-call []", "sync custom-call [1]", "sync infeed []"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "func.func @main()",
        "HloModule m\nENTRY %e (p: f32[]) -> f32[] {\n}\n",
        "HloModule m, is_scheduled=true\n",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HLO"):
        parse_schedule(text)


def test_dumps_tell_what_a_combiner_merged() -> None:
    before = hlo(f"""%a = f32[4]{{0}} all-reduce(%x), {tag("1")}
        %b = f32[8]{{0}} all-reduce(%y), {tag("2")}
        %c = f32[8]{{0}} all-reduce(%x), {tag("3")}
    """)
    merged = "%m = (f32[4]{0}, f32[8]{0}) all-reduce(%x, %y), to_apply=%r"
    after = hlo(f"{merged}\n%c = f32[8]{{0}} all-reduce(%x), {tag('3')}")
    known: dict[str, tuple[int, ...]] = {}
    add_merged(before, after, known)
    assert known == {"m": (1, 2)}
    assert shown(parse_schedule(after, known)) == ["sync all-reduce [1, 2]", "sync all-reduce [3]"]
    # A second run takes what the first one found for the ids that are gone from the text.
    twice = hlo("%n = (f32[4]{0}, f32[8]{0}, f32[8]{0}) all-reduce(%x, %y, %x)")
    add_merged(after, twice, known)
    assert set(known["n"]) == {1, 2, 3}


def test_metadata_of_a_kernel_in_lines_of_its_own_ends_no_computation():
    text = """ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %k = f32[2]{0} custom-call(%a), frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="splash"}
  ROOT %r = f32[2]{0} negate(%k)
}
"""
    computations, entry = parse_computations(text)
    assert [each.name for each in computations[entry]] == ["a", "k", "r"]
    assert [each.number for each in computations[entry]] == [2, 3, 6]
    assert computations[entry][1].op_name == "splash"

"""Pipeline text: what it splits into, that it round-trips, and that mistakes are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.passes.parser import PassText, parse_pipeline_text
from stablehlo_tools.passes.pipeline import Pipeline


def test_splits_passes_and_options():
    assert parse_pipeline_text(" cse , thread-tokens{ form=composite  minimal }") == [
        PassText("cse"),
        PassText("thread-tokens", (("form", "composite"), ("minimal", None))),
    ]


def test_brackets_and_quotes_keep_commas_and_spaces_together():
    (part,) = parse_pipeline_text("p{a={x y,z} b='1, 2' c=[3,4]}")
    assert part.options == (("a", "{x y,z}"), ("b", "'1, 2'"), ("c", "[3,4]"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("cse,", "expected a pass name"),
        (",cse", "expected a pass name"),
        ("cse{", "missing at the end"),
        ("cse}", "matches no opening bracket"),
        ("cse{a=}", "is not an option"),
        ("cse{=a}", "is not an option"),
        ("cse x", "expected {"),
        ("thread-tokens{form=ring}", "barrier or composite"),
        ("thread-tokens{form}", "needs a value"),
        ("thread-tokens{minimal=1}", "true or false"),
        ("thread-tokens{minimal minimal}", "twice"),
        ("thread-tokens{shape=1}", "no option 'shape'"),
        ("thread-token", "did you mean 'thread-tokens'"),
        ("cse{nonsense=1}", "no such option"),
        ("order-collectives{form=barrier}", "has no options"),
    ],
)
def test_mistakes_are_named(text: str, message: str):
    with pytest.raises(ToolError, match=message):
        Pipeline.parse(text)


_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "form": st.sampled_from(["barrier", "composite"]),
        "scope": st.sampled_from(["all", "group"]),
        "minimal": st.sampled_from(["true", "false"]),
    },
)


@given(st.lists(st.one_of(_OPTIONS, st.sampled_from(["cse", "strip-tokens"])), min_size=1))
def test_printed_pipelines_parse_to_themselves(parts: list[dict[str, str] | str]):
    text = ",".join(
        part
        if isinstance(part, str)
        else "thread-tokens{" + " ".join(f"{n}={v}" for n, v in part.items()) + "}"
        for part in parts
    )
    pipeline = Pipeline.parse(text)
    assert Pipeline.parse(str(pipeline)) == pipeline
    assert str(Pipeline.parse(str(pipeline))) == str(pipeline)


def test_defaults_are_not_printed():
    text = "thread-tokens{form=barrier scope=group minimal=true},cse"
    assert str(Pipeline.parse(text)) == "thread-tokens{scope=group minimal},cse"

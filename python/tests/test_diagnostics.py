"""Locations of JAX decoded to the line people want, and messages in one form."""

import pytest

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import (
    Diagnostics,
    Place,
    ToolError,
    nearest,
    render_diagnostics,
    to_place,
)

JAX = 'callsite("layer"("model.py":11:4) at "step"("train.py":40:2))'


@pytest.mark.parametrize(
    ("location", "rendered"),
    [
        (f'loc("mlp/psum"({JAX}))', "model.py:11 in layer (mlp/psum)"),
        (f'loc("psum:"({JAX}))', "model.py:11 in layer (psum)"),
        ('loc("model.py":11:4)', "model.py:11"),
        ('loc("step"("model.py":11:4))', "model.py:11 in step"),
        ('loc("-":3:7)', "in.mlir:3:7"),
        ('loc("psum")', "in.mlir (psum)"),
        ("loc(unknown)", "in.mlir"),
        ('loc(fused[unknown, "model.py":11:4])', "model.py:11"),
    ],
)
def test_places(location: str, rendered: str):
    module = bindings.parse_module(f"module {{}} {location}", bindings.new_context())
    assert to_place(module.operation.location).render("in.mlir") == rendered


def test_an_error_prints_itself_and_its_notes_one_line_each():
    from stablehlo_tools.diagnostics import note

    error = ToolError("no", Place(None, 3, 5), (note("because", Place("model.py", 2)),))
    error.input_name = "in.mlir"
    assert str(error) == "in.mlir:3:5: error: no\nmodel.py:2: note: because"


@pytest.mark.parametrize(
    ("word", "meant"), [("gpip", "gpipe"), ("1b1f", "1f1b"), ("zb-v1", "zb-v"), ("2f2b", "")]
)
def test_what_was_meant_by_a_word(word: str, meant: str):
    assert nearest(word, ["gpipe", "1f1b", "zb-v"]) == meant


def test_warnings_are_collected_in_order():
    diagnostics = Diagnostics()
    diagnostics.warn("first")
    diagnostics.warn("second", Place(None, 1, 1))
    assert [d.render("x") for d in diagnostics.collected] == [
        "x: warning: first",
        "x:1:1: warning: second",
    ]


def test_what_reads_alike_is_printed_once():
    diagnostics = Diagnostics()
    for line in (2, 3, 2, 2):
        diagnostics.warn("gathered", Place("model.py", line))
    assert render_diagnostics(diagnostics.collected, "x") == [
        "model.py:2: warning: gathered",
        "model.py:3: warning: gathered",
    ]


def test_reports_of_cpp_passes_do_not_reach_stderr(capfd: pytest.CaptureFixture[str]):
    from stablehlo_tools.diagnostics import capture_diagnostics

    context = bindings.new_context()
    with capture_diagnostics(context) as reported, context:
        ir.Location.file("-", 4, 2).emit_error("from C++")
    assert [d.render("x") for d in reported] == ["x:4:2: error: from C++"]
    assert capfd.readouterr().err == ""

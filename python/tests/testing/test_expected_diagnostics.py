"""Split inputs and expected diagnostics behave as mlir-opt's do."""

import pytest

from stablehlo_tools.diagnostics import Diagnostic, Place, Severity
from stablehlo_tools.testing.expected_diagnostics import join_parts, mismatches, split_input


def error(line: int, message: str, *notes: Diagnostic) -> Diagnostic:
    return Diagnostic(Severity.ERROR, message, Place(None, line, 1), notes)


def test_parts_keep_their_line_numbers():
    text = "a\nb\n// -----\nc\n  // -----\nd\n"
    parts = split_input(text)
    assert [part.strip() for part in parts] == ["a\nb", "c", "d"]
    assert [part.split("\n").index(name) + 1 for part, name in zip(parts, "acd", strict=True)] == [
        1,
        4,
        6,
    ]


def test_a_text_without_separator_is_one_part():
    assert split_input("a\n") == ["a\n"]
    assert join_parts(["a\n", "b\n"]) == "a\n// -----\nb\n"


@pytest.mark.parametrize(
    ("comment", "line", "message"),
    [
        ("// expected-error {{bad op}}", 1, "a bad op here"),
        ("// expected-error@+1 {{bad}}", 2, "bad"),
        ("// expected-error@below {{bad}}", 2, "bad"),
        ("\n\n// expected-error@-2 {{bad}}", 1, "bad"),
        ("\n// expected-error@above {{bad}}", 1, "bad"),
        ("// expected-error-re {{op {{[0-9]+}} is (bad)}}", 1, "op 12 is (bad)"),
        ("// expected-error@unknown {{bad}}", 0, "bad"),
    ],
)
def test_matching(comment: str, line: int, message: str):
    assert mismatches(comment, [error(line, message)]) == []
    assert len(mismatches(comment, [])) == 1
    assert len(mismatches(comment, [error(line + 7, message)])) == 2
    assert len(mismatches(comment, [error(line, "else")])) == 2


def test_severities_are_not_confused():
    warning = Diagnostic(Severity.WARNING, "bad", Place(None, 1, 1))
    assert mismatches("// expected-warning {{bad}}", [warning]) == []
    assert len(mismatches("// expected-error {{bad}}", [warning])) == 2


def test_notes_may_be_expected_but_need_not_be():
    note = Diagnostic(Severity.NOTE, "because", Place(None, 5, 1))
    reported = [error(1, "bad", note)]
    assert mismatches("// expected-error {{bad}}", reported) == []
    both = "// expected-error {{bad}}\n// expected-note@+3 {{because}}"
    assert mismatches(both, reported) == []
    assert len(mismatches(both, [error(1, "bad")])) == 1


def test_one_expectation_takes_one_diagnostic():
    assert len(mismatches("// expected-error {{bad}}", [error(1, "bad"), error(1, "bad")])) == 1


def test_several_expectations_on_a_line():
    text = "// expected-error {{one}} expected-error {{two}}"
    assert mismatches(text, [error(1, "two"), error(1, "one")]) == []

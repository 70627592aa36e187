"""The directive linter reports what would silently do nothing, and leaves prose alone."""

from pathlib import Path

import lint_directives
import pytest

RUN = "// RUN: stablehlo-tools opt %s -p cse | filecheck %s"
RUN_GPU = f"{RUN} --check-prefixes=CHECK,GPU"
RUN_VERIFY = "// RUN: stablehlo-tools opt %s -p cse --verify-diagnostics"


def messages(*lines: str) -> list[str]:
    return [
        f"{finding.line}: {finding.message}" for finding in lint_directives.lint("\n".join(lines))
    ]


@pytest.mark.parametrize(
    ("directive", "expected"),
    [
        ("CHEK: x", "'CHEK' is not a directive; did you mean 'CHECK:'?"),
        ("CHCEK-NEXT: x", "'CHCEK-NEXT' is not a directive; did you mean 'CHECK-NEXT:'?"),
        ("CHECK-NXT: x", "'CHECK-NXT' is not a directive; did you mean 'CHECK-NEXT:'?"),
        ("CHECK-NXT x", "'CHECK-NXT' is not a directive; did you mean 'CHECK-NEXT:'?"),
        ("CHECK_NEXT: x", "'CHECK_NEXT' is not a directive; did you mean 'CHECK-NEXT:'?"),
        ("CHECKNEXT: x", "'CHECKNEXT' is not a directive; did you mean 'CHECK-NEXT:'?"),
        ("check-next: x", "'check-next' is not a directive; did you mean 'CHECK-NEXT:'?"),
        ("CHECK-GPU: x", "'CHECK-GPU' is not a directive"),
        ("MY-CHECK: x", "'MY-CHECK' is not a directive"),
        ("CHECK{LITERAL}-NEXT: x", "no colon right after 'CHECK'"),
        ("CHECK-COUNT: x", "'CHECK-COUNT' is not a directive; did you mean 'CHECK-COUNT-N:'?"),
        ("CHECK NEXT: x", "no colon right after 'CHECK'"),
        ("CHECK %0 = x", "no colon right after 'CHECK'"),
        ("CHECK-NEXT x", "no colon right after 'CHECK-NEXT'"),
        ("CHECK-DAG : x", "a space between 'CHECK-DAG' and its colon"),
        ("CHECK-LABEL:", "'CHECK-LABEL:' has no pattern"),
        ("CHECK-EMPTY: x", "EMPTY takes no pattern"),
        ("CHECK: [[#N:]]", "filecheck has no numeric variables and no @LINE"),
        ("CHECK: [[# @LINE + 1]]", "filecheck has no numeric variables and no @LINE"),
        ("CHECK: [[@LINE]]", "filecheck has no numeric variables and no @LINE"),
    ],
)
def test_misspelt_directives_are_found(directive: str, expected: str) -> None:
    assert messages(RUN, "// CHECK: y", f"  // {directive}") == [f"3: {expected}"]


def test_directive_that_filecheck_takes_for_a_comment_is_found() -> None:
    expected = ["3: filecheck takes a line with COM or RUN before a prefix for a comment"]
    assert messages(RUN, "// CHECK: y", "func.func @COMBINE() // CHECK: x") == expected


@pytest.mark.parametrize("directive", ["GPU-NEXT: x", "GPU: %0 = stablehlo.add", "GPU: @main"])
def test_prefix_that_no_run_line_names_is_found(directive: str) -> None:
    expected = ["3: no RUN line's filecheck reads the prefix GPU"]
    assert messages(RUN, "// CHECK: y", f"// {directive}") == expected


def test_directive_without_any_filecheck_is_found() -> None:
    expected = ["2: no RUN line's filecheck reads the prefix CHECK"]
    assert messages("// RUN: stablehlo-tools opt %s", "// CHECK: y") == expected
    assert messages("// RUN: stablehlo-tools opt %s | filecheck %S/x", "// CHECK: y") == expected


def test_prefix_that_no_directive_uses_is_found_at_its_run_line() -> None:
    unused = "no directive uses the check prefix"
    assert messages("", RUN) == [f"2: {unused} CHECK"]
    assert messages(RUN_GPU, "// CHECK: y") == [f"1: {unused} GPU"]


def test_each_way_to_name_a_prefix_is_read() -> None:
    for option in ("--check-prefix=GPU", "--check-prefix GPU", "-check-prefixes=GPU"):
        assert not messages(f"{RUN} {option}", "// GPU: y")


def test_a_continued_run_line_is_read_whole() -> None:
    lines = ["// RUN: stablehlo-tools opt %s \\", "// RUN:   | filecheck %s \\"]
    assert not messages(*lines, "// RUN:     --check-prefix=GPU", "// GPU: y")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("RUN stablehlo-tools opt %s", "lit reads only 'RUN:'"),
        ("RUN : stablehlo-tools opt %s", "lit reads only 'RUN:'"),
        ("RNU: stablehlo-tools opt %s", "'RNU' is not a directive; did you mean 'RUN:'?"),
        ("run: stablehlo-tools opt %s", "'run' is not a directive; did you mean 'RUN:'?"),
    ],
)
def test_misspelt_run_is_found(line: str, expected: str) -> None:
    assert messages(RUN, "// CHECK: y", f"// {line}") == [f"3: {expected}"]


def test_file_without_a_run_line_is_found() -> None:
    assert messages("module {}") == ["1: no RUN line: lit runs nothing"]


@pytest.mark.parametrize(
    "line",
    [
        "expected-eror {{x}}",
        "expected-error@1{{x}}",
        "expected-error@1 {{x}}",
        "expected-error: x",
        "expected-error {{x",
        "expected_error {{x}}",
        "expected error {{x}}",
        "expcted-error@+1 {{x}}",
        "Expected-error {{x}}",
    ],
)
def test_malformed_diagnostic_is_found(line: str) -> None:
    expected = "malformed diagnostic; write expected-error[@+N|@-N|@above|@below] {{…}}"
    assert messages(RUN_VERIFY, f"// {line}") == [f"2: {expected}"]


def test_diagnostic_that_nobody_verifies_is_found() -> None:
    line = "// expected-error@+1 {{x}}"
    assert messages(RUN, "// CHECK: y", line) == ["3: no RUN line passes --verify-diagnostics"]
    assert not messages(RUN_VERIFY, line)


@pytest.mark.parametrize("place", ["", "@+1", "@-2", " @below ", "@above", "-re@+1"])
def test_good_diagnostics_pass(place: str) -> None:
    assert not messages(RUN_VERIFY, f"  func.return // expected-error{place} {{{{x}}}}")


def test_good_directives_pass() -> None:
    kinds = ("", "-LABEL", "-NEXT", "-SAME", "-NOT", "-DAG", "-COUNT-2")
    lines = [f"// {prefix}{kind}: y" for prefix in ("CHECK", "GPU") for kind in kinds]
    assert not messages(RUN_GPU, *lines, "// CHECK-EMPTY:", "// CHECK{LITERAL}: [[y]]")
    assert not messages("# RUN: stablehlo-tools opt %s | filecheck %s", "# CHECK: y")
    assert not messages(RUN, "func.return // CHECK: %[[TOKEN:.+]] = y")


@pytest.mark.parametrize(
    "prose",
    [
        "The token chain stays; see CHECK-NXT and GPU-NEXT below.",
        "Check: the order of both collectives.",
        "CHECK lines below follow program order.",
        "RUN lines share one input.",
        "Run %iter times: once per microbatch.",
        "P2: the loop counts up, so %i is below @n.",
        "Do-not: a reader should see %0.",
        "SPMD: every device runs the same program.",
        "XLA:GPU reorders independent collectives.",
        "NOTE: %0 is dead.",
        "REQUIRES: gpu",
        "DEFINE: %{opt} = stablehlo-tools opt",
        "Expected errors are listed by precondition.",
        "The expected-error comments come first.",
        "-----",
    ],
)
def test_prose_passes(prose: str) -> None:
    assert not messages(RUN, "// CHECK: y", f"// {prose}")


def test_command_prints_findings_and_counts_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.mlir", tmp_path / "bad.test"
    good.write_text(f"{RUN}\n// CHECK: y\n")
    (tmp_path / "Inputs").mkdir()
    (tmp_path / "Inputs" / "input.mlir").write_text("module {}\n")
    assert lint_directives.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 files checked\n"

    bad.write_text(f"{RUN}\n// CHECK: y\n// CHEK: y\n")
    assert lint_directives.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{bad}:3: 'CHEK' is not a directive")

    assert lint_directives.main([str(tmp_path / "absent")]) == 2

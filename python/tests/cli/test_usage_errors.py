"""What is tried where a command line cannot be taken is a command that can be."""

import shlex
from pathlib import Path

import pytest

from stablehlo_tools.cli.main import main
from stablehlo_tools.cli.parsers import parse, parser_of
from stablehlo_tools.cli.usage_errors import replace_word

WRONG = (
    "opt x.mlir -pipline cse",
    "opt x.mlir -p cse -outptu y.mlir",
    "compile x.mlir --traget gpu",
    "opt x.mlir -p 'canonicalize{fast}'",
    "opt x.mlir -p 'fsdp{hardwar=h100}'",
    "opt x.mlir --split-input-file -o y.mlirbc",
    "optimize x.mlir --target gpu -o -",
    "optimize x.mlir --target gpu --report why.pdf",
    "expand-mpmd x.mlir -o out --schedule 1f1b --ranks 2 --memory-limit 3",
    "schedule 1f1b --stages 4 --microbatches 4 --chunks 3",
    "schedule seq1f1b --stages 4 --microbatches 4",
    "make-test x.mlir",
    "optimise x.mlir --target gpu",
    "inspect x.mlir -hardware h100",
    "inspect x.mlir -hardwre=h100",
    "inspect x.mlir --hardwre h100",
    "inspect x.mlir --target GPU",
    "compile x.mlir",
    "opt x.mlir -output y.mlir",
    "optimize x.mlir",
    "lower-mpmd ranks -o gpu",
    "align-order a.mlir b.mlir",
    "opt x.mlir -p cse -o y.txt",
    "report x.mlir",
    "report x.mlir -o x.txt",
    "make-test x.mlir -p cse",
    "schedule 1f1b --stages 4",
    "expand-mpmd x.mlir --schedule zb_v --ranks 2 -o out",
    "expand-mpmd x.mlir --schedule 1f1b -o out",
    "expand-mpmd x.mlir --ranks 2 -o out",
    "expand-mpmd x.mlir --schedule 1f1b --ranks 2 -o out --compare",
)


@pytest.mark.parametrize("words", WRONG)
def test_what_is_tried_can_be_taken(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, tried = told(shlex.split(words), capsys)
    assert "error: " in error
    program, command, *rest = shlex.split(tried.removeprefix("try: "))
    assert program == "stablehlo-tools"
    assert rest != ["--help"], "there is something nearer"
    parsed, left = parser_of([command])[0].parse_known_args([command, *rest])
    assert "run" in parsed
    assert not left


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The two lines on standard error."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2
    assert not said.out
    return said.err.splitlines()


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        ("opt x.mlir -outp y.mlir", "opt x.mlir --output y.mlir"),
        ("opt --list-pases", "opt --list-passes"),
        ("optimize x.mlir --target GUP --jobs 4", "optimize x.mlir --target gpu --jobs 4"),
    ],
)
def test_what_was_typed_is_kept(words: str, tried: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(shlex.split(words), capsys)[1].endswith(f" {tried}")


@pytest.mark.parametrize(
    "words",
    [
        "zzz",
        "opt x.mlir --fast",
        "optimize x.mlir --target cpu",
        "inspect x.mlir --platform metal",
        "run-mpmd ranks --schedule 1f1b",
        "help opt",
        "compile x.mlir --target gpu -o y",
        "opt x.mlir y.mlir -o y.mlir",
        "opt x.mlir -p 'partition(hardware=h100)'",
        "optimize x.mlir --target gpu --budget 10m",
        "compile x.mlir --target h100",
    ],
)
def test_where_nothing_is_near_the_help_says_what_there_is(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(shlex.split(words), capsys)[1].partition(" --help")[1]


def test_of_a_mistyped_pass_the_help_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    tried = told(["opt", "--help", "expand_pipeline"], capsys)[1]
    assert tried == "try: stablehlo-tools opt --help expand-pipeline"


def test_directories_are_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "step.mlir").write_text("module {}")
    assert "Is a directory" in told(["inspect", "folder"], capsys)[0]
    assert told(["inspect", "stpe.mlir"], capsys)[1] == "try: stablehlo-tools inspect step.mlir"
    writing = ["opt", "step.mlir", "-p", "cse", "-o"]
    assert told([*writing, "no/where/y.mlir"], capsys)[1] == "try: mkdir -p no/where"
    assert told([*writing, "folder"], capsys)[1].endswith("such as folder/out.mlir")


def test_of_two_pipelines_none_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    error, tried = told(["opt", "x.mlir", "-p", "cse", "-p", "symbol-dce"], capsys)
    assert "-p is given 2 times" in error
    assert tried == "try: one pipeline: -p cse,symbol-dce"


def test_a_word_is_replaced_whole_before_it_is_within_others() -> None:
    assert replace_word(["opt", "h10.mlir", "h10"], "h10", "h100") == ["opt", "h10.mlir", "h100"]
    assert replace_word(["opt", "-p", "a,b{c=d}"], "b", "e") == ["opt", "-p", "a,e{c=d}"]
    assert not replace_word(["opt", "x-b"], "b", "e")
    assert not replace_word(["verify", "a.mlir", "b.mlir"], "b.mlir", "a.mlir")


def test_the_words_of_a_script_are_its_own() -> None:
    assert parse(["run-mpmd", "set", "--train", "s.py", "--lr", "3"]).train == ["s.py", "--lr", "3"]

"""The golden comparison on trees of a few lines: what is equal, what differs, and what is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from golden import compare, corpus, run, session, trees
from golden.compare import Named
from golden.corpus import Command, Commands, LitFile, Unit
from golden.session import Records
from golden.trees import Tree

SAYS = "print('said')"
COMMAND = Command("zoo/model/opt/pass", ("opt", "file", "-o", "OUT.txt"), "1")
LIT_TEST = """\
// RUN: stablehlo-tools opt %s | filecheck %s
// RUN: not stablehlo-tools refuse %s 2>&1 | filecheck %s
// RUN: stablehlo-tools opt %s > %t.once && \\
// RUN: stablehlo-tools opt %s | diff %t.once -
"""
MAIN = """\
import sys
from pathlib import Path

def main():
    words = sys.argv[1:]
    if words[0] == "refuse":
        print("refused", file=sys.stderr)
        return 2
    if "-o" in words:
        Path(words[-1]).write_text("written")
    {says}
    return 0
"""
MakeTree = Callable[[str, str], Tree]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Makes a tree whose command runs a statement."""

    def make(name: str, says: str) -> Tree:
        package = tmp_path / name / "stablehlo_tools"
        (package / "cli").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "cli" / "__init__.py").touch()
        (package / "cli" / "main.py").write_text(MAIN.format(says=says))
        script = '[project.scripts]\nstablehlo-tools = "stablehlo_tools.cli.main:main"\n'
        (package.parent / "pyproject.toml").write_text(script)
        return Tree(package.parent, name, name)

    return make


@pytest.fixture
def lit_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LitFile:
    """A lit test in a suite of its own."""
    directory = tmp_path / "lit_tests"
    directory.mkdir()
    (directory / "case.mlir").write_text(LIT_TEST)
    monkeypatch.setattr(corpus, "LIT", directory)
    return LitFile("lit/case.mlir", Path("case.mlir"), corpus.run_lines(LIT_TEST), "1")


def recorded(tree: Tree, cache: Path, unit: Unit | Command = COMMAND, seed: int = 0) -> Records:
    """The records of one unit."""
    options = SimpleNamespace(all_slow=False, seeds=(0,), again=False, jobs=1)
    unit = Commands((unit,)) if isinstance(unit, Command) else unit
    return run.recorded(tree, seed, [unit], cache, options)  # pyright: ignore[reportArgumentType]


def compared(one: Tree, other: Tree, cache: Path, named: list[Named] | None = None) -> int:
    """The exit status of a comparison of two trees by one command."""
    records = {(tree.key, 0): recorded(tree, cache) for tree in (one, other)}
    return run.report(records, one, other, (0,), named or [], filtered=False)


def test_trees_that_say_the_same_are_equal_wherever_they_lie(
    make_tree: MakeTree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "print(__file__, 'at', hex(id(main)))"
    assert compared(make_tree("one", says), make_tree("other", says), tmp_path) == 0
    assert capsys.readouterr().out == ("1 cases, 1 commands, seeds 0: other against one: equal\n")


@pytest.mark.parametrize(
    ("says", "part"),
    [
        ("print('said otherwise')", "stdout"),
        ("print('said'); print('warned', file=sys.stderr)", "stderr"),
        ("print('said'); return 1", "status"),
        ("print('said'); Path(words[-1]).write_text('other')", "file out.txt"),
        ("print('said'); Path(words[-1] + '2').write_text('more')", "file out.txt2"),
        ("print('said'); Path(words[-1]).unlink()", "file out.txt"),
    ],
)
def test_a_difference_is_reported(
    make_tree: MakeTree, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: str, part: str
) -> None:
    assert compared(make_tree("one", SAYS), make_tree("other", says), tmp_path) == 1
    assert f"differs: zoo/model/opt/pass: {part} (seed 0)\n" in capsys.readouterr().out


def test_what_hangs_on_the_seed_is_nondeterministic(
    make_tree: MakeTree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree("tree", "print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}))")
    records = {(tree.key, seed): recorded(tree, tmp_path, seed=seed) for seed in (0, 1)}
    assert run.report(records, tree, tree, (0, 1), [], filtered=False) == 1
    assert "nondeterministic: zoo/model/opt/pass: stdout (seeds 0" in capsys.readouterr().out


def test_a_named_difference_is_none_and_one_that_did_not_occur_is_said(
    make_tree: MakeTree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [Named("zoo/*/opt/pass", "meant", "a test"), Named("lit/*", "meant", "a test")]
    trees_ = make_tree("one", SAYS), make_tree("other", "print('said otherwise')")
    assert compared(*trees_, tmp_path, named) == 0
    printed = capsys.readouterr().out
    assert "named, but did not occur: lit/*\n" in printed
    assert "equal, 1 named differences" in printed


def test_a_lit_test_has_a_case_for_each_run_line(
    make_tree: MakeTree, tmp_path: Path, lit_test: LitFile
) -> None:
    records = recorded(make_tree("tree", SAYS), tmp_path, lit_test)
    assert list(records) == [f"lit/case.mlir:{number}" for number in (1, 2, 3)]
    first, refused, twice = records.values()
    assert first["commands"][0]["arguments"] == ["opt", "lit_tests/case.mlir"]
    assert (refused["status"], refused["commands"][0]["status"]) == (0, 2)
    assert refused["commands"][0]["joined"]
    blobs = session.Blobs(tmp_path)
    assert blobs.get(refused["commands"][0]["stdout"]) == b"refused\n"
    assert blobs.get(twice["files"]["case.mlir.tmp.once"]) == b"said\n"
    assert len(twice["commands"]) == 2


def test_a_record_is_kept_until_the_case_is_another(make_tree: MakeTree, tmp_path: Path) -> None:
    tree = make_tree("tree", SAYS)
    before = recorded(tree, tmp_path)
    (tree.directory / "stablehlo_tools" / "cli" / "main.py").unlink()
    assert recorded(tree, tmp_path) == before
    other = Command(COMMAND.id, ("opt", "other"), "2")
    (record,) = recorded(tree, tmp_path, other).values()
    assert record["commands"] == []


def test_a_lit_test_that_was_broken_off_runs_again(
    make_tree: MakeTree, tmp_path: Path, lit_test: LitFile
) -> None:
    tree = make_tree("tree", SAYS)
    path = tmp_path / "records" / tree.key / "0.json"
    whole = recorded(tree, tmp_path, lit_test)
    lines = json.loads(path.read_text())
    path.write_text(json.dumps({key: lines[key] for key in list(lines)[:1]}))
    again = recorded(tree, tmp_path, lit_test)
    assert list(compare.differing(whole, again)) == []


def test_slow_commands_run_under_one_seed(make_tree: MakeTree, tmp_path: Path) -> None:
    tree = make_tree("tree", SAYS)
    slow = Command("zoo/model/verify", ("verify", "file"), "1")
    (ran,) = recorded(tree, tmp_path, slow).values()
    (skipped,) = recorded(tree, tmp_path, slow, seed=1).values()
    assert skipped["commands"] == [{"arguments": ["verify", "file"], "skipped": True}]
    assert "stdout" in ran["commands"][0]
    assert compare.different_parts(ran, skipped) == []


def test_the_diff_of_two_outputs(make_tree: MakeTree, tmp_path: Path) -> None:
    tree, other = make_tree("one", SAYS), make_tree("other", "print('said otherwise')")
    pair = [recorded(each, tmp_path)[COMMAND.id] for each in (tree, other)]
    lines = list(compare.shown(pair[0], pair[1], session.Blobs(tmp_path), tree))
    assert lines[-2:] == ["-said", "+said otherwise"]


def test_a_named_difference_has_a_reason_and_a_test(tmp_path: Path) -> None:
    assert compare.read_named(run.DIFFERENCES) is not None
    path = tmp_path / "differences.toml"
    path.write_text('[[difference]]\ncases = "lit/*"\nreason = "meant"\n')
    with pytest.raises(ValueError, match="cases, a reason and a test"):
        compare.read_named(path)


def test_the_corpus_has_all_that_the_tool_says_it_has(tmp_path: Path) -> None:
    working = Tree(trees.ROOT, "key", "the working tree")
    passes, pipelines, schedules = corpus.vocabulary(working)
    assert {"partition", "thread-tokens", "expand-pipeline"} <= set(passes)
    assert "order-collectives" in pipelines
    assert {"1f1b", "dualpipe-v", "compare"} <= set(schedules)
    ids = list(run.digests(corpus.units(working)))
    assert len(ids) == len({corpus.file_name([identity], "") for identity in ids})
    assert {
        "lit/transforms/partition.mlir",
        "zoo/llama/opt/partition",
        "zoo/vit-step/partitioned/opt/thread-tokens",
        "zoo/independent/check-order",
        "schedule/1f1b/4x8",
        "mpmd/llama/1f1b-2",
    } <= set(ids)


def test_times_and_the_tree_that_exported_are_not_compared():
    printed = b'2 ranks, sequential, 9.0 s\n"seconds": 1.25,\nat /a/b-c/python/models/llama.py:3'
    cleaned = session.EXPORTED_FROM.sub(b"<root>", session.TOOK.sub(rb"\1\2<time>", printed))
    assert cleaned == (
        b'2 ranks, sequential, <time> s\n"seconds": <time>,\nat <root>/python/models/llama.py:3'
    )
    passes = b"    0.0025 s  93.5%  thread-tokens\n    0.0027 s        total"
    assert session.TOOK.sub(rb"\1\2<time>", passes) == b"<time>  thread-tokens\n<time>        total"
    predicted = b"total 1.60 s, exposed 724 ms"
    assert session.TOOK.sub(rb"\1\2<time>", predicted) == predicted

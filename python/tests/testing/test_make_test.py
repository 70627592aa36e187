"""Generated tests pass, fail on a wrong output, and do not hang on names that jax chooses."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lint_directives import lint
from tree import LIT_TESTS

from stablehlo_tools.artifacts.artifact import parse, to_text
from stablehlo_tools.bindings import ir
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.passes.registry import PASSES
from stablehlo_tools.testing.check_lines import check_lines
from stablehlo_tools.testing.expected_diagnostics import split_input
from stablehlo_tools.testing.generated_test import generated_test, mismatch, regenerate_test, verify
from stablehlo_tools.testing.minimised import minimise_module
from stablehlo_tools.testing.outcome import Effect, TestOutcome, outcome_of
from stablehlo_tools.testing.recipe import Recipe, recipe_of, run_producer

# Without those of `partition`, which is slow: a test of it is simplified in some fifty runs.
INPUTS = [
    path
    for path in sorted((LIT_TESTS / "transforms").glob("*.mlir"))
    if not path.stem.startswith("partition")
]


def one_in(share: int) -> list[Any]:
    """The inputs: one in so many by default, the others for `make soak`."""
    return [
        pytest.param(path, marks=() if number % share == 0 else pytest.mark.soak)
        for number, path in enumerate(INPUTS)
    ]


COLLECTIVE = re.compile(
    r'"stablehlo\.(?:all_gather|all_reduce|all_to_all|reduce_scatter|collective_permute|'
    r'collective_broadcast)"\('
)


@dataclass(frozen=True)
class Made:
    """A generated test and what it was made from."""

    recipe: Recipe
    data: bytes
    text: str
    outcome: TestOutcome


def pieces(path: Path) -> Iterator[tuple[str, str]]:
    """The pipeline and the modules of a hand-written test, without its comments."""
    text = path.read_text()
    run = re.search(r"RUN:.*opt %s -p ('[^']+'|\S+)", text)
    of_name = (name for name in PASSES if path.stem.startswith(name.replace("-", "_")))
    pipeline = run[1].strip("'") if run else next(of_name)
    for part in split_input(text):
        yield pipeline, re.sub(r"//.*", "", part)


def made(part: str, pipeline: str, *, full: bool = False, brief: bool = False) -> Made:
    recipe = Recipe(pipeline, full, source="x.mlir", brief=brief)
    data = minimise_module(parse(part.encode(), "x.mlir"), Pipeline.parse(pipeline)).encode()
    test = generated_test(recipe, "x.mlir", data)
    verify(test, recipe, data)
    outcome = outcome_of(
        test.text.encode(), "x.mlir", Pipeline.parse(pipeline), everything=full, brief=brief
    )
    return Made(recipe, data, test.text, outcome)


@cache
def made_of_all(path: Path, *, full: bool = False, brief: bool = False) -> Sequence[Made]:
    """The tests of all pieces, but of those of which no test could fail."""
    found: list[Made] = []
    for pipeline, part in pieces(path):
        try:
            found.append(made(part, pipeline, full=full, brief=brief))
        except ToolError as error:
            if "could not fail" not in error.diagnostic.message:
                raise
    return found


def renamed(text: str) -> str:
    """The module with other names for its values, private functions and meshes."""
    text = re.sub(r"%(\w+)", r"%renamed_\1", text)
    for name in re.findall(r"(?:func\.func private|sdy\.mesh) @([\w.]+)", text):
        text = re.sub(rf"@{re.escape(name)}(?![\w.])", f"@other_{name}_77", text)
    return text


def collectives(text: str) -> list[tuple[int, int]]:
    """The lines of each collective, the last one excluded."""
    lines = text.splitlines()
    ops: list[tuple[int, int]] = []
    for start, line in enumerate(lines):
        if not COLLECTIVE.search(line):
            continue
        end = start + 1
        indent = len(line) - len(line.lstrip())
        if line.endswith("({"):
            end = next(
                n + 1 for n in range(end, len(lines)) if lines[n].startswith(" " * indent + "})")
            )
        ops.append((start, end))
    return ops


def without_one(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for start, end in collectives(text):
        yield "\n".join([*lines[:start], *lines[end:]]) + "\n"


def swapped(text: str) -> Iterator[str]:
    """Neighbours change places; they must be in one block, and differ in more than names."""
    lines = text.splitlines()
    ops = collectives(text)
    for (first, middle), (second, end) in pairwise(ops):
        indents = {len(lines[n]) - len(lines[n].lstrip()) for n in (first, second)}
        between = lines[middle:second]
        if len(indents) == 1 and not any(line.strip()[:1] == "}" for line in between):
            blocks = [*lines[second:end], *between, *lines[first:middle]]
            yield "\n".join([*lines[:first], *blocks, *lines[end:]]) + "\n"


def with_one_twice(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for start, end in collectives(text):
        again = [line.replace("%", "%again", 1) for line in lines[start:end]]
        yield "\n".join([*lines[:end], *again, *lines[end:]]) + "\n"


def with_other_groups(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for start, _ in collectives(text):
        changed = re.sub(r'dense<\[\[|axis_ref<name = "', r"\g<0>7", lines[start], count=1)
        assert changed != lines[start]
        yield "\n".join([*lines[:start], changed, *lines[start + 1 :]]) + "\n"


@pytest.mark.parametrize("path", one_in(24), ids=lambda path: path.stem)
@pytest.mark.parametrize("full", [False, True], ids=["default", "full"])
def test_each_hand_written_input_yields_a_test(path: Path, full: bool):
    for test in made_of_all(path, full=full):
        assert not lint(test.text), test.text
        assert "%0" not in re.sub(r"(?m)^(?!// ).*", "", test.text)
        assert recipe_of(test.text, "x.mlir") == test.recipe
        assert regenerate_test(test.text, "x.mlir") == test.text


@pytest.mark.parametrize("path", one_in(24), ids=lambda path: path.stem)
@pytest.mark.parametrize("full", [False, True], ids=["default", "full"])
def test_names_do_not_matter(path: Path, full: bool):
    for test in made_of_all(path, full=full):
        if test.outcome.effect is Effect.CHANGED:
            assert mismatch(test.text, renamed(test.outcome.after)) is None, test.text


@pytest.mark.parametrize("path", one_in(24), ids=lambda path: path.stem)
def test_a_wrong_output_is_noticed(path: Path):
    for test in made_of_all(path, full=False):
        if test.outcome.effect is not Effect.CHANGED:
            continue
        in_order = "stablehlo_tools.token_link" in test.outcome.after
        for change in (without_one, with_other_groups, *([swapped] if in_order else [])):
            for wrong in change(test.outcome.after):
                assert mismatch(test.text, wrong), f"{change.__name__}\n{test.text}\n{wrong}"


@pytest.mark.parametrize("path", one_in(24), ids=lambda path: path.stem)
def test_a_collective_more_is_noticed(path: Path):
    for test in made_of_all(path, full=False):
        if test.outcome.effect is Effect.CHANGED and "COUNT: " not in test.text:
            for wrong in with_one_twice(test.outcome.after):
                assert mismatch(test.text, wrong), f"{test.text}\n{wrong}"


BRIEF = [path for path in INPUTS if path.stem in ("create_reduce_scatter", "thread_tokens")]


@pytest.mark.parametrize("path", BRIEF, ids=lambda path: path.stem)
def test_a_brief_test_is_short_and_notices_what_it_checks(path: Path):
    for test in made_of_all(path, brief=True):
        assert not lint(test.text), test.text
        assert recipe_of(test.text, "x.mlir") == test.recipe
        assert regenerate_test(test.text, "x.mlir") == test.text
        if test.outcome.effect is not Effect.CHANGED:
            continue
        after = test.outcome.after
        assert mismatch(test.text, renamed(after)) is None, test.text
        assert test.text.count("CHECK") <= 3 * len(collectives(after)) + 8, test.text
        for change in (without_one, with_other_groups):
            for wrong in change(after):
                assert mismatch(test.text, wrong), f"{change.__name__}\n{test.text}\n{wrong}"


def test_a_brief_test_counts_what_it_leaves_out():
    part = (LIT_TESTS / "transforms" / "thread_tokens.mlir").read_text().partition("// -----")[0]
    test = made(re.sub(r"//.*", "", part), "thread-tokens", brief=True)
    links = test.outcome.after.count("stablehlo_tools.token_link")
    assert f"// LINKS: {{{{^}}}}{links}{{{{$}}}}\n" in test.text
    assert "grep -c stablehlo_tools.token_link %t.after.mlir | filecheck %s" in test.text
    assert re.search(r"// COUNT: : \d+ communicating ops on ", test.text)
    assert "token_link" not in re.sub(r"(?m)^(// RUN|[^/]).*", "", test.text)


def test_brief_and_full_exclude_each_other(capsys: pytest.CaptureFixture[str]):
    assert main(["make-test", "x.mlir", "-p", "cse", "-o", "y.mlir", "--full", "--brief"]) == 2
    assert "--full and --brief exclude each other" in capsys.readouterr().err


LONG = ", ".join(map(str, range(40)))


def directives(part: str, *, full: bool = False) -> list[str]:
    return check_lines(parse(part.encode()).module, everything=full).lines


def test_meshes_that_look_the_same_are_not_told_apart():
    mesh = 'sdy.mesh @a = <["x"=2]>\nsdy.mesh @b = <["x"=2]>\nsdy.mesh @c = <["y"=2]>\n'
    sharded = "{sdy.sharding = #sdy.sharding<@%s, [{}]>}"
    part = (
        f"{mesh}func.func @f(%x: tensor<2xf32> {sharded % 'b'}, %y: tensor<2xf32> {sharded % 'c'})"
        "{\n  return\n}"
    )
    lines = directives(part)
    assert sum(line.startswith("CHECK-DAG: sdy.mesh") for line in lines) == 2
    assert "#sdy.sharding<@{{[^ ,)]+}}, [{}]>" in "".join(lines)
    assert "#sdy.sharding<@[[C]], [{}]>" in "".join(lines)


def test_lines_left_out_that_look_like_the_next_check_are_checked_too():
    barrier = "stablehlo.optimization_barrier %x, %x : tensor<f32>, tensor<f32>"
    token = "stablehlo.optimization_barrier %x, %t : tensor<f32>, !stablehlo.token"
    body = f"  %0:2 = {barrier}\n  %1 = stablehlo.negate %x : tensor<f32>\n  %2:2 = {token}\n"
    part = (
        "func.func @f(%x: tensor<f32>, %t: !stablehlo.token) -> !stablehlo.token {\n"
        f"{body}  return %2#1 : !stablehlo.token\n}}"
    )
    assert mismatch("\n".join(directives(part)), to_text(parse(part.encode()).module)) is None


def test_the_middle_of_a_long_list_is_left_out_by_default():
    arguments = ", ".join(f"%x{n}: tensor<{n}xf32>" for n in range(1, 13))
    part = f"func.func @f({arguments}) -> tensor<12xf32> {{\n  return %x12 : tensor<12xf32>\n}}"
    text = to_text(parse(part.encode()).module)
    for full in (False, True):
        lines = directives(part, full=full)
        assert ("tensor<6xf32>" in "".join(lines)) == full
        assert mismatch("\n".join(lines), text) is None


def test_groups_are_never_shortened():
    pairs = ", ".join(f"[{n}, {(n + 1) % 24}]" for n in range(24))
    part = f"""func.func @f(%x: tensor<f32>) -> tensor<f32> {{
  %0 = "stablehlo.collective_permute"(%x) {{
    source_target_pairs = dense<[{pairs}]> : tensor<24x2xi64>
  }} : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}}"""
    assert "[11, 12]" in "".join(directives(part))


def test_brackets_that_filecheck_reads_are_escaped():
    part = """func.func @f(%x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.custom_call @f(%x) {
    backend_config = "{{a}} [[B]] [[C:.+]]", has_side_effect = true
  } : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}"""
    text = to_text(parse(part.encode()).module)
    checks = "\n".join(directives(part))
    assert mismatch(checks, text) is None
    assert mismatch(checks, text.replace("{{a}}", "{{b}}"))


@dataclass(frozen=True)
class RefuseZeros(Pass):
    """Refuses a module whose constants are all zero; stands for whatever reads constants."""

    name = "refuse-zeros"

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        if "dense<0>" in str(module):
            raise ToolError("nothing but zeros")


def test_a_simplification_that_changes_the_outcome_is_undone():
    part = f"""func.func @f() -> (tensor<40xi32> {{jax.result_info = "r"}}) {{
  %0 = stablehlo.constant dense<[{LONG}]> : tensor<40xi32>
  return %0 : tensor<40xi32>
}}"""
    loaded = parse(part.encode())
    before = to_text(loaded.module)
    simple = minimise_module(loaded, Pipeline(()))
    assert "dense<0>" in simple
    assert "result_info" not in simple
    careful = minimise_module(loaded, Pipeline((RefuseZeros(),)))
    assert LONG in careful
    assert "result_info" not in careful
    assert to_text(loaded.module) == before


def test_without_filecheck_the_message_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "filecheck.finput", None)
    with pytest.raises(ToolError, match="filecheck, which is not installed"):
        mismatch("CHECK: a", "a")


def test_a_recipe_survives_its_line():
    for recipe in (
        Recipe("cse", source="it's.mlir"),
        Recipe("thread-tokens{form=composite scope=group}", True, producer="make 'a b' %t.mlir"),
        Recipe("cse", source="x.mlir", brief=True),
    ):
        assert recipe_of(f"// RUN: x\n// {recipe.made_by}\n", "x.mlir") == recipe


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "make-test did not write this test"),
        ("x.mlir", "lacks the pipeline"),
        ("x.mlir -p cse --producer y", "lacks the pipeline"),
        ("x.mlir -p cse --fast", "cannot be read: '--fast'"),
        ("x.mlir -p 'cse", "cannot be read: No closing quotation"),
    ],
)
def test_a_recipe_that_cannot_be_read(line: str, message: str):
    text = f"// Made by: stablehlo-tools make-test {line}\n" if line else ""
    with pytest.raises(ToolError, match=message):
        recipe_of(text, "x.mlir")


def test_a_lit_configuration_that_fails_is_named(tmp_path: Path):
    (tmp_path / "lit.cfg.py").write_text("raise ValueError('no')\n")
    with pytest.raises(ToolError, match=r"lit.cfg.py' cannot be read: ValueError: no"):
        run_producer(Recipe("cse", producer="true %t.mlir"), tmp_path / "x.test")

"""One name for a pass everywhere: module, class, flag, test files; and what they must hold."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest
from tree import LIT_TESTS

from stablehlo_tools.passes.base import Pass
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.passes.registry import NAMED, PASSES, find_pass

HEAVY = ("jax", "jaxlib", "numpy")


def snake_case(name: str) -> str:
    return name.replace("-", "_")


def preconditions(name: str) -> list[str]:
    """The numbers of a pass's preconditions, as its docstring lists them: `p1`, `p2` …"""
    module = importlib.import_module(f"stablehlo_tools.transforms.{snake_case(name)}")
    docstring = inspect.getdoc(module) or ""
    return [f"p{number}" for number in re.findall(r"(?m)^ +P(\d+) ", docstring)]


@pytest.mark.parametrize("name", PASSES)
def test_module_class_and_flag_bear_one_name(name: str):
    camel_case = "".join(word.capitalize() for word in name.split("-"))
    kind = find_pass(name)
    assert kind is not None
    assert issubclass(kind, Pass)
    assert kind.__module__ == f"stablehlo_tools.transforms.{snake_case(name)}"
    assert kind.__name__ == f"{camel_case}Pass"
    assert kind.name == name


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("suffix", ["", "_invalid", "_unchanged"])
def test_each_pass_has_its_test_files(name: str, suffix: str):
    assert (LIT_TESTS / "transforms" / f"{snake_case(name)}{suffix}.mlir").is_file()


@pytest.mark.parametrize("name", PASSES)
def test_preconditions_are_numbered_in_order(name: str):
    numbers = preconditions(name)
    assert numbers == [f"p{number}" for number in range(1, len(numbers) + 1)]
    assert numbers, f"{name} has no numbered precondition: what does it refuse?"


@pytest.mark.parametrize("name", PASSES)
def test_each_precondition_has_a_function_that_breaks_it(name: str):
    tests = (LIT_TESTS / "transforms").glob(f"{snake_case(name)}*_invalid.mlir")
    text = "".join(path.read_text() for path in tests)
    broken = set(re.findall(r"func\.func [^@\n]*@\w+_(p\d+)\b", text))
    assert broken == set(preconditions(name))


def test_every_transforms_test_belongs_to_a_pass():
    stems = tuple(snake_case(name) for name in PASSES)
    strays = [
        path.name
        for path in (LIT_TESTS / "transforms").glob("*.mlir")
        if not path.stem.startswith(stems)
    ]
    assert not strays


@pytest.mark.parametrize("name", NAMED)
def test_named_pipelines_parse_give_reasons_and_are_tested(name: str):
    assert name not in PASSES
    assert str(Pipeline.parse(name)) == ",".join(step.text for step in NAMED[name])
    assert all(step.reason for step in NAMED[name])
    assert (LIT_TESTS / "pipelines" / f"{snake_case(name)}.mlir").is_file()


@pytest.mark.parametrize("words", [["--help"], ["opt", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(words: list[str]):
    script = (
        "import sys\n"
        "from stablehlo_tools.cli.main import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert finished.stdout
    assert finished.stderr.split() == []

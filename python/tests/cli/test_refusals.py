"""What is tried where a program is refused, or a file is, runs."""

import shlex
import sys
from pathlib import Path

import pytest
from models.zoo import SMALL
from tree import ROOT

import stablehlo_tools
from stablehlo_tools.cli.main import main

sys.path.append(str(ROOT / "python" / "examples"))
import export_step

PIPELINES = (
    # A number that the program does not take.
    ("expand-pipeline{microbatches=7}", "expand-pipeline{microbatches=4}"),
    ("expand-pipeline{microbatches=1000000000}", "expand-pipeline{microbatches=8}"),
    ("accumulate-gradients{microbatches=0}", "accumulate-gradients{microbatches=2}"),
    ("accumulate-gradients{microbatches=6}", "accumulate-gradients{microbatches=4}"),
    # An axis of the mesh.
    ("expand-pipeline{axis=stag}", "expand-pipeline{axis=stage}"),
    # What has to run before.
    ("schedule-overlap", "partition,create-reduce-scatter,schedule-overlap"),
    # What has to run behind.
    ("thread-tokens{minimal},partition", "partition,thread-tokens{minimal}"),
)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two layers on a mesh of two stages and four devices each; its batch has 8 rows."""
    file = tmp_path_factory.mktemp("step") / "step.jax_export"
    file.write_bytes(export_step.exported(2, 8, 8, 2, "float32").serialize())
    return file


@pytest.mark.parametrize(("wrong", "right"), PIPELINES)
def test_the_pipeline_that_is_tried_runs(
    wrong: str, right: str, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = step.with_name("out.mlir")
    assert main(["opt", str(step), "-p", wrong, "-o", str(output)]) == 2
    assert not output.exists()
    _, tried = capsys.readouterr().err.splitlines()
    words = shlex.split(tried.removeprefix("try: "))
    assert words[words.index("-p") + 1] == right
    assert main(words[1:]) == 0
    output.unlink()
    with pytest.raises(stablehlo_tools.ToolError, match="error: ") as refused:
        stablehlo_tools.transform(stablehlo_tools.load(step), wrong)
    assert f"try: stablehlo_tools.transform(program, {right!r})" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        ("opt STEP -p expand-pipeline{axis=floor}", "expand-pipeline{axis=stage}"),
        ("opt STEP -p shard-optimizer{axis=floor}", "axis=stage or axis=data"),
        (
            "opt STEP -p 'expand-pipeline{microbatches=4 schedule=zb-v}'",
            "expand-mpmd STEP -o ranks --schedule zb-v --pipeline-axis stage --microbatches 4",
        ),
        ("opt STEP -p shard-optimizer{axis=dta}", "shard-optimizer{axis=data}"),
        ("optimize STEP --target gpu --pipeline-axis nope", "--target gpu --pipeline-axis stage"),
        ("optimize STEP --target gpu --pipeline-axis stag", "--pipeline-axis stage"),
        ("opt STEP -p expand-pipeline{arguments=9}", "opt --help expand-pipeline"),
        ("opt STEP -p 'expand-pipeline{arguments=2 dimension=7}'", "opt --help expand-pipeline"),
        ("opt STEP -p expand-pipeline{repeats=2}", "opt --help expand-pipeline"),
        ("opt STEP -p break-permute-cycles{min-bytes=-1}", "opt --help break-permute-cycles"),
        ("inspect STEP --compiler-option xla_a=2", "--compiler-option xla_a=2 --target gpu"),
        (
            "expand-mpmd STEP -o OUT --schedule 1f1b --ranks 2 --pipeline-axis stage",
            "STEP -o OUT --schedule 1f1b --ranks 2 --pipeline-axis stage --microbatches 4",
        ),
        (
            "expand-mpmd STEP -o OUT --schedule 1f1b --ranks 2 --pipeline-axis=pp",
            "STEP -o OUT --schedule 1f1b --ranks 2 --pipeline-axis=stage",
        ),
        ("expand-mpmd STEP -o OUT --schedule 1f1b --ranks 2 --microbatches 5", "--microbatches 2"),
        ("expand-mpmd STEP -o OUT --schedule 1f1b --ranks 999999999", "expand-mpmd --help"),
        ("verify STEP STEP --set 9=1", "--set 3=1"),
        ("check-mpmd STEP", "expand-mpmd STEP -o ranks --schedule 1f1b --ranks 2"),
    ],
)
def test_words_that_a_program_does_not_take(
    words: str, tried: str, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = step.with_name("ranks")
    named = {"STEP": str(step), "OUT": str(output)}
    assert main([named.get(word, word) for word in shlex.split(words)]) == 2
    wanted = tried.replace("STEP", str(step)).replace("OUT", str(output))
    assert wanted in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()


def test_a_file_with_another_number_is_another_file(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tried in (("stpe", str(step)), ("step2", "another path"), ("model", "another path")):
        assert main(["inspect", str(step.with_stem(name))]) == 2
        assert tried in capsys.readouterr().err.splitlines()[-1]


def test_of_several_platforms_one_that_there_is_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = SMALL["two-platforms"].build()
    assert not isinstance(built, str)
    file = tmp_path / "both.jax_export"
    file.write_bytes(built.serialize())
    words = ["check-order", "--target", "none", str(file), str(file)]
    for added in ([], ["--platform", "rocm"], ["--platform=rocm"]):
        assert main([*words, *added]) == 2
        tried = shlex.split(capsys.readouterr().err.splitlines()[-1])
        assert tried[:7] == ["try:", "stablehlo-tools", *words]
        assert " ".join(tried[7:]).replace("=", " ") == "--platform cpu"


@pytest.mark.parametrize("wrong", ["partition,thread-token", "", "partition{hardwar=h100}"])
def test_words_stand_nowhere_in_python(wrong: str) -> None:
    with pytest.raises(stablehlo_tools.ToolError, match=r"\Aerror: .*\ntry: "):
        stablehlo_tools.Pipeline.parse(wrong)

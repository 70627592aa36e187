"""Schedules in files: text, JSON and PyTorch's CSV, with their sends or without."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from mpmd_steps import Step

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.manifest import encode_manifest
from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.forms import to_csv, to_json, to_text
from stablehlo_tools.schedules.setting import ScheduleSetting, unit_costs

STEP = Step(microbatches=4)
FORMS = {"csv": to_csv, "json": to_json, "txt": to_text}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step in a file."""
    path = tmp_path / "step.mlir"
    artifact.save(artifact.from_exported(STEP.export()), path)
    return path


FILES = [
    *(("1f1b", False, form) for form in FORMS),
    ("1f1b", True, "csv"),
    ("zb-v", False, "json"),
    ("zb-v", True, "txt"),
]
MORE_FILES = [
    case for case in itertools.product(("1f1b", "zb-v"), (False, True), FORMS) if case not in FILES
]


@pytest.mark.parametrize(
    ("name", "explicit", "form"),
    [*FILES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_FILES)],
)
def test_a_file_is_as_good_as_a_name(
    name: str, explicit: bool, form: str, step: Path, tmp_path: Path
):
    table = build(name, ScheduleSetting(2, STEP.microbatches, unit_costs(2)))
    file = tmp_path / f"{name}.{form}"
    file.write_text(FORMS[form](with_communication(table) if explicit else table))
    where = tmp_path / "set"
    assert main(["expand-mpmd", str(step), "-o", str(where), "--schedule", str(file)]) == 0
    assert main(["check-mpmd", str(where)]) == 0
    if name == "1f1b" and not explicit:  # others are made for the costs, or send elsewhere
        request = ExpansionRequest(name, 2, load_hardware("h100"))
        made = expand_mpmd(artifact.load(step), request)
        assert (where / "manifest.json").read_text() == encode_manifest(made.manifest)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "3"), "1f1b is for 2 ranks, but --ranks is 3"),
        (("--chunks", "2"), "1f1b is for 1 chunks, but --chunks is 2"),
    ],
)
def test_counts_that_are_not_the_files(
    words: tuple[str, ...],
    said: str,
    step: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    file = tmp_path / "1f1b.json"
    file.write_text(to_json(build("1f1b", ScheduleSetting(2, STEP.microbatches, unit_costs(2)))))
    where = tmp_path / "set"
    command = ["expand-mpmd", str(step), "-o", str(where), "--schedule", str(file), *words]
    assert main(command) == 2
    assert said in capsys.readouterr().err
    assert not where.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        ("0F0,0F1\n", "has no backward, but the step has one"),
        ("0F0,0B0,0B0\n", "is not valid"),
        ("0F0,0B0\n", "is for 1 microbatches, but the step has 4"),
        ("nonsense\n", "error: "),
    ],
)
def test_a_file_that_is_none(
    content: str, said: str, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "bad.csv"
    file.write_text(content)
    where = tmp_path / "set"
    assert main(["expand-mpmd", str(step), "-o", str(where), "--schedule", str(file)]) == 2
    assert said in capsys.readouterr().err
    assert not where.exists()

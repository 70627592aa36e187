"""A manifest from anywhere: it names files of its own set only, and whatever is wrong with it is
one message, from every command that reads sets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manifest_mutations import mutants
from proof_sets import SCHEDULES, files

from stablehlo_tools.cli import main as command_line
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd import rank_set
from stablehlo_tools.mpmd.manifest import NAME, decode_manifest, refusal_of_name
from stablehlo_tools.mpmd.rank_set import load, write
from stablehlo_tools.processes import activity

SET = SCHEDULES[0]
Change = Callable[[Any], object]


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A set in a directory of its own."""
    directory = tmp_path / "set"
    directory.mkdir()
    for name, text in files(SET, 1).items():
        (directory / name).write_text(text)
    return directory


def changed(room: Path, change: Change) -> None:
    """Changes the manifest of a set."""
    path = room / NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def called(*words: object) -> int:
    return command_line.main([str(word) for word in words])


def test_the_set_is_one(room: Path, capsys: pytest.CaptureFixture[str]):
    assert called("check-mpmd", room) == 0
    assert decode_manifest((room / NAME).read_bytes()) == load(room).manifest


NAMES = [
    "../outside.mlir",
    "{outside}",
    "sub/rank_1.mlir",
    "..",
    "",
    "rank_1.mlir\x00",
    "rank_1\x1b[2J.mlir",
    "rank_1\u202e.mlir",
    "sub\\rank_1.mlir",
    "C:rank_1.mlir",
    "rank_1",
    ".mlir",
    "manifest.json",
    "x" * 300 + ".mlir",
    "rank_0.mlir",
    "RANK_0.mlir",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["check-mpmd", "lower-mpmd", "report", "run-mpmd"])
def test_programs_lie_in_the_set(
    command: str, name: str, room: Path, capsys: pytest.CaptureFixture[str]
):
    outside, output = room.parent / "outside.mlir", room.parent / "lowered" / "set"
    shutil.copy(room / "rank_1.mlir", outside)
    before = outside.read_bytes()
    name = name.format(outside=outside)
    changed(room, lambda content: content["ranks"][1].update(program=name))
    more = ["-o", output, "--transfers", "both-ends"] if command == "lower-mpmd" else []
    assert called(command, room, *more) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith(f"{room / NAME}: ")
    assert "ranks[1].program" in told
    assert told.strip().isprintable()
    assert outside.read_bytes() == before
    assert not output.exists()


@pytest.mark.parametrize("linked", ["rank_1.mlir", NAME])
def test_links_lead_to_the_set(linked: str, room: Path, capsys: pytest.CaptureFixture[str]):
    outside = room.parent / "outside"
    shutil.move(room / linked, outside)
    (room / linked).symlink_to(outside)
    assert called("check-mpmd", room) == 2
    assert f"{room / linked}: error: the link leads to '{outside}'" in capsys.readouterr().err
    (room / linked).unlink()
    shutil.move(outside, room / f"own-{linked}")
    (room / linked).symlink_to(f"own-{linked}")
    assert called("check-mpmd", room) == 0, "a link within the set is one"


@pytest.mark.parametrize("linked", ["rank_1.mlir", NAME])
def test_nothing_is_written_through_a_link(
    linked: str, room: Path, capsys: pytest.CaptureFixture[str]
):
    outside, output = room.parent / "outside", room.parent / "lowered"
    outside.write_text("precious")
    output.mkdir()
    (output / linked).symlink_to(outside)
    assert called("lower-mpmd", room, "-o", output, "--transfers", "both-ends") == 2
    assert "outside the set" in capsys.readouterr().err
    assert outside.read_text() == "precious"
    assert [path.name for path in output.iterdir()] == [linked]


def test_two_ranks_have_two_files(room: Path, capsys: pytest.CaptureFixture[str]):
    (room / "rank_1.mlir").unlink()
    (room / "rank_1.mlir").symlink_to("rank_0.mlir")
    assert called("check-mpmd", room) == 2
    assert "this is the same file as 'rank_0.mlir'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rank_1.mlir", NAME])
def test_what_is_no_regular_file_is_not_waited_for(
    name: str, room: Path, capsys: pytest.CaptureFixture[str]
):
    (room / name).unlink()
    os.mkfifo(room / name)
    assert called("check-mpmd", room) == 2
    assert f"{room / name}: error: not a regular file" in capsys.readouterr().err


def test_usual_names_are_names():
    for name in ("rank_0.mlir", "stage é.mlirbc", "a.b.bc", "x" * 250 + ".mlir"):
        assert not refusal_of_name(name)


def test_a_set_is_not_written_by_another_name(room: Path, tmp_path: Path):
    loaded = load(room)
    loaded.manifest.ranks[0].__dict__["program"] = "../outside.mlir"
    with pytest.raises(
        ToolError, match=r"cannot write a program of a set: '../outside.mlir' must be a"
    ):
        write(tmp_path / "new" / "set", loaded.manifest, [])
    assert not (tmp_path / "new" / "outside.mlir").exists()


def transfer(content: Any) -> Any:
    return content["transfers"][1]


CHANGES: list[tuple[Change, str]] = [
    (lambda c: c.pop("hop"), "error: not a manifest of rank programs: there is no hop"),
    (lambda c: c.update(extra=1), "unknown field 'extra'"),
    (lambda c: c.update(version=2), "not a manifest of rank programs of version 1"),
    (lambda c: c.update(version=True), "version: true is not a whole number from 1 to 1"),
    (lambda c: c.update(devices=0), "devices: 0 is not a whole number from 1 to"),
    (lambda c: c.update(devices="1"), "devices: '1' is not a whole number"),
    (lambda c: c.update(form="sends"), "form: 'sends' is not one of pairs, both-ends, permutes"),
    (lambda c: c.update(hop=-1), "hop: -1 is not a number from 0 up"),
    (lambda c: c.update(source=None), "source: null is not a string"),
    (lambda c: c.update(ranks={}), "ranks: an object of 0 fields is not a list"),
    (lambda c: c["ranks"].pop(), "ranks: 1 programs for the 2 ranks of the schedule"),
    (lambda c: c["ranks"][0].update(stages=[2]), "ranks[0].stages[0]: 2 is not a whole number"),
    (
        lambda c: c["ranks"][0].update(wiring={"return": 1}),
        "ranks[0].wiring.return: 1 is not a list",
    ),
    (lambda c: c["stages"].pop(), "stages: 1 stages, but the schedule has 2"),
    (lambda c: c["stages"].reverse(), "stages[0].stage: 1 is not a whole number from 0 to 0"),
    (lambda c: c["stages"][1].pop("kept"), "stages[1]: there is no kept"),
    (lambda c: c["stages"][1].update(forward=1e200), "stages[1].forward: 1e+200 is not a number"),
    (
        lambda c: c["inputs"][0].update(type="tensor<xf32>"),
        "inputs[0].type: 'tensor<xf32>' is not a",
    ),
    (lambda c: c["inputs"][0]["pieces"][0].update(rank=2), "inputs[0].pieces[0].rank: 2 is not"),
    (lambda c: c["inputs"][0]["pieces"][0].update(dim=3), "inputs[0].pieces[0].dim: 3 is not"),
    (
        lambda c: c["inputs"][0]["pieces"][0].update(limit=9),
        "rows 0 to 9 are outside dimension 0, which has 2",
    ),
    (lambda c: c["outputs"][1]["pieces"][0].update(dim=0), "a scalar has no dimension to cut"),
    (
        lambda c: c["inputs"][0]["pieces"].append(dict(c["inputs"][0]["pieces"][0])),
        "inputs[0].pieces[2]: number 0 of rank 0 is a piece of two tensors",
    ),
    (lambda c: transfer(c).update(channel=1), "transfers[1]: channel 1 has two transfers"),
    (
        lambda c: transfer(c).update(target=0),
        "transfers[1]: this transfer goes from rank 0 to itself",
    ),
    (lambda c: transfer(c).update(source=-1), "transfers[1].source: -1 is not a whole number"),
    (
        lambda c: transfer(c).update(action="0RECV_F0"),
        "transfers[1].action: '0RECV_F0' is neither a send",
    ),
    (lambda c: transfer(c).update(action="sends"), "transfers[1].action: 'sends' is not an action"),
    (
        lambda c: c["schedule"].update(microbatches=0),
        "schedule: microbatches: 0; a schedule needs 1",
    ),
    (lambda c: c["schedule"]["rows"].pop(), "schedule: placement.routes names rank 1"),
    (lambda c: c["schedule"]["rows"][0].append("9F0"), "schedule: '1f1b' is not valid: "),
    (
        lambda c: c["schedule"]["rows"][0].__setitem__(slice(1, 1), ["0OFFLOAD0", "0RELOAD0"]),
        "schedule: 1f1b copies activations to the host, but programs keep them",
    ),
    (lambda c: c["schedule"].pop("name"), "schedule: the schedule has no name"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[said[-20:] for _, said in CHANGES])
def test_every_field_is_checked(
    change: Change, said: str, room: Path, capsys: pytest.CaptureFixture[str]
):
    changed(room, change)
    assert called("check-mpmd", room) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len([line for line in told.splitlines() if not line.startswith("try: ")]) == 1
    assert told.startswith(f"{room / NAME}:")


def check_mutants(room: Path, count: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """That each is judged, or refused in one message, by a command that reads sets."""
    path, output = room / NAME, room.parent / "output"
    text = path.read_text()
    commands: list[list[object]] = [
        ["check-mpmd", room],
        ["report", room],
        ["lower-mpmd", room, "-o", output, "--transfers", "permutes"],
        ["lower-mpmd", room, "-o", output, "--transfers", "both-ends"],
    ]
    outside = {entry for entry in room.parent.iterdir() if entry != output}
    for number, mutant in enumerate(mutants(text, count, seed)):
        path.write_bytes(mutant)
        command = commands[number % len(commands)]
        code = called(*command)
        told = capsys.readouterr().err
        assert "bug in this tool" not in told, (number, told)
        told = "" if told.startswith("wrote ") else told
        assert code in ((0, 1) if not told else (2,)), (number, code, told)
        assert not told or told.count(": error: ") == 1, (number, told)
        assert code != 2 or not output.exists(), number
        shutil.rmtree(output, ignore_errors=True)
        assert {*room.parent.iterdir()} == outside


def test_mutated_manifests_are_judged_or_refused(room: Path, capsys: pytest.CaptureFixture[str]):
    check_mutants(room, 250, 21, capsys)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_many_mutated_manifests_are_judged_or_refused(
    seed: int, room: Path, capsys: pytest.CaptureFixture[str]
):
    check_mutants(room, 250, seed, capsys)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("", "", ""),
        (NAME, '"devices": 1', '"devices": 0'),
        (NAME, '"rank_1.mlir"', '"rank_9.mlir"'),
        ("rank_1.mlir", "stablehlo.after_all", "stablehlo.after_some"),
    ],
    ids=["sound", "manifest", "missing", "program"],
)
def test_a_fork_checks_a_manifest_to_the_same_end(
    name: str, old: str, new: str, room: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a command, whose manifest is large; here it is taken to be."""
    if name:
        text = (room / name).read_text()
        assert old in text
        (room / name).write_text(text.replace(old, new, 1))

    def outcome() -> object:
        try:
            return load(room).manifest
        except ToolError as error:
            return error.diagnostic.render(error.input_name or "")

    usual = outcome()
    monkeypatch.setattr(rank_set, "_WORTH_A_FORK", 0)
    monkeypatch.setattr(activity, "may_end", lambda: True)
    assert outcome() == usual
    assert isinstance(usual, str) == bool(name)

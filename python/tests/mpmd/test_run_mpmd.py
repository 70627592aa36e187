"""Running sets of rank programs: the same values as the step, and what is said of wrong sets."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rank_sets import RATE, ROWS, WIDTH, Case, step_of, table_of, write_set, write_step
from soaking import first

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cli import main as command_line
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.manifest import NAME, decode_manifest, encode_manifest
from stablehlo_tools.mpmd.rank_set import digest_of, load, write
from stablehlo_tools.mpmd.running import sequential_process, set_outcome
from stablehlo_tools.mpmd.running.origin_inputs import make_inputs
from stablehlo_tools.mpmd.running.rank_child import cut_pieces, join_pieces
from stablehlo_tools.mpmd.running.sequential import read_results, write_inputs
from stablehlo_tools.mpmd.running.set_outcome import RunnerName, SetOptions, SetOutcome, run_set
from stablehlo_tools.verify.comparison import Rule
from stablehlo_tools.verify.element_types import Array

CASES: list[Case] = [
    ("zb-v", 2, 4, None, 1),
    ("1f1b", 2, 2, None, 2),
    ("dualpipe", 4, 8, None, 1),
    ("interleaved-1f1b", 2, 4, 2, 1),
    ("zb-h1", 3, 5, None, 1),
    ("dualpipe-v", 2, 4, None, 2),
    ("gpipe", 4, 4, None, 1),
]
SMALL: Case = ("1f1b", 2, 2, None, 1)
ROUNDING = Rule(rtol=2e-6, atol=1e-6)


def written(directory: Path, case: Case, *, step: bool = False) -> Path:
    """The set of a case, the step beside it where asked for."""
    write_set(directory, table_of(case), case[-1])
    if step:
        write_step(directory / "step.jax_export", table_of(case), case[-1])
    return directory


def ran(directory: Path, how: RunnerName = "sequential") -> SetOutcome:
    """A run of a set against its step: in exact arithmetic if that is how, else within rounding."""
    original = artifact.load(directory / "step.jax_export")
    options = SetOptions(how=how, rule=Rule() if how == "sequential" else ROUNDING)
    return run_set(load(directory), original, options)


def played(directory: Path, seed: int = 0) -> tuple[list[Array], list[Array], dict[str, Any]]:
    """Plays a set in this process: the inputs, the outputs, and what a child would answer."""
    ranks = load(directory)
    inputs = make_inputs(ranks.manifest, None, seed, {}).arrays
    with tempfile.TemporaryDirectory() as room:
        write_inputs(ranks, cut_pieces(ranks.manifest, inputs), Path(room))
        answer = sequential_process.answer(Path(room), {"set": str(directory)})
        return inputs, join_pieces(ranks.manifest, read_results(ranks, Path(room))), answer


def edited(directory: Path, rank: int, change: Callable[[str], str]) -> None:
    """Changes the text of a rank's program."""
    path = directory / f"rank_{rank}.mlir"
    before = path.read_text()
    after = change(before)
    assert after != before
    path.write_text(after)


def first_two_channels_swapped(text: str) -> str:
    """The text of a program in which channels 1 and 2 change places."""
    names = {"handle = 1,": "handle = 2,", "handle = 2,": "handle = 1,"}
    return re.sub(r"handle = [12],", lambda found: names[found[0]], text)


@pytest.mark.parametrize("case", first(2, CASES), ids=lambda case: f"{case[0]}-{case[-1]}")
def test_a_set_gives_the_values_of_its_step(case: Case, tmp_path: Path) -> None:
    inputs, outputs, _ = played(written(tmp_path, case))
    expected = step_of(table_of(case).stages)(*map(jnp.asarray, inputs))
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("how", first(2, ["processes", "sequential"]))
def test_every_way_gives_the_same_values(how: RunnerName, tmp_path: Path) -> None:
    found = ran(written(tmp_path, SMALL, step=True), how)
    assert found.values is not None
    assert found.same
    assert [output.path for output in found.outputs] == ["[0]", "[1]", "[2]"]
    assert (found.values.exact is not None) == (how == "sequential")
    assert not found.values.in_floats


@pytest.mark.soak
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[4]], ids=lambda case: case[0])
def test_processes_of_several_forms(case: Case, tmp_path: Path) -> None:
    assert ran(written(tmp_path, case, step=True), "processes").same


def expanded(directory: Path, schedule: str, ranks: int, microbatches: int) -> Path:
    """A set that expand-mpmd writes, and its step: layers in a loop, a loop over microbatches."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0] ** 2)

    def step(w: Any, x: Any) -> Any:
        def add(sums: Any, rows: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(w, rows)), None

        total, gradient = jax.lax.scan(add, (jnp.float32(0), jnp.zeros_like(w)), x)[0]
        return total, w - RATE * gradient

    shapes = ((2 * ranks, WIDTH, WIDTH), (microbatches, ROWS, WIDTH))
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    exported = jax.export.export(jax.jit(step), platforms=["cpu"])(*specs)
    directory.mkdir(exist_ok=True)
    (directory / "step.jax_export").write_bytes(exported.serialize())
    request = ExpansionRequest(schedule, ranks, load_hardware("h100"))
    made = expand_mpmd(artifact.from_exported(exported), request)
    write(directory, made.manifest, made.modules)
    return directory


@pytest.mark.soak
@pytest.mark.parametrize("how", ["sequential", "processes"])  # exact, and in floats
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        *(("gpipe", 5), ("1f1b", 5), ("interleaved-1f1b", 6)),
        *(("zb-h1", 5), ("zb-v", 6), ("dualpipe-v", 8)),
    ],
)
def test_what_expand_mpmd_writes_runs(
    schedule: str, microbatches: int, ranks: int, how: RunnerName, tmp_path: Path
) -> None:
    assert ran(expanded(tmp_path, schedule, ranks, microbatches), how).same


def test_what_ranks_did_is_what_the_schedule_says(tmp_path: Path) -> None:
    _, _, answer = played(written(tmp_path, CASES[0]))
    table = decode_manifest((tmp_path / NAME).read_text()).table
    for rank, row in zip(answer["ranks"], table.rows, strict=True):
        scheduled = [action for action in rank["actions"] if action[0].isdigit()]
        assert scheduled == [str(step) for step in row]
        assert rank["peak_bytes"] >= 2 * WIDTH * WIDTH * 4  # the weights alone


def test_equal_functions_are_compiled_once(tmp_path: Path) -> None:
    _, _, answer = played(written(tmp_path, ("gpipe", 4, 4, None, 1)))
    # Of the first rank, one in the middle and the last: prepare, forward, backward and finish_0,
    # of which the middle ones are also others'; finish_1; a constant for each microbatch.
    assert answer["functions"] <= 3 * 4 + 1 + 4


def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    written(tmp_path, SMALL, step=True)
    sums = re.compile(r"stablehlo\.add %a\d+, %h")
    edited(tmp_path, 1, lambda text: sums.sub("stablehlo.add %h, %h", text))
    values = ran(tmp_path).values
    assert values is not None
    assert [bool(output.differing) for output in values.outputs] == [True, False, True]


def test_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    written(tmp_path, ("gpipe", 2, 2, None, 1))
    edited(tmp_path, 1, first_two_channels_swapped)
    with pytest.raises(ToolError, match="wait for each other forever") as raised:
        played(tmp_path)
    notes = [note.message for note in raised.value.diagnostic.notes]
    assert "rank 0 waits in the send on channel 1 (0SEND_F0) for rank 1" in notes[0]
    assert "rank 1 waits in the receive on channel 2 (1RECV_F1) for rank 0" in notes[1]
    with pytest.raises(ToolError, match="wait for each other forever"):
        run_set(load(tmp_path), None, SetOptions(how="processes"))
    write_step(tmp_path / "step.jax_export", table_of(SMALL))
    with pytest.raises(ToolError, match="wait for each other forever"):
        ran(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("handle = 1,", "handle = 77,"), "has no channel 77"),
        (lambda text: text.replace("dense<[[0, 1]]>", "dense<[[1, 0]]>", 1), "has pairs"),
        (
            lambda text: text.replace("func.func public @main", "func.func public @other"),
            "no @main",
        ),
        (lambda text: text.replace("num_partitions = 2", "num_partitions = 4"), "for 4 devices"),
    ],
    ids=["channel", "pairs", "main", "partitions"],
)
def test_what_does_not_fit_the_manifest_is_refused(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    written(tmp_path, SMALL)
    edited(tmp_path, 0, change)
    with pytest.raises(ToolError, match=message):
        played(tmp_path)


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    found = write_set(tmp_path, table_of(SMALL))
    weights, rest = found.inputs[0], found.inputs[1:]
    for pieces, message in (
        (weights.pieces[1:], "does not list argument 0"),
        ((replace(weights.pieces[0], limit=2), weights.pieces[1]), "manifest lists it as"),
        ((replace(weights.pieces[0], limit=7), weights.pieces[1]), "rows 0 to 7 are outside"),
        ((*weights.pieces, replace(weights.pieces[0], number=9)), "has no argument 9"),
        ((*weights.pieces, replace(weights.pieces[0], rank=9)), "rank: 9 is not a whole number"),
    ):
        changed = replace(found, inputs=(replace(weights, pieces=pieces), *rest))
        (tmp_path / NAME).write_text(encode_manifest(changed))
        with pytest.raises(ToolError, match=message):
            load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r": error: not a directory of rank programs: "):
        load(tmp_path)
    write_set(tmp_path, table_of(SMALL))
    (tmp_path / "rank_1.mlir").unlink()
    with pytest.raises(ToolError, match=r"rank_1\.mlir: error: cannot read"):
        load(tmp_path)


def test_a_set_is_written_as_it_was_read(tmp_path: Path) -> None:
    write_set(tmp_path / "one", table_of(SMALL))
    loaded = load(tmp_path / "one")
    modules = [program.module for program in loaded.programs]
    write(tmp_path / "new" / "two", loaded.manifest, modules)
    again = load(tmp_path / "new" / "two")
    assert again.manifest == loaded.manifest
    for one, other in zip(loaded.programs, again.programs, strict=True):
        assert artifact.to_text(one.module) == artifact.to_text(other.module)


def test_another_step_is_refused(tmp_path: Path) -> None:
    written(tmp_path, SMALL)
    write_step(tmp_path / "step.jax_export", table_of(("gpipe", 3, 2, None, 1)))
    with pytest.raises(ToolError, match="is this the program that the set was made from"):
        ran(tmp_path)


def test_a_step_with_other_names_is_refused(tmp_path: Path) -> None:
    found = write_set(tmp_path, table_of(SMALL))
    renamed = replace(found.inputs[1], path="['batch']")
    changed = replace(found, inputs=(found.inputs[0], renamed))
    (tmp_path / NAME).write_text(encode_manifest(changed))
    write_step(tmp_path / "step.jax_export", table_of(SMALL))
    with pytest.raises(ToolError, match=r"input 1 is \[1\], but the manifest has \['batch'\]"):
        ran(tmp_path)


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, SMALL, step=True)
    words = ["run-mpmd", str(tmp_path), str(tmp_path / "step.jax_export")]
    assert command_line.main(words) == 0
    printed, warned = capsys.readouterr()
    assert not warned, "the set does not say what it was made of"
    lines = printed.splitlines()
    assert lines[0] == "identical in exact arithmetic: 3 outputs, 34 elements, 3 inputs"
    assert re.fullmatch(r"2 ranks, sequential, [\d.]+ s", lines[-1])
    assert command_line.main([*words, "--rtol", "1e-5", "--atol", "1e-6"]) == 0
    printed, _ = capsys.readouterr()
    assert printed.startswith("same: 3 outputs, 34 elements, within rtol=1e-05 atol=1e-06, 1 trial")
    assert re.search(r"^2 ranks, sequential, \d+ functions compiled, [\d.]+ s$", printed, re.M)
    step = artifact.load(tmp_path / "step.jax_export")
    found = decode_manifest((tmp_path / NAME).read_text())
    for digest, warning in ((digest_of(step), ""), ("5f", "is not the program that the set was")):
        (tmp_path / NAME).write_text(encode_manifest(replace(found, digest=digest)))
        assert command_line.main(words) == 0
        warned = capsys.readouterr().err
        assert (warning in warned) if warning else not warned
    words = ["run-mpmd", str(tmp_path), "--json", "--set", "1=0.5"]
    assert command_line.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [output["path"] for output in found["outputs"]] == ["[0]", "[1]", "[2]"]
    assert found["ranks"] == 2


def test_the_command_refuses_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["run-mpmd", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}: error: not a directory of rank programs: ")


def test_an_op_without_a_form_in_exact_arithmetic_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, SMALL, step=True)
    tanh = re.compile(r"stablehlo\.tanh %p : (\S+)")
    edited(tmp_path, 0, lambda text: tanh.sub(r"chlo.broadcast_add %p, %p : (\1, \1) -> \1", text))
    words = ["run-mpmd", str(tmp_path), str(tmp_path / "step.jax_export")]
    assert command_line.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    place = r"compared in floats: chlo\.broadcast_add at .*rank_0\.mlir:\d+:\d+, which has no form "
    assert re.match(place, lines[0])
    assert lines[1].startswith("differs: output 0")
    assert command_line.main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["values"]["kind"] == "floats"
    assert found["values"]["in_floats"].startswith("chlo.broadcast_add at ")


def test_a_step_that_is_too_large_for_this_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, SMALL, step=True)
    monkeypatch.setattr(set_outcome, "estimated_bytes", lambda _: 2**60)
    with pytest.raises(ToolError, match="export the step at smaller sizes") as raised:
        ran(tmp_path)
    assert raised.value.input_name == str(tmp_path / "step.jax_export")


def test_a_fixed_input_and_options_of_floats_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, SMALL, step=True)
    step = str(tmp_path / "step.jax_export")
    assert command_line.main(["run-mpmd", str(tmp_path), step, "--set", "1=0.5"]) == 0
    assert capsys.readouterr().out.startswith("identical in exact arithmetic: 3 outputs")
    assert (
        command_line.main(["run-mpmd", str(tmp_path), step, "--set", "0=-0.0", "--atol", "1"]) == 0
    )
    assert capsys.readouterr().out.startswith("same: 3 outputs, 34 elements, within ")
    assert command_line.main(["verify", step, str(tmp_path), "--specials"]) == 2
    assert (
        "--specials, --backend and --as-deployed do not apply to a set" in capsys.readouterr().err
    )
    assert command_line.main(["verify", step, str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "exact"

"""Sets in exact arithmetic: no exchange of operands, residuals, messages or gradients passes, even
one that the ranks agree about; correct sets are the same as their origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import exchange_mutations as exchanges
import jax
import pytest
from exact_sets import ComparedMutants
from mpmd_steps import Step
from proof_programs import step as small_step
from rank_mutations import KINDS, OUTSIDE, mutants
from soaking import first

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli import main as command_line
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.mpmd.expansion import ExpansionRequest, expand_mpmd
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import RankSet, load, write
from stablehlo_tools.mpmd.running.set_outcome import SetOptions, run_set

# A schedule, its ranks and chunks.
Case = tuple[str, int, int | None]
CASES: list[Case] = [
    ("1f1b", 2, None),
    ("zb-h1", 2, None),
    ("gpipe", 2, None),
    ("interleaved-1f1b", 2, 2),
    ("zb-v", 2, None),
    ("dualpipe", 2, None),
]
MICROBATCHES = 4
EVERYWHERE = {
    "operands-exchanged-everywhere": exchanges.operands_exchanged,
    "results-exchanged-everywhere": exchanges.results_exchanged,
    "arguments-exchanged": exchanges.arguments_exchanged,
}
IN_ONE_PLACE = {
    name: mutation
    for name, mutation in (KINDS | OUTSIDE).items()
    if "exchanged" in name or "swapped" in name or name == "operand-replaced"
}


@pytest.fixture(autouse=True)
def wide_integers() -> Iterator[None]:
    """Residues have 64 bits."""
    with jax.enable_x64(True):
        yield


def set_of(step: Artifact, case: Case, room: Path) -> RankSet:
    """The set that expand-mpmd writes of a step."""
    name, ranks, chunks = case
    made = expand_mpmd(step.copy(), ExpansionRequest(name, ranks, load_hardware("h100"), chunks))
    write(room, made.manifest, made.modules)
    return load(room)


def title(case: object) -> str | None:
    return f"{case[0]}-{case[1]}" if isinstance(case, tuple) else None


def exchanged_set(room: Path) -> RankSet:
    """A set in which both tensors of all activations of rank 0 are exchanged."""
    ranks = set_of(small_step(MICROBATCHES), CASES[0], room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "messages", exchanges.messages_exchanged(ranks.manifest))
        said, mutant = next(mutants(ranks, "messages"))
    assert said.startswith("rank 0: tensors 0 and 1 of every 0")
    write(room, mutant.manifest, [program.module for program in mutant.programs])
    return load(room)


def test_exchanged_messages_are_refuted_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = exchanged_set(tmp_path / "set")
    assert prove(ranks).is_proven
    step, name = str(tmp_path / "step.mlir"), str(tmp_path / "set")
    Path(step).write_text(artifact.to_text(small_step(MICROBATCHES).module))
    assert command_line.main(["check-mpmd", name]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "order, structure and memory are proven, but values were not compared; try:"
    )
    assert last.endswith(f"check-mpmd {name} --of STEP")
    for words in (
        ["check-mpmd", name, "--of", step],
        ["run-mpmd", name, step],
        ["verify", step, name],
    ):
        assert command_line.main(words) == 1
        assert "differs in exact arithmetic: output 0" in capsys.readouterr().out
    assert command_line.main(["check-mpmd", name, "--of", step, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["proven"]
    assert not found["values"]["same"]


@pytest.mark.parametrize("case", first(1, CASES), ids=title)
def test_exchanges_that_ranks_agree_on_are_noticed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = small_step(MICROBATCHES)
    compared = ComparedMutants(step, set_of(step, case, tmp_path), tmp_path, monkeypatch)
    assert compared.same(compared.ranks)
    messages = exchanges.messages_exchanged(compared.ranks.manifest)
    for name, mutation in {"messages-exchanged": messages, **EVERYWHERE}.items():
        missed, count = compared.unnoticed(name, mutation, 2)
        assert count
        assert not missed


@pytest.mark.soak
@pytest.mark.parametrize(
    ("step", "case"),
    [*(("small", case) for case in CASES), ("decoder", CASES[0]), ("decoder", CASES[4])],
    ids=lambda value: value if isinstance(value, str) else title(value),
)
def test_more_exchanges_are_noticed(
    step: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = small_step(MICROBATCHES)
    if step == "decoder":
        program = artifact.from_exported(Step(microbatches=MICROBATCHES).export())
    compared = ComparedMutants(program, set_of(program, case, tmp_path), tmp_path, monkeypatch)
    messages = exchanges.messages_exchanged(compared.ranks.manifest)
    for name, mutation in {"messages-exchanged": messages, **EVERYWHERE, **IN_ONE_PLACE}.items():
        assert not compared.unnoticed(name, mutation, 4 if name in IN_ONE_PLACE else 12)[0]


@pytest.mark.parametrize("case", first(1, CASES[1:]), ids=title)
def test_correct_sets_are_the_same_in_every_bit(case: Case, tmp_path: Path) -> None:
    for step in (small_step(MICROBATCHES), artifact.from_exported(Step(microbatches=4).export())):
        outcome = run_set(set_of(step, case, tmp_path), step, SetOptions())
        assert outcome.values is not None
        assert outcome.values.exact is not None
        assert outcome.same
        assert not outcome.values.vacuous

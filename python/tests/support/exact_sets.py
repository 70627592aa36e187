"""Mutants of a set against its origin in exact arithmetic, in this process: functions in common are
compiled once. Call it with 64-bit types enabled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from exchange_mutations import Mutation, is_neutral
from rank_mutations import KINDS, mutants

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.proof.proving import prove
from stablehlo_tools.mpmd.rank_set import RankSet, load
from stablehlo_tools.mpmd.running import player
from stablehlo_tools.mpmd.running.exact_process import SetComparison, SetProgram
from stablehlo_tools.mpmd.running.set_in_field import map_set, plan_set
from stablehlo_tools.verify.exact.host_functions import Host, register_host
from stablehlo_tools.verify.exact.programs import FieldRequest

TRIALS = 3


class ComparedMutants:
    """A set and its origin, whose outputs are known."""

    def __init__(
        self, step: Artifact, ranks: RankSet, room: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = player.Executables(ranks.manifest.devices, ())
        monkeypatch.setattr(player, "Executables", lambda *_: machine)
        self.ranks, self.room = ranks, room
        self.plan = plan_set(ranks, step)
        self._write(self.plan.files)
        request = FieldRequest(self.plan, {}, seed=0, trials=TRIALS, together=False)
        self.comparison = SetComparison(room, request)
        self.inputs = [self.comparison.make_inputs(trial, None) for trial in range(TRIALS)]
        self.outputs = [
            self.comparison.made("before", arrays, trial)
            for trial, arrays in enumerate(self.inputs)
        ]

    def same(self, ranks: RankSet) -> bool:
        """Whether a set gives what the origin gives, for all inputs. Raises ToolError."""
        code, functions, _ = map_set(ranks, self.plan.field)
        self._write(code)
        program = SetProgram(load(self.room), self.plan.runs["after"].run.taken["before"])
        with register_host(Host(self.plan.field, functions)):
            for inputs, expected in zip(self.inputs, self.outputs, strict=True):
                found = program(inputs)
                if any(o.differing for o in self.comparison.compare_outputs(expected, found)):
                    return False
        return True

    def unnoticed(self, name: str, mutation: Mutation, most: int) -> tuple[list[str], int]:
        """The mutants that are proven and have the origin's values, and how many there are; those
        that exchange two terms of a sum are right."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(KINDS, name, mutation)
            made = list(mutants(self.ranks, name, most))
        return [said for said, mutant in made if self._passes(said, mutant)], len(made)

    def _passes(self, said: str, mutant: RankSet) -> bool:
        try:
            is_same = self.same(mutant)
        except ToolError:
            return False
        return is_same and not is_neutral(self.ranks, said) and prove(mutant).is_proven

    def _write(self, code: Mapping[str, bytes]) -> None:
        for name, content in code.items():
            (self.room / name).write_bytes(content)

"""The child process that compares a set with its origin on residues (`set_in_field`).

python -m stablehlo_tools.mpmd.running.exact_process DIRECTORY
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stablehlo_tools import bindings
from stablehlo_tools.mpmd.rank_set import RankSet, load
from stablehlo_tools.mpmd.running.player import SetPlayer
from stablehlo_tools.mpmd.running.rank_child import cut_pieces, join_pieces, serve
from stablehlo_tools.verify.comparison import whole
from stablehlo_tools.verify.exact.host_functions import Host
from stablehlo_tools.verify.exact.process import FieldComparison
from stablehlo_tools.verify.exact.programs import FieldAnswer, FieldRequest
from stablehlo_tools.verify.execution import ExecutableProgram, Instances, Shards


class SetComparison(FieldComparison):
    """Compares a program with the set in the same directory, which is `after`."""

    def compile_program(self, name: str) -> tuple[ExecutableProgram, Host]:
        """Returns a program, or the set, that is ready to run, and its host."""
        if name != "after":
            return super().compile_program(name)
        described = self.plan.runs[name]
        host = Host(self.plan.field, described.host_functions)
        return SetProgram(load(self.directory), described.run.taken["before"]), host


class SetProgram:
    """A set that is called like its origin, with whole arrays. It reads the inputs `taken`."""

    def __init__(self, ranks: RankSet, taken: Sequence[int]) -> None:
        self.taken = taken
        self.manifest = ranks.manifest
        self.player = SetPlayer(ranks, bindings.SIMPLIFYING_PASSES)

    def __call__(self, instances: Instances) -> Shards:
        """Returns the outputs, each as one shard, for the inputs of the only instance."""
        [inputs] = instances
        pieces = cut_pieces(self.manifest, [inputs[number] for number in self.taken])
        results = self.player.run(pieces)
        return [[whole(array)] for array in join_pieces(self.manifest, results)]


def answer(directory: Path, request: FieldRequest) -> FieldAnswer:
    """Compares the programs of a request on its inputs."""
    return SetComparison(directory, request).run()


if __name__ == "__main__":
    serve(answer)

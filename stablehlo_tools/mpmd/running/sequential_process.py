"""The child process that plays a set: `python -m stablehlo_tools.mpmd.running.sequential_process`.

A process of its own because the number of virtual devices is fixed when JAX starts.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from stablehlo_tools.mpmd.rank_set import load
from stablehlo_tools.mpmd.running.child import (
    inputs_of,
    outputs_of,
    read_arrays,
    serve,
    write_arrays,
)
from stablehlo_tools.mpmd.running.localisation import localised
from stablehlo_tools.mpmd.running.player import Executables, Player, play


def answer(directory: Path, request: dict[str, str]) -> dict[str, object]:
    """Plays the set that the request names on the inputs that lie in `directory`."""
    ranks = load(request["set"])
    machine = Executables(ranks.manifest.devices)
    programs = [localised(ranks, rank) for rank in range(ranks.ranks)]
    players = [
        Player(
            ranks.manifest,
            rank,
            program,
            machine,
            program.divided(read_arrays(directory / inputs_of(rank))),
        )
        for rank, program in enumerate(programs)
    ]
    machine.compile_ahead([module for player in players for module in player.functions()])
    play(ranks.manifest, players)
    for rank, (player, program) in enumerate(zip(players, programs, strict=True)):
        results = program.joined(player.results)
        write_arrays(directory / outputs_of(rank), results, program.types[1])
    return {"ranks": [asdict(player.played) for player in players], "functions": len(machine)}


if __name__ == "__main__":
    serve(answer)

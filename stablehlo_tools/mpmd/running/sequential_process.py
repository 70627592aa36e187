"""The child process that runs a set: `python -m stablehlo_tools.mpmd.running.sequential_process`.

It is a separate process because the number of virtual devices is fixed when JAX starts.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from stablehlo_tools.mpmd.rank_set import load
from stablehlo_tools.mpmd.running.player import SetPlayer
from stablehlo_tools.mpmd.running.rank_child import (
    inputs_of,
    outputs_of,
    read_arrays,
    serve,
    write_arrays,
)


def answer(directory: Path, request: dict[str, str]) -> dict[str, object]:
    """Runs the set that the request names on the inputs in `directory`."""
    ranks = load(request["set"])
    player = SetPlayer(ranks)
    results = player.run([read_arrays(directory / inputs_of(rank)) for rank in range(ranks.ranks)])
    for rank, (arrays, program) in enumerate(zip(results, player.programs, strict=True)):
        write_arrays(directory / outputs_of(rank), arrays, program.types[1])
    played = [asdict(each.played) for each in player.players]
    return {"ranks": played, "functions": len(player.machine)}


if __name__ == "__main__":
    serve(answer)

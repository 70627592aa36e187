"""A process of a job on one machine: joins the others, then runs the user's script.

python -m stablehlo_tools.mpmd.runtime.launched RANK RANKS ADDRESS DEVICES SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import jax

from stablehlo_tools.processes.activity import end_with_parent


def main(rank: int, ranks: int, address: str, devices: int, script: str) -> None:
    """Joins the job, then runs the script as the main program.

    A script that also runs alone checks `jax.distributed.is_initialized()` before it initializes.
    """
    end_with_parent(os.getppid())
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        ranks,
        rank,
        local_device_ids=range(rank * devices, (rank + 1) * devices),
        coordinator_bind_address=address,
    )
    search_beside(script)
    runpy.run_path(script, run_name="__main__")


def search_beside(script: str) -> None:
    """Finds modules as `python SCRIPT` does: in the script's directory first, then as before.

    No entry is removed from the path. This process runs with `-P`, so the first entry is the
    directory of the package. If the package is installed, that is the site-packages with all other
    packages.
    """
    sys.path.insert(0, str(Path(script).resolve().parent))


if __name__ == "__main__":
    number, count, place, size, path, *words = sys.argv[1:]
    sys.argv = [path, *words]
    main(int(number), int(count), place, int(size), path)

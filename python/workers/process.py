"""One worker: compiles its program, waits for the others to be as far, and runs it.

    python -m workers.process DIRECTORY PORT

The parent holds the other end of standard input: a line means that all have compiled, and its end
that nobody waits for this worker any more.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path

import jax

from workers.files import COMPILED, FAILED, INPUTS, OUTPUTS, read_arrays, read_request, write_arrays
from workers.programs import load_program


def main(directory: Path, port: int) -> None:
    """Leaves the outputs in `directory`, and raises whatever JAX or XLA raises."""
    go = threading.Event()
    threading.Thread(target=_listen, args=(go,), daemon=True).start()
    request = read_request(directory)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, request.workers, request.rank, coordinator_bind_address=address
    )
    inputs = read_arrays(directory / INPUTS)
    run = load_program(Path(request.program), inputs)
    (directory / COMPILED).touch()
    go.wait()
    write_arrays(directory / OUTPUTS, run())


def _listen(go: threading.Event) -> None:
    """Ends the process at once when the parent is gone, whatever hangs."""
    for _ in sys.stdin:
        go.set()
    os._exit(1)


def _stay() -> None:
    """Leaves the end to the parent: one worker's goodbye makes JAX end the others, too."""
    threading.Event().wait()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        main(place, int(sys.argv[2]))
    except Exception:  # whatever JAX or XLA has to say
        traceback.print_exc()
        (place / FAILED).touch()
    _stay()

"""Says what a process was doing that ended without saying so: killed, or aborted by jax.

    python last_words.py RANK [HOST:PORT]

A line on standard input says what rank RANK is doing; an empty one that it ends by itself. Where
the input ends without that, a line on standard error says what the last was, and whether what
listened at HOST:PORT, the coordinator of the job, is gone: then jax aborts all processes.
Runs without the package, for it has to start at once.
"""

import socket
import sys
import time


def main(rank: str, coordinator: str = "") -> None:
    """Follows the input to its end."""
    doing = "starting"
    for line in sys.stdin:
        doing = line.strip()
        if not doing:
            return
    time.sleep(0.5)  # whatever ended it may still be ending
    where = doing if doing.startswith("behind ") else f"in {doing}"
    why = f"error: rank {rank} was killed {where}"
    if coordinator:
        host, _, port = coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5).close()
        except OSError:
            why = (
                f"error: rank 0, which coordinates the job, is gone; jax ended rank {rank} for it, "
                f"{where}"
            )
    print(why, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

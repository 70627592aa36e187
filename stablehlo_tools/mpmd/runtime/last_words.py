"""Reports the last activity of a process that was killed, or that jax aborted.

    python last_words.py RANK [HOST:PORT]

Each line on standard input is the current activity of rank RANK. An empty line means that the rank
ends by itself. If the input ends without an empty line, standard error gets the last activity. If
the coordinator at HOST:PORT no longer listens, the message says so, because jax then aborts all
processes. The script does not import the package, so that it starts at once.
"""

import socket
import sys
import time


def main(rank: str, coordinator: str = "") -> None:
    """Reads the input to its end."""
    doing = "starting"
    for line in sys.stdin:
        doing = line.strip()
        if not doing:
            return
    time.sleep(0.5)  # the coordinator may still be about to end
    where = doing if doing.startswith("after ") else f"in {doing}"
    why = f"error: rank {rank} was killed {where}"
    if coordinator:
        host, _, port = coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5).close()
        except OSError:
            why = (
                f"error: rank 0, which coordinates the job, ended; jax ended rank {rank} for that "
                f"reason, {where}"
            )
    print(why, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

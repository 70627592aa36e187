"""Starts the processes of a job on this machine, one for each rank, and forwards their output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.transfers import SHARDED_AUTOTUNING
from stablehlo_tools.processes.child import end_group, free_port, start

_MODULE = "stablehlo_tools.mpmd.runtime.launched"
_POLL = 0.05


def launch(ranks: RankSet, script: str, words: Sequence[str], grace: float) -> int:
    """Runs a script in a process for each rank. Returns 0 if all succeed, otherwise 1.

    Each line of output is prefixed with the number of its rank. After a rank has failed, the others
    have `grace` seconds to end. No process outlives the call.
    """
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as running:
        processes: list[subprocess.Popen[bytes]] = []
        readers: list[threading.Thread] = []
        for rank in range(ranks.ranks):
            process = start(
                _MODULE,
                *map(str, (rank, ranks.ranks, address, ranks.manifest.devices, script, *words)),
                environment=_variables(ranks.manifest.devices),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            running.callback(end_group, process)
            processes.append(process)
            for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert stream is not None
                reader = threading.Thread(target=_pass_on, args=(rank, stream, out), daemon=True)
                reader.start()
                readers.append(reader)
        code = _wait(processes, grace)
    for reader in readers:
        reader.join(1.0)
    return code


def _wait(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> int:
    """Waits until all have ended, or until `grace` seconds after one has failed. Returns 0 or 1."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL)
        codes = [process.poll() for process in processes]
        if failed is None:
            failed = next(((r, code) for r, code in enumerate(codes) if code), None)
            deadline = deadline if failed is None else time.monotonic() + grace
    if failed is None:
        failed = next(((r, p.returncode) for r, p in enumerate(processes) if p.returncode), None)
    if failed is None:
        return 0
    rank, code = failed
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    print(f"error: rank {rank} ended with {how}", file=sys.stderr, flush=True)
    return 1


def _variables(devices: int) -> dict[str, str]:
    """Returns the environment of the processes, without proxies: ranks meet at a local address."""
    kept = {n: text for n, text in os.environ.items() if not n.lower().endswith("_proxy")}
    flags = [
        kept.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
        f"--{SHARDED_AUTOTUNING}=false",
    ]
    return {**kept, "XLA_FLAGS": " ".join(filter(None, flags)), "PYTHONUNBUFFERED": "1"}


def _pass_on(rank: int, stream: IO[bytes], out: IO[str]) -> None:
    for line in stream:
        text = line.decode(errors="replace").rstrip("\n")
        if not text.startswith("[Gloo]"):
            print(f"{rank}: {text}", file=out, flush=True)

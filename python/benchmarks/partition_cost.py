"""What `partition` costs on a training step of full size, and how it grows with the layers.

    python python/benchmarks/partition_cost.py [--layers 8 16 32 64] [--model decoder-2d-step]

The program is the zoo's at the size of Llama 3 8B: unrolled, AdamW, for 8 x 8 devices; shapes only.
Each row is one run of the whole command, start-up, reading and writing included, in a process of
its own; the last column is its CPU time over that of the row above. Prints a table; exit code 1
when the published number of layers takes longer, or more memory, than promised.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import ZOO

from stablehlo_tools.artifacts import artifact

PIPELINES = ("partition", "partition,create-reduce-scatter,thread-tokens")
LAYERS = (8, 16, 32, 64)
PUBLISHED = 32  # layers of Llama 3 8B
MOST_SECONDS, MOST_BYTES = 60.0, 8 * 2**30
OPT = Path(sys.executable).with_name("stablehlo-tools")
ROW = "{:>6}  {:48}  {:>9}  {:>9}  {:>9}  {:>10}  {:>10}  {:>9}"


@dataclass(frozen=True)
class Cost:
    """Of one command: seconds of wall clock and of all cores, and the most bytes that one of its
    processes held; Shardy's passes run in a process of their own."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int

    @property
    def kept(self) -> bool:
        """Whether it is within what is promised."""
        return self.seconds <= MOST_SECONDS and self.peak_bytes <= MOST_BYTES


def main() -> int:
    """Runs the benchmark; 1 when a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--model", choices=ZOO, default="decoder-2d-step")
    arguments = parser.parse_args()
    print(f"{arguments.model} at full size")
    names = ("layers", "pipeline", "input MB", "export s", "seconds", "CPU s", "peak MiB", "growth")
    print(ROW.format(*names), flush=True)
    previous: dict[str, Cost] = {}
    kept = True
    with tempfile.TemporaryDirectory() as directory:
        for layers in arguments.layers:
            path = Path(directory) / f"step{layers}.mlirbc"
            exporting = write(arguments.model, layers, path)
            for pipeline in PIPELINES:
                cost = run(path, pipeline)
                last = previous.get(pipeline)
                growth = cost.cpu_seconds / last.cpu_seconds if last else 0.0
                previous[pipeline] = cost
                kept &= cost.kept or layers != PUBLISHED
                row = (
                    layers,
                    pipeline,
                    f"{path.stat().st_size / 1e6:.1f}",
                    f"{exporting:.1f}",
                    f"{cost.seconds:.1f}",
                    f"{cost.cpu_seconds:.1f}",
                    f"{cost.peak_bytes / 2**20:,.0f}",
                    f"x {growth:.2f}" if growth else "",
                )
                print(ROW.format(*row), flush=True)
    print(
        f"promised for {PUBLISHED} layers: {MOST_SECONDS:g} s and {MOST_BYTES / 2**30:g} GiB: "
        + ("kept" if kept else "broken")
    )
    return int(not kept)


def write(model: str, layers: int, path: Path) -> float:
    """Exports the step with so many layers to a file; the seconds that it took."""
    start = time.perf_counter()
    exported = ZOO[model].full(layers=layers)
    artifact.save(artifact.from_exported(exported), path)
    return time.perf_counter() - start


def run(path: Path, pipeline: str) -> Cost:
    """Runs `opt` on a file once. Raises SystemExit where it fails."""
    command = [OPT, "opt", path, "-p", pipeline, "-o", path.with_suffix(".out.mlirbc")]
    start = time.perf_counter()
    child = os.posix_spawn(command[0], [str(word) for word in command], os.environ)
    _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - start
    if status != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    sys.exit(main())

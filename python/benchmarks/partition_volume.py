"""How many bytes each device sends: XLA's partitioner against `partition,create-reduce-scatter`.

    python python/benchmarks/partition_volume.py [MODEL ...] [--target cpu tpu] [--markdown]

Both programs, the export as it is and the partitioned one, go through the same compiler, and the
bytes are read from the two schedules (targets/volume.py). A ratio above 1 says that XLA's own
partitioner moves less. No device is needed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS, ZOO

from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.volume import volume

PIPELINE = "partition,create-reduce-scatter"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
COLUMNS = ("model", "target", "partitioner", *KINDS, "total", "ratio")


def main() -> None:
    """Prints a table: two rows for each model and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all of the zoo by default")
    targets = ("cpu", "gpu", "tpu")
    parser.add_argument("--target", nargs="+", choices=targets, default=["cpu", "tpu"])
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    form = "| " + " | ".join(["{}"] * len(COLUMNS)) + " |" if arguments.markdown else _PLAIN
    print(form.format(*COLUMNS))
    if arguments.markdown:
        print(form.format(*["---", "---", "---", *["---:"] * (len(COLUMNS) - 3)]))
    for name in arguments.models or ZOO:
        for target in arguments.target:
            for row in rows(name, target):
                print(form.format(*row), flush=True)


_PLAIN = "{:26s} {:4s} {:8s}" + " {:>14s}" * len(KINDS) + " {:>12s} {:>6s}"


def rows(name: str, target: str) -> list[list[str]]:
    """What XLA moves and what the pipeline moves, in bytes per device and run."""
    model = MODELS[name]
    exported = model.build()
    assert not isinstance(exported, str)
    before = artifact.from_exported(exported, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = transforming.transform(before, PIPELINE)
    xla, ours = (_volume(program, target, model.devices) for program in (before, after))
    ratio = f"{ours.total() / xla.total():.3f}" if xla.total() else "-"
    return [
        [name, target, "XLA", *(f"{xla[kind]:,}" for kind in KINDS), f"{xla.total():,}", ""],
        ["", "", "Shardy", *(f"{ours[kind]:,}" for kind in KINDS), f"{ours.total():,}", ratio],
    ]


def _volume(program: Artifact, target: str, devices: int) -> Counter[str]:
    return volume(compile_artifact(program, target).schedule, devices)


if __name__ == "__main__":
    main()

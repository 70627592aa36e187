"""From an exported training step to a faster one, with the proof and the reason.

    python demo.py [--candidates N] [--keep DIR]

Exports four layers of a decoder with the widths of Llama 3 8B (bfloat16, FSDP over 8 devices by
annotations alone, forward, backward and AdamW), and has `optimize` find what XLA:GPU schedules
fastest for H100s. Takes a minute or two on two cores, and no accelerator; it ends after a number
of candidates, not with a clock, so that a busy machine takes longer and finds the same. Exit code 0
when what was found is faster than the export and nothing about it was refuted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.cli.progress import ProgressLine
from stablehlo_tools.optimization.optimizer import OptimizationRequest, optimize
from stablehlo_tools.optimization.optimum_report import page, to_text
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.topologies import missing_package

MODEL = "decoder-fsdp-step"
WIDTHS = {
    "layers": 4,
    "d_model": 4096,
    "heads": 32,
    "key_value_heads": 8,
    "head_size": 128,
    "d_feed_forward": 14336,
    "vocabulary": 32000,
    "batch": 16,
    "sequence": 2048,
    "dtype": "bfloat16",
    "optimizer": "adamw",
    "scan_layers": True,
    "remat": True,
    "donate": True,
    "platforms": ("cuda",),
}
CANDIDATES = 3  # compiled beside the export; more find more


def main() -> int:
    """Runs the demo; 1 when something is missing or not as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, default=CANDIDATES, metavar="N")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the files there")
    arguments = parser.parse_args()
    package = missing_package(Target.GPU)
    if package is not None:
        print(
            f"the demo needs XLA:GPU's compiler, and {package} is not installed: run `make setup`, "
            "or pip install '.[aot]'",
            file=sys.stderr,
        )
        return 1
    try:
        if arguments.keep is None:
            with tempfile.TemporaryDirectory() as directory:
                return run(Path(directory), arguments.candidates, kept=False)
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return run(arguments.keep, arguments.candidates, kept=True)
    except stablehlo_tools.ToolError as error:
        print(error, file=sys.stderr)
        return 1


def run(directory: Path, count: int, *, kept: bool) -> int:
    """Exports, optimizes and draws, with the files in `directory`."""
    began = time.perf_counter()
    step, fast, why = (
        directory / name for name in ("step.jax_export", "fast.jax_export", "why.html")
    )
    exported = MODELS[MODEL].build(**WIDTHS)
    assert not isinstance(exported, str), "this model is an artifact of jax.export"
    step.write_bytes(exported.serialize())
    print(
        f"exported {step.name}: {WIDTHS['layers']} layers of a decoder, forward, backward and "
        f"AdamW, {exported.nr_devices} devices\n"
    )
    print(
        f"$ stablehlo-tools optimize {step.name} --target gpu --candidates {count} "
        f"--no-option-trials -o {fast.name} --report {why.name}"
    )
    request = OptimizationRequest("gpu", candidates=count, cache=False, try_options=False)
    with ProgressLine("optimize") as line:
        optimum = optimize(stablehlo_tools.load(step), request, lambda at: line.show(at.doing))
    stablehlo_tools.save(optimum.artifact, fast)
    why.write_text(page(optimum, version("stablehlo-tools")))
    print(to_text(optimum))
    files = f"{step}, {fast}, {why}" if kept else "--keep DIR keeps the program and the page."
    print(f"\n{time.perf_counter() - began:.0f} s. {files}")
    return 0 if optimum.after.total_ns < optimum.before.total_ns and optimum.proof.holds else 1


if __name__ == "__main__":
    sys.exit(main())

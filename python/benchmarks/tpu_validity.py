"""How the model's kernel times compare with what XLA:TPU itself expects, model by model.

    python python/benchmarks/tpu_validity.py [NAME ...] [--markdown]

XLA:TPU writes `estimated_cycles` beside its kernels. Each program, some layers of a model of the
zoo at real widths, is compiled for 8 TPU v5e, and `kernel_ns` of every kernel that XLA expects to
take more than 10 us is compared with cycles at 1.5 GHz. One scale, the median over the programs
that the model was fitted to, is allowed; the others were compiled after the fit. No device is
needed; all programs take some ten minutes.

    rho         Spearman's rank correlation
    median      of XLA's time over the model's, scaled
    fold        the median of how many times too long or too short the model is
    p10, p90    of XLA's time over the model's, scaled
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import ZOO

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.cost.kernels import kernel_ns
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.module import parse_module
from stablehlo_tools.targets.hlo.work import work

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')  # of XLA:TPU
CYCLES_PER_NS = 1.5  # 197 TFLOP/s are 4 units of 128 x 128 multiply-adds at 1.5 GHz
LEAST_NS = 10_000.0
SCALE = 1.15  # of the fitted programs


@dataclass(frozen=True)
class Program:
    """A model of the zoo at a size; whether the model of the times was fitted to it."""

    model: str
    fitted: bool
    options: dict[str, Any]

    def text(self) -> str:
        """The schedule that XLA:TPU makes of it."""
        exported = ZOO[self.model].full(**self.options)
        return compile_artifact(artifact.from_exported(exported, self.model), "tpu").text


def _fitted(model: str, /, **options: Any) -> Program:
    return Program(model, True, options)


def _held_out(model: str, /, **options: Any) -> Program:
    return Program(model, False, options)


PROGRAMS = {
    "decoder-forward": _fitted("decoder-fsdp-forward", layers=1, fsdp=8, batch=8, sequence=2048),
    "decoder-step": _fitted("decoder-2d-step", layers=1, fsdp=4, model=2, batch=8, sequence=2048),
    "decoder-scan-step": _fitted(
        "decoder-2d-scan-step", layers=2, fsdp=4, model=2, batch=8, sequence=2048
    ),
    "moe-forward": _fitted("moe-forward", layers=1, data=2, expert=4, batch=16, sequence=1024),
    "moe-step": _fitted("moe-step", layers=1, data=2, expert=4, batch=16, sequence=1024),
    "vit-step": _fitted("vit-step", layers=1, data=4, model=2, batch=256),
    "convnet-forward": _fitted("convnet-forward", data=8, batch=256),
    "convnet-step": _fitted("convnet-step", blocks=(1, 1, 1, 1), data=8, batch=512),
    "convnet-channels-step": _fitted(
        "convnet-channels-step", blocks=(1, 1, 1, 1), data=4, model=2, batch=256
    ),
    "encoder-decoder-step": _fitted("encoder-decoder-step", layers=1, data=4, model=2, batch=64),
    "mamba-forward": _fitted("mamba-forward", layers=1, data=4, model=2, batch=16, sequence=1024),
    "mamba-scan-step": _fitted(
        "mamba-scan-step", layers=1, data=4, model=2, batch=16, sequence=1024
    ),
    "mamba-associative-step": _fitted(
        "mamba-associative-step", layers=1, data=4, model=2, batch=8, sequence=256
    ),
    "nnx-llama-step": _fitted("nnx-llama-step", layers=1, fsdp=4, model=2, batch=8, sequence=1024),
    "decoder-tp-step": _held_out(
        "decoder-tp-step", layers=1, fsdp=1, model=8, batch=4, sequence=1024
    ),
    "moe-shard-map-step": _held_out(
        "moe-shard-map-step", layers=1, data=2, expert=4, batch=16, sequence=512
    ),
    "vit-forward": _held_out("vit-forward", layers=2, data=8, model=1, batch=256),
    "encoder-decoder-forward": _held_out(
        "encoder-decoder-forward", layers=1, data=8, model=1, batch=64
    ),
    "nnx-llama-forward": _held_out(
        "nnx-llama-forward", layers=1, fsdp=8, model=1, batch=8, sequence=2048
    ),
    "mamba-data-forward": _held_out(
        "mamba-forward", layers=2, data=8, model=1, batch=16, sequence=512
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Times of the same kernels in ns: XLA's and the model's."""

    expected: Sequence[float]
    modelled: Sequence[float]

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison([*self.expected, *other.expected], [*self.modelled, *other.modelled])

    @property
    def ratios(self) -> np.ndarray:
        """XLA's times over the model's."""
        return np.array(self.expected) / np.array(self.modelled)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, ties by their mean rank."""
        return float(np.corrcoef(_ranks(self.expected), _ranks(self.modelled))[0, 1])

    def fold(self, scale: float) -> float:
        """The median of how many times too long or too short the model is."""
        return float(np.exp(np.median(np.abs(np.log(self.ratios / scale)))))


def compare(text: str) -> Comparison:
    """The kernels of a schedule that XLA:TPU expects to take more than 10 us."""
    hardware = load_hardware("tpu-v5e")
    module = parse_module(text)
    pairs = [
        (
            int(cycles[1]) / CYCLES_PER_NS,
            kernel_ns(work(instruction, computation, module), hardware),
        )
        for computation in module.computations.values()
        for instruction in computation.instructions
        if (cycles := CYCLES.search(instruction.line)) and int(cycles[1]) / CYCLES_PER_NS > LEAST_NS
    ]
    return Comparison([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values)
    ordered = np.sort(array)
    below = np.searchsorted(ordered, array, "left")
    return (below + np.searchsorted(ordered, array, "right") - 1) / 2


COLUMNS = ("program", "family", "", "ops", "rho", "median", "fold", "p10", "p90")


def row(name: str, family: str, fitted: str, found: Comparison) -> list[str]:
    """The figures of a comparison as the table shows them."""
    scaled = found.ratios / SCALE
    p10, median, p90 = np.quantile(scaled, [0.1, 0.5, 0.9])
    figures = (found.rank_correlation, median, found.fold(SCALE), p10, p90)
    return [name, family, fitted, str(len(scaled)), *(f"{figure:.2f}" for figure in figures)]


def main() -> None:
    """Prints a table: a row for each program, for each family, and in total."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    form = "| " + " | ".join(["{}"] * len(COLUMNS)) + " |" if arguments.markdown else _PLAIN
    print(form.format(*COLUMNS))
    if arguments.markdown:
        print(form.format(*["---"] * 3, *["---:"] * (len(COLUMNS) - 3)))
    empty = Comparison([], [])
    totals: dict[tuple[str, str, str], Comparison] = {}
    for name in arguments.names or PROGRAMS:
        program = PROGRAMS[name]
        found = compare(program.text())
        family, fitted = ZOO[program.model].family, "fitted" if program.fitted else "held out"
        print(form.format(*row(name, family, fitted, found)), flush=True)
        for key in (("family", family, ""), ("total", "", fitted), ("total", "", "all")):
            totals[key] = totals.get(key, empty) + found
    for key, found in sorted(totals.items()):
        print(form.format(*row(*key, found)))
    scale = np.median(totals["total", "", "all"].ratios)
    print(f"scale of these programs: {scale:.3f} (used: {SCALE})")


_PLAIN = "{:24s} {:16s} {:8s}" + " {:>6s}" * (len(COLUMNS) - 3)


if __name__ == "__main__":
    main()

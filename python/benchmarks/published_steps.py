"""Predicted times of training steps against measurements that others published.

    python python/benchmarks/published_steps.py [--json] [NAME ...]

NAME: a row, or the beginning of several; without one, all. No accelerator is needed: each program
(`models.published`) is compiled ahead of time for the machine that was measured.

    predicted, measured   seconds of a step; a ratio if percentages were published
    contended             with --json: the prediction if collectives slow kernels down
    error                 predicted / measured - 1
    source                the address of the measurement

XLA:TPU refuses programs that exceed the memory. Values that a recipe offloads to the host stay on
the device here, and their transfers are assumed to be hidden. So each program for TPUs is compiled
at two small depths. A further layer adds the same time, which gives that of all layers.

Measured rates in TFLOP/s count the masked half of causal attention, as MaxText did before PR 1988.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.published import PublishedModel, PublishedStep, export_published_step

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report.document import ProgramReport
from stablehlo_tools.report.exposure import program_report
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.compiler_options import CompilerOptions
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

_TIMEOUT = 600.0  # seconds of a compilation
# Layers of the programs that are compiled for TPUs; the second pair if the first needs too much.
_DEPTHS = ((4, 8), (2, 4))
_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/trillium"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main"
_TIERS = f"{_MAXTEXT}/docs/reference/models/tiering.md"
_NVIDIA = "https://github.com/NVIDIA/dgxc-benchmarking/blob"
_MARIN = "https://github.com/marin-community/marin/issues/8054"

LLAMA2_7B = PublishedModel(32, 4096, 32, 32, 11008, 32000)
LLAMA2_70B = PublishedModel(80, 8192, 64, 8, 28672, 32000)
LLAMA3_8B = PublishedModel(32, 4096, 32, 8, 14336, 128256)
LLAMA3_70B = replace(LLAMA2_70B, vocabulary=128256)
MISTRAL_7B = replace(LLAMA3_8B, vocabulary=32000)
MIXTRAL_8X7B = replace(MISTRAL_7B, experts=8)
# MaxText's default model at its `global_parameter_scale`.
SCALE_16 = PublishedModel(32, 4096, 64, 64, 28672, 32000)
SCALE_32 = PublishedModel(32, 8192, 64, 64, 28672, 32000)
SCALE_64 = PublishedModel(64, 8192, 64, 64, 28672, 32000)
SCALE_128 = PublishedModel(64, 8192, 128, 128, 57344, 32000)

# The values that MaxText's policies of recomputation keep.
_QKV = ("query_proj", "key_proj", "value_proj")
_EXCEPT_MLPWI = (*_QKV, "out_proj", "mlpwo")
_MINIMAL = (*_EXCEPT_MLPWI, "mlpwi_0", "mlpwi_1")
_MINIMAL_FLASH = (*_MINIMAL, "context")
_OFFLOADED = ("decoder_layer_input", *_QKV)


def _gpu_options(gathered: int, scattered: int) -> dict[str, Any]:
    """Returns NVIDIA's flags for MaxText that today's XLA:GPU has; thresholds in bytes."""
    return {
        "xla_gpu_all_reduce_combine_threshold_bytes": gathered,
        "xla_gpu_all_gather_combine_threshold_bytes": gathered,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": scattered,
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_disable_hlo_passes": "rematerialization",
    }


_DGXC = _gpu_options(2 << 30, 32 << 20)
_TOOLBOX = _gpu_options(1 << 30, 128 << 20)
_A3 = _gpu_options(128 << 20, 64 << 20)


@dataclass(frozen=True)
class PublishedRow:
    """A measurement, with the step that is compared or the reason `why` none is.

    `measured` is in `unit`: seconds of a step, or tokens/s or TFLOP/s of a device.
    """

    name: str
    hardware: str
    devices: int
    measured: float
    unit: str  # s, tokens/s, TFLOP/s, or ratio
    source: str
    step: PublishedStep | None = None
    why: str = ""

    @property
    def measured_seconds(self) -> float:
        """The measured seconds of a step; a ratio if the measurement is one."""
        if self.unit in ("s", "ratio") or self.step is None:
            return self.measured
        tokens = self.step.tokens / self.step.devices
        if self.unit == "tokens/s":
            return tokens / self.measured
        step = self.step
        flops = step.model.training_flops(1, step.sequence, is_causal=False) * tokens
        return flops / (self.measured * 1e12)


def _h100(
    name: str,
    model: PublishedModel,
    axes: Mapping[str, int],
    sequence: int,
    saved: tuple[str, ...],
    measured: float,
    source: str,
    *,
    options: Mapping[str, Any] = _DGXC,
    batch: float = 2,
    unit: str = "s",
) -> PublishedRow:
    step = PublishedStep(model, axes, batch, sequence, "cuda", saved=saved, options=options)
    return PublishedRow(name, "h100", step.devices, measured, unit, source, step)


_LLAMA2_H100 = f"{_NVIDIA}/143b90dd91f9be958fed4773ae95d941a3356a82/maxtext/README_70b.md"
_LLAMA3_H100 = f"{_NVIDIA}/8f5cbb3799ea8cc031ed2c2cee1cbdbc15b240ad/maxtext/README_70b.md"
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": 98304}
_OVERLAP = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
_LAYOUT = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
}
# Today's libtpu rejects the recipes' `fuse_all_gather` for chips other than v5e.
_FUSION = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
_RECIPE: dict[str, Any] = _VMEM | _LAYOUT | _OVERLAP | _FUSION
_FUSED_GATHERS = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": True}


def _v6e(
    name: str,
    model: PublishedModel,
    devices: int,
    batch: float,
    measured: float,
    directory: str,
    **changes: Any,
) -> PublishedRow:
    """A row of the recipes for Trillium: FSDP over the slice, values offloaded to the host."""
    step = PublishedStep(
        model,
        {"fsdp": devices},
        batch,
        8192,
        "tpu",
        offloaded=_OFFLOADED,
        block=2048,
        options=_RECIPE,
    )
    source = directory if directory.startswith("https") else f"{_RECIPES}/{directory}/README.md"
    step = replace(step, **changes)
    return PublishedRow(name, "tpu-v6e", devices, measured, "tokens/s", source, step)


def _scaled(
    hardware: str,
    scale: int,
    model: PublishedModel,
    axes: Mapping[str, int],
    batch: float,
    saved: tuple[str, ...],
    measured: float,
) -> PublishedRow:
    """A row of MaxText's configurations for v5e and v5p."""
    options = _OVERLAP | _FUSION | (_FUSED_GATHERS if hardware == "tpu-v5e" else {})
    step = PublishedStep(
        model, axes, batch, 2048, "tpu", saved=saved, block=512, block_dq=512, options=options
    )
    chip = hardware.removeprefix("tpu-")
    source = f"{_MAXTEXT}/src/maxtext/configs/tpu/{chip}/README.md"
    name = f"maxtext-{scale}b-{chip}-{step.devices}"
    return PublishedRow(name, hardware, step.devices, measured, "TFLOP/s", source, step)


_OUT: dict[str, Any] = {"offloaded": (*_OFFLOADED, "out_proj")}
_NO_RINGS = {"options": _RECIPE | {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000}}
_MIXED: dict[str, Any] = {
    **_OUT,
    "sequence": 4096,
    "block_dq": 2048,
    "options": {"xla_tpu_scoped_vmem_limit_kib": 81920} | _OVERLAP | _FUSION,
}
_NO_DCN = "several slices: no compiler for the data-centre network ahead of time"
_A3_LINKS = "the hosts' four 200 Gb/s adapters have no profile"
_HERO = "a GB200 rack runs marin's own mixture with its kernels, which is not exported here"

ROWS = (
    _h100("llama2-7b-h100-8", LLAMA2_7B, {"fsdp": 8}, 4096, _MINIMAL_FLASH, 0.721,
          "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/README.md",
          options=_TOOLBOX),
    _h100("llama2-7b-a3-8", LLAMA2_7B, {"fsdp": 8}, 4096, _MINIMAL_FLASH, 492,
          f"{_MAXTEXT}/src/maxtext/configs/gpu/a3/llama_2_7b/README.md",
          options=_A3, batch=4, unit="TFLOP/s"),
    _h100("llama2-70b-h100-64", LLAMA2_70B, {"fsdp": 64}, 4096, _EXCEPT_MLPWI, 7.908,
          _LLAMA2_H100),
    _h100("llama2-70b-h100-64-table", LLAMA2_70B, {"fsdp": 64}, 4096, _EXCEPT_MLPWI, 6.999,
          _LLAMA2_H100),
    _h100("llama2-70b-h100-128", LLAMA2_70B, {"fsdp": 128}, 4096, _EXCEPT_MLPWI, 7.072,
          _LLAMA2_H100),
    _h100("llama2-70b-h100-256", LLAMA2_70B, {"fsdp": 256}, 4096, _EXCEPT_MLPWI, 7.153,
          _LLAMA2_H100),
    _h100("llama3-70b-h100-128", LLAMA3_70B, {"fsdp": 128}, 8192, _QKV, 15.570, _LLAMA3_H100),
    _h100("llama3-70b-h100-256", LLAMA3_70B, {"fsdp": 256}, 8192, _QKV, 15.444, _LLAMA3_H100),
    _h100("llama3-70b-h100-512", LLAMA3_70B, {"data": 4, "fsdp": 128}, 8192, _QKV, 15.519,
          _LLAMA3_H100),
    _v6e("llama3.1-8b-v6e-8", LLAMA3_8B, 8, 3, 7138.890, "Llama3.1-8B-MaxText/v6e-8",
         **_OUT, **_NO_RINGS),
    _v6e("llama3.1-8b-v6e-16", LLAMA3_8B, 16, 3, 7243.378, "Llama3.1-8B-MaxText/v6e-16",
         **_OUT, **_NO_RINGS),
    _v6e("llama3.1-8b-v6e-32", LLAMA3_8B, 32, 3, 7031.689, "Llama3.1-8B-MaxText/v6e-32",
         **_OUT, **_NO_RINGS),
    _v6e("llama3.1-8b-v6e-64", LLAMA3_8B, 64, 5, 7247.111, "Llama3.1-8B-MaxText/v6e-64", **_OUT),
    _v6e("llama3.1-8b-v6e-128", LLAMA3_8B, 128, 4, 7119.648, "Llama3.1-8B-MaxText/v6e-128",
         **_OUT),
    _v6e("llama3.1-8b-v6e-256", LLAMA3_8B, 256, 4, 7207, _TIERS, **_OUT),
    _v6e("mistral-7b-v6e-8", MISTRAL_7B, 8, 6, 7776.813, "Mistral-7B-MaxText", **_OUT, **_NO_RINGS),
    _v6e("llama2-70b-v6e-256", LLAMA2_70B, 256, 2, 900, _TIERS, sequence=4096, transposed=True,
         offloaded=_QKV, block=1024, block_dq=2048, options=_VMEM | _FUSION),
    _v6e("llama3.1-70b-v6e-32", LLAMA3_70B, 32, 2, 920.965, "Llama3.1-70B-MaxText/v6e-32",
         weight_dtype="bfloat16", **_NO_RINGS),
    _v6e("llama3.1-70b-v6e-64", LLAMA3_70B, 64, 2, 876.736, "Llama3.1-70B-MaxText/v6e-64"),
    _v6e("llama3.1-70b-v6e-128", LLAMA3_70B, 128, 4, 941.976, "Llama3.1-70B-MaxText/v6e-128"),
    _v6e("llama3.1-70b-v6e-256", LLAMA3_70B, 256, 5, 960, _TIERS),
    _v6e("mixtral-8x7b-v6e-256", MIXTRAL_8X7B, 256, 12, 3899, _TIERS, **_MIXED),
    _scaled("tpu-v5e", 16, SCALE_16, {"fsdp": 256}, 6, (), 120),
    _scaled("tpu-v5e", 32, SCALE_32, {"fsdp": 256}, 4, (), 132),
    _scaled("tpu-v5p", 32, SCALE_32, {"fsdp": 16, "tensor": 4}, 6, _MINIMAL, 328),
    _scaled("tpu-v5p", 64, SCALE_64, {"fsdp": 16, "tensor": 4}, 3, _MINIMAL, 323),
    _scaled("tpu-v5p", 128, SCALE_128, {"fsdp": 16, "tensor": 8}, 1, _MINIMAL, 315),
    *(
        PublishedRow(f"maxtext-{scale}b-v5e-{slices}x256", "tpu-v5e", slices * 256, measured,
                     "TFLOP/s", f"{_MAXTEXT}/src/maxtext/configs/tpu/v5e/README.md", why=_NO_DCN)
        for scale, slices, measured in ((16, 2, 117), (16, 32, 108), (32, 2, 128), (32, 32, 119))
    ),
    PublishedRow("llama2-7b-a3-16", "h100", 16, 422, "TFLOP/s",
                 f"{_MAXTEXT}/src/maxtext/configs/gpu/a3/llama_2_7b/README.md", why=_A3_LINKS),
    *(
        PublishedRow(f"marin-8054-{name}", "gb200", 64, 1 + change / 100, "ratio", _MARIN,
                     why=_HERO)
        for name, change in (("o1", -3.70), ("o1-without-scheduler", -7.06), ("scheduler", -4.22))
    ),
)  # fmt: skip


def main() -> None:
    """Prints the table, or with --json a list of objects."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted = tuple(arguments.names)
    rows = [row for row in ROWS if not wanted or row.name.startswith(wanted)]
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(_figures(row))
        if not arguments.json:
            print(_line(found[-1]), flush=True)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    errors = [abs(each["error"]) for each in found if each["error"] is not None]
    if errors:
        print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def _figures(row: PublishedRow) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "program": row.name,
        "devices": row.devices,
        "hardware": row.hardware,
        "unit": "ratio" if row.unit == "ratio" else "s" if row.step else row.unit,
        "predicted": None,
        "measured": row.measured_seconds,
        "error": None,
        "source": row.source,
    }
    if row.step is None:
        return figures | {"why": row.why}
    began = time.monotonic()
    try:
        predicted, contended = predict_seconds(row.step, row.hardware)
    except ToolError as error:
        return figures | {"why": str(error)}
    figures["predicted"] = predicted
    figures["contended"] = contended
    figures["error"] = predicted / row.measured_seconds - 1
    return figures | {"seconds": round(time.monotonic() - began, 1)}


def _line(figures: Mapping[str, Any]) -> str:
    if figures["predicted"] is None:
        head = f"{figures['program']:28s} {'':>9s} {figures['measured']:9.3f} {'':>7s}"
        return f"{head}  {figures['source']} ({figures['why']})"
    return (
        f"{figures['program']:28s} {figures['predicted']:9.3f} {figures['measured']:9.3f} "
        f"{figures['error']:+7.1%}  {figures['source']}"
    )


def predict_seconds(step: PublishedStep, hardware: str) -> tuple[float, float]:
    """Returns the predicted seconds of a step, and those if collectives slow kernels down.

    Raises ToolError if the compiler refuses the step.
    """
    if step.platform == "cuda":
        return _seconds(step_report(step, hardware))
    on_device = replace(step, saved=(*step.saved, *step.offloaded), offloaded=())
    for depths in _DEPTHS:
        try:
            first, second = (
                _seconds(step_report(replace(on_device, model=model), hardware))
                for model in (replace(step.model, layers=depth) for depth in depths)
            )
        except ToolError:
            if depths == _DEPTHS[-1]:
                raise
            continue
        more = (step.model.layers - depths[0]) / (depths[1] - depths[0])
        return first[0] + more * (second[0] - first[0]), first[1] + more * (second[1] - first[1])
    raise AssertionError("the last depths return or raise")


def _seconds(report: ProgramReport) -> tuple[float, float]:
    return report.total_ns / 1e9, report.contended_ns / 1e9


def step_report(step: PublishedStep, hardware: str) -> ProgramReport:
    """Times the schedule of the step's compiler. Raises ToolError if it refuses the program."""
    machine = load_hardware(hardware)
    options = CompilerOptions.from_values(step.options)
    program = artifact.from_exported(export_published_step(step), hardware)
    target = Target.GPU if step.platform == "cuda" else Target.TPU
    compiled = compile_artifact(
        program, target, _TIMEOUT, hardware=machine, options=options, schedule_only=True
    )
    graph = hlo_task_graph(
        compiled.text, machine, step.devices, None, one_stream=options.one_stream
    )
    return program_report(
        graph, machine, step.devices, name=hardware, target=step.platform, with_timeline=False
    )


if __name__ == "__main__":
    main()

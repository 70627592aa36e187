"""Compile an artifact for XLA:CPU, XLA:GPU or XLA:TPU; no accelerator is needed.

The table lists the collectives in the order in which the compiled program issues them on a device.
The verdict says whether that is the order of the artifact, and which collectives XLA deleted,
merged, copied or moved. The program is compiled for as many devices as it runs on. INPUT is MLIR
text, MLIR bytecode, a portable artifact or a jax.export file; `-` is standard input. Exit code 0
if the program compiled, whatever the order; 2 if it did not.
"""

from __future__ import annotations

import argparse
import json

from stablehlo_tools.cli.shared_arguments import add_compiler_options, add_timeout, compiler_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `compile` to its parser."""
    parser.add_argument("input", metavar="INPUT", help="the artifact, or - for standard input")
    parser.add_argument(
        "--target", required=True, choices=("cpu", "gpu", "tpu"), help="the compiler to use"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="the device to compile for: a name or a profile in a TOML file (otherwise: h100 for "
        "gpu, tpu-v5e for tpu)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_timeout(parser, "time limit of the compiler in seconds (default: 600)")
    add_compiler_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compiles and prints; always 0. Raises ToolError."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.cost.hardware import load_hardware
    from stablehlo_tools.targets import compilation_report
    from stablehlo_tools.targets.compilation import compile_artifact

    hardware = load_hardware(arguments.hardware) if arguments.hardware is not None else None
    loaded = artifact.load(arguments.input)
    compilation = compile_artifact(
        loaded,
        arguments.target,
        arguments.timeout,
        hardware=hardware,
        options=compiler_options(arguments),
    )
    if arguments.json:
        print(json.dumps(compilation_report.to_json(compilation, loaded.name), indent=2))
    else:
        print(compilation_report.to_text(compilation, loaded.name))
    return 0

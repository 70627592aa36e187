"""Creates a folder of regression tests for a user's artifacts: settings of lit, a first test, CI.

`lit DIR` runs it anywhere the package is installed with its extra `tests`. Without an artifact, the
first test is of a small placeholder program.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from stablehlo_tools.analysis.partitioner_work import EXPLICIT, left_to_the_partitioner
from stablehlo_tools.artifacts.artifact import Artifact, parse
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files.atomic import write_all_atomically
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.testing.generated_test import generated_test, verify
from stablehlo_tools.testing.minimised import minimise_module
from stablehlo_tools.testing.recipe import Recipe

LIT_CONFIG = "lit.cfg.py"
WORKFLOW = "ci.yml"
IGNORED = ".gitignore"
PLACEHOLDER = "placeholder.mlir"

_LIT = '''\
# pyright: reportUndefinedVariable=false
# ruff: noqa: F821 - lit injects `config`
"""Regression tests of StableHLO artifacts. Run them: lit -v {folder}"""

import os
import sys
from pathlib import Path

import lit.formats

HERE = Path(__file__).resolve().parent

config.name = {name!r}
config.test_format = lit.formats.ShTest()
config.suffixes = [".mlir", ".test"]
config.excludes = [{config!r}]
config.test_source_root = str(HERE)
config.test_exec_root = str(HERE / ".lit")

# stablehlo-tools and filecheck are next to the interpreter that runs lit.
config.environment["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), config.environment["PATH"]]
)
'''

_CI = """\
# Copy this to .github/workflows/ to run the tests of {folder} on every push.
name: artifacts
on: [push, pull_request]
jobs:
  artifacts:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      # From an index that has it; from a clone: pip install './stablehlo-tools[tests]'
      - run: pip install 'stablehlo-tools[tests]>={version}'
      - run: lit -v {folder}
"""

_PROGRAM = """\
module @jit_placeholder attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%rows: tensor<8x4xf32>) -> tensor<16x4xf32> {
    %0 = "stablehlo.all_gather"(%rows) <{all_gather_dim = 0 : i64, channel_handle = \
#stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : \
tensor<1x2xi64>, use_global_device_ids}> : (tensor<8x4xf32>) -> tensor<16x4xf32>
    return %0 : tensor<16x4xf32>
  }
}
"""
_IN_PLACE = """\
// A placeholder for your program. Export a step, and make a test of it:
//   stablehlo-tools make-test step.jax_export -p {pipeline} --brief -o {folder}/step.mlir
"""


def write_suite(
    folder: str, given: Artifact | None, pipeline: str | None, *, full: bool, cost: str | None
) -> list[str]:
    """Writes the folder, with a first test of `given`; returns the names of the files.

    The default pass pipeline is `partition,create-reduce-scatter` for a program that leaves
    collectives to the compiler, `thread-tokens` for others. Raises ToolError before any file is
    written if a file exists already, or if no test can be made of the artifact.
    """
    loaded = given if given is not None else parse(_PROGRAM.encode(), PLACEHOLDER)
    if pipeline is None:
        left = left_to_the_partitioner(loaded.module)
        pipeline = "thread-tokens" if left is None else EXPLICIT
    name = PLACEHOLDER
    if given is not None:
        name = "step.mlir" if given.name.startswith("<") else f"{Path(given.name).stem}.mlir"
    root = Path(folder)
    for each in (LIT_CONFIG, WORKFLOW, name):
        if (root / each).exists():
            raise ToolError(
                f"{str(root / each)!r} exists, and --init starts a new suite: add a test to a "
                "suite with -o TEST.mlir",
                instead=(folder, f"{root}-2"),
            )
    recipe = Recipe(pipeline, full, Path(loaded.name).name, None, not full, cost)
    data = minimise_module(loaded, Pipeline.parse(pipeline)).encode()
    test = generated_test(recipe, str(root / name), data)
    verify(test, recipe, data)
    introduction = _IN_PLACE.format(pipeline=pipeline, folder=root) if given is None else ""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot make the directory {folder!r}: {error.strerror}") from None
    ci = _CI.format(folder=root.as_posix(), version=version("stablehlo-tools"))
    lit = _LIT.format(folder=root.as_posix(), name=root.resolve().name, config=LIT_CONFIG)
    contents = {LIT_CONFIG: lit, name: introduction + test.text, WORKFLOW: ci, IGNORED: "/.lit/\n"}
    write_all_atomically([(root / file, text.encode()) for file, text in contents.items()])
    return [str(root / file) for file in contents]

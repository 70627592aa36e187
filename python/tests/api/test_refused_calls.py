"""Calls that cannot be answered are refused with what can be, in words of Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import stablehlo_tools
from stablehlo_tools import ToolError
from stablehlo_tools.artifacts.artifact import Artifact, parse

PROGRAM = b"func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"


@pytest.mark.parametrize(
    ("call", "told", "tried"),
    [
        (
            lambda given: stablehlo_tools.inspect(given, target="cuda"),
            "unknown target 'cuda'; known: as-written, gpu, tpu",
            'target="as-written" or target="gpu" or target="tpu"',
        ),
        (
            lambda given: stablehlo_tools.optimize(given, target="rocm"),
            "target 'rocm': a program is optimized for gpu or tpu",
            'target="gpu" or target="tpu"',
        ),
        (
            lambda given: stablehlo_tools.optimize(given, "gpu", memory_limit=-3),
            "memory_limit=-3: it must be more than 0",
            "without memory_limit, or memory_limit=60",
        ),
        (
            lambda _: stablehlo_tools.transform("step.jax_export", "cse"),  # pyright: ignore[reportArgumentType,reportCallIssue]
            "a str is not a program",
            'stablehlo_tools.load("step.jax_export")',
        ),
        (
            lambda given: stablehlo_tools.save(given, "step.jax_export"),
            "only an artifact of jax.export can become a .jax_export file",
            'stablehlo_tools.save(program, "out.mlirbc")',
        ),
        (
            lambda given: stablehlo_tools.transform(given, "partition{hardwear=h100}"),
            "has no option 'hardwear'",
            "stablehlo_tools.transform(program, 'partition{hardware=h100}')",
        ),
        (
            lambda given: stablehlo_tools.transform(given, ""),
            "the pipeline is empty",
            "print(stablehlo_tools.describe())",
        ),
        (
            lambda given: stablehlo_tools.transform(given, "partition{speed=3}"),
            "has no option 'speed'",
            'print(stablehlo_tools.describe("partition"))',
        ),
    ],
)
def test_what_is_tried_is_python(call: Callable[[Artifact], object], told: str, tried: str) -> None:
    with pytest.raises(ToolError) as refused:
        call(parse(PROGRAM, "x.mlir"))
    said, *_, last = str(refused.value).splitlines()
    assert told in said
    assert last == f"try: {tried}"


def test_a_pass_is_described() -> None:
    assert "Options:" in stablehlo_tools.describe("partition")
    assert "partition: a plain sharded jit export" in stablehlo_tools.describe()

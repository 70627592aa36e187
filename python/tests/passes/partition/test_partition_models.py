"""Partitioned models keep their values and their calling convention, and compile everywhere.

A few models stand for the others; `make soak` takes all of them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import kept_values
import numpy as np
import pytest
from jax.export import Exported, deserialize
from kept_values import Known, assert_kept
from models.zoo import ZOO

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import main_function, walk
from stablehlo_tools.targets.compilation import compile_artifact

PIPELINE = "partition,create-reduce-scatter,thread-tokens"
FORWARD = [name for name, model in ZOO.items() if not model.training]
# Experts, convolutions and a recurrence, which are quick to compile.
COMPARED = ["moe-forward", "convnet-forward", "mamba-forward"]
DONATES = "decoder-2d-scan-step"
# A step with a loop, a manual computation and convolutions.
QUICK = [DONATES, "moe-shard-map-forward", "convnet-forward"]
# What XLA's partitioner divides in the same way, so that the same numbers are added in one order.
# Not decoder-fsdp-step: Shardy adds its embedding's gradients of each batch, XLA exchanges them.
# Not encoder-decoder-step: each device adds its parts of sums that meet in an add.
BITWISE = [
    "decoder-fsdp-forward",
    "moe-forward",
    "moe-step",
    "moe-shard-map-forward",
    "vit-forward",
    "vit-step",
    "convnet-forward",
    "convnet-step",
    "mamba-forward",
    "mamba-scan-step",
    "mamba-associative-step",
    "encoder-decoder-forward",
    "nnx-llama-forward",
]
# A second layer of these says nothing that the first does not, and takes as long.
SHORT = ("moe-forward", "mamba-forward", "vit-forward")
TARGETS = ("cpu", "gpu", "tpu")
COMPILED = {  # each compiler once, for a model of another family
    "mamba-forward": "cpu",
    "vit-forward": "gpu",
    "convnet-forward": "tpu",
}


def soaked(names: Iterable[str], every: Iterable[str] = ZOO) -> list[Any]:
    """All models, by default of the zoo; those that are not among the names are for `make soak`."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.soak) for name in every]


def options(name: str) -> dict[str, Any]:
    """What a model is built with."""
    return {"layers": 1} if name in SHORT else {}


def arguments_of(name: str, seed: int = 0) -> tuple[Any, ...]:
    """Random arguments of a model."""
    return ZOO[name].arguments(seed, **options(name))


@functools.cache
def known(name: str) -> Known:
    """What a model computes before the pipeline."""
    return Known.of(built(name), arguments_of(name))


@functools.cache
def built(name: str) -> Exported:
    """A model as it is exported."""
    exported = ZOO[name].build(**options(name))
    assert isinstance(exported, Exported)
    return exported


@functools.cache
def partitioned(name: str, pipeline: str = PIPELINE) -> Exported:
    """The model after the pipeline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stablehlo_tools.transform(built(name), pipeline)


def ops_of(module: ir.Module, name: str) -> list[ir.Operation]:
    """All ops of a name, in text order."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == name:
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return found


@pytest.mark.parametrize("name", soaked(COMPARED))
def test_values_are_kept(name: str):
    assert_kept(known(name).compared(partitioned(name)))


@pytest.mark.parametrize("name", soaked(["moe-shard-map-forward"], BITWISE))
def test_values_are_those_of_xla_where_shardy_chooses(name: str):
    after = partitioned(name, PIPELINE.replace("partition", "partition{choices=shardy}"))
    assert_kept(known(name).compared(after), bitwise=True)


def broken(name: str, kind: str, attribute: str, change: Any) -> Exported:
    """A partitioned model in which one constant of numbers is changed, in the first op that has
    one that the change takes."""
    as_xla = PIPELINE.replace("partition", "partition{choices=shardy}")
    program = artifact.from_exported(partitioned(name, as_xla))
    for op in ops_of(program.module, kind):
        numbers = op.attributes[attribute]
        if isinstance(numbers, ir.DenseIntElementsAttr) and not numbers.is_splat:
            changed = change(np.array(numbers))
            if changed is not None:
                with program.module.context:
                    op.attributes[attribute] = ir.DenseElementsAttr.get(changed)
                return program.to_exported()
    raise AssertionError(f"no {kind} to break")


def exchanged_members(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The last of the first group and the first of the second one, each in the other's place."""
    if groups.shape[0] < 2:
        return None
    groups = groups.copy()
    groups[0, -1], groups[1, 0] = groups[1, 0], groups[0, -1]
    return groups


def shifted_table(table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Of a table with an entry for each device, the entries of the next device."""
    return np.roll(table, 1) if table.shape == (8,) and table.dtype == np.int32 else None


@pytest.mark.parametrize(
    ("kind", "attribute", "change"),
    [
        ("stablehlo.all_reduce", "replica_groups", exchanged_members),
        ("stablehlo.constant", "value", shifted_table),
    ],
)
def test_a_program_that_is_slightly_wrong_is_told_apart(kind: str, attribute: str, change: Any):
    name = "vit-forward"
    wrong = broken(name, kind, attribute, change)
    with pytest.raises(AssertionError, match="Output"):
        assert_kept(known(name).compared(wrong))


def compile_cases() -> list[Any]:
    """Each model for each compiler."""
    return [
        pytest.param(name, target, marks=() if COMPILED.get(name) == target else pytest.mark.soak)
        for name in ZOO
        for target in TARGETS
    ]


@pytest.mark.parametrize(("name", "target"), compile_cases())
def test_partitioned_models_compile_and_keep_the_order(name: str, target: str):
    program = artifact.from_exported(partitioned(name), name)
    compilation = compile_artifact(program, target)
    assert compilation.order.same_order
    assert len(compilation.tagged) == len(find_collectives(program.module))


@pytest.mark.parametrize("name", soaked(["moe-forward"]))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_token_chain_takes_nothing_else_and_is_whole(name: str):
    after, bare = partitioned(name), PIPELINE.removesuffix(",thread-tokens")
    threaded_again = stablehlo_tools.transform(after, "thread-tokens")
    assert threaded_again.mlir_module_serialized == after.mlir_module_serialized
    stripped = stablehlo_tools.transform(after, "strip-tokens")
    assert stripped.mlir_module() == stablehlo_tools.transform(built(name), bare).mlir_module()


@pytest.mark.parametrize("name", soaked(QUICK))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_second_run_changes_nothing(name: str):
    once = stablehlo_tools.transform(built(name), "partition")
    again = stablehlo_tools.transform(once, "partition")
    assert again.mlir_module_serialized == once.mlir_module_serialized


@pytest.mark.parametrize("name", soaked([DONATES]))
def test_a_second_run_changes_nothing_after_the_whole_pipeline(name: str):
    again = stablehlo_tools.transform(partitioned(name), "partition")
    assert again.mlir_module_serialized == partitioned(name).mlir_module_serialized


@pytest.mark.parametrize("name", soaked(QUICK))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_same_bytes_come_out_every_time(name: str):
    again = stablehlo_tools.transform(built(name), PIPELINE)
    assert again.mlir_module_serialized == partitioned(name).mlir_module_serialized


@pytest.mark.parametrize("name", soaked(["moe-forward"]))
def test_the_same_bytes_come_out_of_every_process(name: str, tmp_path: Path):
    given = tmp_path / "given.mlirbc"
    artifact.save(artifact.from_exported(built(name)), given)
    results: list[bytes] = []
    for seed in ("1", "2"):
        result = tmp_path / f"{seed}.mlirbc"
        command = [sys.executable, "-m", "stablehlo_tools.cli.main", "opt", given]
        subprocess.run(
            [*command, "-p", PIPELINE, "-o", result],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        results.append(result.read_bytes())
    assert results[0] == results[1]


def signature(exported: Exported) -> dict[str, str]:
    """Types and attributes of `main`, donation among them."""
    module = artifact.from_exported(exported).module
    main = main_function(module)
    assert main is not None
    return {
        name: str(main.attributes[name])
        for name in ("function_type", "arg_attrs", "res_attrs", "sym_visibility")
        if name in main.attributes
    }


@pytest.mark.parametrize("name", soaked([*COMPARED, *QUICK]))
def test_the_calling_convention_stays(name: str):
    before, after = built(name), partitioned(name)
    for field in (
        "fun_name",
        "in_tree",
        "in_avals",
        "out_tree",
        "out_avals",
        "in_shardings_hlo",
        "out_shardings_hlo",
        "nr_devices",
        "platforms",
        "ordered_effects",
        "unordered_effects",
        "disabled_safety_checks",
        "calling_convention_version",
        "module_kept_var_idx",
        "uses_global_constants",
    ):
        assert getattr(after, field) == getattr(before, field), field
    assert signature(after) == signature(before)


def test_donation_is_part_of_what_stays():
    assert "tf.aliasing_output" in signature(partitioned(DONATES))["arg_attrs"]


@pytest.mark.parametrize("name", soaked(["mamba-forward"], FORWARD))
def test_an_artifact_runs_from_its_file_inside_another_program(name: str):
    program, arguments = partitioned(name), arguments_of(name, seed=1)
    again = deserialize(program.serialize())

    def doubled(*given: Any) -> Any:
        return jax.tree.map(lambda output: 2 * output, again.call(*given))

    given = kept_values.placed(program, arguments)
    outer = jax.jit(doubled).lower(*given).compile(compiler_options=kept_values.QUICKLY)
    direct = kept_values.run(program, arguments)
    for one, other in zip(direct, jax.tree.leaves(outer(*given)), strict=True):
        scale = float(np.abs(one).max())
        np.testing.assert_allclose(np.asarray(other), 2 * one, rtol=0, atol=1e-5 * scale)

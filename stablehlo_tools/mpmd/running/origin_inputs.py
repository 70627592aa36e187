"""Matches the inputs of a set with those of its origin, and generates random ones.

An export may have inputs that its module lacks, because no op reads them. A module for several
platforms has the index of the platform as an additional first input, which callers do not pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.mpmd.manifest import Manifest, ManifestEntry
from stablehlo_tools.mpmd.rank_set import argument_paths, result_paths
from stablehlo_tools.mpmd.running.rank_child import element_of, type_of, value_of
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.random_inputs import made_valid, random_array, random_words
from stablehlo_tools.verify.run_plan import BackendPlan, cpu_index, make_plan, no_input
from stablehlo_tools.verify.signatures import SignatureValue, count_platform_inputs


def check_origin(
    manifest: Manifest,
    original: Artifact,
    inputs: Sequence[SignatureValue],
    outputs: Sequence[SignatureValue],
    instances: int,
) -> tuple[int, ...]:
    """Returns the numbers of the original's inputs in the manifest, without the platform index.

    Raises ToolError if the inputs or outputs of the original differ from those of the manifest.
    """
    if instances != 1:
        raise ToolError("the program must run as one instance, with one value for each input")
    first, listed = count_platform_inputs(inputs), manifest.inputs[platform_inputs(manifest) :]
    numbers = list(range(len(inputs) - first))
    if len(listed) != len(numbers) and original.exported is not None:
        numbers = list(original.exported.module_kept_var_idx)
    if len(listed) != len(numbers):
        raise ToolError(
            f"the program has {len(inputs) - first} inputs, but the set was made from one with "
            f"{len(listed)}: {manifest.source}"
        )
    for number, entry in zip(numbers, listed, strict=True):
        if entry.pieces:
            _check_type(f"input {number}", inputs[first + number], entry)
    if len(outputs) != len(manifest.outputs):
        raise ToolError(f"{len(outputs)} outputs, but the manifest has {len(manifest.outputs)}")
    for number, (value, entry) in enumerate(zip(outputs, manifest.outputs, strict=True)):
        _check_type(f"output {number}", value, entry)
    _check_paths("input", argument_paths(original), manifest.inputs)
    _check_paths("output", result_paths(original), manifest.outputs)
    return tuple(first + number for number in numbers)


def platform_inputs(manifest: Manifest) -> int:
    """Returns the number of platform index inputs: 1 for a program for several platforms, else
    0."""
    return int(bool(manifest.inputs) and not manifest.inputs[0].path)


@dataclass(frozen=True)
class OriginInputs:
    """Arrays for the original, in its order, and the plan to run it (None without one).

    `of_set` are the arrays that the manifest lists.
    """

    arrays: list[Array]
    of_set: list[Array]
    plan: BackendPlan | None = None


def make_inputs(
    manifest: Manifest, original: Artifact | None, seed: int, fixed: Mapping[int, float]
) -> OriginInputs:
    """Returns random inputs. `fixed` maps numbers of inputs to a value for all their elements.

    Raises ToolError as `check_origin` does.
    """
    if original is None:
        values = [value_of(entry.type, entry.path) for entry in manifest.inputs]
        arrays = _arrays(values, platform_inputs(manifest), seed, fixed)
        return OriginInputs(arrays, arrays)
    with naming(original.name):
        plan = make_plan({"before": original, "after": original}, "cpu")
        run = plan.run
        numbers = check_origin(manifest, original, run.inputs, run.outputs, run.instances)
    arrays = _arrays(run.inputs, count_platform_inputs(run.inputs), seed, fixed)
    platform = np.asarray(cpu_index({"before": original}), np.int32)
    front = [platform] * platform_inputs(manifest)
    return OriginInputs(arrays, [*front, *(arrays[i] for i in numbers)], plan)


def _arrays(
    values: Sequence[SignatureValue], first: int, seed: int, fixed: Mapping[int, float]
) -> list[Array]:
    """Returns arrays for values. The first `first` values are platform indices."""
    count = len(values) - first
    wrong = next((index for index in fixed if index >= count), None)
    if wrong is not None:
        raise no_input(wrong, fixed[wrong], count)
    return [
        np.zeros(value.shape, element_of(value).dtype)
        if i < first
        else _input_array(value, (seed, 0, i, 0), fixed.get(i - first))
        for i, value in enumerate(values)
    ]


def _check_type(what: str, value: SignatureValue, entry: ManifestEntry) -> None:
    if type_of(value) != entry.type:
        raise ToolError(
            f"{what} is {type_of(value)}, but the manifest has {entry.path} as {entry.type}: is "
            "this the program that the set was made from?"
        )


def _check_paths(what: str, paths: Sequence[str], entries: Sequence[ManifestEntry]) -> None:
    """Compares the pytree paths if both programs have some. The platform index has none."""
    named = [path for path in paths if path]
    listed = [entry for entry in entries if entry.path]
    for number, (path, entry) in enumerate(zip(named, listed, strict=False)):
        if path != entry.path and path.startswith("[") and entry.path.startswith("["):
            raise ToolError(
                f"{what} {number} is {path}, but the manifest has {entry.path}: is this the "
                "program that the set was made from?"
            )


def _input_array(value: SignatureValue, key: tuple[int, ...], fixed: float | None) -> Array:
    if value.role == "key":
        return random_words(value.shape, key)
    if value.role != "data":
        return np.zeros(value.shape, element_of(value).dtype)
    if fixed is not None:
        return np.full(value.shape, fixed).astype(element_of(value).dtype)
    element = element_of(value)
    return made_valid(random_array(element, value.shape, key), element, value.below)

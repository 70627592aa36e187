"""The program that a set was made of, run on random inputs, and how far off a set may be.

A set sums the same terms in another order, so it rounds differently. How much that matters is the
program's own affair: it is run again on inputs moved by one rounding of the coarsest float type
that it computes in, and a set may differ by a few times what that changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from stablehlo_tools.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.mpmd.manifest import Entry, Manifest
from stablehlo_tools.mpmd.running import child
from stablehlo_tools.mpmd.running.arrays import (
    element_of,
    read_arrays,
    type_of,
    value_of,
    write_arrays,
)
from stablehlo_tools.verify.comparison import BITWISE
from stablehlo_tools.verify.element_types import Array, Kind, element_type, real_part
from stablehlo_tools.verify.job import Request
from stablehlo_tools.verify.plan import Plan, make_plan
from stablehlo_tools.verify.random_inputs import random_array, random_words
from stablehlo_tools.verify.signatures import Value

MOVED = 2  # runs on moved inputs
FACTOR = 16  # a set may differ by so many times what the moved inputs change
_LEAST = 32  # roundings of an output's largest element that are always allowed
_JOB = "original"


@dataclass(frozen=True)
class Expected:
    """What the original makes of the inputs; `allowed` is how far each output may be off."""

    outputs: tuple[Array, ...]
    values: tuple[Value, ...]
    allowed: tuple[float, ...]


def make_inputs(
    manifest: Manifest, original: Artifact | None, seed: int, fixed: Mapping[int, float]
) -> tuple[list[Array], Plan | None]:
    """Random inputs for the original, in its order, and how it is run.

    `fixed` gives inputs, by number, one value in every element. Raises ToolError where the original
    and the manifest do not speak of the same inputs and outputs.
    """
    if original is None:
        plan = None
        values = [value_of(entry.type, entry.path) for entry in manifest.inputs]
    else:
        with naming(original.name):
            plan = make_plan({"before": original, "after": original}, "cpu")
            if plan.run.instances != 1:
                raise ToolError("each device has a value of its own for each input of this program")
            values = list(plan.run.inputs)
            _check("input", values, _listed(manifest, original, len(values)))
            _check("output", plan.run.outputs, list(manifest.outputs))
    wrong = next((index for index in fixed if index >= len(values)), None)
    if wrong is not None:
        raise ToolError(f"there is no input {wrong} to set")
    return [_input(value, (seed, 0, i, 0), fixed.get(i)) for i, value in enumerate(values)], plan


def of_manifest(manifest: Manifest, original: Artifact | None, inputs: list[Array]) -> list[Array]:
    """The inputs that the manifest lists: an original may have some that its module has not."""
    if original is None or len(inputs) == len(manifest.inputs):
        return inputs
    return [inputs[i] for i in _kept(original)]


def run_original(
    directory: Path,
    plan: Plan,
    program: Artifact,
    inputs: Sequence[Array],
    seed: int,
    timeout: float,
) -> Expected:
    """Runs the original on the inputs, and on inputs moved a little."""
    run = plan.run
    job = directory / _JOB
    job.mkdir()
    (job / run.program("before")).write_bytes(plan.programs["before"])
    Request((run,), BITWISE, 1, seed, False, {}, False).write(job)
    step = 2.0 ** -_coarsest(program.module)
    types = [type_of(value) for value in run.inputs]
    for number in range(1 + MOVED):
        moved = [
            array if number == 0 else _moved(array, value, step, (seed, number, i))
            for i, (array, value) in enumerate(zip(inputs, run.inputs, strict=True))
        ]
        write_arrays(directory / child.inputs_of(number), moved, types)
    request = {"job": _JOB, "count": 1 + MOVED}
    devices = run.replicas * run.partitions
    with naming(program.name):
        child.ask("reference_process", directory, request, devices, timeout, "running the program")
    found = [read_arrays(directory / child.outputs_of(number)) for number in range(1 + MOVED)]
    allowed = [
        _allowed(value, found[0][i], [other[i] for other in found[1:]], step)
        for i, value in enumerate(run.outputs)
    ]
    return Expected(tuple(found[0]), run.outputs, tuple(allowed))


def _listed(manifest: Manifest, original: Artifact, count: int) -> list[Entry | None]:
    """The entry of each input; None for one that the module of the original does not have."""
    if len(manifest.inputs) == count:
        return list(manifest.inputs)
    kept = _kept(original)
    if len(manifest.inputs) != len(kept):
        raise ToolError(f"there are {count} inputs, and the manifest has {len(manifest.inputs)}")
    entries = dict(zip(kept, manifest.inputs, strict=True))
    return [entries.get(i) for i in range(count)]


def _kept(original: Artifact) -> list[int]:
    return [] if original.exported is None else list(original.exported.module_kept_var_idx)


def _check(what: str, values: Sequence[Value], entries: Sequence[Entry | None]) -> None:
    if len(values) != len(entries):
        raise ToolError(f"there are {len(values)} {what}s, and the manifest has {len(entries)}")
    for number, (value, entry) in enumerate(zip(values, entries, strict=True)):
        if entry is None or (what == "input" and not entry.pieces):
            continue
        if type_of(value) != entry.type:
            raise ToolError(
                f"{what} {number} is {type_of(value)}, and the manifest has {entry.path} as "
                f"{entry.type}: is this the program that the set was made of?"
            )


def _input(value: Value, key: tuple[int, ...], fixed: float | None) -> Array:
    if value.role == "key":
        return random_words(value.shape, key)
    if value.role != "data":
        return np.zeros(value.shape, element_of(value).dtype)
    if fixed is not None:
        return np.full(value.shape, fixed).astype(element_of(value).dtype)
    return random_array(element_of(value), value.shape, key)


def _moved(array: Array, value: Value, step: float, key: tuple[int, ...]) -> Array:
    """Floats, each a rounding up or down."""
    element = element_of(value)
    if value.role != "data" or not element.is_inexact:
        return array
    precise = np.complex128 if element.kind is Kind.COMPLEX else np.float64
    signs = np.random.default_rng(key).integers(2, size=array.shape) * 2 - 1
    return (array.astype(precise) * (1 + signs * step)).astype(element.dtype)


def _allowed(value: Value, base: Array, others: Sequence[Array], step: float) -> float:
    element = element_of(value)
    if not element.is_inexact or not base.size:
        return 0.0
    precise = np.complex128 if element.kind is Kind.COMPLEX else np.float64
    with np.errstate(all="ignore"):
        size = _largest(np.abs(base.astype(precise)))
        changes = [_largest(np.abs(o.astype(precise) - base.astype(precise))) for o in others]
    own = 2.0 ** -int(ml_dtypes.finfo(real_part(element).dtype).nmant)
    return max(FACTOR * max(changes), _LEAST * min(own, step) * size)


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _coarsest(module: ir.Module) -> int:
    """Bits of the mantissa of the coarsest float type of a program's values."""
    bits: list[int] = []
    seen: set[ir.Type] = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        for result in op.results:
            kind = result.type
            if kind in seen or not isinstance(kind, ir.RankedTensorType):
                continue
            seen.add(kind)
            element = element_type(str(kind.element_type))
            if element is not None and element.is_inexact:
                bits.append(int(ml_dtypes.finfo(real_part(element).dtype).nmant))
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    return min(bits, default=52)

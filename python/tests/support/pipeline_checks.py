"""What tests of pipelines ask of two versions of a program: are values kept, and what is sent.

    known = reference(before, arguments, alone)
    assert_close(compare(known, after))
    assert not [s for s in collectives_after_partition(after) if s.kind == "all_gather"]

Both versions run on as many virtual devices as they are for. The truth is the program in float64,
on one device where it was also exported for one, so that no partitioner has a part in it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import kept_values
import ml_dtypes
import numpy as np
from jax.export import Exported
from widened import is_float, wide, widened

import stablehlo_tools
from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.analysis.loops import constant_integer, counted
from stablehlo_tools.analysis.replica_groups import DeviceMesh, ProcessGroups
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import entry_function

Array = np.ndarray[Any, Any]
WHILE = "stablehlo.while"
_FLOATS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


class Kept(NamedTuple):
    """One output of a program before and after: are all bits equal, and how far from the truth is
    each, at most, relative to the largest true value.

    `slack` is what is allowed however exact the program was before: 16 epsilons of the output, or
    an eighth of the coarsest epsilon that the program computes with; a sum of rounded numbers may
    be right by luck. Integers have no errors and no slack: they are equal or wrong.
    """

    name: str
    bitwise: bool
    before: float = 0.0
    after: float = 0.0
    slack: float = 0.0

    def close(self, bound: float) -> bool:
        """Whether the error after is at most `bound` times that before and the slack."""
        allowed = bound * self.before + self.slack
        return self.bitwise or (self.slack > 0 and self.after <= allowed)


@dataclass(frozen=True)
class Reference:
    """What a program computes of these arguments, and what it would without rounding."""

    names: tuple[str, ...]
    arguments: Sequence[Any]
    values: tuple[Array, ...]
    truth: tuple[Array, ...]
    coarsest: float  # the largest epsilon among the floats that the program computes with


def reference(
    before: Exported, arguments: Sequence[Any], alone: Exported | None = None
) -> Reference:
    """Runs a program, and it or its form for one device, `alone`, in float64."""
    whole = before.out_tree.unflatten(before.out_avals)
    paths = jax.tree_util.tree_flatten_with_path(whole)[0]
    names = tuple(jax.tree_util.keystr(path) or "output" for path, _ in paths)
    values = tuple(kept_values.run(before, arguments))
    with jax.enable_x64(True):
        exact = kept_values.run(widened(alone or before), jax.tree.map(wide, arguments))
    return Reference(names, arguments, values, tuple(exact), _coarsest(before))


def compare(known: Reference, after: Exported) -> list[Kept]:
    """Each output of another version of a program, on the same arguments."""
    values = kept_values.run(after, known.arguments)
    each = zip(known.names, known.values, values, known.truth, strict=True)
    return [_kept(*one, known.coarsest) for one in each]


def assert_close(outputs: Sequence[Kept], bound: float = 4.0) -> None:
    """That no output is further from the truth than it may be; the message lists those that are."""
    worse = [output for output in outputs if not output.close(bound)]
    assert not worse, "\n".join(map(str, worse[:10]))


def assert_bitwise(outputs: Sequence[Kept]) -> None:
    """That no bit of any output has changed."""
    changed = [output for output in outputs if not output.bitwise]
    assert not changed, "\n".join(map(str, changed[:10]))


def _kept(name: str, before: Array, after: Array, truth: Array, coarsest: float) -> Kept:
    kind = (before.dtype, before.shape)
    assert kind == (after.dtype, after.shape), f"{name} was {kind}: {after.dtype} {after.shape}"
    same = before.tobytes() == after.tobytes()
    if not is_float(before.dtype):
        return Kept(name, same)
    for array in (before, after, truth):
        assert np.isfinite(array.astype(np.float64)).all(), f"{name} has values that are no numbers"
    slack = max(16 * float(ml_dtypes.finfo(before.dtype).eps), coarsest / 8)
    return Kept(name, same, _error(before, truth), _error(after, truth), slack)


def _error(array: Array, truth: Array) -> float:
    """The largest error over the largest true value; absolute where all is 0."""
    largest = float(np.abs(truth).max(initial=0.0))
    return float(np.abs(array.astype(np.float64) - truth).max(initial=0.0)) / (largest or 1.0)


def _coarsest(exported: Exported) -> float:
    text = str(exported.mlir_module())
    kinds = [dtype for name, dtype in _FLOATS.items() if re.search(rf"[x<]{name}>", text)]
    return max((float(ml_dtypes.finfo(dtype).eps) for dtype in kinds), default=0.0)


class Sent(NamedTuple):
    """A collective: what goes in and comes out on one device, who takes part, and where it is.

    `groups` are flattened device ids, of a collective_permute its pairs. `axes` are those of the
    mesh along which members of one group differ. `depth` counts the loops around it.
    """

    kind: str
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    groups: ProcessGroups
    axes: tuple[str, ...]
    depth: int


def collectives_after_partition(
    exported: Exported, pipeline: str = "partition{choices=shardy}"
) -> list[Sent]:
    """Every collective, in program order, once each device's part of the program is explicit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = artifact.from_exported(stablehlo_tools.transform(exported, pipeline)).module
    facts = ModuleFacts.of(module)
    mesh = max(facts.meshes.values(), key=lambda mesh: mesh.size, default=DeviceMesh(()))
    return [_sent(collective, facts, mesh) for collective in find_collectives(module)]


def _sent(collective: Collective, facts: ModuleFacts, mesh: DeviceMesh) -> Sent:
    groups = facts.groups(collective) or ()
    return Sent(
        collective.kind,
        _shapes(collective.inner.operands),
        _shapes(collective.inner.results),
        groups,
        _axes(groups, mesh),
        _depth(collective.op),
    )


def _shapes(values: Sequence[ir.Value]) -> tuple[tuple[int, ...], ...]:
    kinds = [value.type for value in values]
    return tuple(tuple(kind.shape) for kind in kinds if isinstance(kind, ir.RankedTensorType))


def _axes(groups: ProcessGroups, mesh: DeviceMesh) -> tuple[str, ...]:
    ids = mesh.device_ids or range(mesh.size)
    position = {device: place for place, device in enumerate(ids)}
    sizes = [size for _, size in mesh.axes]
    spanned: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index([position[device] for device in group], sizes))
        spanned |= {axis for axis, row in enumerate(places) if len(set(row.tolist())) > 1}
    return tuple(name for axis, (name, _) in enumerate(mesh.axes) if axis in spanned)


def _depth(op: ir.Operation) -> int:
    """How many loops are around an op."""
    depth, parent = 0, op.parent
    while parent is not None:
        depth += parent.name == WHILE
        parent = parent.operation.parent
    return depth


class Loop(NamedTuple):
    """A loop's trip count, None where constants do not say it, and the loops in its body."""

    trips: int | None
    inner: tuple[Loop, ...] = ()


def loops(exported: Exported) -> tuple[Loop, ...]:
    """The loops of a program, those of functions that it calls included, in program order."""
    module = artifact.from_exported(exported).module
    inline_all_calls(module)
    return tuple(_loops(entry_function(module)))


def shown(found: Sequence[Loop]) -> str:
    """Loops in short: `8[4] ?` is one of 8 iterations with one of 4 inside, then an unknown one."""
    return " ".join(
        f"{'?' if loop.trips is None else loop.trips}"
        + (f"[{shown(loop.inner)}]" if loop.inner else "")
        for loop in found
    )


def _loops(op: ir.Operation) -> Iterator[Loop]:
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                inner = _loops(view.operation)
                if view.operation.name == WHILE:
                    yield Loop(_trips(view.operation), tuple(inner))
                else:
                    yield from inner


def _trips(loop: ir.Operation) -> int | None:
    def known(value: ir.Value) -> tuple[int, ...] | None:
        constant = constant_integer(value)
        return None if constant is None else (constant,)

    found = counted(loop, known)
    return None if isinstance(found, str) else found.trips[0]

"""Whether a program keeps its values: two versions run on virtual devices, and a third in float64
that says how much each of them rounds.

    known = Known.of(before, arguments)
    assert_kept(known.compared(after))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.export import Exported
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from widened import is_float, wide, widened

from stablehlo_tools.artifacts.program_mesh import program_mesh

Array = np.ndarray[Any, Any]
_FLOATS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
# What takes most of a run is compiling, so XLA leaves out what makes programs fast.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Output:
    """One output of a program before and after: the largest errors, and what is allowed.

    Errors are absolute, against the program in float64; integers have none and must be equal.
    """

    name: str
    bitwise: bool
    error_before: float = 0.0
    error_after: float = 0.0
    slack: float = 0.0  # what is allowed however exact the program was before

    @property
    def ratio(self) -> float:
        """The error over the largest that is allowed; at most 1 where the values are kept."""
        if self.bitwise:
            return 0.0
        allowed = 4 * self.error_before + self.slack
        return self.error_after / allowed if allowed else float("inf")


@dataclass(frozen=True)
class Known:
    """What a program computes of these arguments, and what it would without rounding."""

    program: Exported
    names: Sequence[str]  # of the outputs
    arguments: Sequence[Any]  # pytrees of NumPy arrays
    values: Sequence[Array]
    truth: Sequence[Array]
    coarsest: float  # the largest epsilon among the floats that the program computes with

    @classmethod
    def of(
        cls, program: Exported, arguments: Sequence[Any], alone: Exported | None = None
    ) -> Known:
        """Runs a program, and in float64 it or its form for one device, `alone`.

        No partitioner has a part in the truth of the latter.
        """
        whole = program.out_tree.unflatten(program.out_avals)
        paths = jax.tree_util.tree_flatten_with_path(whole)[0]
        names = [jax.tree_util.keystr(path) or "output" for path, _ in paths]
        values = run(program, arguments)
        truth: Sequence[Array] = values
        if any(is_float(array.dtype) for array in values):
            with jax.enable_x64(True):
                truth = run(widened(alone or program), jax.tree.map(wide, arguments))
        return cls(program, names, arguments, values, truth, _coarsest(program))

    def compared(self, after: Exported) -> list[Output]:
        """Every output of this and of another version of the program."""
        each = zip(self.names, self.values, run(after, self.arguments), self.truth, strict=True)
        return [_output(*one, self.coarsest) for one in each]


def compared(before: Exported, after: Exported, arguments: Sequence[Any]) -> list[Output]:
    """Every output of two versions of a program, for these arguments: pytrees of NumPy arrays."""
    return Known.of(before, arguments).compared(after)


def assert_kept(outputs: Sequence[Output], *, bitwise: bool = False) -> None:
    """Asserts that no output is further from the truth than it may be, or has changed in a bit."""
    worse = [output for output in outputs if not (output.bitwise if bitwise else output.ratio <= 1)]
    assert not worse, "\n".join(map(str, worse[:10]))


def run(exported: Exported, arguments: Sequence[Any]) -> list[Array]:
    """The outputs, flat, of a call on as many virtual devices as the program is for."""
    given = placed(exported, arguments)
    called = jax.jit(exported.call).lower(*given).compile(compiler_options=QUICKLY)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(called(*given))]


def placed(exported: Exported, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as arrays on the devices, divided as the program wants them."""
    mesh = program_mesh(exported, jax.devices()[: exported.nr_devices])
    leaves, structure = jax.tree.flatten(tuple(arguments))
    shardings = [s or NamedSharding(mesh, P()) for s in exported.in_shardings_jax(mesh)]
    return structure.unflatten(map(jax.device_put, leaves, shardings))


def _coarsest(exported: Exported) -> float:
    text = str(exported.mlir_module())
    kinds = [dtype for name, dtype in _FLOATS.items() if re.search(rf"[x<]{name}>", text)]
    return max((float(ml_dtypes.finfo(dtype).eps) for dtype in kinds), default=0.0)


def _output(name: str, first: Array, second: Array, truth: Array, coarsest: float) -> Output:
    kind = (first.dtype, first.shape)
    assert kind == (second.dtype, second.shape), f"{name} was {kind}: {second.dtype} {second.shape}"
    same = first.tobytes() == second.tobytes()
    if not is_float(first.dtype):
        return Output(name, same)
    for array in (first, second, truth):
        assert np.isfinite(array.astype(np.float64)).all(), f"{name} has values that are no numbers"
    # A mean over many rounded numbers may be right by luck: hence an eighth of their epsilon.
    epsilon = max(16 * float(ml_dtypes.finfo(first.dtype).eps), coarsest / 8)
    largest = float(np.abs(truth).max(initial=0.0))
    return Output(name, same, _error(first, truth), _error(second, truth), epsilon * largest)


def _error(array: Array, truth: Array) -> float:
    return float(np.abs(array.astype(np.float64) - truth).max(initial=0.0))

"""Functions of whole arrays that the host computes while a mapped program runs.

XLA:CPU calls them by a custom call, whose first operand is the number of the function in the
program's list. The host computes an exact function (a triangular solve, a top-k) or an
uninterpreted one: random numbers from a hash of all operands, or of each matrix.

    %l = stablehlo.cholesky %a              ==>  %l = stablehlo.custom_call @field_host(%n, %a)

The same custom call also returns a predicate or an index unchanged, to count the branches that run.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import backend_config, label
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.verify.element_types import Array, element_type
from stablehlo_tools.verify.exact.field import Field

TARGET = "stablehlo_tools_field_host"
PROBE = "probe"
# Attributes that do not affect a custom call's function, or that `backend_config` reads.
_PLACING = frozenset(
    [
        "api_version",
        "backend_config",
        "call_target_name",
        "called_computations",
        "has_side_effect",
        "mhlo.backend_config",
        "mhlo.frontend_attributes",
        "mhlo.sharding",
        "operand_layouts",
        "output_operand_aliases",
        "result_layouts",
        "sdy.sharding",
        "sdy.sharding_rule",
    ]
)


@dataclass(frozen=True)
class HostFunction:
    """A function of arrays. `kind`: `opaque`, `matrices` (each matrix of a batch by itself),
    `triangular_solve`, `top_k`, or `probe`. `name` identifies an opaque function."""

    kind: str
    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # element type and shape
    results: tuple[tuple[str, tuple[int, ...]], ...]
    options: Mapping[str, Any]
    inexact: tuple[bool, ...] = ()  # for each result, True if it holds residues


def write_host_call(
    kind: str, op: ir.Operation, inexact: tuple[bool, ...], builder: Builder, number: int
) -> tuple[HostFunction, list[ir.Value]]:
    """Writes the host call that replaces an op; returns its function and its results.

    Raises ToolError for element types that NumPy does not have.
    """
    options = _options(kind, op)
    name = kind
    if kind in ("opaque", "matrices"):
        others = sorted(f"{n} = {op.attributes[n]}" for n in op.attributes if n not in _PLACING)
        name = " ".join((label(op), backend_config(op), *others))
    written = write_call(kind, name, list(op.operands), op.results, builder, number, options)
    return replace(written[0], inexact=inexact), written[1]


def write_call(
    kind: str,
    name: str,
    operands: Sequence[ir.Value],
    results: Sequence[ir.Value],
    builder: Builder,
    number: int,
    options: Mapping[str, Any],
) -> tuple[HostFunction, list[ir.Value]]:
    """Writes the call of a host function whose results have the types of `results`."""
    function = HostFunction(
        kind, name, tuple(map(_signature, operands)), tuple(map(_signature, results)), options
    )
    types = [value.type for value in results]
    single = len(types) == 1
    given = [builder.i32(number), *operands]
    call = builder.create(
        CUSTOM_CALL,
        given,
        types if single else [ir.TupleType.get_tuple(types, builder.context)],
        {
            "call_target_name": ir.StringAttr.get(TARGET, builder.context),
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32, builder.context), 1),
            "operand_layouts": _row_major(given),
            "result_layouts": _row_major(results),
        },
    )
    if single:
        return function, list(call.results)
    i32 = ir.IntegerType.get_signless(32, builder.context)
    return function, [
        builder.op("get_tuple_element", list(call.results), type_, index=ir.IntegerAttr.get(i32, i))
        for i, type_ in enumerate(types)
    ]


def _signature(value: ir.Value) -> tuple[str, tuple[int, ...]]:
    name = str(element_of(value))
    if element_type(name) is None:
        raise ToolError(f"an operand of {name}")
    return name, tuple(shape_of(value))


def _row_major(values: Sequence[ir.Value]) -> ir.Attribute:
    index = ir.IndexType.get()
    layouts = [
        ir.DenseElementsAttr.get(np.arange(len(shape_of(v)))[::-1].astype(np.int64), type=index)
        if len(shape_of(v))
        else ir.Attribute.parse("dense<> : tensor<0xindex>")
        for v in values
    ]
    return ir.ArrayAttr.get(layouts)


def _options(kind: str, op: ir.Operation) -> dict[str, Any]:
    if kind == "triangular_solve" and op.name == CUSTOM_CALL:  # LAPACK's letters
        config = ir.DictAttr(op.attributes["mhlo.backend_config"])
        letters = {each.name: chr(ir.IntegerAttr(each.attr).value) for each in config}
        return {
            "left_side": letters["side"] == "L",
            "lower": letters["uplo"] == "L",
            "unit_diagonal": letters["diag"] == "U",
            "transposed": letters["trans_x"] != "N",
        }
    if kind == "triangular_solve":
        flags = {
            name: ir.BoolAttr(op.attributes[name]).value
            for name in ("left_side", "lower", "unit_diagonal")
        }
        return {**flags, "transposed": "NO_TRANSPOSE" not in str(op.attributes["transpose_a"])}
    if kind == "top_k":
        least = "largest = false" in str(op.attributes.get("mhlo.attributes"))
        return {"k": shape_of(op.results[0])[-1], "sign": 1 if least else -1}
    return {}


# In the process that runs the program.


class Host:
    """Computes the host functions of one program, and records the values of its probes."""

    def __init__(self, field: Field, functions: Sequence[HostFunction]) -> None:
        self.field = field
        self.functions = functions
        self.seen: dict[int, set[int]] = {}

    def call(self, out: int, operands: Any) -> None:
        """Handles a call from XLA; `out` and `operands` are addresses."""
        number = int(ctypes.cast(operands[0], ctypes.POINTER(ctypes.c_int32))[0])
        function = self.functions[number]
        given = [_array_at(operands[i], *each) for i, each in enumerate(function.operands, 1)]
        if function.kind == PROBE:
            self.seen.setdefault(number, set()).add(int(given[0]))
            results = given
        else:
            results = self.compute(function, given)
        places = [out]
        if len(function.results) != 1:
            table = ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))
            places = [table[i] for i in range(len(function.results))]
        for place, (name, shape), result in zip(places, function.results, results, strict=True):
            target = _array_at(place, name, shape)
            target[...] = np.asarray(result).astype(target.dtype).reshape(shape)

    def compute(self, function: HostFunction, operands: Sequence[Array]) -> list[Array]:
        """Returns the results of a function; for residues they are residues."""
        if function.kind == "top_k":
            keys = function.options["sign"] * operands[0].astype(np.int64)
            order = np.argsort(keys, axis=-1, kind="stable")[..., : function.options["k"]]
            return [np.take_along_axis(operands[0], order, -1), order]
        if function.kind == "triangular_solve":
            return [self._solve(function.options, *operands)]
        if function.kind == "opaque":
            return self._drawn(function, operands, function.results)
        batch = operands[0].shape[:-2]
        size = math.prod(batch)
        rows = [operand.reshape(size, -1) for operand in operands]
        shapes = [(name, shape[len(batch) :]) for name, shape in function.results]
        drawn = [self._drawn(function, [row[i] for row in rows], shapes) for i in range(size)]
        return [
            np.array([one[k] for one in drawn]).reshape(shape)
            for k, (_, shape) in enumerate(function.results)
        ]

    def _drawn(
        self,
        function: HostFunction,
        operands: Sequence[Array],
        results: Sequence[tuple[str, tuple[int, ...]]],
    ) -> list[Array]:
        """Returns random numbers, seeded by the operands' contents.

        Integers are below the size of the last dimension, like indices. An integer scalar is 0,
        like the status of LAPACK."""
        digest = hashlib.blake2b(f"{function.name} {function.options}".encode(), digest_size=16)
        for operand in operands:
            digest.update(np.ascontiguousarray(operand).tobytes())
        rng = np.random.default_rng(np.frombuffer(digest.digest(), np.uint64))
        drawn: list[Array] = []
        for name, shape in results:
            element = element_type(name)
            assert element is not None
            if function.inexact[len(drawn)] and name == "i64":
                drawn.append(self.field.random(rng, shape))
            elif name.startswith("complex"):
                parts = [self.field.random(rng, shape) for _ in range(2)]
                drawn.append(parts[0] + 1j * parts[1])
            else:
                sizes = [n for _, given in function.operands[:1] for n in given[-2:]]
                below = max(1, min(sizes, default=1)) if shape else 1
                drawn.append(rng.integers(0, 2 if name == "i1" else below, shape))
        return drawn

    def _solve(self, options: Mapping[str, Any], matrix: Array, right: Array) -> Array:
        """Solves op(A) X = B or X op(A) = B in the field, by substitution row by row."""
        flip = not options["left_side"]  # X A = B is A^T X^T = B^T
        if options["transposed"] != flip:
            matrix = np.swapaxes(matrix, -1, -2)
        lower = options["lower"] != (options["transposed"] != flip)
        solution = np.array(np.swapaxes(right, -1, -2) if flip else right)
        size, prime = matrix.shape[-1], self.field.prime
        for row in range(size) if lower else range(size - 1, -1, -1):
            known = slice(0, row) if lower else slice(row + 1, size)
            # Each product is reduced, so that the sum does not overflow.
            products = matrix[..., row, known, None] * solution[..., known, :] % prime
            value = (solution[..., row, :] - products.sum(-2)) % prime
            if not options["unit_diagonal"]:
                inverses = np.vectorize(self.field.inverse, [np.int64])(matrix[..., row, row])
                value = value * inverses[..., None]
            solution[..., row, :] = self.field.centre_residues(value)
        return np.swapaxes(solution, -1, -2) if flip else solution


def _array_at(address: int, name: str, shape: tuple[int, ...]) -> Array:
    element = element_type(name)
    assert element is not None
    size = math.prod(shape) * element.dtype.itemsize
    buffer = (ctypes.c_char * size).from_address(address) if size else bytearray()
    return np.frombuffer(buffer, element.dtype).reshape(shape)


_current: list[Host] = []  # the host that a running program calls is the last


@contextmanager
def register_host(host: Host) -> Generator[None]:
    """Makes running programs call this host until the end of the block."""
    _current.append(host)
    try:
        yield
    finally:
        _current.pop()


def register() -> None:
    """Registers the host call with XLA:CPU. Call it before compiling a program that needs it."""
    bindings.register_host_call(TARGET, _dispatch)


def _dispatch(out: int, operands: Any) -> None:
    _current[-1].call(out, operands)

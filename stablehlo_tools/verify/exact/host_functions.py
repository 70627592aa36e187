"""Functions of whole arrays that the host computes while a mapped program runs.

XLA:CPU calls them by a custom call, whose first operand is the number of the function in the
program's list. The host computes an exact function (a triangular solve, a top-k) or an
uninterpreted one: random numbers from a hash of all operands. A function may treat some dimensions
independently, as the matrices of a batch or the samples of a kernel. Each index of them has a hash
of its own. So the function of a part of a batch is that part of the function of the batch.

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
from typing import Any, NamedTuple

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.custom_calls import is_of_matrices, label
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.dialect.factors import Along, FactorRole
from stablehlo_tools.dialect.kernels.table import config_of_one
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.verify.element_types import Array, element_type
from stablehlo_tools.verify.exact.field import Field

TARGET = "stablehlo_tools_field_host"
PROBE = "probe"
_MATRIX = 2  # dimensions of a matrix
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


class Independent(NamedTuple):
    """A factor that a function treats independently: its size, and its dimension of each operand
    and each result, None for a tensor without it."""

    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True)
class HostFunction:
    """A function of arrays. `kind`: `opaque`, `triangular_solve`, `top_k`, or `probe`. `name`
    identifies an opaque function. `along` are the dimensions that it treats independently."""

    kind: str
    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # element type and shape
    results: tuple[tuple[str, tuple[int, ...]], ...]
    options: Mapping[str, Any]
    inexact: tuple[bool, ...] = ()  # for each result, True if it holds residues
    along: tuple[Independent, ...] = ()


def write_host_call(
    kind: str, op: ir.Operation, inexact: tuple[bool, ...], builder: Builder, number: int
) -> tuple[HostFunction, list[ir.Value]]:
    """Writes the host call that replaces an op; returns its function and its results.

    Raises ToolError for element types that NumPy does not have.
    """
    options = _options(kind, op)
    name, along = kind, ()
    if kind == "opaque":
        others = sorted(f"{n} = {op.attributes[n]}" for n in op.attributes if n not in _PLACING)
        along = _independent_along(op)
        name = " ".join((label(op), config_of_one(op, dimensions_of(op)), *others))
    written = write_call(kind, name, list(op.operands), op.results, builder, number, options)
    return replace(written[0], inexact=inexact, along=along), written[1]


def _independent_along(op: ir.Operation) -> tuple[Independent, ...]:
    """Returns the dimensions that an op treats independently."""
    shapes, made = ([shape_of(value) for value in side] for side in (op.operands, op.results))
    if op.name != CUSTOM_CALL or is_of_matrices(op):  # each matrix of a batch
        rank = len(shapes[0]) - _MATRIX
        return tuple(
            Independent(shapes[0][dim], (dim,) * len(shapes), (dim,) * len(made))
            for dim in range(rank)
        )
    relation = dimensions_of(op)
    kept = () if relation is None else relation.factors
    return tuple(
        Independent(
            factor.size,
            tuple(_dim_of(factor.in_operand(i)) for i in range(len(shapes))),
            tuple(_dim_of(factor.in_result(i)) for i in range(len(made))),
        )
        for factor in kept
        if factor.role is FactorRole.KEPT
    )


def _dim_of(along: Along | None) -> int | None:
    return None if along is None else along.dim


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
        results = [
            np.zeros(shape, np.complex128 if name.startswith("complex") else np.int64)
            for name, shape in function.results
        ]
        # Without independent dimensions, this is one index: the function of whole operands.
        for index in np.ndindex(*(each.size for each in function.along)):
            given = [
                operand[
                    _place_of(index, [each.operands[i] for each in function.along], operand.ndim)
                ]
                for i, operand in enumerate(operands)
            ]
            places = [
                _place_of(index, [each.results[i] for each in function.along], result.ndim)
                for i, result in enumerate(results)
            ]
            signatures = [
                (name, result[place].shape)
                for (name, _), result, place in zip(function.results, results, places, strict=True)
            ]
            drawn = self._drawn(function, given, signatures)
            for result, place, part in zip(results, places, drawn, strict=True):
                result[place] = part
        return results

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
                sizes = operands[0].shape[-2:] if operands else ()
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


def _place_of(
    index: Sequence[int], dims: Sequence[int | None], rank: int
) -> tuple[int | slice, ...]:
    """Returns the position in a tensor of an index along some of its dimensions."""
    found = {dim: number for dim, number in zip(dims, index, strict=True) if dim is not None}
    return tuple(found.get(dim, slice(None)) for dim in range(rank))


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

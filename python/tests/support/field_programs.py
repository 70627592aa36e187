"""Programs in exact arithmetic: mapped and run in this process, without a child, and what their
residues should be by Python's integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.exact.entered_branches import write_probes
from stablehlo_tools.verify.exact.field import Field
from stablehlo_tools.verify.exact.host_functions import Host, HostFunction, register, register_host
from stablehlo_tools.verify.exact.mapping import field_of, map_into_field

FIELD = Field(16777199, 2**21)
P = FIELD.prime


class MappedProgram:
    """A module that computes with residues, compiled for one device."""

    def __init__(self, text: str, field: Field | None = FIELD) -> None:
        context = bindings.new_context()
        if "!quant" in text:
            bindings.load_quantized_types(context)
        module = bindings.parse_module(text, context)
        self.field = field or field_of([module])
        functions: list[HostFunction] = []
        with context, ir.Location.unknown():
            write_probes(module, functions)
        map_into_field(module, self.field, functions)
        register()
        self.devices = jax.devices()[:1]
        self.executable = bindings.compile_for_devices(
            bindings.write_bytecode(module), 1, 1, self.devices, partitioned=False
        )
        self.host = Host(self.field, functions)

    def __call__(self, *inputs: Any) -> list[Array]:
        with register_host(self.host), jax.enable_x64(True):
            arguments = [[np.asarray(each)] for each in inputs]
            results = bindings.run_on_devices(self.executable, arguments, self.devices)
            return [np.asarray(parts[0]) for parts in results]


def mapped(function: Callable[..., Any], *specs: Any, field: Field | None = FIELD) -> MappedProgram:
    """A jax function in exact arithmetic; `field` None: the one that suits its constants."""
    exported = export.export(jax.jit(function, keep_unused=True))(*specs)
    return MappedProgram(str(exported.mlir_module()), field)


def module_text(body: str, inputs: str, outputs: str) -> str:
    """A module with one function."""
    return f"func.func @main({inputs}) -> ({outputs}) {{\n{body}\n}}"


def written(body: str, *inputs: str, outputs: str) -> MappedProgram:
    """A program with inputs %a and %b of some types, as `4xf32`; it returns %0 if its text does not
    say more."""
    given = ", ".join(
        f"%{name}: tensor<{type_}>" for name, type_ in zip("ab", inputs, strict=False)
    )
    types = ", ".join(f"tensor<{type_}>" for type_ in outputs.split(", "))
    if "\n    return" not in body and "\nreturn" not in body:
        body = f"{body}\nreturn %0 : {types}"
    return MappedProgram(module_text(body, given, types))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def c64(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# Residues, and what is expected of them.


def residues(field: Field, *shape: int, seed: int = 0) -> Array:
    """Uniform centred residues."""
    return field.random(np.random.default_rng((seed, *shape)), shape)


def centred(values: Any) -> Array:
    """Centred residues of Python integers or of NumPy's."""
    residue = np.asarray(values, object) % P
    return np.where(residue > FIELD.half, residue - P, residue).astype(np.int64)


def inverses(values: Array) -> Array:
    """What each residue times is 1; 0 for 0."""
    found = [FIELD.inverse(int(each)) for each in values.reshape(-1)]
    return np.array(found, object).reshape(values.shape)


def big(values: Array) -> Array:
    """Python's integers."""
    return values.astype(object)


def same(found: Array, expected: Any) -> None:
    """Asserts that residues are those of some integers."""
    expected = centred(expected)
    assert found.dtype == np.int64
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def ordered(values: Array) -> Array:
    """Integers with the order of residues."""
    return FIELD.to_ordered(values)


def by_order(choose: Callable[..., Array], *values: Array) -> Array:
    """The residues that NumPy's `choose` gives of integers that are ordered as they are."""
    chosen = choose(*map(ordered, values))
    return (chosen + 2**23) % 2**24 - 2**23


def complex_residues(*shape: int, seed: int = 0) -> Array:
    return residues(FIELD, *shape, seed=seed) + 1j * residues(FIELD, *shape, seed=seed + 100)


def parts(values: Array) -> tuple[Array, Array]:
    return np.real(values).astype(np.int64).astype(object), np.imag(values).astype(np.int64).astype(
        object
    )


def same_complex(found: Array, real: Any, imaginary: Any) -> None:
    assert found.dtype == np.complex128
    assert np.array_equal(np.real(found), centred(real))
    assert np.array_equal(np.imag(found), centred(imaginary))

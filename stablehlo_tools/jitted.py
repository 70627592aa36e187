"""The callable behind `stablehlo_tools.jit`: one transformed artifact per kind of call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import export
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools import api, bindings
from stablehlo_tools.passes import Pipeline
from stablehlo_tools.program_mesh import program_mesh

_Call = Callable[..., Any]


class Jitted:
    """Exports a function for the arguments it is called with, transforms that, and calls it."""

    def __init__(self, function: _Call, pipeline: Pipeline, options: dict[str, Any]) -> None:
        self.jitted = jax.jit(function, **options)
        self.pipeline = pipeline
        self.static_positions, self.static_names = _static_arguments(function, options)
        self.calls: dict[Hashable, _Call] = {}
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self.__doc__ = getattr(function, "__doc__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic = self._dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        statics = (
            tuple((i, args[i]) for i in sorted(self.static_positions) if i < len(args)),
            tuple((n, kwargs[n]) for n in sorted(self.static_names) if n in kwargs),
        )
        key = (tree, statics, tuple(_kind(leaf) for leaf in leaves))
        if key not in self.calls:
            self.calls[key] = self._compile(args, kwargs, leaves)
        return self.calls[key](*leaves)

    def export(self, *args: Any, **kwargs: Any) -> export.Exported:
        """The transformed artifact for these arguments, to save or to inspect.

        Arguments may be `jax.ShapeDtypeStruct`s. Warnings of passes become Python warnings.
        """
        backend = jax.default_backend()
        platform = "cuda" if backend == "gpu" else backend
        plain = export.export(self.jitted, platforms=[platform])(*args, **kwargs)
        return api.transform(plain, self.pipeline)

    def _compile(self, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[Any]) -> _Call:
        lowered = self.jitted.trace(*args, **kwargs).lower()
        donated = [info.donated for info in jax.tree.leaves(lowered.args_info)]
        artifact = self.export(*args, **kwargs)
        devices = bindings.lowered_devices(lowered)
        mesh = program_mesh(artifact, devices)
        traced = [isinstance(leaf, Tracer) and len(devices) > 1 for leaf in leaves]

        def call(*flat: Any) -> Any:
            named_devices = [
                _anywhere_on(mesh, value) if inside else value
                for value, inside in zip(flat, traced, strict=True)
            ]
            positional, named = jax.tree.unflatten(artifact.in_tree, named_devices)
            return artifact.call(*positional, **named)

        return jax.jit(
            call,
            in_shardings=_placements(artifact, mesh, leaves),
            donate_argnums=[i for i, given in enumerate(donated) if given],
        )

    def _dynamic(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        positional = tuple(a for i, a in enumerate(args) if i not in self.static_positions)
        return positional, {k: v for k, v in kwargs.items() if k not in self.static_names}


def _static_arguments(function: _Call, options: dict[str, Any]) -> tuple[set[int], set[str]]:
    """The static arguments by position and by name, each inferred from the other, as in jax."""
    numbers, names = options.get("static_argnums"), options.get("static_argnames")
    positions: set[int] = {numbers} if isinstance(numbers, int) else set(numbers or ())
    named: set[str] = {names} if isinstance(names, str) else set(names or ())
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return positions, named
    positions = {i % len(parameters) if i < 0 else i for i in positions}
    named |= {parameters[i] for i in positions if i < len(parameters)}
    return positions | {i for i, name in enumerate(parameters) if name in named}, named


def _kind(leaf: Any) -> Hashable:
    aval = jax.typeof(leaf)
    traced = isinstance(leaf, Tracer)
    return aval.shape, aval.dtype, aval.weak_type, traced or _committed_sharding(leaf)


def _committed_sharding(leaf: Any) -> Any:
    if isinstance(leaf, Tracer) or not getattr(leaf, "committed", False):
        return None
    return leaf.sharding


def _placements(artifact: export.Exported, whole: Mesh, leaves: list[Any]) -> tuple[Any, ...]:
    """Where each flat argument goes: where it is, where it was exported for, or everywhere."""
    devices = whole.devices
    if devices.size == 1:
        return (None,) * len(leaves)
    everywhere = NamedSharding(whole, PartitionSpec())
    placements: list[Any] = []
    for leaf, sharding in zip(leaves, artifact.in_shardings_jax(), strict=True):
        if _committed_sharding(leaf) is not None or isinstance(leaf, Tracer):
            placements.append(None)
        elif isinstance(sharding, NamedSharding) and sharding.mesh.size == devices.size:
            mesh = sharding.mesh
            concrete = Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)
            placements.append(NamedSharding(concrete, sharding.spec))
        else:
            placements.append(everywhere)
    return tuple(placements)


def _anywhere_on(mesh: Mesh, value: Any) -> Any:
    """Tells an outer jit which devices the call needs, leaving the sharding to it."""
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * jax.numpy.ndim(value))
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

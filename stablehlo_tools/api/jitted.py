"""The callable behind `stablehlo_tools.jit`: one transformed artifact per kind of call.

Which calls are of one kind is for jax to say: those for which it has one jaxpr, by whatever its
own cache looks at (types and values of static arguments, weak types, the configuration, meshes),
on arguments that are committed to one sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import jax
from jax import export
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools import bindings
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts.module_bytes import vouch
from stablehlo_tools.artifacts.program_mesh import program_mesh
from stablehlo_tools.diagnostics import Place, ToolError, note
from stablehlo_tools.passes.pipeline import Pipeline

_Call = Callable[..., Any]


def jit(function: Callable[..., Any], pipeline: str | Pipeline, **jit_options: Any) -> Jitted:
    """Like `jax.jit`, but through export and a pipeline: exports, transforms, calls.

    `jit_options` go to `jax.jit` (in_shardings, out_shardings, static_argnums, donate_argnums …).
    One artifact is made for each set of argument shapes, dtypes, shardings and static values, as
    `jax.jit` would compile one. Raises ToolError when a pass refuses.
    """
    return Jitted(function, transforming.parsed(pipeline), jit_options)


class Jitted:
    """Exports a function for the arguments it is called with, transforms that, and calls it."""

    def __init__(self, function: _Call, pipeline: Pipeline, options: dict[str, Any]) -> None:
        self.jitted: Any = jax.jit(function, **options)
        self.pipeline = pipeline
        self.static_positions, self.static_names = bindings.static_arguments(self.jitted)
        self.calls: dict[Hashable, _Call] = {}
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self.__doc__ = getattr(function, "__doc__", None)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jaxpr = self.jitted.trace(*args, **kwargs).jaxpr
        leaves, tree = jax.tree.flatten(self._dynamic(args, kwargs))
        key = (jaxpr, tree, tuple(_placed(leaf) for leaf in leaves))
        if key not in self.calls:
            self.calls[key] = self._compile(args, kwargs, leaves)
        return self.calls[key](*leaves)

    def clear_cache(self) -> None:
        """Forgets all artifacts, and what jax traced for them."""
        self.calls.clear()
        self.jitted.clear_cache()

    def export(self, *args: Any, **kwargs: Any) -> export.Exported:
        """The transformed artifact for these arguments, to save or to inspect.

        Arguments may be `jax.ShapeDtypeStruct`s. Warnings of passes become Python warnings. Raises
        ToolError for a program that a pass refuses, or that calls Python.
        """
        backend = jax.default_backend()
        # jax names a backend, jax.export the platform that it compiles for.
        platform = "cuda" if backend == "gpu" else backend
        try:
            plain = export.export(self.jitted, platforms=[platform])(*args, **kwargs)
        except NotImplementedError as reason:
            jaxpr = self.jitted.trace(*args, **kwargs).jaxpr
            raise _named_callbacks(jaxpr, reason) or reason from None
        # MLIR in this process has just written it: no other process need read it first.
        vouch(plain.mlir_module_serialized)
        return transforming.transform(plain, self.pipeline)

    def _compile(self, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[Any]) -> _Call:
        lowered = self.jitted.trace(*args, **kwargs).lower()
        # An Exported does not say what its function gave up: whoever calls it donates anew.
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
        static = {i + len(args) if i < 0 else i for i in self.static_positions}
        positional = tuple(a for i, a in enumerate(args) if i not in static)
        return positional, {k: v for k, v in kwargs.items() if k not in self.static_names}


def _named_callbacks(jaxpr: Any, reason: NotImplementedError) -> ToolError | None:
    """What to say of a program that calls Python; None if it does not, and something else failed.

    jax.export refuses such a program without saying where.
    """
    calls = [
        (name, Place(file and Path(file).name, line, function=function))
        for name, file, line, function in bindings.python_callbacks(jaxpr)
    ]
    if not calls:
        return None
    notes = tuple(note(f"{name} calls Python here too", place) for name, place in calls[1:])
    return ToolError(
        f"{calls[0][0]} calls Python, which an exported program cannot hold ({reason}): return the "
        "value and print or use it outside of the function, or leave this function to jax.jit",
        calls[0][1],
        notes,
    )


def _placed(leaf: Any) -> Hashable:
    return isinstance(leaf, Tracer) or _committed_sharding(leaf)


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

"""The callable that `stablehlo_tools.jit` returns: one transformed artifact per kind of call.

Calls are of one kind if jax traces them to one jaxpr and their arguments are committed to the same
shardings. The jaxpr depends on the keys of jax's cache: types, static arguments, weak types, the
configuration and meshes.

Inside a transformation of jax the call is an op of its own, `transformed_call`. It has the rules of
every op that calls a jaxpr: its derivative is such an op on the derived jaxpr. Evaluating the op
transforms that jaxpr, and so does an outer `jax.jit` that compiles it. An outer
`stablehlo_tools.jit` compiles it as part of its own program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps
from pathlib import Path
from types import MethodType
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import jax
from jax import export
from jax.extend.core import Primitive, jaxpr_as_fun, register_call_primitive_rules
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablehlo_tools import bindings
from stablehlo_tools.api import optimizing, planning, transforming
from stablehlo_tools.api.inspecting import Inspection, inspect
from stablehlo_tools.artifacts.module_bytes import vouch
from stablehlo_tools.artifacts.program_mesh import program_mesh
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Place, ToolError, naming, note
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.chips import chip_called, target_of

_Call = Callable[..., Any]
_Transform = Callable[[export.Exported], export.Exported]


AUTO = "auto"


@overload
def jit(
    function: _Call,
    pipeline: str | Pipeline = AUTO,
    *,
    target: str | None = None,
    hardware: str | None = None,
    memory_limit: float | None = None,
    budget: float | None = None,
    candidates: int | None = None,
    plan: Literal["auto"] | None = None,
    **jit_options: Any,
) -> Jitted: ...
@overload
def jit(
    *,
    pipeline: str | Pipeline = AUTO,
    target: str | None = None,
    hardware: str | None = None,
    memory_limit: float | None = None,
    budget: float | None = None,
    candidates: int | None = None,
    plan: Literal["auto"] | None = None,
    **jit_options: Any,
) -> Callable[[_Call], Jitted]: ...
def jit(
    function: _Call | None = None,
    pipeline: str | Pipeline = AUTO,
    *,
    target: str | None = None,
    hardware: str | None = None,
    memory_limit: float | None = None,
    budget: float | None = None,
    candidates: int | None = None,
    plan: Literal["auto"] | None = None,
    **jit_options: Any,
) -> Jitted | Callable[[_Call], Jitted]:
    """Like `jax.jit`, but through export and a pipeline: exports, transforms, calls.

    Without a function it is a decorator: `@stablehlo_tools.jit(pipeline="fsdp")`. `jit_options` are
    passed to `jax.jit` (in_shardings, out_shardings, static_argnums, donate_argnums …). One
    artifact is made for each set of argument shapes, dtypes, shardings and static values, as
    `jax.jit` would compile one. Raises ToolError if a pass refuses the program.

    `pipeline="auto"` searches for the fastest pipeline with `stablehlo_tools.optimize`. The options
    from `target` to `candidates` are passed to it. Without target and hardware, the target is the
    device of jax.

    `plan="auto"`: the step is written as for one device; `stablehlo_tools.plan` chooses, by the
    model, how all devices of jax divide it, before the pipeline, which may be "". Shardings of
    arguments are not read.

    Under `jax.grad`, `jax.vmap` and similar, the derived programs are transformed. Inside an outer
    `stablehlo_tools.jit`, the outer pipeline transforms the whole program. Inside an outer
    `jax.jit`, the call stays a transformed program of its own.
    """
    search = {
        "target": target,
        "hardware": hardware,
        "memory_limit": memory_limit,
        "budget": budget,
        "candidates": candidates,
    }
    if pipeline == AUTO:
        transform = partial(_optimize_exported, **search)
    else:
        of_plan = ("hardware", "memory_limit") if plan else ()
        given = [n for n, value in search.items() if value is not None and n not in of_plan]
        if given:
            raise ToolError(
                f"jit: {', '.join(given)} needs pipeline='auto'; give it to a pass as an option "
                "of that pass"
            )
        steps = None if plan and not pipeline else transforming.as_pipeline(pipeline)
        transform = partial(_transform_exported, pipeline=steps)
    planner = None if plan is None else partial(_plan_exported, hardware, memory_limit)
    if function is None:
        return partial(Jitted, transform=transform, planner=planner, **jit_options)
    return Jitted(function, transform, planner, **jit_options)


def _plan_exported(
    hardware: str | None, memory_limit: float | None, exported: export.Exported
) -> export.Exported:
    devices = len(jax.devices())
    if devices == 1:
        return exported
    if hardware is None:
        _, hardware = _machine(None)
    found = planning.plan(exported, hardware, devices, budget=0, memory_limit=memory_limit)
    return found.exported


def _transform_exported(exported: export.Exported, pipeline: Pipeline | None) -> export.Exported:
    return exported if pipeline is None else transforming.transform(exported, pipeline)


def _optimize_exported(
    exported: export.Exported, target: str | None, hardware: str | None, **request: Any
) -> export.Exported:
    if target is None:
        target, hardware = _machine(hardware)
    return optimizing.optimize(exported, target, hardware, **request).exported


def _machine(hardware: str | None) -> tuple[str, str]:
    """Returns the target of the hardware and its name; without one, those of the jax device.

    Raises ToolError if no compiler is known."""
    if hardware is not None:
        target = target_of(load_hardware(hardware))
        if target is None:
            raise ToolError(f"no compiler is known for {hardware}: give a target as well")
        return target.value, hardware
    device = jax.devices()[0].device_kind
    chip = chip_called(device)
    if chip is None:
        raise ToolError(
            f"pipeline='auto' needs the device's compiler, and none is known for {device!r}: name "
            "the hardware to optimize for, or another pipeline"
        )
    return chip.target.value, chip.name


class Jitted:
    """Exports a function for the arguments it is called with, transforms that, and calls it."""

    __name__ = "function"  # for functions without a name, such as a partial

    def __init__(
        self,
        function: _Call,
        transform: _Transform,
        planner: _Transform | None = None,
        **options: Any,
    ) -> None:
        update_wrapper(self, function)

        @wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        # jax caches lowered programs by function, and another jit may lower the same one otherwise.
        self.jitted: Any = jax.jit(alone, **options)
        self.transform, self.planner = transform, planner
        self.planned: WeakKeyDictionary[Any, export.Exported] = WeakKeyDictionary()  # by jaxpr
        self.static_positions, self.static_names = bindings.static_arguments(self.jitted)
        # By jaxpr, and dropped with it: jax may trace a function again that closes over a tracer.
        self.calls: WeakKeyDictionary[Any, dict[Hashable, _Call]] = WeakKeyDictionary()
        self.called: WeakKeyDictionary[Any, dict[Hashable, export.Exported]] = WeakKeyDictionary()
        self.as_calls: dict[Any, Any] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self.jitted(*args, **kwargs)
        traced = self.jitted.trace(*args, **kwargs)
        leaves, tree = jax.tree.flatten(self._dynamic(args, kwargs))
        if bindings.at_top_level():
            return self._call(traced.jaxpr, tree, self.jitted, args, kwargs, leaves)(*leaves)
        call, around = self.as_calls.get(traced.jaxpr), []
        if call is None:
            call, around = bindings.as_call(traced)
            if not around:  # otherwise it is never traced again
                self.as_calls[traced.jaxpr] = call
        results = transformed_call.bind(*around, *leaves, call_jaxpr=call, jitted=self)
        return jax.tree.unflatten(traced.out_tree, results)

    def clear_cache(self) -> None:
        """Forgets all artifacts, and what jax traced for them."""
        for cache in (self.calls, self.called, self.as_calls, self.planned):
            cache.clear()
        self.jitted.clear_cache()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the results: those of the program before the pipeline."""
        return self.jitted.eval_shape(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> export.Exported:
        """The transformed artifact for these arguments, to save or to inspect.

        Arguments may be `jax.ShapeDtypeStruct`s. Warnings of passes become Python warnings. Raises
        ToolError for a program that a pass refuses, or that calls Python.
        """
        return self._export(self.jitted, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The call of the transformed program, traced: `.jaxpr`, `.lower()` and so on."""
        program = self._program(self.jitted, args, kwargs)
        placements = program.placements(jax.tree.leaves(self._dynamic(args, kwargs)))
        infos, structure = jax.tree.flatten(program.arguments)
        given = [
            jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=placement)
            for info, placement in zip(infos, placements, strict=True)
        ]
        positional, named = jax.tree.unflatten(structure, given)
        by_position, by_name = program.arguments
        return jax.jit(
            program.call,
            donate_argnums=[i for i, part in enumerate(by_position) if _is_donated(part)],
            donate_argnames=[name for name, part in by_name.items() if _is_donated(part)],
        ).trace(*positional, **named)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The transformed program as jax lowers it: `.as_text()`, `.compile()` and so on."""
        return self.trace(*args, **kwargs).lower()

    def inspect(
        self, *args: Any, hardware: str | None = None, target: str | None = None, **kwargs: Any
    ) -> Inspection:
        """Times the transformed program's collectives, as `stablehlo-tools inspect` does.

        `hardware` and `target` are that command's options: times for the program as written, or
        as the target's compiler schedules it.
        """
        return inspect(self.export(*args, **kwargs), hardware=hardware, target=target)

    def _export(
        self,
        jitted: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        platforms: Sequence[str] | None = None,
    ) -> export.Exported:
        if self.planner is not None:
            return self._export_planned(jitted, args, kwargs)
        return self._export_as_is(jitted, args, kwargs, platforms, [self.transform])

    def _export_planned(
        self, jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> export.Exported:
        """Exports for one device, whatever the arguments are divided over, and plans once."""
        if jitted is not self.jitted or not self.planner:
            raise ToolError(
                f"{self.__name__}: jit(plan='auto') plans a whole program: call it outside of "
                "jax.jit, jax.grad and other transformations"
            )
        bare = self._without_placements(args, kwargs)
        jaxpr = jitted.trace(*bare[0], **bare[1]).jaxpr
        found = self.planned.get(jaxpr)
        if found is None:
            found = self._export_as_is(jitted, *bare, None, [self.planner, self.transform])
            self.planned[jaxpr] = found
        return found

    def _without_placements(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        static = self._static_positions(args)
        positional = [a if i in static else jax.tree.map(_shape, a) for i, a in enumerate(args)]
        named = {
            k: v if k in self.static_names else jax.tree.map(_shape, v) for k, v in kwargs.items()
        }
        return positional, named

    def _export_as_is(
        self,
        jitted: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        platforms: Sequence[str] | None,
        transforms: Sequence[_Transform],
    ) -> export.Exported:
        try:
            with _lowering_whole():
                plain = export.export(jitted, platforms=platforms or [default_platform()])(
                    *args, **kwargs
                )
        except NotImplementedError as reason:
            jaxpr = jitted.trace(*args, **kwargs).jaxpr
            raise _named_callbacks(jaxpr, reason) or reason from None
        # MLIR in this process has just written it, so it is safe to read here.
        vouch(plain.mlir_module_serialized)
        with naming(self.__name__):
            for transform in transforms:
                plain = transform(plain)
        return plain

    def _program(self, jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> JittedProgram:
        with _lowering_whole():
            lowered = jitted.trace(*args, **kwargs).lower()
        artifact = self._export(jitted, args, kwargs)
        devices = bindings.lowered_devices(lowered)
        if self.planner is not None:
            devices = jax.devices()
        mesh = program_mesh(artifact, devices)
        return JittedProgram(artifact, mesh, lowered.args_info)

    def _call(
        self,
        jaxpr: Any,
        tree: Any,
        jitted: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> _Call:
        """Returns the compiled call for these leaves, and for others with the same placements."""
        calls = self.calls.setdefault(jaxpr, {})
        key = (tree, tuple(map(committed_sharding, leaves)))
        if key not in calls:
            calls[key] = self._program(jitted, args, kwargs).build_call(leaves)
        return calls[key]

    def evaluate(self, leaves: list[Any], call: Any) -> Any:
        """The results of a jaxpr that jax derived from the call, transformed."""
        return self._call(call, None, bindings.as_jitted(call), leaves, {}, leaves)(*leaves)

    def called_in(self, call: Any, avals: Sequence[Any], platforms: Sequence[str]) -> _Call:
        """The transformed call inside a program for these platforms."""
        artifacts = self.called.setdefault(call, {})
        key = (tuple(avals), tuple(platforms))
        if key not in artifacts:
            artifacts[key] = self._export(bindings.as_jitted(call), avals, {}, platforms)
        return artifacts[key].call

    def _static_positions(self, args: Sequence[Any]) -> set[int]:
        return {i + len(args) if i < 0 else i for i in self.static_positions}

    def _dynamic(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        static = self._static_positions(args)
        positional = tuple(a for i, a in enumerate(args) if i not in static)
        return positional, {k: v for k, v in kwargs.items() if k not in self.static_names}


@dataclass(frozen=True)
class JittedProgram:
    """A transformed program, its mesh, and the `args_info` of `jax.jit`."""

    artifact: export.Exported
    mesh: Mesh
    arguments: Any

    @property
    def call(self) -> _Call:
        """The call of the artifact, under the name of its function."""
        artifact = self.artifact

        def call(*args: Any, **kwargs: Any) -> Any:
            results = artifact_call.bind(*jax.tree.leaves((args, kwargs)), artifact=artifact)
            return jax.tree.unflatten(artifact.out_tree, results)

        call.__name__ = call.__qualname__ = artifact.fun_name
        return call

    def build_call(self, leaves: list[Any], **options: Any) -> _Call:
        """Returns the jitted call, for flat arguments with the placements of `leaves`; `options`
        are those of jax.jit."""

        def call(*flat: Any) -> Any:
            positional, named = jax.tree.unflatten(self.artifact.in_tree, flat)
            return self.call(*positional, **named)

        # An Exported does not record donated arguments, so the call donates them again.
        donated = [i for i, info in enumerate(jax.tree.leaves(self.arguments)) if info.donated]
        options["donate_argnums"] = donated
        in_shardings = tuple(
            None if committed_sharding(leaf) is not None else placement
            for leaf, placement in zip(leaves, self.placements(leaves), strict=True)
        )
        if any(in_shardings):  # with any, None for each or not, jax.jit commits the results
            options["in_shardings"] = in_shardings
        return jax.jit(call, **options)

    def placements(self, leaves: list[Any]) -> list[Any]:
        """Returns each flat argument's sharding: its own, the exported one, or replicated.

        None for each argument on one device."""
        devices = self.mesh.devices
        if devices.size == 1:
            return [None] * len(leaves)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        placements: list[Any] = []
        for leaf, sharding in zip(leaves, self.artifact.in_shardings_jax(), strict=True):
            committed = committed_sharding(leaf)
            if committed is not None:
                placements.append(committed)
            elif isinstance(sharding, NamedSharding) and sharding.mesh.size == devices.size:
                mesh = sharding.mesh
                concrete = Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)
                placements.append(NamedSharding(concrete, sharding.spec))
            else:
                placements.append(everywhere)
        return placements


def default_platform() -> str:
    """Returns the platform of the default backend, as jax.export names it."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _shape(leaf: Any) -> Any:
    """Returns the type of an array without its devices."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)


def committed_sharding(leaf: Any) -> Any:
    return leaf.sharding if getattr(leaf, "committed", False) else None


def _is_donated(argument: Any) -> bool:
    leaves = jax.tree.leaves(argument)
    return bool(leaves) and all(info.donated for info in leaves)


# Registered with a parameter `jitted`, which jax passes on to derived calls.
transformed_call = Primitive("transformed_call")
register_call_primitive_rules(transformed_call)
transformed_call.skip_canonicalization = True  # of weak types, as for jax's own calls
_thread = threading.local()


@contextmanager
def _lowering_whole() -> Generator[None]:
    """Marks a block in which jax lowers a program to be transformed as a whole."""
    before = getattr(_thread, "lowering_whole", False)
    _thread.lowering_whole = True
    try:
        yield
    finally:
        _thread.lowering_whole = before


def _lower_call(context: Any, *operands: Any, call_jaxpr: Any, jitted: Jitted) -> Any:
    around = context.module_context.axis_context
    if getattr(_thread, "lowering_whole", False):
        function = jaxpr_as_fun(call_jaxpr)
    elif isinstance(around, mlir.SPMDAxisContext) and around.manual_axes:
        raise ToolError(
            f"{jitted.__name__} is called inside jax.shard_map, and only a whole program can be "
            "transformed: put stablehlo_tools.jit around the shard_map"
        )
    else:
        platforms = context.platforms or context.module_context.platforms
        function = jitted.called_in(call_jaxpr, context.avals_in, platforms)
    return mlir.lower_fun(function, multiple_results=True)(context, *operands)


def _flat_call(artifact: export.Exported) -> _Call:
    def call(*leaves: Any) -> Any:
        positional, named = jax.tree.unflatten(artifact.in_tree, leaves)
        return jax.tree.leaves(artifact.call(*positional, **named))

    return call


# The primitive that `jax.jit` compiles. It would commit the results of an Exported's own call.
artifact_call = Primitive("artifact_call")
artifact_call.multiple_results = True
artifact_call.def_abstract_eval(
    lambda *avals, artifact: jax.make_jaxpr(_flat_call(artifact))(*avals).out_avals
)
mlir.register_lowering(
    artifact_call,
    lambda context, *operands, artifact: mlir.lower_fun(
        _flat_call(artifact), multiple_results=True
    )(context, *operands),
    cacheable=False,
)
transformed_call.def_impl(
    lambda *leaves, call_jaxpr, jitted: jitted.evaluate(list(leaves), call_jaxpr)
)
mlir.register_lowering(transformed_call, _lower_call, cacheable=False)


def _named_callbacks(jaxpr: Any, reason: NotImplementedError) -> ToolError | None:
    """Returns the error of a program that calls Python, with the places of the calls.

    jax.export refuses such a program without the places. None if the program does not call Python.
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

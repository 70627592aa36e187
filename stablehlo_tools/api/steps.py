"""Exports a step, and loads the artifact of one to call it in a training loop.

`jax.export` has two gaps here. `serialize` refuses states of optax, flax, equinox and others,
because their types are not registered. `Exported.call` donates no argument, so a loop needs more
memory than the program was proven to. `export` writes plain structures, and `load_step` accepts the
caller's own, with the donation of the artifact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export

from stablehlo_tools.analysis.entry import attributes_of_arguments, is_donated
from stablehlo_tools.api.jitted import JittedProgram, committed_sharding, default_platform
from stablehlo_tools.artifacts.artifact import Artifact, from_exported, load
from stablehlo_tools.artifacts.program_mesh import program_mesh
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.walk import entry_function

_UNSTABLE = "custom calls"  # in jax's refusal of a custom call without a promise


def export(
    step: Callable[..., Any],
    *args: Any,
    platforms: Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    allow: Sequence[str] = (),
) -> jax_export.Exported:
    """Exports a step, so that the file can be written whatever types its arguments have.

    NamedTuples, dataclasses and other nodes become tuples of their fields in the artifact; a step
    that `load_step` returns accepts the original types.

    Args:
        step: a function, or one that `jax.jit` returned.
        *args: arguments of one call, as arrays or `jax.ShapeDtypeStruct`s. Their shardings become
            those of the artifact.
        platforms: `["cuda"]` or `["tpu"]`, for which the artifact is compiled later; by default the
            accelerator of this machine. An export for `"cpu"` writes kernels, random bits and
            grouped products in other forms, so its times say little about an accelerator.
        donate_argnums: arguments whose memory the step may reuse, such as the state; only for a
            function without `jax.jit`.
        allow: targets of custom calls that `jax.export` does not promise to keep, such as those of
            one's own kernels.

    Raises:
        ToolError: no platform is given on a machine without an accelerator, or jax refuses a custom
            call, or an argument has a leaf that is no array.
    """
    if platforms is None:
        here = default_platform()
        if here == "cpu":
            raise ToolError(
                "export: this machine has no accelerator: pass platforms=['cuda'] or ['tpu'], "
                "where the step will run; for ['cpu'] jax writes some ops in another form"
            )
        platforms = [here]
    jitted: Any = step
    if hasattr(step, "lower") and not hasattr(step, "trace"):
        raise ToolError(
            f"export: {type(step).__module__} has compiled this function, and what it donates is "
            "not seen here: give the function below it, with donate_argnums"
        )
    if not hasattr(step, "trace"):
        jitted = jax.jit(step, donate_argnums=donate_argnums)
    elif donate_argnums != ():
        raise ToolError("export: donate_argnums belongs to the jax.jit that made this step")
    checks = [jax_export.DisabledSafetyCheck.custom_call(name) for name in (*_KERNELS, *allow)]
    arguments = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=committed_sharding(leaf))
        if isinstance(leaf, jax.Array)
        else leaf
        for leaf in jax.tree.leaves(args)
    ]
    try:
        exported = jax_export.export(jitted, platforms=platforms, disabled_checks=checks)(
            *jax.tree.unflatten(jax.tree.structure(args), arguments)
        )
    except ValueError as error:
        if _UNSTABLE not in str(error):
            raise
        raise ToolError(f"export: {error}; pass its target in `allow`") from None
    except TypeError as error:
        if _NO_ARRAY not in str(error):
            raise
        raise ToolError(
            f"export: {' '.join(str(error).split())}",
            hint="arrays alone: arrays, static = equinox.partition(state, equinox.is_array)",
        ) from None
    # Types that only this process registers with jax would make the file unreadable elsewhere.
    taken, given = (_plain_values(tree) for tree in (exported.in_tree, exported.out_tree))
    stated = from_exported(exported)
    types = ir.StringAttr.get(_types_of(args), stated.module.context)
    stated.module.operation.attributes[_TYPES] = types
    return replace(
        stated.to_exported(),
        in_tree=jax.tree.structure(taken),
        out_tree=jax.tree.structure(given),
        _get_vjp=None,
    )


_TYPES = "stablehlo_tools.arguments"  # of a module: the types of the arguments, as text
_NO_ARRAY = "Error interpreting argument"  # in jax's error for a leaf that is no array
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _types_of(args: Sequence[Any]) -> str:
    """Returns the structure of arguments as text, with types, names and static fields."""
    return _ADDRESS.sub("", str(jax.tree.structure(tuple(args))))


_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2")


def _plain_values(tree: Any) -> Any:
    """Returns zeros in a structure with the same leaves in the same order: tuples, lists, dicts."""
    node = tree.node_data()
    if node is None:
        return 0
    kind, keys = node
    children = [_plain_values(child) for child in tree.children()]
    if kind is dict and all(isinstance(key, str) for key in keys):  # others are not written
        return dict(zip(keys, children, strict=True))
    if kind is type(None):
        return None
    return children if kind is list else tuple(children)


def load_step(
    source: str | Path | jax_export.Exported | Artifact,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    check_types: bool = True,
) -> Step:
    """Loads a step to call it in a loop, with the artifact's donated arguments and shardings.

    `compiler_options` are those of `jax.jit`, such as `optimize` recommends. With `check_types`, a
    call with arguments of other types, or with other static fields than `stablehlo_tools.export`
    saw, is an error: the program has their values as constants.

    Raises:
        ToolError: the file is unreadable, or this process has other devices than the artifact.
    """
    if isinstance(source, str | Path):
        source = load(Path(source))
    artifact = from_exported(source) if isinstance(source, jax_export.Exported) else source
    exported = artifact.to_exported()
    here = default_platform()
    if here not in exported.platforms:
        raise ToolError(
            f"the step was exported for {' and '.join(exported.platforms)}, and jax runs on {here} "
            "here: export it with platforms=[…] of this machine"
        )
    devices = jax.devices()
    if len(devices) < exported.nr_devices:
        raise ToolError(
            f"the step is for {exported.nr_devices} devices, and jax has {len(devices)} here; on "
            "several hosts, call jax.distributed.initialize() first"
        )
    main = entry_function(artifact.module)
    listed = attributes_of_arguments(main)
    donated = [False] * len(exported.in_avals)
    for number, leaf in enumerate(exported.module_kept_var_idx):
        donated[leaf] = is_donated(listed, number)
    mesh = program_mesh(exported, devices[: exported.nr_devices])
    infos = [_Donation(each) for each in donated]
    program = JittedProgram(exported, mesh, jax.tree.unflatten(exported.in_tree, infos))
    stated = artifact.module.operation.attributes.get(_TYPES) if check_types else None
    types = "" if stated is None else ir.StringAttr(stated).value
    return Step(exported, program, dict(compiler_options or {}), types, {})


@dataclass(frozen=True)
class _Donation:
    donated: bool


@dataclass(frozen=True, repr=False)
class Step:
    """A step of an artifact, called as the exported function: `state, loss = step(state, batch)`.

    Arguments have the types of the exported function, or those of the artifact. Donated arguments
    cannot be used after a call; `donated` has them, by leaf. A result with the structure of an
    argument, such as the next state, has the type of that argument.
    """

    exported: jax_export.Exported
    program: JittedProgram
    compiler_options: Mapping[str, Any]
    _types: str
    _calls: dict[Hashable, Callable[..., Any]]

    @property
    def donated(self) -> Any:
        """The arguments' structure, with True for each leaf that a call donates."""
        infos = jax.tree.leaves(self.program.arguments)
        return jax.tree.unflatten(self.exported.in_tree, [info.donated for info in infos])[0]

    @property
    def shardings(self) -> Any:
        """The arguments' structure, with the sharding of each leaf: what to place a state by."""
        placements = self.program.placements([None] * len(self.exported.in_avals))
        return jax.tree.unflatten(self.exported.in_tree, placements)[0]

    def place(self, *args: Any) -> Any:
        """Returns the first arguments of a call, in their own types, on the devices of the step."""
        leaves, tree = jax.tree.flatten(args)
        placements = self.program.placements([None] * len(self.exported.in_avals))
        placed = jax.device_put(leaves, placements[: len(leaves)])
        found = jax.tree.unflatten(tree, placed)
        return found[0] if len(args) == 1 else found

    def __repr__(self) -> str:
        donated = sum(jax.tree.leaves(self.donated))
        return (
            f"Step({self.exported.fun_name}: {len(self.exported.in_avals)} arrays, {donated} "
            f"donated, on {self.exported.nr_devices} devices)"
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the step. Raises ToolError if the arguments are not those of the artifact."""
        if named:
            names = ", ".join(named)
            raise ToolError(f"the step takes its arguments by position, not by name: {names}")
        wanted, _ = jax.tree.unflatten(self.exported.in_tree, range(len(self.exported.in_avals)))
        trees = [jax.tree.structure(each) for each in wanted]
        given = [jax.tree.structure(each) for each in args]
        leaves = jax.tree.leaves(args)
        self._check(trees, given, leaves)
        if self._types and given != trees and (own := _types_of(args)) != self._types:
            at = next(n for n, (a, b) in enumerate(zip(own, self._types, strict=False)) if a != b)
            said = [text[max(0, at - 30) : at + 30] for text in (own, self._types)]
            raise ToolError(
                "the arguments have other types or static fields than those of the export: "
                f"…{said[0]}… instead of …{said[1]}…; export the step again, or pass "
                "check_types=False to load_step"
            )
        key = tuple(map(committed_sharding, leaves))
        if key not in self._calls:
            options = {"compiler_options": dict(self.compiler_options)}
            self._calls[key] = self.program.build_call(leaves, **options)
        results = self._calls[key](*leaves)
        same = {tree: own for tree, own in zip(trees, given, strict=True) if tree.num_leaves > 1}
        return _with_types(results, same)

    def _check(self, trees: Sequence[Any], given: Sequence[Any], leaves: Sequence[Any]) -> None:
        counts, own = ([tree.num_leaves for tree in each] for each in (trees, given))
        if counts != own:
            raise ToolError(
                f"the step has {len(counts)} arguments with {counts} arrays, and was called with "
                f"{len(own)} with {own}"
            )
        for number, (leaf, aval) in enumerate(zip(leaves, self.exported.in_avals, strict=True)):
            shape = tuple(getattr(leaf, "shape", ()))
            if shape != aval.shape:
                raise ToolError(
                    f"array {number} of the arguments has shape {shape}, and the step was exported "
                    f"for {aval.shape}: a step has fixed shapes, so export it again"
                )


def _with_types(results: Any, same: dict[Any, Any]) -> Any:
    """Returns results in which each part with the structure of an argument has its type."""
    tree = jax.tree.structure(results)
    if tree in same:
        return jax.tree.unflatten(same[tree], jax.tree.leaves(results))
    if isinstance(results, tuple):
        return tuple(_with_types(each, same) for each in results)
    return results

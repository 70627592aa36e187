"""jax.export files: reads the `Exported` of one, restates its shardings, and explains errors.

A pass may change the sharding of an argument or a result of `main`. Callers place their arguments
by the shardings of the `Exported`, so these must change too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stablehlo_tools import bindings
from stablehlo_tools.analysis.shardings import axes_in, function_sharding, sharding_axes
from stablehlo_tools.artifacts.parsing import AGAIN, HOW_TO_EXPORT, WANTED
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.device_placement import HOST, lies_in_host
from stablehlo_tools.ir.gspmd_import import write_mesh
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import MESH, main_function

if TYPE_CHECKING:
    from jax.export import Exported


_BEHIND_THE_END = re.compile(r"buffer of at least (\d+) bytes")  # an error of Python's struct
_FARTHEST = 1000  # file sizes; a larger offset is of damaged bytes, not of a truncated file
_EXPIRED = "6-month backward-compatibility window"  # in an error of jax
_MODULE_ONLY = "its module alone is readable: opt --module-only FILE -o FILE.bc"


def deserialize_exported(data: bytes) -> Exported:
    """Returns the `Exported` of a file. Raises ToolError."""
    try:
        return bindings.deserialize_with_stand_ins(data)
    except Exception as error:  # damaged bytes make flatbuffers raise any type
        other = _other_version(data, str(error))
        if other:
            raise ToolError(other) from None
        raise _unreadable(data, str(error)) from None


def module_of(data: bytes) -> bytes:
    """Returns the portable artifact in a file of any jax version. Raises ToolError."""
    try:
        module = bindings.exported_envelope(data).module
    except Exception as error:  # as above
        raise _unreadable(data, str(error)) from None
    if bindings.portable_version(module) is None:
        raise _unreadable(data, "")
    return module


def _unreadable(data: bytes, refusal: str) -> ToolError:
    """Explains why bytes of a supposed jax.export file are unreadable: truncated, damaged, or of
    another format."""
    if bindings.BYTECODE_MAGIC not in data:
        said = f"{len(data):,} bytes of an unknown form; {WANTED}"
        return ToolError(said, hint=HOW_TO_EXPORT)
    behind = _BEHIND_THE_END.search(refusal)
    last = int(behind[1]) if behind else 0
    if len(data) < last < _FARTHEST * len(data):
        said = f"that was cut off: it ends at byte {len(data):,}, but refers to byte {last:,}"
        return ToolError(f"a jax.export file {said}", hint=AGAIN)
    return ToolError("a damaged jax.export file: its parts contradict each other", hint=AGAIN)


def _other_version(data: bytes, refusal: str) -> str:
    """Says which jax, or which process, reads an intact file that this one refuses; "" if the file
    is damaged."""
    import jax

    try:
        envelope = bindings.exported_envelope(data)
    except Exception:  # as above
        return ""
    if bindings.portable_version(envelope.module) is None:
        return ""
    if envelope.before_0_8_2:
        return (
            "exported by a jax before 0.8.2 (serialization version "
            f"{envelope.serialization_version}), and jax {jax.__version__} reads only files of "
            f"the last six months: export it again, or read it with jax 0.8.1; {_MODULE_ONLY}"
        )
    if _EXPIRED in refusal:  # such as files without named shardings, before 15 January 2026
        return (
            f"exported by an older jax, and jax {jax.__version__} reads only files of the last "
            "six months: export it again, or read it with a jax of before July 2026; "
            f"{_MODULE_ONLY}"
        )
    if envelope.serialization_version > bindings.newest_serialization_version():
        return (
            f"exported by jax {envelope.jax_version}, which is newer than this jax "
            f"{jax.__version__}: install that version; {_MODULE_ONLY}"
        )
    return ""


def check_fits(exported: Exported, module: ir.Module) -> None:
    """Raises ToolError if an `Exported` and its module differ in arguments or results."""
    main = main_function(module)
    if main is None:
        raise ToolError("damaged: the module of this jax.export file has no function @main")
    main_type = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    kept, effects = exported.module_kept_var_idx, len(exported.ordered_effects)
    # Before the caller's arguments: the index of the platform, and a token for each effect.
    inputs = len(kept) + effects + (len(exported.platforms) > 1)
    outputs = len(exported.out_avals) + effects
    fits = (
        (len(main_type.inputs), len(main_type.results)) == (inputs, outputs)
        and list(kept) == sorted(set(kept))
        and all(0 <= leaf < len(exported.in_avals) for leaf in kept)
        and len(exported._in_named_shardings) == len(exported.in_avals)  # pyright: ignore[reportPrivateUsage]
        and len(exported._out_named_shardings) == len(exported.out_avals)  # pyright: ignore[reportPrivateUsage]
    )
    if not fits:
        raise ToolError(
            f"damaged: the jax.export file describes {inputs} arguments and {outputs} results of "
            f"@main, which has {len(main_type.inputs)} and {len(main_type.results)}"
        )


def state_mesh(exported: Exported, module: ir.Module) -> None:
    """Adds the mesh of the `Exported` to a module with GSPMD's shardings, which have no axes."""
    if b"mhlo.sharding" not in exported.mlir_module_serialized:
        return
    named = (*exported._in_named_shardings, *exported._out_named_shardings)  # pyright: ignore[reportPrivateUsage]
    meshes = list(dict.fromkeys(each.mesh for each in named if each is not None))
    if len(meshes) == 1 and not any(op.operation.name == MESH for op in module.body.operations):
        axes = zip(meshes[0].axis_names, meshes[0].axis_sizes, strict=True)
        write_mesh(module, "mesh", tuple(axes))


def argument_leaves(exported: Exported, main: ir.Operation) -> dict[int, int]:
    """Maps each argument of `main` that the caller passes to its leaf of the call's arguments."""
    kept = sorted(exported.module_kept_var_idx)
    first = len(Function(main).body.arguments) - len(kept)
    return {first + place: leaf for place, leaf in enumerate(kept)}


def result_leaves(exported: Exported, count: int) -> dict[int, int]:
    """Maps each of the `count` results of `main` that the caller gets to its leaf."""
    first = count - len(exported.out_avals)
    return {first + leaf: leaf for leaf in range(len(exported.out_avals))}


def changed_fields(exported: Exported, module: ir.Module) -> dict[str, tuple[Any, ...]]:
    """Returns the changed fields of an `Exported`, from the shardings and memories of `main`.

    The memories are those of arguments and results. A value without a sharding in the `Exported`
    gets none if its sharding has an open dimension, because the compiler chooses it."""
    from jax import memory

    main = main_function(module)
    if main is None:
        return {}
    results = len(ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results)
    sides = (
        ("_in_named_shardings", "in_avals", "arg_attrs", argument_leaves(exported, main)),
        ("_out_named_shardings", "out_avals", "res_attrs", result_leaves(exported, results)),
    )
    changed: dict[str, tuple[Any, ...]] = {}
    for name, avals_name, attrs_name, leaves in sides:
        listed = list(getattr(exported, name))
        avals = list(getattr(exported, avals_name))
        for number, leaf in leaves.items():
            attribute = function_sharding(main, attrs_name, number)
            if attribute is not None and exported.nr_devices > 1:
                before, rank = listed[leaf], avals[leaf].ndim
                listed[leaf] = _to_named_sharding(exported, module, before, attribute, rank)
            if lies_in_host(main, attrs_name, number):
                avals[leaf] = avals[leaf].update(memory_space=memory.Space.Host)
                if listed[leaf] is not None:
                    listed[leaf] = listed[leaf].with_memory_kind(HOST)
        for field, after in ((name, listed), (avals_name, avals)):
            if after != list(getattr(exported, field)):
                changed[field] = tuple(after)
    return changed


def _to_named_sharding(
    exported: Exported, module: ir.Module, before: Any, attribute: ir.Attribute, rank: int
) -> Any:
    """Returns the sharding of a value of this rank; `before` if it cannot be stated."""
    dims = [
        bindings.SdyDimensionShardingAttr(dim)
        for dim in bindings.TensorShardingAttr(attribute).dimension_shardings
    ]
    stated = tuple(tuple(axis.name for axis in axes_in(str(dim))) for dim in dims)
    # The tensor of random keys has one more dimension than the keys: their words.
    if any(stated[rank:]):
        return before
    dims, stated = dims[:rank], stated[:rank]
    is_open = any(not dim.is_closed for dim in dims)
    # A PartitionSpec cannot name a part of an axis.
    in_parts = any(axis.size is not None for dim in dims for axis in axes_in(str(dim)))
    known = () if before is None else before.spec.partitions
    # The axes of each dimension of `before`; none for open dimensions.
    held: list[tuple[str, ...]] = [
        tuple(entry) if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        for entry in known
    ]
    held += [()] * (len(dims) - len(held))
    if in_parts or stated == tuple(held) or (before is None and is_open):
        return before
    mesh = _mesh(exported, module, before, attribute)
    if mesh is None:
        return before
    from jax.sharding import NamedSharding, PartitionSpec

    parts = bindings.TensorShardingAttr(attribute).unreduced_axes
    unreduced = frozenset(bindings.SdyAxisRefAttr(axis).name for axis in parts)
    reduced = frozenset() if before is None else before.spec.reduced
    entries: list[Any] = []
    for place, axes in enumerate(stated):
        is_free = not axes and not dims[place].is_closed and place < len(known)
        entries.append(
            known[place] if is_free else tuple(axes) if len(axes) > 1 else next(iter(axes), None)
        )
    return NamedSharding(mesh, PartitionSpec(*entries, unreduced=unreduced, reduced=reduced))


def _mesh(exported: Exported, module: ir.Module, before: Any, attribute: ir.Attribute) -> Any:
    """Returns the abstract mesh of a sharding, preferably that of another sharding of the program.

    None if an `Exported` cannot state the mesh."""
    if before is not None:
        return before.mesh
    from jax.sharding import AbstractMesh

    from stablehlo_tools.analysis.collectives import ModuleFacts

    mesh = ModuleFacts.from_module(module).meshes.get(sharding_axes(attribute)[0])
    # An abstract mesh has no order of devices.
    if mesh is None or mesh.device_ids or mesh.size != exported.nr_devices:
        return None
    names = tuple(name for name, _ in mesh.axes)
    for known in (*exported._in_named_shardings, *exported._out_named_shardings):  # pyright: ignore[reportPrivateUsage]
        if known is not None and known.mesh.axis_names == names:
            return known.mesh
    return AbstractMesh(tuple(size for _, size in mesh.axes), names)

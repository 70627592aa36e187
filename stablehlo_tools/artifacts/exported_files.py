"""jax.export files: the `Exported` in one, or why this jax does not read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stablehlo_tools import bindings
from stablehlo_tools.analysis.entry import main_function
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, first_line

if TYPE_CHECKING:
    from jax.export import Exported

_UNREADABLE = "neither MLIR text, MLIR bytecode nor a readable jax.export file (truncated?)"
_MODULE_ONLY = "its module alone is readable: opt --module-only FILE -o FILE.bc"


def deserialize_exported(data: bytes) -> Exported:
    """The `Exported` that a file holds. Raises ToolError."""
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    except Exception as error:  # flatbuffers raises whatever the damaged bytes lead it to
        why = f"{_UNREADABLE}: {first_line(str(error) or type(error).__name__)}"
        raise ToolError(_other_version(data) or why) from None


def module_of(data: bytes) -> bytes:
    """The portable artifact in a file of any jax. Raises ToolError."""
    try:
        module = bindings.exported_envelope(data).module
    except Exception as error:  # as above
        why = first_line(str(error) or type(error).__name__)
        raise ToolError(f"{_UNREADABLE}: {why}") from None
    if bindings.portable_version(module) is None:
        raise ToolError(f"{_UNREADABLE}: there is no StableHLO artifact in it")
    return module


def _other_version(data: bytes) -> str:
    """Says which jax reads a whole file that this one does not; empty for one that is damaged."""
    import jax

    try:
        envelope = bindings.exported_envelope(data)
    except Exception:  # as above
        return ""
    if bindings.portable_version(envelope.module) is None:
        return ""
    if envelope.before_0_8_2:
        return (
            f"exported by a jax before 0.8.2 (serialization version "
            f"{envelope.serialization_version}), and jax {jax.__version__} reads the files of six "
            f"months: export it again, or read it with jax 0.8.1; {_MODULE_ONLY}"
        )
    if envelope.serialization_version > bindings.newest_serialization_version():
        return (
            f"exported by jax {envelope.jax_version}, which is newer than this jax "
            f"{jax.__version__}: install that; {_MODULE_ONLY}"
        )
    return ""


def check_fits(exported: Exported, module: ir.Module) -> None:
    """Raises ToolError where an `Exported` describes another program than its module is."""
    main = main_function(module)
    if main is None:
        raise ToolError("damaged: the module of this jax.export file has no function @main")
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    kept, effects = exported.module_kept_var_idx, len(exported.ordered_effects)
    inputs = len(kept) + effects + (len(exported.platforms) > 1)
    outputs = len(exported.out_avals) + effects
    fits = (
        (len(kind.inputs), len(kind.results)) == (inputs, outputs)
        and list(kept) == sorted(set(kept))
        and all(0 <= leaf < len(exported.in_avals) for leaf in kept)
        and len(exported._in_named_shardings) == len(exported.in_avals)  # pyright: ignore[reportPrivateUsage]
        and len(exported._out_named_shardings) == len(exported.out_avals)  # pyright: ignore[reportPrivateUsage]
    )
    if not fits:
        raise ToolError(
            f"damaged: the jax.export file describes {inputs} arguments and {outputs} results of "
            f"@main, which has {len(kind.inputs)} and {len(kind.results)}"
        )

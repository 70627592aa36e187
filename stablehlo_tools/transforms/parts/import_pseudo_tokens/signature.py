"""Drops the argument that held the zero."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.carriers import drop_entry_argument
from stablehlo_tools.ir.symbols import symbol_name
from stablehlo_tools.transforms.parts.import_pseudo_tokens.graph import TokenGraph

_JAX_EXPORT = "jax.uses_shape_polymorphism"
# Attributes of a module that count arguments.
_LISTS = (
    "mhlo.input_output_alias",
    "mhlo.cross_program_prefetches",
    "mhlo.spmd_parameters_shardings",
    "mhlo.xla_entry_computation_parameter_layouts",
    "mhlo.xla_entry_computation_parameter_tiles",
)


def drop_token_arguments(module: ir.Module, chains: Sequence[TokenGraph]) -> None:
    """Removes the arguments that the chains started from.

    Raises a located ToolError where one is still used, or the arguments are listed elsewhere.
    """
    arguments = [ir.BlockArgument(chain.root) for chain in chains if chain.root is not None]
    for argument in sorted(arguments, key=lambda argument: -argument.arg_number):
        function = argument.owner.owner.operation
        what = f"drop-token-argument: argument {argument.arg_number} of @{symbol_name(function)}"
        _check_not_listed(module, what)
        use = next(iter(argument.uses), None)
        if use is not None:
            user = use.owner.operation
            raise ToolError(f"{what} is still used, by {user.name} (P6)", user.location)
        drop_entry_argument(function, argument.arg_number)


def _check_not_listed(module: ir.Module, what: str) -> None:
    attributes = module.operation.attributes
    if _JAX_EXPORT in attributes:
        raise ToolError(
            f"{what} belongs to the calling convention of a jax.export artifact (P6)",
            module.operation.location,
        )
    for name in _LISTS:
        listed = attributes.get(name)
        if listed is None or (isinstance(listed, ir.ArrayAttr) and not len(listed)):
            continue
        raise ToolError(
            f"{what}: the module's attribute {name} counts arguments, and would be wrong (P6)",
            module.operation.location,
        )

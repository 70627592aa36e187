"""The names of a program's arguments and results in the pytrees that it was exported with."""

from __future__ import annotations

from typing import Any

from stablehlo_tools.analysis.entry import entry_function, path_of
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir


def argument_paths(artifact: Artifact) -> list[str]:
    """A name for each argument: its path from the arguments of the exported function, `[0]['w']`,
    or without any what its location says."""
    main = entry_function(artifact.module)
    arguments = list(main.regions[0].blocks[0].arguments)
    if artifact.exported is not None:
        names = _paths(artifact.exported.in_tree, positional=True)
        kept = artifact.exported.module_kept_var_idx
        chosen = [names[index] for index in kept]
        return [""] * (len(arguments) - len(chosen)) + chosen  # a platform's index comes first
    return [path_of(argument) or f"argument {n}" for n, argument in enumerate(arguments)]


def result_paths(artifact: Artifact) -> list[str]:
    """A name for each result: its path from what the exported function returns, `['loss']`."""
    main = entry_function(artifact.module)
    count = len(ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results)
    if artifact.exported is not None:
        return _paths(artifact.exported.out_tree, positional=False)
    return [f"result {number}" for number in range(count)]


def _paths(structure: Any, *, positional: bool) -> list[str]:
    import jax

    tree = jax.tree_util.tree_unflatten(structure, list(range(structure.num_leaves)))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    return [_of_arguments(name) for name in names] if positional else names


def _of_arguments(name: str) -> str:
    """Without the first step, that of (arguments, keyword arguments)."""
    return name.removeprefix("[0]") if name.startswith("[0]") else name.removeprefix("[1]")

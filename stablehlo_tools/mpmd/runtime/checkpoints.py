"""Writes and reads Orbax checkpoints of the whole state, as the pytree of the original program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import ToolError, installing


def save(directory: str | os.PathLike[str], tree: Any) -> None:
    """Writes a pytree; every process calls it. Raises ToolError if the directory exists."""
    path = _absolute(directory)
    if path.exists():
        raise ToolError(f"{path} exists: a checkpoint never overwrites another")
    with _checkpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(directory: str | os.PathLike[str]) -> Any:
    """Returns a pytree of NumPy arrays. Raises ToolError for an invalid checkpoint."""
    import jax
    import numpy as np
    from orbax import checkpoint as orbax

    path = _absolute(directory)
    if not path.is_dir():
        raise ToolError(f"checkpoint {path} does not exist")
    with _checkpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(path).item_metadata
            wanted = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), metadata)
            return checkpointer.restore(path, restore_args=wanted)
        except (ValueError, OSError, KeyError) as error:
            raise ToolError(f"{path} is not a readable checkpoint: {error}") from None


def _absolute(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(directory))  # noqa: PTH100 - links stay links


def _checkpointer() -> Any:
    try:
        from orbax import checkpoint as orbax
    except ImportError:
        raise ToolError(
            "checkpoints need Orbax, which the extra `train` installs", hint=installing("train")
        ) from None
    return orbax.PyTreeCheckpointer()

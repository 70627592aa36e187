"""MaxText: the training step that its own train_compile.py compiles ahead of time.

    python from_maxtext.py [--keep DIR] [--optimize]

train_compile.py builds the state, the batch and their shardings as shapes, and hands them to
`jit_and_compile`. This recipe runs it with the arguments of its command line, and puts an export in
the place of the compilation; no TPU and no libtpu is asked for.
"""

# The library is in an environment of its own: see docs/recipes.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from recipe import export_step, main

import jax  # isort: skip
from jax.export import Exported
from jax.sharding import AxisType, Mesh
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import maxtext_utils

# As for `python -m maxtext.trainers.pre_train.train_compile`: base.yml, and what differs from it.
ARGUMENTS = [
    "train_compile",
    str(files("maxtext") / "configs" / "base.yml"),
    "run_name=recipe",
    "compile_topology=v5e-8",
    "compile_topology_num_slices=1",
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "enable_checkpointing=false",
    "dataset_type=synthetic",
    "log_config=false",
    "steps=10",
    "dtype=float32",  # so that a comparison of values shows more than rounding
    "attention=dot_product",  # its Pallas kernels are for TPUs alone
    "base_emb_dim=64",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "base_mlp_dim=128",
    "base_num_decoder_layers=4",
    "head_dim=16",
    "vocab_size=256",
    "max_target_length=32",
    "per_device_batch_size=2",
    "ici_fsdp_parallelism=4",
    "ici_tensor_parallelism=2",
]


class Done(Exception):  # noqa: N818 - no error: it ends train_compile early
    """Carries the export out of train_compile."""

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        self.exported = exported


def mesh_of_virtual_devices(config: Any) -> Mesh:
    """In place of the topology: MaxText's own mesh, of the devices that are here."""
    devices = maxtext_utils.create_device_mesh(config, jax.devices())
    kinds = (AxisType.Auto,) * len(config.mesh_axes)
    return Mesh(devices, config.mesh_axes, axis_types=kinds)


def export_instead(
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    _keywords: dict[str, Any],
    mesh: Mesh,
    in_shardings: tuple[Any, ...],
    out_shardings: tuple[Any, ...],
    _static: tuple[int, ...],
    _donated: tuple[int, ...],
    _config: Any,
    rules: Any,
) -> None:
    """In place of `jit_and_compile`, with its parameters; raises Done."""
    del out_shardings  # a prefix of the results; the state's are those of its arguments
    shapes = [
        jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            argument,
            sharding if isinstance(sharding, type(argument)) else spread(argument, sharding),
        )
        for argument, sharding in zip(arguments, in_shardings, strict=True)
    ]
    with jax.set_mesh(mesh), rules:
        raise Done(export_step(step, *shapes, donated=1))


def spread(tree: Any, sharding: Any) -> Any:
    """One sharding for every leaf, where there is one alone."""
    if jax.tree.structure(sharding) == jax.tree.structure(tree):
        return sharding
    return jax.tree.map(lambda _: sharding, tree)


def build() -> Exported:
    """What train_compile would have compiled."""
    train_compile.get_topology_mesh = mesh_of_virtual_devices
    train_compile.jit_and_compile = export_instead
    try:
        train_compile.main(ARGUMENTS)
    except Done as done:
        return done.exported
    raise RuntimeError("train_compile.main did not call jit_and_compile")


if __name__ == "__main__":
    sys.exit(main(build, "from_maxtext", "maxtext", "flax"))

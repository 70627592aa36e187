"""What the programs of the zoo have in common: options, a mesh, an optimizer.

The programs are plain `jit` unless they say otherwise: arguments with shardings, `out_shardings`,
`with_sharding_constraint`, and no collective. The mesh is abstract; it stands for any devices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import jax
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.program import Array, Program, Tree

OPTIMIZERS = ("adamw", "adam", "sgd")
# The first argument's shapes, the function of it and a batch, and the shardings of its results.
Parts = tuple[Tree, Callable[..., Any], Tree]


@dataclass(frozen=True)
class Config(ABC):
    """What every program of the zoo has; each adds its sizes and the sizes of its mesh axes.

    Weights are float32; `dtype` is what activations are computed in. `training` asks for the
    training step `(state, batch) -> (state, metrics)`, otherwise the program is the forward pass
    `(parameters, batch) -> outputs`. `donate` gives the old state's memory to the new one.
    """

    training: bool = True
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    dtype: str = "float32"
    donate: bool = False
    platforms: tuple[str, ...] = ("cpu",)

    family: ClassVar[str]
    partitioned_by: ClassVar[Literal["jit", "shard_map"]] = "jit"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"the optimizer is one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}"
            )

    @abstractmethod
    def axes(self) -> dict[str, int]:
        """Mesh axes, name to size. Those of size 1 are left out of the mesh."""

    @abstractmethod
    def inputs(self) -> dict[str, Array]:
        """The batch, by name."""

    @abstractmethod
    def full(self) -> Self:
        """The same at the size of a published model, on 64 devices."""

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh; of one device when all axes are of size 1."""
        axes = {name: size for name, size in self.axes().items() if size > 1}
        axes = axes or {next(iter(self.axes())): 1}
        return AbstractMesh(
            tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
        )

    @property
    def devices(self) -> int:
        """How many devices the program is for."""
        return math.prod(self.mesh.axis_sizes)

    def spec(self, *axes: Any) -> P:
        """A partition spec; an entry is a name, a tuple of names or None, and names of axes that
        the mesh lacks are dropped."""
        return P(*(self._present(entry) for entry in axes))

    def sharding(self, *axes: Any) -> NamedSharding:
        """The spec on the mesh."""
        return NamedSharding(self.mesh, self.spec(*axes))

    def constrain(self, array: jax.Array, *axes: Any) -> jax.Array:
        """`with_sharding_constraint`, which the user writes where propagation needs telling."""
        return lax.with_sharding_constraint(array, self.sharding(*axes))

    def update_rule(self) -> optax.GradientTransformation:
        """AdamW has what large models are trained with: clipping and a schedule."""
        if self.optimizer == "sgd":
            return optax.sgd(3e-2, momentum=0.9)
        if self.optimizer == "adam":
            return optax.adam(3e-3)
        rate = optax.warmup_cosine_decay_schedule(1e-3, 3e-3, 20, 1000)
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1)
        )

    def program(self) -> Program:
        """The training step, or the forward pass."""
        state, function, results = (self._training_step if self.training else self._forward_pass)()
        inputs = self.inputs()
        return Program(
            function,
            (state, self.described(inputs)),
            results,
            {name: array.below for name, array in inputs.items()},
            donated=(0,) if self.donate and self.training else (),
            platforms=self.platforms,
        )

    @abstractmethod
    def _training_step(self) -> Parts: ...

    @abstractmethod
    def _forward_pass(self) -> Parts: ...

    def described(self, arrays: Tree) -> Tree:
        """Shapes with shardings, of a pytree of `Array`."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=self.sharding(*array.axes)
            ),
            arrays,
            is_leaf=lambda node: isinstance(node, Array),
        )

    def _present(self, entry: Any) -> Any:
        names = tuple(name for name in _names(entry) if name in self.mesh.axis_names)
        return names if len(names) > 1 else next(iter(names), None)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)

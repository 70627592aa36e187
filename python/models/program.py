"""A function with the shapes and shardings of its arguments: all that export needs to know.

Nothing is allocated before numbers are drawn, and meshes may be abstract, so that a program for 64
devices exports on a machine that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

Tree = Any  # a pytree: of arrays, of shapes, of shardings


@dataclass(frozen=True)
class Array:
    """Shape, partition spec and element type of a weight or an input; axes as `Config.spec` has.

    `below` bounds the integers that are drawn for it: 0, 1, …, below - 1.
    """

    shape: tuple[int, ...]
    axes: tuple[Any, ...] = ()
    dtype: str = "float32"
    below: int = 2

    def stacked(self, count: int) -> Array:
        """`count` of them in one, along a new first axis that is not split."""
        return Array((count, *self.shape), (None, *self.axes), self.dtype, self.below)


@dataclass(frozen=True)
class Program:
    """A function, and the shapes and shardings of its arguments; `results` are its out_shardings.

    `arguments` are pytrees of `jax.ShapeDtypeStruct` with shardings on an abstract mesh. `below`
    bounds integers, by the name of the input.
    """

    function: Callable[..., Any]
    arguments: tuple[Tree, ...]
    results: Tree
    below: dict[str, int]
    donated: tuple[int, ...] = ()
    platforms: tuple[str, ...] = ("cpu",)

    def export(self) -> export.Exported:
        """Traces and lowers; allocates no array."""
        shardings = jax.tree.map(lambda shape: shape.sharding, self.arguments)
        jitted = jax.jit(
            self.function,
            in_shardings=shardings,
            out_shardings=self.results,
            donate_argnums=self.donated,
        )
        return export.export(jitted, platforms=self.platforms)(*self.arguments)

    def random_arguments(self, seed: int = 0) -> tuple[Tree, ...]:
        """Arguments as NumPy arrays, each in a range that makes sense for its name.

        Norms are about one, second moments and variances positive, integers below their bound, and
        weights such that activations are of order one at test size.
        """
        random = np.random.default_rng(seed)
        return jax.tree_util.tree_map_with_path(
            lambda path, shape: _drawn(random, _words(path), shape, self.below), self.arguments
        )


def _words(path: tuple[Any, ...]) -> list[str]:
    """The names along a path: `[0]['optimizer']['1']['nu']['scale']` without the first."""
    return [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path[1:]]


def _drawn(
    random: np.random.Generator, words: list[str], shape: Any, below: dict[str, int]
) -> np.ndarray[Any, Any]:
    """Numbers for one leaf, of the sizes that early training has, at about 100 channels."""
    last, size, dtype = words[-1] if words else "", shape.shape, shape.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        drawn = random.integers(0, below[last], size) if last in below else np.full(size, 10)
        return np.asarray(drawn, dtype)
    normal = np.asarray(random.normal(size=size))
    if "nu" in words:
        drawn = 1e-4 * (0.1 + normal**2)
    elif "mu" in words or "trace" in words:
        drawn = 1e-3 * normal
    elif last == "variance":
        drawn = 0.5 + normal**2
    elif last.endswith("scale"):
        drawn = 1 + 0.1 * normal
    elif last in below:  # an input: images, for one
        drawn = normal
    elif last == "rates":  # Mamba's log(-A): 1, 2, … along the state
        drawn = np.broadcast_to(np.log(np.arange(1, size[-1] + 1)), size) + 0.01 * normal
    else:
        drawn = 0.1 * normal
    return drawn.astype(dtype)

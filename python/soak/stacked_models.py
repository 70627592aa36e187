"""Training steps of several stacks of layers, one behind the other, drawn at random.

Each stack is a scan with weights of its own, of its own depth and width. What stands between two of
them, what later ones look at, and what the loss reads, is a matter of options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

TIME, INPUTS, OUTPUTS = 7, 5, 3


@dataclass(frozen=True)
class StackedModel:
    """A step of SGD on a model of `len(widths)` stacks, and how it is made a pipeline.

    `links` are what comes between a stack and the one before: nothing, a norm or a projection;
    `own` stacks start from the inputs, too. Every layer of a stack in `across` looks at what comes
    out of the first one; so do all links behind it with `again`, and the head with `head_looks`.
    With `towers` a stack takes nothing of the one before, and the head takes all. `link_loss` and
    `layer_loss` add terms to the loss; `update` makes a step of gradients, by their global norm.
    """

    widths: tuple[int, ...] = (4, 6)
    depths: tuple[int, ...] = (4, 4)
    stage: int = 2
    data: int = 1
    repeats: int = 1
    microbatches: int = 4
    samples: int = 1
    links: tuple[str, ...] = ("none", "norm")
    own: tuple[bool, ...] = (True, True)
    across: tuple[bool, ...] = (False, True)
    again: bool = False
    head_looks: bool = False
    towers: bool = False
    link_loss: bool = False
    layer_loss: bool = False
    update: bool = False
    remat: bool = False
    reverse: bool = False
    schedule: str = "1f1b"
    skip: str = "auto"
    layout: str = "layers"

    @staticmethod
    def drawn(seed: int) -> StackedModel:
        """A model at random."""
        random = np.random.default_rng(seed)

        def one(*of: Any) -> Any:
            return of[random.integers(len(of))]

        def coin() -> bool:
            return bool(random.integers(2))

        count, stage, repeats = one(2, 2, 3), one(2, 4), one(1, 1, 2)
        depths = tuple(stage * repeats + one(0, 0, 1, 2) for _ in range(count))
        even = all(depth % (stage * repeats) == 0 for depth in depths)
        return StackedModel(
            widths=tuple(one(4, 4, 6) for _ in range(count)),
            depths=depths,
            stage=stage,
            data=one(1, 1, 2) if stage == 2 else 1,
            repeats=repeats,
            microbatches=one(2, 3, 4),
            samples=one(1, 2),
            links=tuple(one("none", "norm", "projection") for _ in range(count)),
            own=tuple(coin() for _ in range(count)),
            across=tuple(coin() for _ in range(count)),
            again=coin(),
            head_looks=coin(),
            towers=one(False, False, True),
            link_loss=coin(),
            layer_loss=coin(),
            update=coin(),
            remat=one(False, False, True),
            reverse=one(False, False, False, True),
            schedule=one("1f1b", "eager-1f1b"),
            skip=one("auto", "auto", "false"),
            layout=one("layers", "layers", "pipeline") if even and repeats == 1 else "layers",
        )

    @property
    def options(self) -> str:
        """The options of expand-pipeline."""
        return (
            f"microbatches={self.microbatches} schedule={self.schedule} repeats={self.repeats} "
            f"skip={self.skip} layout={self.layout}"
        )

    def arguments(self) -> tuple[Any, ...]:
        """Weights, inputs and labels, the same for the same model."""
        random = np.random.default_rng(0)
        weights: dict[str, np.ndarray] = {}

        def weight(name: str, *shape: int) -> None:
            weights[name] = (random.normal(size=shape) * 0.4).astype("f4")

        for k, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            weight(f"inward{k}", INPUTS, width)
            weight(f"layer{k}", depth, width, width)
            weight(f"bias{k}", depth, width)
            weight(f"across{k}", depth, self.widths[0], width)
            weight(f"between{k}", self.widths[k - 1], width)
            weight(f"again{k}", self.widths[0], width)
            weight(f"outward{k}", width, OUTPUTS)
        batch = self.microbatches * self.data * self.samples
        inputs = random.normal(size=(batch, TIME, INPUTS)).astype("f4")
        return weights, inputs, random.normal(size=(batch, TIME, OUTPUTS)).astype("f4")

    def exported(self) -> Exported:
        """The step for a mesh of stages and data."""
        sizes = (self.stage, self.data)
        mesh = AbstractMesh(sizes, ("stage", "data"), axis_types=(AxisType.Auto,) * 2)

        def struct(value: np.ndarray, *axes: str) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, P(*axes))
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

        weights, inputs, labels = self.arguments()
        return export.export(jax.jit(self.step))(
            jax.tree.map(struct, weights), struct(inputs, "data"), struct(labels, "data")
        )

    def step(self, weights: Any, inputs: Any, labels: Any) -> Any:
        """The loss, and its gradients or what they make of the weights."""
        loss, gradients = jax.value_and_grad(self.loss)(weights, inputs, labels)
        if not self.update:
            return loss, gradients
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradients)))
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g / (1 + norm), weights, gradients)

    def loss(self, weights: Any, inputs: Any, labels: Any) -> Any:
        """The mean square, and what links and layers add."""
        hidden = jnp.tanh(inputs @ weights["inward0"])
        total = (jnp.float32(0), jnp.float32(0))
        hidden, of_layers = self._stack(0, weights, hidden, hidden, total[1])
        first, of_links, ends = hidden, total[0], [hidden]
        for k in range(1, len(self.widths)):
            before = hidden
            if self.links[k] == "norm":
                before = before / jnp.sqrt(jnp.square(before).mean(-1, keepdims=True) + 1e-6)
            if k == 1:
                first = before
            if self.link_loss:
                of_links += jnp.square(before).mean()
            hidden = self._start(k, weights, inputs, before, first)
            hidden, of_layers = self._stack(k, weights, hidden, first, of_layers)
            ends.append(hidden)
        logits = hidden @ weights[f"outward{len(self.widths) - 1}"]
        if self.head_looks:
            logits += first @ weights["outward0"]
        if self.towers:
            logits += sum(jnp.tanh(end @ weights[f"outward{k}"]) for k, end in enumerate(ends))
        return jnp.square(logits - labels).mean() + 0.1 * of_links + 0.01 * of_layers

    def _start(self, k: int, weights: Any, inputs: Any, before: Any, first: Any) -> Any:
        start = jnp.tanh(inputs @ weights[f"inward{k}"])
        if self.towers:
            return start
        if not self.own[k]:
            start = jnp.zeros_like(start)
        same = before.shape[-1] == start.shape[-1]
        if same and self.links[k] != "projection":
            start += before
        else:
            start += jnp.tanh(before @ weights[f"between{k}"])
        if self.again and k > 1:
            start += jnp.sin(first @ weights[f"again{k}"])
        return start

    def _stack(self, k: int, weights: Any, hidden: Any, first: Any, losses: Any) -> Any:
        looks = k > 0 and self.across[k]

        def layer(carried: Any, w: Any) -> tuple[Any, None]:
            hidden, losses = carried
            moved = hidden @ w["layer"] + w["bias"]
            if looks:
                moved += jnp.tanh(first @ w["across"])
            hidden += jnp.tanh(moved)
            return (hidden, losses + jnp.square(hidden).mean() * self.layer_loss), None

        names = ("layer", "bias", "across") if looks else ("layer", "bias")
        stacks = {name: weights[f"{name}{k}"] for name in names}
        run = jax.checkpoint(layer) if self.remat else layer
        return lax.scan(run, (hidden, losses), stacks, reverse=self.reverse)[0]

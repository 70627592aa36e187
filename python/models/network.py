"""A network as functions of its weights, and the training step around its loss."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from models.config import Config, Parts
from models.program import Tree

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Network(Config):
    """A family derives from this, lists its weights and computes a loss from them."""

    @abstractmethod
    def weights(self) -> Tree:
        """A pytree of `Array`: what is trained."""

    @abstractmethod
    def forward(self, parameters: Tree, batch: Tree) -> Any:
        """The outputs for a batch."""

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        """The mean loss over the global batch, float32, and what else to report."""
        raise NotImplementedError

    def statistics(self) -> Tree:
        """A pytree of `Array`: what a step computes anew and does not train."""
        return {}

    def loss_and_statistics(
        self, parameters: Tree, statistics: Tree, batch: Tree
    ) -> tuple[jax.Array, tuple[Metrics, Tree]]:
        """What the training step differentiates; families with statistics override this one."""
        loss, metrics = self.loss(parameters, batch)
        return loss, (metrics, statistics)

    @abstractmethod
    def output_axes(self) -> tuple[Any, ...]:
        """The axes of `forward`'s result, as `spec` takes them."""

    def cast(self, tree: Tree) -> Tree:
        """Weights in the type of the activations."""
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype), tree)

    def _forward_pass(self) -> Parts:
        results = self.sharding(*self.output_axes())
        return self.described(self.weights()), self.forward, results

    def _training_step(self) -> Parts:
        rule = self.update_rule()
        parameters = self.described(self.weights())
        moments = self._moments(rule, parameters)

        def step(state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
            weights = state["parameters"]
            gradient = jax.value_and_grad(self.loss_and_statistics, has_aux=True)
            (loss, (metrics, statistics)), gradients = gradient(weights, state["statistics"], batch)
            updates, new = rule.update(gradients, repacked(moments, state["optimizer"]), weights)
            weights = optax.apply_updates(weights, updates)
            metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
            state = {"parameters": weights, "optimizer": plain(new), "statistics": statistics}
            return state, metrics

        state = {
            "parameters": parameters,
            "optimizer": plain(moments),
            "statistics": self.described(self.statistics()),
        }
        shardings = jax.tree.map(lambda shape: shape.sharding, state)
        return state, step, (shardings, self.sharding())

    def _moments(self, rule: optax.GradientTransformation, parameters: Tree) -> Tree:
        """The optimizer's state: moments lie where their weights do, the rest is replicated."""

        def described(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        return optax.tree.map_params(
            rule,
            lambda shape, weight: described(shape, weight.sharding),
            jax.eval_shape(rule.init, parameters),
            parameters,
            transform_non_params=lambda shape: described(shape, self.sharding()),
        )


def plain(node: Tree) -> Tree:
    """Optax's named tuples as dicts: an artifact then loads where optax is not installed."""
    if not isinstance(node, tuple):
        return node
    names: Any = getattr(node, "_fields", [str(number) for number in range(len(node))])
    return {name: plain(child) for name, child in zip(names, node, strict=True)}


def repacked(like: Tree, node: Tree) -> Tree:
    """The inverse of `plain`, into the structure of `like`."""
    if not isinstance(like, tuple):
        return node
    names: Any = getattr(like, "_fields", None)
    if names is None:
        return tuple(repacked(child, node[str(number)]) for number, child in enumerate(like))
    return type(like)(*(repacked(getattr(like, name), node[name]) for name in names))

"""What programs whose layers run in a loop have in common: a mesh with stages, options, steps.

A `Network` here is functions of weights and a batch; `LayerScan` gives it a mesh, shardings, a
loss and a training step, and exports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax

from models import network
from models.config import Parts
from models.network import Metrics, plain, repacked
from models.program import Array, Tree

STAGE, DATA, MODEL = "stage", "data", "model"
WIDTH, INNER, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, VOCABULARY = 16, 32, 4, 2, 4, 32
Loss = tuple[jax.Array, Metrics]
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "dots": {"policy": jax.checkpoint_policies.dots_saveable},
    "nothing-kept": {"policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": False},
}


class Network(NamedTuple):
    """Weights and inputs as pytrees of `Array`, and functions of both.

    `results` are the out_shardings of `forward`. `loss` is what the training step differentiates;
    None for what is not trained.
    """

    weights: Tree
    inputs: dict[str, Array]
    forward: Callable[[Tree, Tree], Any]
    results: Any
    loss: Callable[[Tree, Tree], Loss] | None = None


@dataclass(frozen=True)
class LayerScan(network.Network):
    """A network, and how it is run.

    `stage`, `data`, `model` are sizes of mesh axes. `staged` puts stacked weights on the stages
    where they divide them; otherwise each device has all layers. `step` is what a training step
    returns: the new state of an optimizer, the bare gradients, or the loss alone. `accumulate` adds
    the gradients of so many parts of the batch, in a loop that `accumulate_form` names. `remat`,
    `unroll` and `form` are those of the loop over layers.
    """

    network: Callable[[LayerScan], Network] | None = None
    layers: int = 8
    batch: int = 8
    sequence: int = 8
    stage: int = 4
    data: int = 1
    model: int = 1
    staged: bool = True
    loss_form: Literal["mean", "sum", "masked", "examples", "outputs"] = "mean"
    step: Literal["update", "gradients", "evaluation"] = "update"
    accumulate: int = 1
    accumulate_form: Literal["scan", "fori"] = "scan"
    remat: Literal["", "full", "dots", "nothing-kept"] = ""
    unroll: int = 1
    form: Literal["scan", "reverse", "fori"] = "scan"

    family: ClassVar[str] = "layer-scan"

    def axes(self) -> dict[str, int]:
        return {STAGE: self.stage, DATA: self.data, MODEL: self.model}

    def full(self) -> Self:
        raise ValueError("programs for tests have no full size")

    @cached_property
    def parts(self) -> Network:
        """The network with these options."""
        assert self.network is not None, "a LayerScan needs a network"
        return self.network(self)

    def weights(self) -> Tree:
        return self.parts.weights

    def inputs(self) -> dict[str, Array]:
        return self.parts.inputs

    def forward(self, parameters: Tree, batch: Tree) -> Any:
        return self.parts.forward(parameters, batch)

    def loss(self, parameters: Tree, batch: Tree) -> Loss:
        assert self.parts.loss is not None, "this network is not trained"
        return self.parts.loss(parameters, batch)

    def output_axes(self) -> tuple[Any, ...]:
        return ()

    def stacked(self, layer: Tree, count: int | None = None) -> Tree:
        """The weights of one layer, `count` times (all layers without) along a new first axis."""
        count = self.layers if count is None else count
        first = STAGE if self.staged and count % self.stage == 0 else None
        return jax.tree.map(
            lambda one: Array((count, *one.shape), (first, *one.axes), one.dtype, one.below),
            layer,
            is_leaf=lambda node: isinstance(node, Array),
        )

    def scan(self, layer: Callable[..., Any], carry: Tree, xs: Tree) -> tuple[Tree, Tree]:
        """The loop over layers, `layer(carry, x) -> (carry, y)`, as the options want it."""
        if self.remat:
            layer = jax.checkpoint(layer, **POLICIES[self.remat])
        if self.form == "fori":
            return lax.fori_loop(0, _length(xs), _indexed(layer, xs), carry), None
        return lax.scan(layer, carry, xs, reverse=self.form == "reverse", unroll=self.unroll)

    def _forward_pass(self) -> Parts:
        return self.described(self.weights()), self.forward, self.parts.results

    def _training_step(self) -> Parts:
        parameters = self.described(self.weights())
        of_weights = jax.tree.map(lambda shape: shape.sharding, parameters)
        if self.step == "evaluation":
            return parameters, self.loss, self.sharding()
        if self.step == "gradients":
            return parameters, self.gradients, ((self.sharding(), self.sharding()), of_weights)
        rule = self.update_rule()
        moments = self._moments(rule, parameters)

        def step(state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
            weights = state["parameters"]
            (loss, metrics), gradients = self.gradients(weights, batch)
            updates, new = rule.update(gradients, repacked(moments, state["optimizer"]), weights)
            metrics = {**metrics, "loss": loss, "gradient_norm": optax.tree.norm(gradients)}
            weights = optax.apply_updates(weights, updates)
            return {"parameters": weights, "optimizer": plain(new)}, metrics

        state = {"parameters": parameters, "optimizer": plain(moments)}
        shardings = jax.tree.map(lambda shape: shape.sharding, state)
        return state, step, (shardings, self.sharding())

    def gradients(self, weights: Tree, batch: Tree) -> tuple[Loss, Tree]:
        """`((loss, metrics), gradients)`: of the whole batch, or the mean over its parts."""
        of_part = jax.value_and_grad(self.loss, has_aux=True)
        if self.accumulate == 1:
            return of_part(weights, batch)
        parts = jax.tree.map(lambda x: x.reshape(self.accumulate, -1, *x.shape[1:]), batch)

        def added(total: Tree, part: Tree) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, of_part(weights, part)), None

        first = jax.tree.map(lambda x: x[0], parts)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_part, weights, first))
        if self.accumulate_form == "fori":
            total = lax.fori_loop(0, self.accumulate, _indexed(added, parts), zeros)
        else:
            total, _ = lax.scan(added, zeros, parts)
        return jax.tree.map(lambda x: x / self.accumulate, total)


def _length(xs: Tree) -> int:
    return jax.tree.leaves(xs)[0].shape[0]


def _indexed(body: Callable[..., Any], xs: Tree) -> Callable[[Any, Tree], Tree]:
    """A scan's body as that of a fori_loop that indexes into the whole of `xs`."""
    return lambda i, carry: body(carry, jax.tree.map(lambda x: x[i], xs))[0]


def tokens_input(o: LayerScan) -> dict[str, Array]:
    """Tokens (batch, sequence), and lengths where the loss is masked with them."""
    inputs = {"tokens": Array((o.batch, o.sequence), (DATA,), "int32", VOCABULARY)}
    if o.loss_form in ("masked", "examples"):
        inputs["lengths"] = Array((o.batch,), (DATA,), "int32", o.sequence)
    return inputs


def token_loss(o: LayerScan, logits: jax.Array, batch: Tree) -> Loss:
    """Cross-entropy of the next token, summed up in the form that the options name.

    `mean` and `sum` divide by constants; `masked` by the count of tokens that are no padding, which
    follows from lengths alone; `examples` is the mean of each example's mean. `outputs` weighs a
    token by how sure the model is and divides by the sum of these weights over the whole batch, so
    that no part of the batch has a loss of its own.
    """
    tokens, logits = batch["tokens"], logits.astype(jnp.float32)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    summed = partial(_SUMMED[o.loss_form], o, logits=logits, batch=batch)
    return summed(losses), {"chance": summed(jnp.exp(-losses))}


def _mean(_: LayerScan, values: jax.Array, **__: Any) -> jax.Array:
    return values.mean()


def _sum(o: LayerScan, values: jax.Array, **_: Any) -> jax.Array:
    return values.sum() * (1.0 / (o.batch // o.accumulate * o.sequence))


def _kept(values: jax.Array, batch: Tree) -> jax.Array:
    """1 for tokens within the length of their example, at least one of each."""
    position = jnp.arange(values.shape[1])
    return (position <= batch["lengths"][:, None]).astype(jnp.float32)


def _masked(_: LayerScan, values: jax.Array, batch: Tree, **__: Any) -> jax.Array:
    kept = _kept(values, batch)
    return (values * kept).sum() / jnp.maximum(kept.sum(), 1)


def _examples(_: LayerScan, values: jax.Array, batch: Tree, **__: Any) -> jax.Array:
    kept = _kept(values, batch)
    return jnp.mean((values * kept).sum(1) / kept.sum(1))


def _outputs(_: LayerScan, values: jax.Array, logits: jax.Array, **__: Any) -> jax.Array:
    sure = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))
    return (values * sure).sum() / sure.sum()


_SUMMED: dict[str, Callable[..., jax.Array]] = {
    "mean": _mean,
    "sum": _sum,
    "masked": _masked,
    "examples": _examples,
    "outputs": _outputs,
}

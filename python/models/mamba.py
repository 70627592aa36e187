"""A Mamba-style language model, data × model: a selective scan over the sequence in each layer.

The inner channels are split over `model`. The state of a channel decays and is driven at a pace
that the input sets; `scan` computes that one step after another, or by `lax.associative_scan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from models import layers
from models.network import Metrics, Network
from models.program import Array, Tree

DATA, MODEL = "data", "model"
Pair = tuple[jax.Array, jax.Array]  # the decay over some steps, and the state driven in them


@dataclass(frozen=True)
class MambaConfig(Network):
    """Sizes of the model, of the batch and of the mesh.

    `state` is the elements of state a channel, `taps` the length of the convolution and `rank` the
    width of the projection that sets the pace.
    """

    layers: int = 2
    d_model: int = 32
    d_inner: int = 64
    state: int = 8
    taps: int = 4
    rank: int = 6
    vocabulary: int = 96
    batch: int = 8
    sequence: int = 24
    scan: Literal["sequential", "associative"] = "sequential"
    data: int = 4
    model: int = 2

    family: ClassVar[str] = "mamba"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scan not in ("sequential", "associative"):
            raise ValueError(f"the scan is sequential or associative, not {self.scan!r}")

    def axes(self) -> dict[str, int]:
        return {DATA: self.data, MODEL: self.model}

    def full(self) -> Self:
        """Mamba 2.8B."""
        return replace(
            self,
            layers=64,
            d_model=2560,
            d_inner=5120,
            state=16,
            rank=160,
            vocabulary=50_280,
            batch=64,
            sequence=2048,
            dtype="bfloat16",
            data=8,
            model=8,
        )

    def inputs(self) -> dict[str, Array]:
        return {"tokens": Array((self.batch, self.sequence), (DATA,), "int32", self.vocabulary)}

    def output_axes(self) -> tuple[Any, ...]:
        return DATA, None, MODEL

    def weights(self) -> Tree:
        width, inner = self.d_model, self.d_inner
        layer = {
            "scale": Array((width,)),
            "inward": Array((width, 2 * inner), (None, MODEL)),
            "taps": Array((self.taps, 1, inner), (None, None, MODEL)),
            "taps_bias": Array((inner,), (MODEL,)),
            "selection": Array((inner, self.rank + 2 * self.state), (MODEL,)),
            "pace": Array((self.rank, inner), (None, MODEL)),
            "pace_bias": Array((inner,), (MODEL,)),
            "rates": Array((inner, self.state), (MODEL,)),
            "skip": Array((inner,), (MODEL,)),
            "outward": Array((inner, width), (MODEL,)),
        }
        return {
            "embedding": Array((self.vocabulary, width), (MODEL,)),
            "layers": [layer] * self.layers,
            "final_scale": Array((width,)),
        }

    def forward(self, parameters: Tree, batch: Tree) -> jax.Array:
        """Logits, (batch, sequence, vocabulary), from the embedding's transpose."""
        weights = self.cast(parameters)
        hidden = self.constrain(jnp.take(weights["embedding"], batch["tokens"], axis=0), DATA)
        for layer in weights["layers"]:
            mixed = self._mixed(layers.rms_norm(hidden, layer["scale"]), layer)
            hidden = self.constrain(hidden + mixed, DATA)
        hidden = layers.rms_norm(hidden, weights["final_scale"])
        return hidden @ weights["embedding"].T

    def loss(self, parameters: Tree, batch: Tree) -> tuple[jax.Array, Metrics]:
        return layers.next_token_loss(self.forward(parameters, batch), batch["tokens"]), {}

    def _mixed(self, hidden: jax.Array, layer: Tree) -> jax.Array:
        inner, gate = jnp.split(hidden @ layer["inward"], 2, axis=-1)
        inner = self.constrain(inner, DATA, None, MODEL)
        inner = jax.nn.silu(self._convolved(inner, layer))
        bounds = (self.rank, self.rank + self.state)
        pace, drive, readout = jnp.split(inner @ layer["selection"], bounds, axis=-1)
        pace = jax.nn.softplus(pace @ layer["pace"] + layer["pace_bias"])
        selected = (inner, pace, drive, readout)
        wide = tuple(array.astype(jnp.float32) for array in selected)
        rates = -jnp.exp(layer["rates"].astype(jnp.float32))
        scan = _associative if self.scan == "associative" else _sequential
        scanned = scan(rates, *wide).astype(self.dtype) + layer["skip"] * inner
        return (scanned * jax.nn.silu(gate)) @ layer["outward"]

    def _convolved(self, inner: jax.Array, layer: Tree) -> jax.Array:
        """A convolution of each channel by itself, over the past."""
        convolved = lax.conv_general_dilated(
            inner,
            layer["taps"],
            window_strides=(1,),
            padding=((self.taps - 1, 0),),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=self.d_inner,
        )
        return convolved + layer["taps_bias"]


def _sequential(
    rates: jax.Array, inner: jax.Array, pace: jax.Array, drive: jax.Array, readout: jax.Array
) -> jax.Array:
    """One step of the sequence after another; (batch, sequence, channels)."""

    def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        inner, pace, drive, readout = now
        decay = jnp.exp(pace[..., None] * rates)
        state = decay * state + (pace * inner)[..., None] * drive[:, None]
        return state, jnp.einsum("bcn,bn->bc", state, readout)

    first = jnp.zeros((inner.shape[0], *rates.shape), jnp.float32)
    over_time = tuple(array.swapaxes(0, 1) for array in (inner, pace, drive, readout))
    return lax.scan(step, first, over_time)[1].swapaxes(0, 1)


def _associative(
    rates: jax.Array, inner: jax.Array, pace: jax.Array, drive: jax.Array, readout: jax.Array
) -> jax.Array:
    """The same in a logarithm of the steps, with every state in memory."""

    def after(earlier: Pair, later: Pair) -> Pair:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    decay = jnp.exp(pace[..., None] * rates)
    driven = (pace * inner)[..., None] * drive[:, :, None]
    _, states = lax.associative_scan(after, (decay, driven), axis=1)
    return jnp.einsum("bscn,bsn->bsc", states, readout)

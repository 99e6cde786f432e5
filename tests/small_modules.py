"""Small modules of Linen and Equinox, and a loss of next tokens, for tests of the front door."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

T, D, V = 6, 8, 16


def random_tokens(rows: int) -> Any:
    return jax.random.randint(jax.random.key(7), (rows, T), 0, V)


def next_token_loss(logits: Any, batch: Any) -> Any:
    targets = jnp.roll(batch, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x))))


class EquinoxBlock(eqx.Module):
    mlp: Any

    def __init__(self, key: Any):
        self.mlp = eqx.nn.MLP(D, D, 2 * D, 1, key=key)

    def __call__(self, x: Any) -> Any:
        return x + jax.vmap(self.mlp)(x)

"""What every engine runs: a model as three pure functions, and its weights as three groups.

weights = {"embed": ..., "stages": leaves with stage dims in front, "head": ...}
side    = pytree of [M, ...] arrays every stage may read: tokens, positions, segment ids, targets
keys    = pytree with stage dims in front of what else a stage is given: dropout keys, which layers
          it has; or () without any

Everything is a sum. `loss` returns the share of one microbatch in the loss of the batch (its
target weights are divided by those of the whole batch beforehand), so an engine adds shares up and
nobody scales anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar, Shaped

Sums = dict[str, Scalar]
"""Scalars by name that are added over microbatches, and over stages where stages make them."""


@dataclass(frozen=True)
class Model:
    """Three pure functions, each of one microbatch.

    Attributes:
        embed: `(weights["embed"], side_m) -> x`, what enters the first stage: any pytree.
        stage: `(weights of one stage, x, side_m, rng) -> (y, sums)`, where y is like x and rng is
            this stage's leaves of `keys`; random ones are folded with the microbatch's index.
            `sums["loss"]`, if there, is added to the loss (a load-balance loss, say); the others
            become metrics.
        loss: `(ends, y, side_m) -> (loss, sums)` with ends = `{"head": weights["head"]}`, and
            `"embed"` beside it if the model is tied.
        tied: Whether `loss` reads the embedding's weights too.
        shared_loss: `(ends, y, side_m, axis) -> ((loss, sums), (of_ends, dy))`: the same loss by
            all ranks of an axis together, and its gradients. All are given the same, and return
            shares that add up over the axis; but dy, the gradient by y, each has whole.
    """

    embed: Callable[[Any, Any], Any]
    stage: Callable[[Any, Any, Any, Any], tuple[Any, Sums]]
    loss: Callable[[Any, Any, Any], tuple[Float[Array, ""], Sums]]
    tied: bool = False
    shared_loss: Callable[[Any, Any, Any, str], tuple[Any, Any]] | None = None

    def ends(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The weights that `loss` reads."""
        return {name: weights[name] for name in ("head", *(("embed",) if self.tied else ()))}


def at(tree: PyTree, index: Any) -> PyTree:
    """Entry `index` of dim 0 of every leaf. Any entry, if the index is out of range."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def fold(keys: PyTree, microbatch: Any) -> PyTree:
    """The keys of one microbatch: every random key, whatever its dims, folded with it."""

    def fold_leaf(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        folded = jax.vmap(lambda key: jax.random.fold_in(key, microbatch))(leaf.reshape(-1))
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold_leaf, keys)


def total(sums: dict[str, Shaped[Array, " steps"]]) -> Sums:
    """Adds up sums that came one per step of a scan."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def joined(loss: Scalar, of_loss: Sums, of_stages: Sums) -> tuple[Scalar, Sums]:
    """The batch's loss and metrics from what `loss` and what the stages have summed up.

    Raises:
        ValueError: If `loss` and `stage` use one name for two things.
    """
    clash = sorted(set(of_loss) & set(of_stages))
    if clash:
        raise ValueError(f"`model.loss` and `model.stage` both return {clash}. Rename one of them.")
    metrics = of_loss | {name: x for name, x in of_stages.items() if name != "loss"}
    return loss + of_stages.get("loss", 0.0), metrics

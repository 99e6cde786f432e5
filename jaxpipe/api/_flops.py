"""The work of a layer of each kind, by which layers are divided over stages."""

import jax
from jaxtyping import PyTree

from ..ir.graph import flops
from ..kernels import trace_to_read
from ._kinds import check_all, stack_all
from ._model import Model
from ._packed_x import layer_with_weights, x_of_layers
from ._pieces import shape_of


def layer_flops(model: Model, params: PyTree, batch: PyTree) -> dict[str, float]:
    """Counts the floating-point operations of a layer of each kind, forwards, by its program.

    They are two for each term of a matrix product, none for equations that only move or cast
    numbers, and one for each other number. A `while` loop counts one iteration, a `cond` its
    dearest branch, and a kernel that is not of Pallas its results.

    Args:
        model: A model with several kinds of layers.
        params: Parameters in the user's tree, or their shapes.
        batch: [B, ...] leaves, or their shapes.

    Returns:
        Operations for the batch by kind, for `Model.layer_costs`.

    Raises:
        ValueError: If the model has one kind of layers.

    Example:
        >>> import jax.numpy as jnp
        >>> kinds = {"wide": lambda w, x, batch: x @ w @ w.T, "narrow": lambda w, x, batch: x * w}
        >>> model = Model(lambda w, batch: batch, kinds, lambda w, x, batch: x.mean())
        >>> layers = {"wide": [jnp.ones((4, 8))], "narrow": [jnp.ones(4)]}
        >>> layer_flops(model, {"embed": (), "layers": layers, "head": ()}, jnp.ones((2, 4)))
        {'wide': 256.0, 'narrow': 8.0}
    """
    if not model.has_kinds:
        raise ValueError("`model` has one kind of layers, which all cost the same.")
    batch = jax.tree.map(shape_of, batch)
    kinds, groups = one_of_each_kind(model, params)
    key = jax.eval_shape(lambda: jax.random.key(0)) if model.takes_key else ()
    flops_by_kind: dict[str, float] = {}
    for kind, x in zip(kinds, x_of_layers(model, kinds, groups, batch, key), strict=False):
        if kind not in flops_by_kind:
            function, weights = layer_with_weights(model, kind, groups)
            with trace_to_read():
                closed = jax.make_jaxpr(function)(weights, x, batch, key)
            flops_by_kind[kind] = flops(closed.jaxpr)
    return flops_by_kind


def one_of_each_kind(model: Model, params: PyTree) -> tuple[tuple[str, ...], dict[str, PyTree]]:
    """Returns the kind of every layer in order, and groups with the layers of one of each kind."""
    groups = jax.eval_shape(model.to_groups, jax.tree.map(shape_of, params))
    num_layers, _ = check_all(model.layer, groups["layers"])
    stacked = jax.eval_shape(lambda layers: stack_all(model.layer, layers), groups["layers"])
    groups["layers"] = jax.tree.map(lambda x: shape_of(x, 1), stacked)
    pairs = () if isinstance(num_layers, int) else num_layers
    return tuple(model.order or (kind for kind, count in pairs for _ in range(count))), groups

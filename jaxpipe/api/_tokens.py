"""Which functions of a model move values between tokens, beside attention.

XLA divides what they compute over `context`, and may do so by a collective permute. In a branch
that some ranks do not take, devices would wait for each other for ever.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..ir.rows import Mixed, Rows
from ._layer_results import x_and_aux
from ._losses import loss_parts
from ._model import Model
from ._pieces import shape_of
from ._rows import (
    Activations,
    UntracedError,
    compared,
    layers_with_weights,
    no_activations,
    weights_of_loss,
)
from ._sequences import CONTEXT


def check_token_wise(
    model: Model, weights: dict[str, PyTree], rows: PyTree, key: Any, mesh: Mesh
) -> bool:
    """Checks that functions treat tokens one by one, apart from `jaxpipe.attention`.

    It returns whether a slice of x is what the embedding makes of a slice of its inputs. More is
    allowed: positions and random bits of a slice are not those of the first tokens.
    """
    size, dim = mesh.shape.get(CONTEXT, 1), model.sequence_dim
    if dim is None or size == 1:
        return False
    x, key = no_activations(), jax.tree.map(shape_of, key)
    batches = rows, jax.tree.map(partial(_share, dim, size), rows)

    def judged(name: str, run: Callable, weights: PyTree, x: Activations) -> Activations:
        try:
            relations, results, _ = compared(run, weights, x, batches, key, size, tokens=True)
        except UntracedError as error:
            raise ValueError(
                f"{name} is not known to treat tokens one by one, and this engine runs it in a "
                f"branch that other ranks do not take: {error}"
            ) from error.__cause__
        mixed = next((r for r in relations if isinstance(r, Mixed)), None)
        if mixed is not None:
            reason = str(mixed).replace("rows", "tokens").replace("row ", "token ")
            raise ValueError(
                f"{name} moves values between tokens ({reason}), which the {size} devices of the "
                f"axis {CONTEXT!r} divide. This engine runs it in a branch that other ranks do not "
                "take, where devices could wait for each other. Write attention by "
                "`jaxpipe.attention`, and shift targets in the batch; for all else take "
                "`schedule='circular'` or `engine='mpmd'`."
            )
        count = len(jax.tree.leaves(results[0][0]))
        return Activations((results[0][0], results[1][0]), tuple(relations[:count]))

    def embed(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> tuple[PyTree]:
        return (model.embed(weights, batch, key),)

    def layer_of(function: Callable) -> Callable:
        return lambda weights, x, batch, key: x_and_aux(function(weights, x, batch, key), x)

    def loss(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> tuple[PyTree]:
        return (loss_parts(model.loss(weights, x, batch, key)),)

    x = judged("embed", embed, weights["embed"], x)
    for name, function, params in layers_with_weights(model, weights):
        x = judged(name, layer_of(function), params, x)
    judged(model.loss_name, loss, weights_of_loss(model, weights), x)
    relations, _, draws = compared(embed, weights["embed"], no_activations(), batches, key, size)
    return not draws and all(relation == Rows(dim) for relation in relations)


def _share(dim: int, size: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.ndim <= dim or leaf.shape[dim] % size:
        return leaf
    shape = *leaf.shape[:dim], leaf.shape[dim] // size, *leaf.shape[dim + 1 :]
    return jax.ShapeDtypeStruct(shape, leaf.dtype)

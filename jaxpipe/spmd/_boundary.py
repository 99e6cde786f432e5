"""Loss of a microbatch, and gradients of the boundary: the weights of embedding and head."""

import jax
from jax import lax
from jaxtyping import PyTree, Scalar

from ..autodiff import StagedModel
from ..autodiff.backward import combine, floating
from ..autodiff.staged_model import Aux, combine_losses, split_metrics
from ._buffers import add_trees, to_accum_dtype
from .ranks import AXIS, pvary
from .weight_gather import Gather


def check_vocab_parallel(model: StagedModel, vocab_parallel: bool) -> None:
    """Raises a `ValueError` if ranks should compute a loss together that has no such form."""
    if vocab_parallel and model.vocab_parallel_loss is None:
        raise ValueError(
            "`vocab_parallel` is True and `model.vocab_parallel_loss` None: there is no loss that "
            "ranks can compute together. Give one, or leave `vocab_parallel` at False."
        )


def loss_and_gradients(
    model: StagedModel, boundary: dict[str, PyTree], y: PyTree, batch_inputs: PyTree
) -> tuple[tuple[Scalar, Aux], tuple[dict[str, PyTree], PyTree]]:
    """Computes the loss of a microbatch together with its gradients, so logits are computed once.

    Returns ((loss, metrics), (gradients of the groups of `boundary` that the loss reads, gradient
    of `y`, with the structure of `floating(y)`)).
    """

    def loss(boundary, differentiated):
        return model.loss(boundary, combine(differentiated, y), batch_inputs)

    loss_and_grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return loss_and_grads(model.boundary(boundary), floating(y))


def sum_over_devices(
    gather: Gather, loss: Scalar, loss_metrics: Aux, stage_aux: Aux
) -> tuple[tuple[Scalar, Aux], Aux]:
    """Returns ((loss, metrics) of the batch, metrics that are arrays, as they are)."""
    scalars, arrays = split_metrics(loss_metrics)
    local = jax.tree.map(pvary, (loss, scalars, stage_aux))  # also what is constant
    loss, scalars, stage_aux = lax.psum(local, (AXIS, *gather.batch_axes))
    # With arrays, so that a metric of this name that layers return too is refused.
    loss, metrics = combine_losses(loss, scalars | arrays, stage_aux)
    return (loss, {name: x for name, x in metrics.items() if name not in arrays}), arrays


def add_to_boundary(gradients: dict[str, PyTree], new: dict[str, PyTree]) -> dict[str, PyTree]:
    """Adds gradients of a microbatch to those of embedding and head, in float32."""
    sums = {name: gradients[name] for name in new}
    return gradients | add_trees(sums, to_accum_dtype(new))

"""From the user's functions of one layer to the functions of one stage that engines run.

The batch is cut into M microbatches, and each of these into D pieces of rows: one for each device
that divides rows. L layers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..autodiff import StagedModel
from ..autodiff.staged_model import Past
from ..engines._fsdp import num_row_shards, row_axes
from ..sharding.specs import typed_by_specs
from ._frozen import join
from ._losses import LossParts, batch_divisor, check_metrics, loss_parts, sum_dtype
from ._model import Model
from ._pieces import check_appended, on_pieces, sum_pieces, to_pieces, to_slices


class PieceInputs(NamedTuple):
    """What the functions of a model read besides parameters, for every piece.

    Attributes:
        batch: The rows of the piece, with leaves [M, D, rows, ...].
        scale: [M, D] factors that turn the loss of a piece into its share of the batch's loss.
        key: [M, D] dropout keys of embedding and loss; () without dropout.
        piece: [M, D] the index of the piece in its microbatch, folded into the keys of layers; ()
            without dropout.
    """

    batch: PyTree
    scale: Any = ()
    key: Any = ()
    piece: Any = ()


def takes_key(model: Model) -> bool:
    """Returns whether a function of the model takes a dropout key."""
    return any(getattr(f, "takes_key") for f in (model.embed, *model.layer_functions, model.loss))  # noqa: B009


def make_inputs(
    model: Model,
    mesh: Mesh,
    num_microbatches: int,
    weights: dict[str, Any],
    batch: PyTree,
    key: Any,
    num_slices: int = 1,
) -> PieceInputs:
    """Cuts a batch into pieces, and adds keys and the scale of losses.

    Args:
        model: The model.
        mesh: The mesh.
        num_microbatches: M.
        weights: The parameters in the groups of engines.
        batch: [B, ...] leaves.
        key: The dropout key of embedding and loss, or () without dropout.
        num_slices: Slices of each sequence. Each is a microbatch in the result.

    Returns:
        The inputs.

    Raises:
        ValueError: If rows or sequences do not divide, or the loss has another form than `Model`
            says.
    """
    pieces = to_pieces(batch, num_microbatches, num_row_shards(mesh))
    inputs = PieceInputs(to_slices(pieces, num_slices, model.sliced_leaves))
    shape = num_microbatches * num_slices, num_row_shards(mesh)
    if jax.tree.leaves(key):
        ids = jnp.arange(shape[0] * shape[1])
        keys = jax.vmap(partial(jax.random.fold_in, key))(ids).reshape(shape)
        inputs = inputs._replace(key=keys, piece=jnp.broadcast_to(jnp.arange(shape[1]), shape))
    inputs = inputs._replace(scale=_loss_scale(model, weights, inputs, shape))
    axes = row_axes(mesh)
    if not axes:
        return inputs
    spec = PartitionSpec(None, axes)
    context = jax.sharding.get_abstract_mesh()  # of one group, where each has a program
    if AxisType.Explicit in (mesh if context.empty else context).axis_types:
        return typed_by_specs(inputs, spec, mesh)
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), inputs)


def _loss_scale(
    model: Model, weights: dict[str, Any], inputs: PieceInputs, shape: tuple[int, int]
) -> Array:
    """Returns [M, D] factors that turn losses of pieces into shares of the batch's loss."""
    shapes = jax.tree.map(_shape_of, weights)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), inputs)
    x = jax.eval_shape(partial(_embed, model), shapes["embed"], first)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
    boundary = boundary_model(model, 1).boundary(shapes)
    return jnp.broadcast_to(1 / batch_divisor(partial(_parts, model), boundary, x, flat), shape)


def boundary_model(model: Model, num_pieces: int) -> StagedModel:
    """Returns the model as engines run it, without its layers.

    Args:
        model: The model.
        num_pieces: M * D.

    Returns:
        Functions of leaves [d, ...], for d pieces of a microbatch.
    """
    mean = 1 / num_pieces

    def loss(boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> Any:
        parts = _parts(model, boundary, x, inputs)
        total = jnp.asarray(parts.total, inputs.scale.dtype)
        return total * inputs.scale, _shares(parts.metrics, mean)

    def sum_of_losses(boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> Any:
        return sum_pieces(on_pieces(loss, 1, boundary, x, inputs))

    return StagedModel(
        embed=partial(on_pieces, partial(_embed, model), 1),
        stage=lambda weights, x, inputs, key: x,
        loss=sum_of_losses,
        tied=model.tied,
    )


def staged_model(
    model: Model,
    num_pieces: int,
    own_copy: Callable[[Any], PyTree],
    stage_of: Callable[[Any], Callable],
    sliced_stage_of: Callable[[Any], Callable] | None = None,
) -> StagedModel:
    """Returns the model as engines run it.

    Args:
        model: The model.
        num_pieces: M * D, times the slices of a sequence.
        own_copy: From the weights of a stage to those that all layers share.
        stage_of: From a layer, or layers by kind, to the stage that runs layers. A layer is given
            the dropout key and the frozen leaves of `Engine.layer_keys`.
        sliced_stage_of: The same for layers that run slices, `Engine.sliced_stage`. None without
            slices.

    Returns:
        Functions of leaves [d, ...], for d pieces of a microbatch.
    """
    mean, has_key = 1 / num_pieces, takes_key(model)

    def layer(
        function: Callable, weights: Any, constants: Any, x: PyTree, inputs: PieceInputs
    ) -> Any:
        key, frozen = constants
        if has_key:
            key = jax.random.fold_in(key, inputs.piece)
        returned = function(join(weights, frozen), x, inputs.batch, key)
        return _x_and_aux(returned, x, mean)

    def of_pieces(function: Callable) -> Callable:
        def layer_of_pieces(weights: Any, x: PyTree, inputs: PieceInputs, constants: Any) -> Any:
            x, aux = on_pieces(partial(layer, function), 2, weights, constants, x, inputs)
            return x, sum_pieces(aux)

        return layer_of_pieces

    def make(stage_of: Callable[[Any], Callable], of_layer: Callable) -> Callable:
        if model.shared:
            return _sharing_stage(model, own_copy, stage_of, of_layer)
        return stage_of(jax.tree.map(of_layer, model.layer))  # one function, or one for each kind

    staged = replace(boundary_model(model, num_pieces), stage=make(stage_of, of_pieces))
    if sliced_stage_of is None:
        return staged
    sliced_layer = partial(_sliced_layer, mean, model.sliced_leaves)
    return replace(staged, sliced_stage=make(sliced_stage_of, sliced_layer))


def _sharing_stage(
    model: Model, own_copy: Callable[[Any], PyTree], stage_of: Callable, of_layer: Callable
) -> Callable:
    """Returns a stage whose layers are also given the parameters that all of them share."""

    def stage(weights: Any, x: PyTree, inputs: PieceInputs, keys: Any, *past: Past) -> Any:
        shared = join(own_copy(weights), own_copy(keys))
        layers = jax.tree.map(lambda f: of_layer(_sharing(f, shared)), model.layer)
        return stage_of(layers)(weights["layers"], x, inputs, keys["layers"], *past)

    return stage


def _sharing(layer: Callable, shared: PyTree) -> Callable:
    """Returns a layer that is given its own parameters alone."""

    def run(weights: Any, *arguments: Any) -> Any:
        return layer({"layer": weights, "shared": shared}, *arguments)

    return run


def _sliced_layer(mean: float, sliced_leaves: PyTree, function: Callable) -> Callable:
    """Returns a layer as `Engine.sliced_stage` takes it, from one of the user."""

    def layer(
        weights: Any, constants: Any, offset: Any, num_slices: int, *piece: PyTree
    ) -> tuple[PyTree, dict[str, Any], PyTree, PyTree]:
        x, inputs, earlier = piece
        key, frozen = constants
        past = Past(earlier, offset=offset, num_slices=num_slices)
        returned, made = function(join(weights, frozen), x, inputs.batch, key, past)
        check_appended(made.new, inputs.batch, sliced_leaves)
        return *_x_and_aux(returned, x, mean), made.earlier, made.new

    def layer_of_pieces(weights: Any, x: PyTree, given: Any, constants: Any) -> Any:
        inputs, past = given
        one = partial(layer, weights, constants, past.offset, past.num_slices)
        x, aux, earlier, new = on_pieces(one, 0, x, inputs, past.earlier)
        return x, (sum_pieces(aux), replace(past, earlier=earlier, new=new))

    return layer_of_pieces


def _x_and_aux(returned: Any, x: PyTree, mean: float) -> tuple[PyTree, dict[str, Any]]:
    """Returns what a layer returned as (x, its share of the auxiliary losses and metrics)."""
    if not _is_pair(returned, x):
        return returned, {}
    y, aux = returned
    check_metrics(aux or {}, "layer")
    return y, _shares(aux or {}, mean)


def _shares(metrics: dict[str, Any], mean: float) -> dict[str, Any]:
    """Returns what a piece contributes to means over all pieces."""
    return {name: jnp.asarray(x, sum_dtype(x)) * mean for name, x in metrics.items()}


def _embed(model: Model, weights: Any, inputs: PieceInputs) -> Any:
    """Runs the embedding on one piece."""
    return model.embed(weights, inputs.batch, _folded(inputs.key, 0))


def _parts(model: Model, boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> LossParts:
    """Returns the parts of the loss of one piece."""
    head = boundary if model.tied else boundary["head"]
    return loss_parts(model.loss(head, x, inputs.batch, _folded(inputs.key, 1)))


def _folded(key: Any, index: int) -> Any:
    return jax.random.fold_in(key, index) if jax.tree.leaves(key) else key


def _is_pair(returned: Any, x: PyTree) -> bool:
    if jax.tree.structure(returned) == jax.tree.structure(x):
        return False
    return isinstance(returned, tuple) and len(returned) == 2


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

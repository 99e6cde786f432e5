"""From the user's functions of one layer to the functions of one stage that engines run.

The batch is cut into M microbatches, and each of these into D pieces of rows: one for each device
that divides rows, or one in all if functions are given whole microbatches. L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..autodiff import StagedModel
from ..autodiff.staged_model import (
    Past,
    accum_dtype,
    has_custom_vjp,
    split_metrics,
    sum_scalars,
)
from ..engines import loss_on_ranks
from ..engines.fsdp import num_row_shards, row_axes
from ..ir.rows import Draws, with_own_draws
from ..sharding import draw_own
from ..sharding.specs import reshard_to_spec, typed_by_specs
from ._frozen import join
from ._layer_results import x_and_aux
from ._losses import LossParts, batch_divisor, check_has_rows, check_metrics, loss_parts
from ._model import Model, ModelFunction
from ._packed_x import PackedX
from ._pieces import num_rows, on_pieces, shape_of, sum_pieces, to_pieces, to_slices
from ._sequences import boundary_of_slices, sequences_divided
from ._whole_cotangents import (
    in_accum_dtype,
    with_whole_cotangents,
    without_cotangents_unless,
)


class PieceInputs(NamedTuple):
    """What the functions of a model read besides parameters, for every piece.

    Attributes:
        batch: The rows of the piece, with leaves [M, D, rows, ...].
        scale: [M, D] factors that turn the loss of a piece into its share of the batch's loss.
        key: [M, D] dropout keys of embedding and loss; () without dropout.
        piece: [M, D] the index of the piece in its microbatch, folded into the keys of layers; ()
            without dropout.
        busy: [D] whether the results of the tick are used. None: the engine has no idle ticks.
    """

    batch: PyTree
    scale: Any = ()
    key: Any = ()
    piece: Any = ()
    busy: Any = None


def make_inputs(
    model: Model,
    mesh: Mesh,
    num_microbatches: int,
    weights: dict[str, Any],
    batch: PyTree,
    key: Any,
    num_slices: int = 1,
    whole_microbatches: bool = False,
    same_draws: bool = False,
    loss_of_all_rows: bool = False,
) -> PieceInputs:
    """Cuts a batch [B, ...] into pieces, and adds keys and the scale of losses."""
    num_shards = 1 if whole_microbatches else num_row_shards(mesh)
    pieces = to_pieces(batch, num_microbatches, num_shards)
    inputs = PieceInputs(to_slices(pieces, num_slices, model.sliced_leaves))
    shape = num_microbatches * num_slices, num_shards
    if jax.tree.leaves(key):
        ids = jnp.arange(shape[0] * shape[1])
        if same_draws:
            ids = jnp.repeat(jnp.arange(shape[0]), shape[1])
        keys = jax.vmap(partial(jax.random.fold_in, key))(ids).reshape(shape)
        piece = jnp.zeros(shape[1], jnp.int32) if same_draws else jnp.arange(shape[1])
        inputs = inputs._replace(key=keys, piece=jnp.broadcast_to(piece, shape))
    if loss_of_all_rows:
        cut = to_slices(to_pieces(batch, num_microbatches, 1), num_slices, model.sliced_leaves)
        keys = inputs.key[:, :1] if jax.tree.leaves(inputs.key) else ()
        whole = PieceInputs(cut, key=keys)
        scale = _loss_scale(model, weights, whole, (shape[0], 1)) / shape[1]
        inputs = inputs._replace(scale=jnp.broadcast_to(scale, shape))
    else:
        inputs = inputs._replace(scale=_loss_scale(model, weights, inputs, shape))
    inputs = inputs._replace(batch=sequences_divided(inputs.batch, mesh, model.sequence_dim, 2))
    axes = row_axes(mesh)
    if not axes:
        return inputs
    if whole_microbatches:
        spec = PartitionSpec(None, None, axes)
        divided = jax.tree.map(lambda x: reshard_to_spec(x, spec, mesh), inputs.batch)
        return inputs._replace(batch=divided)
    spec = PartitionSpec(None, axes)
    context = jax.sharding.get_abstract_mesh()  # of one group, where each has a program
    if AxisType.Explicit in (mesh if context.empty else context).axis_types:
        return typed_by_specs(inputs, spec, mesh)
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), inputs)


def piece_shapes(
    model: Model, batch: PyTree, num_microbatches: int, num_shards: int, num_slices: int
) -> PyTree:
    """Returns the shapes of one piece of a batch, [rows, ...] leaves."""

    def cut(batch: PyTree) -> PyTree:
        pieces = to_pieces(batch, num_microbatches, num_shards)
        return to_slices(pieces, num_slices, model.sliced_leaves)

    pieces = jax.eval_shape(cut, batch)
    return jax.tree.map(partial(shape_of, skipped=2), pieces)


def loss_arguments(
    model: Model, weights: dict[str, Any], rows: PyTree, key: Any, packed: PackedX | None
) -> tuple[PyTree, PyTree, PyTree, Any]:
    """Returns the shapes of what `loss` and `output` are given, (head, x, rows, key)."""
    shapes, key = jax.tree.map(shape_of, (weights, key))
    boundary = boundary_model(model, 1).boundary(shapes)
    if packed is None:
        x = jax.eval_shape(model.embed, shapes["embed"], rows, key)
    else:
        x = packed.entering[-1].shapes(num_rows(rows))
    return boundary if model.tied else boundary["head"], x, rows, key


def _loss_scale(
    model: Model, weights: dict[str, Any], inputs: PieceInputs, shape: tuple[int, int]
) -> Array:
    """Returns [M, D] factors that turn losses of pieces into shares of the batch's loss."""
    shapes = jax.tree.map(shape_of, weights)
    first = jax.tree.map(partial(shape_of, skipped=2), inputs)
    x = jax.eval_shape(partial(_embed, model), shapes["embed"], first)
    flat = jax.tree.map(lambda x: x.reshape(shape[0] * shape[1], *x.shape[2:]), inputs)
    boundary = boundary_model(model, 1).boundary(shapes)
    return jnp.broadcast_to(1 / batch_divisor(partial(_parts, model), boundary, x, flat), shape)


Divide = Callable[[PyTree, PyTree], PyTree]
"""`(x, batch) -> x`: says how x is divided over devices."""


def divided(mesh: Mesh, sequence_dim: int | None, whole_microbatches: bool) -> Divide:
    """Returns `(x, batch) -> x` that divides sequences over devices, and rows of microbatches.

    Left to itself, XLA may copy activations whole to every device, or divide another dim.
    """
    spec = PartitionSpec(row_axes(mesh) if whole_microbatches else ())

    def divide(x: PyTree, batch: PyTree) -> PyTree:
        x = sequences_divided(x, mesh, sequence_dim)
        if not whole_microbatches:
            return x
        rows = jnp.shape(jax.tree.leaves(batch)[0])[:1]
        return jax.tree.map(
            lambda leaf: reshard_to_spec(leaf, spec, mesh) if jnp.shape(leaf)[:1] == rows else leaf,
            x,
        )

    return divide


def undivided(x: PyTree, batch: PyTree) -> PyTree:
    """Returns x."""
    del batch
    return x


def on_all_rows(
    model: Model,
    names: tuple[str, ...],
    draws: Mapping[str, Draws],
    mesh: Mesh,
    x_dims: tuple[int | None, ...],
) -> Model:
    """Returns a model of which each device runs some functions on all rows of a microbatch.

    Each function gathers the rows of the other devices, and returns those of its own.

    Args:
        names: The names of the functions: "embed", "layer" or kinds of layers, and "loss".
        draws: The names of functions that run on the rows of a device, but draw random numbers out
            of those of all rows; with the shapes that they draw.
        x_dims: The dim of rows of every leaf of x. A leaf without, None, is the same on all
            devices, or a mean over rows.

    Returns:
        A model whose functions take and return the rows of a device, as those of `model` do.
    """
    axes = row_axes(mesh)

    def gather(x: PyTree) -> PyTree:
        return _map_rows(lambda leaf, dim: _all_gather(leaf, dim, axes), x, x_dims)

    def own(x: PyTree) -> PyTree:
        return _map_rows(partial(_own_rows, axes, num_row_shards(mesh)), x, x_dims)

    def gathered(batch: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _all_gather(leaf, 0, axes), batch)

    def own_of(state: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _own_rows(axes, num_row_shards(mesh), leaf, 0), state)

    def embed(weights: PyTree, batch: PyTree, key: Any) -> PyTree:
        return own(with_whole_cotangents(model.embed, axes)(weights, gathered(batch), key))

    def loss(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> Any:
        of_all = with_whole_cotangents(model.loss, axes)
        returned = of_all(weights, gather(x), gathered(batch), key)
        scalars, arrays = split_metrics(loss_parts(returned).metrics)
        return (returned[0], scalars | own_of(arrays)) if arrays else returned

    def of_layer(function: Callable) -> Callable:
        function = with_whole_cotangents(function, axes)

        def layer(
            weights: PyTree, x: PyTree, batch: PyTree, key: Any, past: Past | None = None
        ) -> Any:
            arguments = weights, gather(x), gathered(batch), key
            if past is None:
                y, aux = x_and_aux(function(*arguments), x)
                return own(y), aux
            all_past = replace(past, earlier=gathered(past.earlier))
            returned, new_past = function(*arguments, all_past)
            y, aux = x_and_aux(returned, x)
            new_past = replace(new_past, earlier=own_of(new_past.earlier), new=own_of(new_past.new))
            return (own(y), aux), new_past

        return layer

    def drawing(function: Callable, shapes: Draws) -> Callable:
        def run(*arguments: Any) -> Any:
            closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
            own_bits = partial(draw_own, axes=axes)
            leaves = with_own_draws(closed, shapes, own_bits)(*jax.tree.leaves(arguments))
            return jax.tree.unflatten(jax.tree.structure(results), leaves)

        return run

    def changed(name: str, function: Any, call: Callable) -> ModelFunction:
        if name in draws:
            call = drawing(function, draws[name])
        elif name not in names:
            return function
        return replace(function, call=call)

    layers: Any = model.layer
    if isinstance(layers, Mapping):
        layers = {kind: changed(kind, f, of_layer(f)) for kind, f in layers.items()}
    else:
        layers = changed("layer", layers, of_layer(layers))
    return replace(
        model,
        embed=changed("embed", model.embed, embed),
        layer=layers,
        loss=changed(model.loss_name, model.loss, loss),
    )


def _map_rows(f: Callable, x: PyTree, dims: tuple[int | None, ...]) -> PyTree:
    leaves, tree = jax.tree.flatten(x)
    return tree.unflatten([f(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(leaf: Any, dim: int | None, axes: tuple[str, ...]) -> Any:
    """Returns the rows of all devices, or the mean of what has no rows."""
    if dim is not None:
        return jax.lax.all_gather(leaf, axes, axis=dim, tiled=True)
    is_number = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return in_accum_dtype(jax.lax.pmean, leaf, axes) if is_number else leaf


def _to_own_rows(dim: int | None, axes: tuple[str, ...], _: None, cotangent: Any) -> tuple[Any]:
    if cotangent.dtype == jax.dtypes.float0:
        return (cotangent,)
    if dim is None:
        return (in_accum_dtype(jax.lax.pmean, cotangent, axes),)
    scatter = partial(jax.lax.psum_scatter, scatter_dimension=dim, tiled=True)
    return (in_accum_dtype(scatter, cotangent, axes),)


_all_gather.defvjp(lambda leaf, dim, axes: (_all_gather(leaf, dim, axes), None), _to_own_rows)


def _own_rows(axes: tuple[str, ...], num_shards: int, leaf: Any, dim: int | None) -> Any:
    if dim is None:
        return leaf
    size = leaf.shape[dim] // num_shards
    return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(axes) * size, size, dim)


def boundary_model(model: Model, num_pieces: int, divide: Divide = undivided) -> StagedModel:
    """Returns the model as engines run it on [d, ...] pieces, without its layers."""
    mean = 1 / num_pieces

    def loss(parts: Callable, boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> Any:
        of_piece, _, metrics = parts(boundary, x, inputs)
        check_has_rows(metrics, num_rows(inputs.batch))
        scalars, arrays = split_metrics(metrics)
        shares = _shares(scalars, mean)
        return jnp.asarray(of_piece, inputs.scale.dtype) * inputs.scale, shares | arrays

    def sum_of_losses(boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> Any:
        return sum_scalars(on_pieces(partial(loss, partial(_parts, model)), 1, boundary, x, inputs))

    def on_ranks(boundary: dict[str, Any], x: PyTree, inputs: PieceInputs, axis: str) -> Any:
        def parts(boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> LossParts:
            head = boundary if model.tied else boundary["head"]
            assert model.vocab_parallel_loss is not None
            own = loss_parts(model.vocab_parallel_loss(head, x, inputs.batch, axis))
            shapes = jax.eval_shape(partial(_parts, model), boundary, x, inputs)
            if jax.tree.structure(own) != jax.tree.structure(shapes):
                raise ValueError(
                    f"`vocab_parallel_loss` returns {_form(own)}, and `loss` {_form(shapes)}. "
                    "Return the same."
                )
            return own

        return sum_scalars(on_pieces(partial(loss, parts), 1, boundary, x, inputs))

    def embed(weights: Any, inputs: PieceInputs) -> PyTree:
        return divide(_embed(model, weights, inputs), inputs.batch)

    return StagedModel(
        embed=partial(on_pieces, embed, 1),
        stage=lambda weights, x, inputs, key: x,
        loss=sum_of_losses,
        tied=model.tied,
        vocab_parallel_loss=None if model.vocab_parallel_loss is None else loss_on_ranks(on_ranks),
    )


def _form(parts: LossParts) -> str:
    name = "a scalar" if parts.weight is None else "a `Weighted`"
    return f"{name} and the metrics {', '.join(parts.metrics)}" if parts.metrics else name


def staged_model(
    model: Model,
    num_pieces: int,
    own_copy: Callable[[Any], PyTree],
    stage_of: Callable[[Any], Callable],
    sliced_stage_of: Callable[[Any], Callable] | None = None,
    divide: Divide = undivided,
    tokens_over: Mesh | None = None,
) -> StagedModel:
    """Returns the model as engines run it.

    Args:
        tokens_over: The mesh whose axis `context` may divide what the embedding is given.
        stage_of: From a layer, or layers by kind, to the stage that runs layers. A layer is given
            the dropout key and the frozen leaves of `Engine.layer_keys`.

    Returns:
        Functions of leaves [d, ...], for d pieces of a microbatch.
    """
    mean, has_key = 1 / num_pieces, model.takes_key

    def layer(
        function: Callable, weights: Any, constants: Any, x: PyTree, inputs: PieceInputs
    ) -> Any:
        key, frozen = constants
        # Without dropout the key may be an empty array, of which an engine reads how many layers
        # there are; functions are given ().
        key = jax.random.fold_in(key, inputs.piece) if has_key else ()
        rows = inputs.batch
        whole = join(weights, frozen), x, rows, key
        if inputs.busy is not None and has_custom_vjp(function, *whole):
            # Without frozen leaves, for whose gradients residuals would be stored.
            weights, x, rows = without_cotangents_unless(inputs.busy, (weights, x, rows))
        y, aux = x_and_aux(function(join(weights, frozen), x, rows, key), x)
        return divide(y, inputs.batch), _shares(aux, mean)

    def of_pieces(function: Callable) -> Callable:
        def layer_of_pieces(weights: Any, x: PyTree, inputs: PieceInputs, constants: Any) -> Any:
            x, aux = on_pieces(partial(layer, function), 2, weights, constants, x, inputs)
            return x, sum_pieces(aux)

        return layer_of_pieces

    def make(stage_of: Callable[[Any], Callable], of_layer: Callable) -> Callable:
        if model.shared:
            return _sharing_stage(model, own_copy, stage_of, of_layer)
        return stage_of(jax.tree.map(of_layer, model.layer))  # one function, or one for each kind

    def mark_idle(inputs: PieceInputs, busy: Array) -> PieceInputs:
        return inputs._replace(busy=jnp.broadcast_to(busy, inputs.scale.shape))

    staged = boundary_model(model, num_pieces, divide)
    staged = replace(staged, stage=make(stage_of, of_pieces), mark_idle=mark_idle)
    if tokens_over is not None:
        embed = partial(on_pieces, partial(_embed, model), 1)
        dim = model.sequence_dim and model.sequence_dim + 1
        staged = replace(staged, of_slices=boundary_of_slices(embed, tokens_over, dim))
    if sliced_stage_of is None:
        return staged
    sliced_layer = partial(_sliced_layer, mean, divide)
    return replace(staged, sliced_stage=make(sliced_stage_of, sliced_layer))


def contributing_model(
    model: Model,
    mesh: Mesh,
    stage_of: Callable[[Any], Callable],
    sliced_stage_of: Callable[[Any], Callable] | None = None,
) -> StagedModel:
    """Returns a model whose functions return contributions, as engines run it."""

    def loss(boundary: dict[str, Any], x: PyTree, inputs: PyTree) -> Any:
        head = boundary if model.tied else boundary["head"]
        value, metrics = model.loss(head, x, inputs, ())
        check_metrics(metrics, "loss")  # a contribution is a sum
        return value, metrics

    def of_layer(function: Any) -> Callable:
        def run(weights: Any, x: PyTree, inputs: PyTree, constants: Any) -> Any:
            key, frozen = constants
            return x_and_aux(function(join(weights, frozen), x, inputs, key), x)

        return run

    def of_sliced_layer(function: Any) -> Callable:
        def run(weights: Any, x: PyTree, inputs: PyTree, constants: Any, past: Past) -> Any:
            key, frozen = constants
            returned, past = function(join(weights, frozen), x, inputs, key, past)
            y, aux = x_and_aux(returned, x)
            return y, (aux, past)

        return run

    def stage(stage_of: Callable, of_layer: Callable) -> Callable:
        return stage_of(jax.tree.map(of_layer, model.layer))

    def embed(weights: Any, inputs: PyTree) -> Any:
        return model.embed(weights, inputs, ())

    return StagedModel(
        embed=embed,
        stage=stage(stage_of, of_layer),
        loss=loss,
        tied=model.tied,
        vocab_parallel_loss=model.vocab_parallel_loss,
        sliced_stage=sliced_stage_of and stage(sliced_stage_of, of_sliced_layer),
        of_slices=boundary_of_slices(embed, mesh, model.sequence_dim, loss),
    )


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


def _sliced_layer(mean: float, divide: Divide, function: Callable) -> Callable:
    """Returns a layer as `Engine.sliced_stage` takes it, from one of the user."""

    def layer(
        weights: Any, constants: Any, offset: Any, num_slices: int, *piece: PyTree
    ) -> tuple[PyTree, dict[str, Any], PyTree, PyTree]:
        x, inputs, earlier = piece
        key, frozen = constants
        past = Past(earlier, offset=offset, num_slices=num_slices)
        returned, new_past = function(join(weights, frozen), x, inputs.batch, key, past)
        y, aux = x_and_aux(returned, x)
        return divide(y, inputs.batch), _shares(aux, mean), new_past.earlier, new_past.new

    def layer_of_pieces(
        weights: Any, x: PyTree, inputs: PieceInputs, constants: Any, past: Past
    ) -> Any:
        one = partial(layer, weights, constants, past.offset, past.num_slices)
        x, aux, earlier, new = on_pieces(one, 0, x, inputs, past.earlier)
        return x, (sum_pieces(aux), replace(past, earlier=earlier, new=new))

    return layer_of_pieces


def _shares(metrics: dict[str, Any], mean: float) -> dict[str, Any]:
    """Returns the share of a piece in means over all pieces."""
    return {name: jnp.asarray(x, accum_dtype(x)) * mean for name, x in metrics.items()}


def _embed(model: Model, weights: Any, inputs: PieceInputs) -> Any:
    """Runs the embedding on one piece."""
    return model.embed(weights, inputs.batch, _folded(inputs.key, 0))


def _parts(model: Model, boundary: dict[str, Any], x: PyTree, inputs: PieceInputs) -> LossParts:
    """Returns the parts of the loss of one piece."""
    head = boundary if model.tied else boundary["head"]
    return loss_parts(model.loss(head, x, inputs.batch, _folded(inputs.key, 1)))


def _folded(key: Any, index: int) -> Any:
    return jax.random.fold_in(key, index) if jax.tree.leaves(key) else key

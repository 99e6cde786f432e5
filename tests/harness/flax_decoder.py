"""A decoder of Flax modules: embedding, the module that `create_pipeline` returns, and loss.

A stage is a module, Linen or NNX, whose parameters are those of the model's stage, [L, ...], and
whose call computes the same. Its auxiliary losses and metrics are sown. Activations are dicts: the
arrays that layers read beside the arguments of their call travel with `x`.

R repeats, S ranks, L layers per stage, M microbatches, n = M / S of them on each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jaxpipe import linen as linen_frontend
from jaxpipe import models, spmd
from jaxpipe import nnx as nnx_frontend
from jaxpipe.autodiff import StagedModel
from jaxpipe.autodiff.staged_model import Aux, combine_losses, sum_scalars
from jaxpipe.models.weights import is_weight, stack_weights
from jaxpipe.spmd.ranks import on_ranks

Activations = dict[str, jax.Array]
StageFn = Callable[[PyTree, Activations, jax.Array, jax.Array], tuple[Activations, Aux]]
"""`(weights [L, ...], activations, segment_ids, positions) -> (activations, aux)`"""

PipelineFn = Callable[..., tuple[PyTree, Aux]]
"""`(weights, inputs [M, ...], segment_ids, positions) -> (outputs, aux)`

Weights are [R, S, L, ...], or [S, L, ...] with one repeat.
"""

METRICS_COLLECTION = "metrics"
"""The collection that Linen stages sow their auxiliary losses and metrics into."""


@dataclass(frozen=True)
class FlaxDecoder:
    """Everything that a pipeline of Flax layers and the functions around it are built from.

    Attributes:
        model: The model.
        stage: Abstract weights of a stage.
        config: The fields that `create_pipeline` reads.
        mesh: The mesh, or None.
        boundary_gathers: The gathers of `{"embed": weights}` and `{"head": weights}`, by name.
        extra_batch_inputs: Arrays of a batch that stages read beside positions and segment ids.
        batch_axes: Mesh axes whose devices embed, and compute the loss of, their own rows.
    """

    model: StagedModel
    stage: PyTree
    config: Any
    mesh: Mesh | None
    boundary_gathers: dict[str, spmd.Gather]
    extra_batch_inputs: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()


class LinenStage(nn.Module):
    """A stage in Linen.

    Attributes:
        weights: Its abstract weights, a tree of `models.Weight`.
        run: The function that it computes.
    """

    weights: Any
    run: StageFn

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        weights = {
            name: self.param(name, partial(_init_boxed, part))
            for name, part in self.weights.items()
        }
        y, aux = self.run(weights, inputs, segment_ids, positions)
        for name, value in aux.items():
            self.sow(METRICS_COLLECTION, name, value)
        return y


def _init_boxed(part: PyTree, key: jax.Array) -> PyTree:
    return _box(part, models.initialize(part, key))


def _box(tree: PyTree, arrays: PyTree) -> PyTree:
    """Boxes `arrays` with their logical axes, as Linen stores parameters."""
    return jax.tree.map(
        lambda w, x: nn.LogicallyPartitioned(x, w.axes), tree, arrays, is_leaf=is_weight
    )


class NnxStage(nnx.Module):
    """A stage in NNX; its arguments are the attributes of `LinenStage`."""

    def __init__(self, weights: Any, run: StageFn, rngs: nnx.Rngs):
        arrays = models.initialize(weights, rngs.params())
        self.weights = nnx.data(
            jax.tree.map(
                lambda w, x: nnx.Param(x, out_sharding=w.axes),
                weights,
                arrays,
                is_leaf=is_weight,
            )
        )
        self.run = run

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        weights = nnx.to_pure_dict(nnx.state(self))["weights"]
        y, aux = self.run(weights, inputs, segment_ids, positions)
        for name, value in aux.items():
            self.sow(nnx.Intermediate, name, value)
        return y


def linen_value(decoder: FlaxDecoder) -> Callable:
    """Builds the loss of a decoder whose layers are Linen modules.

    Returns:
        `(weights, batch_inputs, keys) -> (loss, metrics)`.
    """
    stage = LinenStage(decoder.stage, _stage_fn(decoder.model))
    pipeline = linen_frontend.create_pipeline(decoder.config, stage, decoder.mesh)
    stacked = pipeline.settings.stacked
    tree = stack_weights(decoder.stage, [*stacked.values()], (*stacked,))

    def run(stages: PyTree, *arrays: PyTree) -> tuple[PyTree, Aux]:
        variables = {"params": {"layers": _box(tree, stages)}}
        out: Any = pipeline.apply(
            variables, *arrays, microbatched=True, mutable=[METRICS_COLLECTION]
        )
        y, sown = out
        values = sown.get(METRICS_COLLECTION, {}).get("layers", {})
        return y, {name: jnp.sum(value) for name, (value,) in values.items()}

    return _decoder_value(decoder, run)


def nnx_value(decoder: FlaxDecoder) -> Callable:
    """Builds the loss of a decoder whose layers are NNX modules.

    Returns:
        `(weights, batch_inputs, keys) -> (loss, metrics)`.
    """
    factory = partial(NnxStage, decoder.stage, _stage_fn(decoder.model))
    make = partial(nnx_frontend.create_pipeline, decoder.config, factory, decoder.mesh)
    # No arrays: the caller has them.
    graph, state = jax.eval_shape(lambda: nnx.split(make()))

    def run(stages: PyTree, *arrays: PyTree) -> tuple[PyTree, Aux]:
        with nnx.use_eager_sharding(False):
            pipeline = nnx.merge(graph, _replace_arrays(state, stages), copy=True)
        y, sown = nnx.capture(pipeline, nnx.Intermediate)(*arrays, microbatched=True)
        flat = nnx.to_flat_state(sown)
        return y, {str(path[-1]): jnp.sum(values.get_value()[0]) for path, values in flat}

    return _decoder_value(decoder, run)


def _replace_arrays(state: PyTree, stages: PyTree) -> PyTree:
    """Puts the weights of `stages` into `state`, the abstract state of a pipeline of `NnxStage`."""
    flat = []
    for path, variable in nnx.to_flat_state(state):
        array = stages
        for name in path[2:]:  # behind "layers" and "weights"
            array = array[name]
        flat.append((path, variable.replace(array)))
    return nnx.from_flat_state(flat)


def _stage_fn(model: StagedModel) -> StageFn:
    """Returns the model's stage with the arguments of a module's call."""

    def call(weights, activations, segment_ids, positions):
        batch_inputs = activations | {"segment_ids": segment_ids, "positions": positions}
        y, aux = model.stage(weights, batch_inputs.pop("x"), batch_inputs, ((), ()))
        return activations | {"x": y}, aux

    return call


def _decoder_value(decoder: FlaxDecoder, pipeline: PipelineFn) -> Callable:
    """Builds the loss of a decoder; every rank embeds its microbatches and computes their loss."""
    model, mesh = decoder.model, decoder.mesh
    rows = P("stage", None, decoder.batch_axes) if decoder.batch_axes else 0
    specs = {name: _specs_of(gather, name) for name, gather in decoder.boundary_gathers.items()}
    axes = ("stage", *decoder.batch_axes)

    # As they are stored: so that their gradients add up over microbatches in float32.
    def unshard(boundary: dict[str, PyTree]) -> dict[str, PyTree]:
        return {
            name: decoder.boundary_gathers[name].unshard({name: part})[name]
            for name, part in boundary.items()
        }

    def embed_share(boundary, share):
        return jax.vmap(model.embed, in_axes=(None, 0))(unshard(boundary)["embed"], share)

    def loss_share(boundary, share):
        return jax.lax.psum(_loss_of_microbatches(model, unshard(boundary), share), axes)

    on_mesh = partial(on_ranks, mesh=mesh)
    embed = on_mesh(embed_share, in_dims=({"embed": specs["embed"]}, rows), out_dims=rows)
    loss_of = on_mesh(loss_share, in_dims=(model.boundary(specs), rows), out_dims=None)

    def loss(weights, batch_inputs, keys):
        assert not jax.tree.leaves(keys)
        num_ranks = jax.tree.leaves(weights["stages"])[0].shape[1]
        shares = partial(jax.tree.map, lambda x: x.reshape(num_ranks, -1, *x.shape[1:]))
        x = embed({"embed": weights["embed"]}, shares(batch_inputs))
        extra = {name: batch_inputs[name] for name in decoder.extra_batch_inputs}
        inputs = {"x": x.reshape(-1, *x.shape[2:])} | extra
        stages = weights["stages"]  # [R, S, ...], which a module with one repeat stores as [S, ...]
        if jax.tree.leaves(stages)[0].shape[0] == 1:
            stages = jax.tree.map(lambda w: w[0], stages)
        y, stage_aux = pipeline(
            stages, inputs, batch_inputs["segment_ids"], batch_inputs["positions"]
        )
        value, loss_metrics = loss_of(
            model.boundary(weights), (shares(y["x"]), shares(batch_inputs))
        )
        return combine_losses(value, loss_metrics, stage_aux)

    return loss


def _specs_of(gather: spmd.Gather, group: str) -> PyTree:
    """Returns how a group of weights is sharded over manual axes: one spec if all have it."""
    specs = gather.weight_specs
    return specs[group] if isinstance(specs, dict) else specs


def _loss_of_microbatches(
    model: StagedModel, boundary: PyTree, microbatches: PyTree
) -> tuple[jax.Array, Aux]:
    """Sums the loss of [n, ...] microbatches in a scan, and recomputes logits in the backward."""

    @partial(jax.checkpoint, prevent_cse=False)
    def loss_of_one(boundary, microbatch):
        y, batch_inputs = microbatch
        return model.loss(boundary, y, batch_inputs)

    _, (losses, metrics) = jax.lax.scan(
        lambda _, one: ((), loss_of_one(boundary, one)), (), microbatches
    )
    return jnp.sum(losses), sum_scalars(metrics)

"""A decoder of Flax modules in the trainer's step: embedding, `create_pipeline`'s module, loss.

One layer is a module, Linen or NNX, whose parameters are those of the model's layer and whose call
is the model's. A layer of your own stands in the same place. The trainer keeps its own tree of
weights: the parameters of a rim's module have the same dims, so each step hands them over. What a
layer sums up, a load-balance loss for instance, it sows. Activations are dicts: what layers read
beside the arguments of their call travels with `x`.

R repeats, S ranks, L layers per stage, M microbatches, n = M / S of them on each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ... import linen as linen_rim
from ... import models, modules, spmd
from ... import nnx as nnx_rim
from ...autodiff import Model, Sums, joined, total
from ._family import model_family
from ._fsdp import batch_axes, boundary_gathers
from ._setup import STACK_AXES, Setup

Activations = dict[str, jax.Array]
LayerFn = Callable[[PyTree, Activations, jax.Array, jax.Array], tuple[Activations, Sums]]
"""`(weights of one layer, activations, segment_ids, positions) -> (activations, sums)`"""

PipelineFn = Callable[..., tuple[PyTree, Sums]]
"""`(weights [R, S, L, ...], inputs [M, ...], segment_ids, positions) -> (outputs, sums)`"""

METRICS_COLLECTION = "metrics"
"""The collection that Linen layers sow their sums into."""


@dataclass(frozen=True)
class FlaxDecoder:
    """What a pipeline of Flax layers and the functions around it are made from.

    Attributes:
        model: The model; one layer is its stage.
        layer: Abstract weights of one layer.
        config: What `create_pipeline` reads.
        mesh: The mesh, or None.
        ends: How the weights of `embed` and `head` are gathered.
        more_side: What a stage reads of a batch beside positions and segment ids.
        batch_axes: Axes whose devices embed, and compute the loss of, their own rows.
    """

    model: Model
    layer: PyTree
    config: Any
    mesh: Mesh | None
    ends: dict[str, spmd.Gather]
    more_side: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()


class LinenLayer(nn.Module):
    """A decoder layer in Linen.

    Attributes:
        weights: Its abstract weights, a tree of `models.Weight`.
        run: What it computes.
    """

    weights: Any
    run: LayerFn

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        weights = {
            name: self.param(name, partial(_init_boxed, part))
            for name, part in self.weights.items()
        }
        y, sums = self.run(weights, inputs, segment_ids, positions)
        for name, value in sums.items():
            self.sow(METRICS_COLLECTION, name, value)
        return y


def _init_boxed(part: PyTree, key: jax.Array) -> PyTree:
    return _box(part, models.initialize(part, key))


def _box(tree: PyTree, arrays: PyTree) -> PyTree:
    """`arrays` with their logical axes, as Linen keeps them."""
    return jax.tree.map(
        lambda w, x: nn.LogicallyPartitioned(x, w.axes), tree, arrays, is_leaf=models.is_weight
    )


class NnxLayer(nnx.Module):
    """A decoder layer in NNX; the arguments are `LinenLayer`'s attributes."""

    def __init__(self, weights: Any, run: LayerFn, rngs: nnx.Rngs):
        arrays = models.initialize(weights, rngs.params())
        self.weights = nnx.data(
            jax.tree.map(
                lambda w, x: nnx.Param(x, out_sharding=w.axes),
                weights,
                arrays,
                is_leaf=models.is_weight,
            )
        )
        self.run = run

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        weights = nnx.to_pure_dict(nnx.state(self))["weights"]
        y, sums = self.run(weights, inputs, segment_ids, positions)
        for name, value in sums.items():
            self.sow(nnx.Intermediate, name, value)
        return y


def linen_value_and_grad(decoder: FlaxDecoder) -> Callable:
    """Loss and gradients by `(weights, side, keys)`, as `spmd.circular_value_and_grad`."""
    return jax.value_and_grad(linen_value(decoder), has_aux=True)


def linen_value(decoder: FlaxDecoder) -> Callable:
    """(loss, metrics) alone, by the same arguments."""
    layer = LinenLayer(decoder.layer, _layer_fn(decoder.model))
    pipeline = linen_rim.create_pipeline(decoder.config, layer, decoder.mesh)
    tree = models.stacked(decoder.layer, pipeline.settings.dims, STACK_AXES)

    def run(stages: PyTree, *arrays: PyTree) -> tuple[PyTree, Sums]:
        variables = {"params": {"layers": _box(tree, stages)}}
        out: Any = pipeline.apply(
            variables, *arrays, microbatched=True, mutable=[METRICS_COLLECTION]
        )
        y, sown = out
        values = sown.get(METRICS_COLLECTION, {}).get("layers", {})
        return y, {name: jnp.sum(value) for name, (value,) in values.items()}

    return _decoder_value(decoder, run)


def nnx_value_and_grad(decoder: FlaxDecoder) -> Callable:
    """As `linen_value_and_grad`, through NNX."""
    return jax.value_and_grad(nnx_value(decoder), has_aux=True)


def nnx_value(decoder: FlaxDecoder) -> Callable:
    """As `linen_value`, through NNX."""
    factory = partial(NnxLayer, decoder.layer, _layer_fn(decoder.model))
    make = partial(nnx_rim.create_pipeline, decoder.config, factory, decoder.mesh)
    # No arrays: the caller has them.
    graph, state = jax.eval_shape(lambda: nnx.split(make()))

    def run(stages: PyTree, *arrays: PyTree) -> tuple[PyTree, Sums]:
        with nnx.use_eager_sharding(False):
            pipeline = nnx.merge(graph, _replace_arrays(state, stages), copy=True)
        y, sown = nnx.capture(pipeline, nnx.Intermediate)(*arrays, microbatched=True)
        flat = nnx.to_flat_state(sown)
        return y, {str(path[-1]): jnp.sum(values.get_value()[0]) for path, values in flat}

    return _decoder_value(decoder, run)


def _replace_arrays(state: PyTree, stages: PyTree) -> PyTree:
    """`state`, the abstract one of a pipeline of `NnxLayer`, with other arrays."""
    flat = []
    for path, variable in nnx.to_flat_state(state):
        array = stages
        for name in path[2:]:  # behind "layers" and "weights"
            array = array[name]
        flat.append((path, variable.replace(array)))
    return nnx.from_flat_state(flat)


def make_flax_decoder(setup: Setup, model: Model) -> FlaxDecoder:
    """The decoder of a run."""
    return FlaxDecoder(
        model,
        setup.abstract_unstacked_weights["layer"],
        frontend_config(setup),
        setup.mesh,
        boundary_gathers(setup),
        model_family(setup.config).more_side,
        batch_axes(setup),
    )


def frontend_config(setup: Setup) -> SimpleNamespace:
    """The fields that `create_pipeline` reads: the run's own, and what the setup made of them."""
    of_setup = {
        "num_decoder_layers": setup.layout.num_layers,
        "pipeline_parallel_layers": -1,
        "num_pipeline_microbatches": setup.num_microbatches,
        "micro_batch_size_to_train_on": setup.num_microbatches * setup.microbatch_size,
        "logical_axis_rules": setup.rules,
        # Iterations that are written out leave rows to the compiler.
        "pipeline_batch_axes": batch_axes(setup) if setup.config.scan_pipeline_iterations else (),
        # The model's layer has its policy around it already.
        "set_remat_policy_on_layers_per_stage": False,
    }
    return SimpleNamespace(**(setup.config.model_dump() | of_setup))


def check_frontend(setup: Setup) -> None:
    """Raises a `ValueError` if the rims cannot do what the config asks for."""
    modules.pipeline_settings(frontend_config(setup), setup.mesh)


def _layer_fn(model: Model) -> LayerFn:
    """The model's stage as one layer."""

    def call(weights, activations, segment_ids, positions):
        stack = jax.tree.map(lambda w: w[None], weights)
        side = activations | {"segment_ids": segment_ids, "positions": positions}
        y, sums = model.stage(stack, side.pop("x"), side, ())
        return activations | {"x": y}, sums

    return call


def _decoder_value(decoder: FlaxDecoder, pipeline: PipelineFn) -> Callable:
    """Every rank embeds its share of the microbatches, and computes their loss."""
    model, mesh = decoder.model, decoder.mesh
    rows = P("stage", None, decoder.batch_axes) if decoder.batch_axes else 0
    specs = {name: gather.weight_specs for name, gather in decoder.ends.items()}
    axes = ("stage", *decoder.batch_axes)

    # As they are stored: so that their gradients add up over microbatches in float32.
    def whole(ends: dict[str, PyTree]) -> dict[str, PyTree]:
        return {name: decoder.ends[name].whole(of_end) for name, of_end in ends.items()}

    def embed_share(ends, share):
        return jax.vmap(model.embed, in_axes=(None, 0))(whole(ends)["embed"], share)

    def loss_share(ends, share):
        return jax.lax.psum(_loss_of_microbatches(model, whole(ends), share), axes)

    on_ranks = partial(spmd.on_ranks, mesh=mesh)
    embed = on_ranks(embed_share, in_dims=({"embed": specs["embed"]}, rows), out_dims=rows)
    loss_of = on_ranks(loss_share, in_dims=(model.ends(specs), rows), out_dims=None)

    def loss(weights, side, keys):
        assert not jax.tree.leaves(keys)
        num_ranks = jax.tree.leaves(weights["stages"])[0].shape[1]
        shares = partial(jax.tree.map, lambda x: x.reshape(num_ranks, -1, *x.shape[1:]))
        x = embed({"embed": weights["embed"]}, shares(side))
        more = {name: side[name] for name in decoder.more_side}
        inputs = {"x": x.reshape(-1, *x.shape[2:])} | more
        y, of_stages = pipeline(weights["stages"], inputs, side["segment_ids"], side["positions"])
        value, of_loss = loss_of(model.ends(weights), (shares(y["x"]), shares(side)))
        return joined(value, of_loss, of_stages)

    return loss


def _loss_of_microbatches(
    model: Model, ends: PyTree, microbatches: PyTree
) -> tuple[jax.Array, Sums]:
    """The loss of [n, ...] microbatches, one after the other. Logits are computed again."""

    @partial(jax.checkpoint, prevent_cse=False)
    def of_one(ends, microbatch):
        y, side = microbatch
        return model.loss(ends, y, side)

    _, (losses, sums) = jax.lax.scan(lambda _, one: ((), of_one(ends, one)), (), microbatches)
    return jnp.sum(losses), total(sums)

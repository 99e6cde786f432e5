"""The train step: a state goes in, the next one and its metrics come out.

R repeats, S ranks, L layers, M microbatches of b rows, T tokens a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree

from .. import models, sharding, spmd
from ..autodiff import Model, unpipelined
from ._config import Config
from ._optimizer import adamw, clip, decay_mask, gradient_norm, learning_rate_schedule
from ._remat import remat_of_ticks
from ._setup import STACKED, Setup, batch_shardings, build_model

State = dict[str, Any]
"""`weights`, `optimizer` and `step`, the number of steps done."""


def make_optimizer(setup: Setup) -> optax.GradientTransformation:
    """AdamW; norms' scales do not decay."""
    config = setup.config
    stacked = {"embed": 0, "stages": len(STACKED), "head": 0}
    return adamw(
        make_schedule(setup),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        decay_mask=decay_mask(models.shapes(setup.weight_tree), stacked),
    )


def make_schedule(setup: Setup) -> optax.Schedule:
    """The learning rate by step."""
    config = setup.config
    num_steps = config.learning_rate_schedule_steps
    return learning_rate_schedule(
        config.learning_rate,
        num_steps=config.steps if num_steps == -1 else num_steps,
        warmup_fraction=config.warmup_steps_fraction,
        final_fraction=config.learning_rate_final_fraction,
    )


def initial_state(setup: Setup) -> State:
    """Weights, optimizer state and step 0, each made on the devices that hold it."""
    optimizer, layout = make_optimizer(setup), setup.layout

    def make() -> State:
        tree = models.llama_weights(setup.llama, jnp.dtype(setup.config.weight_dtype))
        key = jax.random.key(setup.config.init_weights_seed)
        ends = {name: tree[name] for name in ("embed", "head")}
        stages = models.initialize_layers(tree["layer"], key, layout.dims)
        weights = models.initialize(ends, key) | {"stages": stages}
        return {"weights": weights, "optimizer": optimizer.init(weights), "step": jnp.int32(0)}

    return jax.jit(make, out_shardings=state_shardings(setup))()


def state_shapes(setup: Setup) -> State:
    """`jax.ShapeDtypeStruct` for every leaf of a state."""
    weights = models.shapes(setup.weight_tree)
    optimizer = jax.eval_shape(make_optimizer(setup).init, weights)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return {"weights": weights, "optimizer": optimizer, "step": step}


def state_axes(setup: Setup) -> State:
    """Logical axes of every leaf: Adam's moments lie like their weights."""
    axes = models.logical_axes(setup.weight_tree)
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(setup),
        lambda _, of_weight: of_weight,
        state_shapes(setup)["optimizer"],
        axes,
        transform_non_params=lambda _: (),
    )
    return {"weights": axes, "optimizer": optimizer, "step": ()}


def state_shardings(setup: Setup) -> State:
    """A sharding for every leaf of a state."""
    return sharding.named_shardings(state_shapes(setup), state_axes(setup), setup.mesh, setup.rules)


def make_train_step(setup: Setup) -> Callable[[State, PyTree], tuple[State, dict[str, Array]]]:
    """The step, `(state, batch from place_batch) -> (state, metrics)`.

    It compiles at its first call. The state that goes in is donated.
    """
    optimizer, schedule = make_optimizer(setup), make_schedule(setup)
    value_and_grad = ENGINES[setup.config.pipeline_engine](setup, build_model(setup))
    threshold = setup.config.gradient_clipping_threshold

    def step(state: State, batch: PyTree) -> tuple[State, dict[str, Array]]:
        weights = state["weights"]
        keys = _dropout_keys(setup, state["step"])
        (loss, metrics), grads = value_and_grad(weights, batch, keys)
        norm = gradient_norm(grads)
        grads = clip(grads, norm, threshold=threshold)
        updates, moments = optimizer.update(grads, state["optimizer"], weights)
        new = {
            "weights": optax.apply_updates(weights, updates),
            "optimizer": moments,
            "step": state["step"] + 1,
        }
        rate = jnp.asarray(schedule(state["step"]))
        return new, {"loss": loss, **metrics, "gradient_norm": norm, "learning_rate": rate}

    shardings = state_shardings(setup)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings(setup)),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )


def place_batch(setup: Setup, batch: dict[str, np.ndarray]) -> dict[str, Array]:
    """[B, T] rows in host memory -> [M, b, T] on the devices.

    `target_weights` come out divided by their sum over the batch: the share of each token in the
    loss, so that uneven masks need no care anywhere else.
    """
    weight = max(float(batch["target_weights"].sum(dtype=np.float64)), 1.0)
    batch = batch | {"target_weights": (batch["target_weights"] / weight).astype(np.float32)}

    def place(rows: np.ndarray, where: jax.sharding.NamedSharding) -> Array:
        rows = rows.reshape(setup.num_microbatches, setup.microbatch_size, -1)
        return jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])

    return jax.tree.map(place, batch, batch_shardings(setup))


def _circular(setup: Setup, model: Model) -> Callable:
    config = setup.config
    ends = {name: setup.weight_tree[name] for name in ("embed", "head")}
    stage = jax.tree.map(_without_ranks, setup.weight_tree["stages"], is_leaf=models.is_weight)

    def gather(tree: PyTree) -> spmd.Gather:
        dtypes = models.read_dtypes(tree, config.dtype)
        return spmd.gather_weights(
            models.logical_axes(tree),
            setup.rules,
            when=_gathering(config),
            cast=lambda w: jax.tree.map(lambda x, dtype: x.astype(dtype), w, dtypes),
            batch_axes=("data", "fsdp"),
        )

    def value_and_grad(weights, side, keys):
        return spmd.circular_value_and_grad(
            model,
            weights,
            side,
            keys,
            mesh=setup.mesh,
            delay=setup.config.pipeline_delay_activation_forwarding,
            remat=remat_of_ticks(config),
            gather=gather(stage),
            ends_gather=gather(ends),
            scan_repeats=config.scan_pipeline_repeats,
        )

    return value_and_grad


def _gathering(config: Config) -> Literal["tick", "repeat", "once"]:
    if config.pipeline_fsdp_ag_per_repeat:
        return "repeat"
    return "once" if config.pipeline_fsdp_ag_once else "tick"


def _without_ranks(weight: models.Weight) -> models.Weight:
    """One stage's part of a weight [R, S, ...]."""
    return dataclasses.replace(weight, shape=weight.shape[2:], axes=weight.axes[2:])


def _none(setup: Setup, model: Model) -> Callable:
    del setup

    def value_and_grad(weights, side, keys):
        # One repeat and one rank: dims 0 and 1 of the stages become one dim of stages.
        flat = weights | {"stages": jax.tree.map(lambda x: x[0], weights["stages"])}
        keys = jax.tree.map(lambda x: x[0], keys)
        value, grads = unpipelined.value_and_grad(model, flat, side, keys)
        return value, grads | {"stages": jax.tree.map(lambda x: x[None], grads["stages"])}

    return value_and_grad


ENGINES: dict[str, Callable[[Setup, Model], Callable]] = {"none": _none, "circular": _circular}


def _dropout_keys(setup: Setup, step: Int[Array, ""]) -> PyTree:
    """[R, S, layers per stage] keys of this step by layer number, or () without dropout."""
    config, layout = setup.config, setup.layout
    if not (config.enable_dropout and config.dropout_rate):
        return ()
    key = jax.random.fold_in(jax.random.key(config.dropout_seed), step)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layout.num_layers))
    return keys.reshape(layout.dims)

"""The train step: a state goes in, the next one and its metrics come out.

R repeats, S ranks, L layers, M microbatches of b rows, T tokens a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree

from .. import models, sharding, spmd
from ..autodiff import Model, unpipelined
from ._gathering import gathers, optimizer_rules
from ._model import build_model
from ._optimizer import adamw, clip, decay_mask, gradient_norm, learning_rate_schedule
from ._remat import remat_of_ticks
from ._router_bias import with_router_biases, without_router_biases
from ._setup import STACKED, Setup, batch_shardings, flax_decoder
from ._xla_flags import compiler_options

State = dict[str, Any]
"""`weights`, `optimizer` and `step`, the number of steps done."""


def make_optimizer(setup: Setup) -> optax.GradientTransformation:
    """AdamW; norms' scales do not decay."""
    config = setup.config
    stacked = _stacked_dims(setup)
    return adamw(
        make_schedule(setup),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        decay_mask=decay_mask(models.shapes(_trained(setup)), stacked),
    )


def _trained(setup: Setup) -> PyTree:
    """The abstract weights that the optimizer sees."""
    return without_router_biases(setup.weight_tree)


def _stacked_dims(setup: Setup) -> PyTree:
    """How many leading dims of the weights only stack layers."""
    ends = {name: dict.fromkeys(setup.weight_tree[name], 0) for name in ("embed", "head")}
    for end in ends.values():
        end |= {"layers": 1} if "layers" in end else {}
    return ends | {"stages": len(STACKED)}


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
    optimizer = make_optimizer(setup)

    def make() -> State:
        weights = _first_weights(setup)
        moments = optimizer.init(without_router_biases(weights))
        return {"weights": weights, "optimizer": moments, "step": jnp.int32(0)}

    return jax.jit(make, out_shardings=state_shardings(setup))()


def _first_weights(setup: Setup) -> PyTree:
    """Every layer starts equal in every layout, also after the pipeline."""
    tree, layout = setup.layer_tree, setup.layout
    key = jax.random.key(setup.config.init_weights_seed)
    weights = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    weights["stages"] = models.initialize_layers(
        tree["layer"], key, layout.dims, numbers=layout.numbers
    )
    if setup.layers_after:
        after = (setup.layers_after,)
        layers = models.initialize_layers(tree["layer"], key, after, first=layout.num_layers)
        weights["head"]["layers"] = layers
    return weights


def state_shapes(setup: Setup) -> State:
    """`jax.ShapeDtypeStruct` for every leaf of a state."""
    weights = models.shapes(setup.weight_tree)
    optimizer = jax.eval_shape(make_optimizer(setup).init, models.shapes(_trained(setup)))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return {"weights": weights, "optimizer": optimizer, "step": step}


def state_axes(setup: Setup) -> State:
    """Logical axes of every leaf: Adam's moments lie like their weights."""
    axes = models.logical_axes(setup.weight_tree)
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(setup),
        lambda _, of_weight: of_weight,
        state_shapes(setup)["optimizer"],
        models.logical_axes(_trained(setup)),
        transform_non_params=lambda _: (),
    )
    return {"weights": axes, "optimizer": optimizer, "step": ()}


def state_shardings(setup: Setup) -> State:
    """A sharding for every leaf of a state."""
    shapes, axes = state_shapes(setup), state_axes(setup)
    rules = {"weights": setup.rules, "optimizer": optimizer_rules(setup), "step": setup.rules}
    return {
        name: sharding.named_shardings(shapes[name], axes[name], setup.mesh, of_part)
        for name, of_part in rules.items()
    }


def gradient_shardings(setup: Setup) -> PyTree:
    """A sharding for every gradient: they lie as the optimizer's state does."""
    tree = setup.weight_tree
    rules = optimizer_rules(setup)
    return sharding.named_shardings(
        models.shapes(tree), models.logical_axes(tree), setup.mesh, rules
    )


def make_train_step(setup: Setup) -> Callable[[State, PyTree], tuple[State, dict[str, Array]]]:
    """The step, `(state, batch from place_batch) -> (state, metrics)`.

    It compiles at its first call. The state that goes in is donated.
    """
    optimizer, schedule = make_optimizer(setup), make_schedule(setup)
    value_and_grad = ENGINES[_engine(setup)](setup, build_model(setup))
    threshold = setup.config.gradient_clipping_threshold
    bias_rate = setup.config.routed_bias_update_rate
    shardings = state_shardings(setup)
    stored, lie = map(without_router_biases, (shardings["weights"], gradient_shardings(setup)))

    def step(state: State, batch: PyTree) -> tuple[State, dict[str, Array]]:
        weights = state["weights"]
        keys = _dropout_keys(setup, state["step"])
        (loss, metrics), grads = value_and_grad(weights, batch, keys)
        trained, of_trained = without_router_biases(weights), without_router_biases(grads)
        norm = gradient_norm(of_trained)
        of_trained = clip(of_trained, norm, threshold=threshold)
        # With ZeRO-1 every device updates its part of the weights, and gathers the others'.
        part, of_part = sharding.place(trained, lie), sharding.place(of_trained, lie)
        updates, moments = optimizer.update(of_part, state["optimizer"], part)
        trained = sharding.place(optax.apply_updates(part, updates), stored)
        new = {
            "weights": with_router_biases(trained, weights, grads, rate=bias_rate),
            "optimizer": moments,
            "step": state["step"] + 1,
        }
        rate = jnp.asarray(schedule(state["step"]))
        return new, {"loss": loss, **metrics, "gradient_norm": norm, "learning_rate": rate}

    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings(setup)),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=compiler_options(setup.config.compile_xla_flags),
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
    gather, ends_gather = gathers(setup)

    def value_and_grad(weights, side, keys):
        return spmd.circular_value_and_grad(
            model,
            weights,
            side,
            keys,
            mesh=setup.mesh,
            delay=setup.config.pipeline_delay_activation_forwarding,
            remat=remat_of_ticks(config),
            gather=gather,
            ends_gather=ends_gather,
            scan_repeats=config.scan_pipeline_repeats,
        )

    return value_and_grad


def _scheduled(setup: Setup, model: Model) -> Callable:
    gather, ends_gather = gathers(setup)
    assert setup.schedule is not None
    ticks = setup.schedule.ticks

    def value_and_grad(weights, side, keys):
        return spmd.scheduled_value_and_grad(
            model,
            weights,
            side,
            keys,
            ticks=ticks,
            mesh=setup.mesh,
            remat=remat_of_ticks(setup.config),
            gather=gather,
            ends_gather=ends_gather,
            share_head=setup.config.pipeline_share_head,
        )

    return value_and_grad


def _none(setup: Setup, model: Model) -> Callable:
    del setup

    def value_and_grad(weights, side, keys):
        # One repeat and one rank: dims 0 and 1 of the stages become one dim of stages.
        flat = weights | {"stages": jax.tree.map(lambda x: x[0], weights["stages"])}
        keys = jax.tree.map(lambda x: x[0], keys)
        value, grads = unpipelined.value_and_grad(model, flat, side, keys)
        return value, grads | {"stages": jax.tree.map(lambda x: x[None], grads["stages"])}

    return value_and_grad


def _linen(setup: Setup, model: Model) -> Callable:
    rim = flax_decoder()
    return rim.linen_value_and_grad(rim.decoder_of(setup, model))


def _nnx(setup: Setup, model: Model) -> Callable:
    rim = flax_decoder()
    return rim.nnx_value_and_grad(rim.decoder_of(setup, model))


ENGINES: dict[str, Callable[[Setup, Model], Callable]] = {
    "none": _none,
    "circular": _circular,
    "scheduled": _scheduled,
    "linen": _linen,
    "nnx": _nnx,
}


def _engine(setup: Setup) -> str:
    """`pipeline_engine`, or the rim whose modules run in it."""
    rims = {None: setup.config.pipeline_engine, False: "linen", True: "nnx"}
    return rims[setup.config.enable_nnx]


def _dropout_keys(setup: Setup, step: Int[Array, ""]) -> PyTree:
    """[R, S, layers per stage] keys of this step by layer number, or () without dropout; and which
    layers are there, if not all are."""
    layout = setup.layout
    keys = _keys_of_layers(setup, step)
    if not layout.counts:
        return keys
    present = jnp.asarray(layout.numbers) >= 0
    return {"dropout": keys, "present": present.reshape(layout.dims)}


def _keys_of_layers(setup: Setup, step: Int[Array, ""]) -> PyTree:
    config, layout = setup.config, setup.layout
    if not (config.enable_dropout and config.dropout_rate):
        return ()
    key = jax.random.fold_in(jax.random.key(config.dropout_seed), step)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(layout.numbers))
    return keys.reshape(layout.dims)

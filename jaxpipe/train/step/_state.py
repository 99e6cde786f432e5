"""The abstract train state: shapes, logical axes and shardings, and its optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ... import models, sharding
from ...models.weights._abstract import weight_shapes
from ..optim._decay import exclude_from_decay
from ..optim._optimizer import adamw, learning_rate_schedule, weight_decay_mask
from ..optim._router_bias import drop_router_biases
from ..plan._fsdp import optimizer_rules
from ..plan._setup import STACK_AXES, Setup

TrainState = dict[str, Any]
"""`weights`, `optimizer` (its state) and `step`, the number of steps done."""


def make_optimizer(setup: Setup) -> optax.GradientTransformation:
    """Builds AdamW; scales of norms do not decay, nor do weights that the config excludes.

    Args:
        setup: The run.

    Returns:
        The optimizer, of weights without router biases.
    """
    config = setup.config
    mask = weight_decay_mask(
        weight_shapes(abstract_trained_weights(setup)), _num_stacked_dims(setup)
    )
    return adamw(
        make_learning_rate_schedule(setup),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        decay_mask=exclude_from_decay(mask, config.weight_decay_exclude),
    )


def abstract_trained_weights(setup: Setup) -> PyTree:
    """Returns the abstract weights that the optimizer updates: all but router biases."""
    return drop_router_biases(setup.abstract_weights)


def _num_stacked_dims(setup: Setup) -> PyTree:
    """Returns how many leading dims of each part of the weights only stack layers."""
    boundary = {name: dict.fromkeys(setup.abstract_weights[name], 0) for name in ("embed", "head")}
    for part in boundary.values():
        part |= {"layers": 1} if "layers" in part else {}
    return boundary | {"stages": 1 if setup.per_stage_state else len(STACK_AXES)}


def make_learning_rate_schedule(setup: Setup) -> optax.Schedule:
    """Builds the learning rate schedule.

    Args:
        setup: The run.

    Returns:
        From the number of a step to its learning rate.
    """
    config = setup.config
    num_steps = config.learning_rate_schedule_steps
    return learning_rate_schedule(
        config.learning_rate,
        num_steps=config.steps if num_steps == -1 else num_steps,
        warmup_fraction=config.warmup_steps_fraction,
        final_fraction=config.learning_rate_final_fraction,
        shape=config.learning_rate_schedule,
    )


def state_shapes(setup: Setup) -> TrainState:
    """Returns a `jax.ShapeDtypeStruct` for every leaf of a train state."""
    weights = weight_shapes(setup.abstract_weights)
    optimizer = jax.eval_shape(
        make_optimizer(setup).init, weight_shapes(abstract_trained_weights(setup))
    )
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return {"weights": weights, "optimizer": optimizer, "step": step}


def state_logical_axes(setup: Setup) -> TrainState:
    """Returns the logical axes of every leaf; Adam's moments have those of their weights.

    Args:
        setup: The run.

    Returns:
        A tree like the train state, whose leaves are tuples of names.
    """
    axes = models.logical_axes(setup.abstract_weights)
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(setup),
        lambda _, of_weight: of_weight,
        state_shapes(setup)["optimizer"],
        models.logical_axes(abstract_trained_weights(setup)),
        transform_non_params=lambda _: (),
    )
    return {"weights": axes, "optimizer": optimizer, "step": ()}


def state_shardings(setup: Setup) -> TrainState:
    """Returns a sharding for every leaf of a train state."""
    shapes, axes, rules = state_shapes(setup), state_logical_axes(setup), state_rules(setup)
    return {
        name: sharding.named_shardings(shapes[name], axes[name], setup.mesh, rules[name])
        for name in shapes
    }


def state_rules(setup: Setup) -> dict[str, sharding.Rules]:
    """Returns the logical axis rules of each part of a train state."""
    return {"weights": setup.rules, "optimizer": optimizer_rules(setup), "step": setup.rules}


def gradient_shardings(setup: Setup) -> PyTree:
    """Returns a sharding for every gradient: that of the weight's moments."""
    tree = setup.abstract_weights
    rules = optimizer_rules(setup)
    return sharding.named_shardings(
        weight_shapes(tree), models.logical_axes(tree), setup.mesh, rules
    )
